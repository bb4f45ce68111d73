"""cuBLAS's scratch memory: torch allocates 32 MiB (on an H100) per thread and stream that multiplies, and never frees it.

A dozen threads that each multiply once, or a new stream for each captured graph, would cost hundreds of megabytes. A graph must
not depend on memory that may be freed either: inside `released` it allocates scratch memory of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # absent from CPU builds of torch


def release() -> None:
    """Give back all scratch memory of cuBLAS; the next product takes some again."""
    if _clear is not None and torch.cuda.is_initialized():
        _clear()


@contextmanager
def released() -> Iterator[None]:
    """Free all scratch memory before and after: a graph captured inside owns its scratch memory exclusively."""
    release()
    try:
        yield
    finally:
        release()
