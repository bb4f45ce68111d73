"""Resolve device names of users; if only the name is needed, without importing torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, TypeVar

from lowq_cli import console
from lowq_packers.errors import UnsupportedError, UsageError
from lowq_packers.lazy import torch


class Device(Protocol):
    """The attributes of a device that a plan needs; torch.device and `NamedDevice` have them."""

    @property
    def type(self) -> str: ...

    @property
    def index(self) -> int | None: ...


AnyDevice = TypeVar("AnyDevice", bound=Device)


@dataclass(frozen=True)
class NamedDevice:
    """A device by its name, in torch's spelling."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def pick_device(device: str | torch.device) -> torch.device:
    """The torch device of "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1".

    Raises UsageError for an invalid name, UnsupportedError for a GPU that does not exist.
    """
    there = torch.cuda.device_count()
    try:
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except (RuntimeError, TypeError):
        raise UsageError(f"device {device!r} does not exist; use auto, cpu or cuda") from None
    return _checked(chosen, device, there)


def name_device(device: str) -> NamedDevice:
    """`pick_device` for a plan: it counts GPUs by the CUDA driver instead of torch, unless torch is built for other GPUs."""
    present = gpus()
    if present is None:
        picked = pick_device(device)
        return NamedDevice(picked.type, picked.index)
    if device == "auto":
        return NamedDevice("cuda" if present else "cpu")
    kind, _, index = device.partition(":")
    if not kind.isalpha() or (":" in device and not index.isdigit()):
        raise UsageError(f"device {device!r} does not exist; use auto, cpu or cuda")
    return _checked(NamedDevice(kind, int(index) if index else None), device, present)


def _checked(chosen: AnyDevice, requested: object, there: int) -> AnyDevice:
    if chosen.type not in ("cpu", "cuda"):
        raise UsageError(f"lowq does not run on device {requested!r}; use auto, cpu or cuda")
    if chosen.type == "cpu" and chosen.index:
        raise UsageError(f"device {requested} does not exist: torch has one CPU device; use --device cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= there:
        raise UnsupportedError(
            f"device {requested} was asked for, but torch can use {there} CUDA GPU(s) here; use --device cpu"
        )
    return chosen


def gpus() -> int | None:
    """Number of GPUs for torch, as the CUDA driver counts them; None for a ROCm build, where only torch can count them."""
    torch_is = find_spec("torch")
    libraries = Path(torch_is.origin).parent / "lib" if torch_is and torch_is.origin else Path()
    if any(libraries.glob("*torch_hip*")):
        return None
    if not any(libraries.glob("*torch_cuda*")):
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    fine = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if fine else 0


def wake(device: str, least: int = 0) -> None:
    """Create the GPU's context and prepare Triton in threads while torch is imported.

    After the import the context would take 0.15 to 0.4 s, and Triton 0.5 s. device: the user's name for it. least: min. bytes
    of a GPU on which a context is created. Without a CUDA GPU nothing happens; errors of a GPU are left for torch to report.
    """
    kind, _, index = device.partition(":")
    if kind in ("auto", "cuda") and (index.isdigit() or not index):
        Thread(target=make_context, args=(int(index or 0), least), daemon=True).start()


def make_context(index: int, least: int) -> None:
    """Make the context of GPU `index` if it has `least` bytes of memory, and compute Triton's digest; nothing without a GPU."""
    if gpus():
        Thread(target=_hash_triton, daemon=True).start()
        driver, handle, context, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
        if driver.cuDeviceGet(ctypes.byref(handle), index) or driver.cuDeviceTotalMem_v2(ctypes.byref(total), handle):
            return
        if total.value >= least:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)  # the context that torch uses too


def _hash_triton() -> None:
    """Let Triton compute and cache the digest of its own 400 MB, which is part of the name of each kernel on disk."""
    for module in ("triton.runtime.cache", "triton.compiler.compiler"):  # Triton 3.5 and later; Triton 3.4
        with suppress(ImportError, AttributeError, OSError):  # without it, the first launch computes the digest
            import_module(module).triton_key()
            return


def say_widened(device: torch.device, model: Any) -> None:
    """Report the bytes of fp8 weights that a device without FP8 hardware holds in 16 bits, if any."""
    if nbytes := sum(m.weight.nbytes for m in model.modules() if getattr(m, "layout", "") == "widened"):
        size = console.size(nbytes)
        console.say(
            f"{device} has no FP8: weights widened to {size} of 16 bits; fp8 activations, if any, are rounded in software"
        )


def pick_devices(names: str | torch.device) -> tuple[torch.device, ...]:
    """The devices of "cuda:0,cuda:1". All must be of one kind: another kind need not compute the same codes.

    A repeated name counts each time. Raises the errors of `pick_device`, and UsageError for devices of two kinds.
    """
    return _several(names, pick_device) if isinstance(names, str) else (pick_device(names),)


def name_devices(names: str) -> tuple[NamedDevice, ...]:
    """`pick_devices` for a plan: see `name_device`."""
    return _several(names, name_device)


def _several(names: str, pick: Callable[[str], AnyDevice]) -> tuple[AnyDevice, ...]:
    devices = tuple(pick(n.strip()) for n in names.split(","))
    if len({d.type for d in devices}) > 1:
        raise UsageError(f"device {names!r} names two kinds of device; use GPUs only, or the CPU only")
    return devices
