"""Read a source's tensors onto a device with several threads; files in the page cache are read at the speed of memory.

For a GPU, bytes go through two pinned buffers per thread, where one is filled while the other is copied. The copies are on the
default stream, so kernels launched later see them. Nothing is read twice. On a CPU, tensors that a file holds in the dtype of
computation are memory-mapped: allocating fresh pages for 1.1 GB took 2.5 s, and other processes share the mapping.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from lowq_cli.files.safetensors_io import torch_dtype
from lowq_cli.files.source import Source
from lowq_kernels.dispatch.registry import load_kernels
from lowq_packers.arch.config import NotPlain
from lowq_packers.qtensor import plausible
from lowq_packers.scheme import Scheme

GPU_THREADS = 8  # one thread copies 5 to 10 GB/s from the page cache; the bus to the GPU takes 50 GB/s
CHUNK = 16 << 20  # bytes per pinned buffer


def host_buffers(threads: int, pinned: bool) -> list[torch.Tensor]:
    """Two buffers for each of `threads` threads. torch keeps pinned memory that is freed for the next buffers of this size."""
    return [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=pinned) for _ in range(2 * threads)]


class Reader:
    """Reads tensors of an open source onto `device`."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source, self.device = source, device
        self.host_threads = torch.get_num_threads()
        self.threads = GPU_THREADS if device.type == "cuda" else self.host_threads
        load_kernels(device.type)  # before the threads start: they must not see a partly filled registry
        self._own = threading.local()
        self._good: list[torch.Tensor] = []

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.host_threads)

    def enter_thread(self) -> None:
        """Initialise a thread: torch operations in it use one thread, since the reader's threads already run in parallel."""
        torch.set_num_threads(1)

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor, in the files' dtype or in `dtype`."""
        return self.join([name], dtype).reshape(self.source.headers[name].shape)

    def join(self, names: Sequence[str], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Tensors concatenated along dim 0, in the files' dtype or in `dtype`; a scalar is one row."""
        headers = [self.source.headers[n] for n in names]
        if len({h.dtype for h in headers}) > 1:
            return torch.cat([self.read(n, dtype) for n in names])
        rows, rest = [h.shape[0] if h.shape else 1 for h in headers], headers[0].shape[1:]
        stored = torch_dtype(headers[0].dtype)
        if self.device.type == "cpu" and dtype in (None, stored) and (there := self.source.mapped(names)) is not None:
            return there.reshape(sum(rows), *rest)
        whole = torch.empty((sum(rows), *rest), dtype=dtype or stored, device=self.device)
        at = 0
        for name, n in zip(names, rows, strict=True):
            part = whole[at : at + n].view(-1)
            for first in range(0, part.numel(), CHUNK // stored.itemsize):
                self._fill(part[first : first + CHUNK // stored.itemsize], name, first, stored)
            at += n
        return whole

    def companion(self, names: Sequence[str], dtype: torch.dtype | None, scheme: Scheme, role: str) -> torch.Tensor:
        """The scales, zeros or tables (`role`) of a scheme's matrices, recorded for `check`."""
        whole = self.join(names, dtype)
        self._good.append(plausible(whole, scheme, role))
        return whole

    def check(self) -> None:
        """Raise NotPlain for scales or zeros that no quantizer writes; loading with transformers then reports which."""
        if self._good and not bool(torch.stack(self._good).all()):
            raise NotPlain("scales or zeros that are not finite or out of range")

    def _fill(self, out: torch.Tensor, name: str, first: int, dtype: torch.dtype) -> None:
        """Read a tensor's elements from `first` on into `out`, at most one CHUNK; `dtype` is the files' dtype."""
        at, nbytes = first * dtype.itemsize, out.numel() * dtype.itemsize
        if out.dtype == dtype and not out.is_cuda:
            self.source.read_into(name, at, out.view(torch.uint8).numpy().data)
            return
        buffer, copied = self._buffer()
        raw = buffer[:nbytes]
        if copied is not None:
            copied.synchronize()
        self.source.read_into(name, at, raw.numpy().data)
        if copied is None:
            out.copy_(raw.view(dtype))
            return
        there = raw.to(out.device, non_blocking=True).view(dtype) if out.dtype != dtype else raw.view(dtype)
        out.copy_(there, non_blocking=True)
        copied.record(torch.cuda.current_stream(out.device))

    def _buffer(self) -> tuple[torch.Tensor, Any]:
        """The next of this thread's two buffers, which alternate; pinned for a GPU, with the event of its last copy."""
        if not hasattr(self._own, "buffers"):
            to_gpu = self.device.type == "cuda"
            self._own.buffers = [(b, torch.cuda.Event() if to_gpu else None) for b in host_buffers(1, pinned=to_gpu)]
        self._own.buffers.reverse()
        return self._own.buffers[0]


class Blank(Reader):
    """A reader that returns uninitialised tensors of a source's shapes, for a model that is only to compile its kernels."""

    def _fill(self, out: torch.Tensor, name: str, first: int, dtype: torch.dtype) -> None:
        """Do nothing: `out` stays uninitialised."""

    def check(self) -> None:
        """Do nothing: the values are not used."""
