"""torch, imported when a tensor is first touched: what a header says is known without it.

Names, shapes, dtypes (there a string: "BF16"), schemes and layouts of a model are facts of its headers. `lowq inspect` of
dense models and other tools' files and `quantize --dry-run` ask for nothing else; which exports can hold a checkpoint of
lowq's is asked of its scales and zeros too. Importing torch takes 1.5 to 3.6 s, these commands 0.2. So a module that has such
facts beside the arithmetic of tensors takes its torch from here: it names torch inside functions and in annotations, which
`from __future__ import annotations` leaves unread, and nowhere else. Modules that only compute import torch as ever.
tests/cli/test_headers.py runs the commands and looks at what they imported.
"""

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _AtFirstUse(ModuleType):
        """Every attribute is torch's own, looked up anew: tests replace some."""

        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _AtFirstUse("torch")
