"""torch, imported when a tensor is first used, so that reading headers needs no torch.

Names, shapes, dtypes (in headers a string: "BF16"), schemes and layouts of a model are in the headers of its files. `lowq
inspect` of dense models and other tools' files, and `quantize --dry-run`, need nothing else (for a checkpoint of lowq `inspect`
also reads scales and zeros, to name the possible exports). Importing torch takes 1.5 to 3.6 s, these commands 0.2 s. A module
with both header facts and tensor arithmetic therefore imports torch from here, and uses it only inside functions and in
annotations, which `from __future__ import annotations` leaves unevaluated. Modules that only compute import torch directly.
tests/cli/test_headers.py runs the commands and checks what they imported.
"""

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _AtFirstUse(ModuleType):
        """Every attribute is torch's, looked up at each use, since tests replace some."""

        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _AtFirstUse("torch")
