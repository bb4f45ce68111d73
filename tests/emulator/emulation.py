"""What every test of emulated sources needs: a skip where they cannot run, and a Hopper GPU that is not there."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from lowq_kernels import registry

EMPTY = torch.empty


def require(kernel: str, compiler: bool = True) -> None:
    """Skip the module that calls this where `kernel`'s launcher does not import or, with `compiler`, there is no g++."""
    if compiler and shutil.which("g++") is None:
        pytest.skip("no g++", allow_module_level=True)
    pytest.importorskip("cuda.pathfinder", reason="the CUDA extra is not installed")
    if kernel not in registry.kernels():
        pytest.skip("NVRTC is not installed, and without it our launchers do not import", allow_module_level=True)


def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.empty, filled with NaN: an output that a kernel leaves unwritten shows."""
    t = EMPTY(*args, **kwargs)
    return t.fill_(float("nan")) if t.is_floating_point() else t.fill_(0x5A)


def forget(*modules: ModuleType) -> None:
    """Drop the kernels that launchers hold."""
    for module in modules:
        for name in ("_kernel", "_prepared"):
            if hasattr(module, name):
                getattr(module, name).cache_clear()


@contextmanager
def hopper(*modules: ModuleType) -> Iterator[None]:
    """Inside, launchers of `modules` run emulated, behind CPU tensors on a GPU of capability 9.0, and empty tensors are NaN."""
    import simt  # needs what `require` asks for

    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(mock.patch.object(module, "Kernel", simt.Kernel))
            if hasattr(module, "tensor_map"):
                patches.enter_context(mock.patch.object(module, "tensor_map", simt.tensor_map))
        patches.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)))
        patches.enter_context(mock.patch.object(registry, "capability", return_value=(9, 0)))
        patches.enter_context(mock.patch("torch.empty", poisoned))
        forget(*modules)
        yield
    forget(*modules)
