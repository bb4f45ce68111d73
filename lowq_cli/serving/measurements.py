"""What an engine has measured of a model on a GPU, for later loads of the same model in the same server.

The start of a server launches every kernel once, runs the largest passes to learn their memory, and records and times passes:
2.4 of the 3.7 s in which a server exchanged one 8B for another on an H200. An engine for which a request waits takes requests
at once, and records each pass when it comes the second time, or while there is nothing to do. In the first load of a model it
then times passes, too. Before, it launches every kernel, since kernels that are not on disk yet are compiled in parallel so;
and where the cache leaves little memory free, it runs the largest passes. A later load knows all that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Measurements:
    """Measurements of an engine; empty before a model's first load.

    key: identifies the model's files and the engine's settings. beside: bytes that the largest pass, recorded passes and
    libraries take of a GPU besides weights and cache; 0 if unknown. passes: seconds of passes by (rows that step, all rows,
    whether they are with LoRA adapters). drafts: seconds of passes with drafts by (rows, the same).
    """

    key: bytes = b""
    beside: int = 0
    passes: Mapping[tuple[int, int, bool], float] = field(default_factory=dict)
    drafts: Mapping[tuple[int, bool], float] = field(default_factory=dict)
