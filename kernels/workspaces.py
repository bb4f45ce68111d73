"""cuBLAS's scratch memory: torch takes 32 MiB (on an H100) for each thread and stream that multiplies, and keeps them.

A dozen threads that each multiply once, or a new stream for each recording, so cost hundreds of megabytes for nothing. A graph
must not depend on what is kept either: `released` around a recording has it take scratch memory of its own.
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
    """Nothing kept before and nothing after: what is recorded inside owns its scratch memory, and nobody else uses it."""
    release()
    try:
        yield
    finally:
        release()
