"""Tensors of a source on a device, read by several threads: files that are in the page cache come at the speed of memory.

To a GPU bytes go through two pinned buffers a thread, one filled while the other is copied, on the default stream: what is
launched after sees them. Nothing is read twice. On a CPU what lies in a file as it is computed with is mapped: 1.1 GB took
2.5 s of fresh pages, and other processes share it.
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

GPU_THREADS = 8  # one copies 5 to 10 GB/s out of the page cache; the bus takes 50
CHUNK = 16 << 20  # bytes of a pinned buffer


class Reader:
    """Reads tensors of an open source onto `device`."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source, self.device = source, device
        self.host_threads = torch.get_num_threads()
        self.threads = GPU_THREADS if device.type == "cuda" else self.host_threads
        load_kernels(device.type)  # here: those threads would find the list half made
        self._own = threading.local()
        self._good: list[torch.Tensor] = []

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.host_threads)

    def enter_thread(self) -> None:
        """Called once by each thread: parallel already, its operations are not cut up further."""
        torch.set_num_threads(1)

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor, in the files' dtype or another."""
        return self.join([name], dtype)

    def join(self, names: Sequence[str], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Tensors one behind the other along dim 0, in the files' dtype or another."""
        headers = [self.source.headers[n] for n in names]
        if len({h.dtype for h in headers}) > 1:
            return torch.cat([self.read(n, dtype) for n in names])
        rows, rest = [h.shape[0] for h in headers], headers[0].shape[1:]
        kept = torch_dtype(headers[0].dtype)
        if self.device.type == "cpu" and dtype in (None, kept) and (there := self.source.mapped(names)) is not None:
            return there.reshape(sum(rows), *rest)
        found = torch.empty((sum(rows), *rest), dtype=dtype or kept, device=self.device)
        at = 0
        for name, n in zip(names, rows, strict=True):
            part = found[at : at + n].view(-1)
            for first in range(0, part.numel(), CHUNK // kept.itemsize):
                self._fill(part[first : first + CHUNK // kept.itemsize], name, first, kept)
            at += n
        return found

    def companion(self, names: Sequence[str], dtype: torch.dtype | None, scheme: Scheme, role: str) -> torch.Tensor:
        """The "scale", "zero" or "table" (the role) of matrices of a scheme, noted for `check`."""
        found = self.join(names, dtype)
        self._good.append(plausible(found, scheme, role))
        return found

    def check(self) -> None:
        """Raise NotPlain if scales or zeros were read that no quantizer writes: transformers' way says which."""
        if self._good and not bool(torch.stack(self._good).all()):
            raise NotPlain("scales or zeros that are not finite or out of range")

    def _fill(self, out: torch.Tensor, name: str, first: int, kept: torch.dtype) -> None:
        """Elements of a tensor from `first` on into `out`, at most a CHUNK of them; `kept` is the files' dtype."""
        at, nbytes = first * kept.itemsize, out.numel() * kept.itemsize
        if out.dtype == kept and not out.is_cuda:
            self.source.read_into(name, at, out.view(torch.uint8).numpy().data)
            return
        buffer, copied = self._buffer()
        raw = buffer[:nbytes]
        if copied is not None:
            copied.synchronize()
        self.source.read_into(name, at, raw.numpy().data)
        if copied is None:
            out.copy_(raw.view(kept))
            return
        there = raw.to(out.device, non_blocking=True).view(kept) if out.dtype != kept else raw.view(kept)
        out.copy_(there, non_blocking=True)
        copied.record(torch.cuda.current_stream(out.device))

    def _buffer(self) -> tuple[torch.Tensor, Any]:
        """One of this thread's two buffers, pinned for a GPU, with the event of its last copy; they take turns."""
        if not hasattr(self._own, "buffers"):
            to_gpu = self.device.type == "cuda"
            made = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=to_gpu) for _ in range(2)]
            self._own.buffers = [(buffer, torch.cuda.Event() if to_gpu else None) for buffer in made]
        self._own.buffers.reverse()
        return self._own.buffers[0]


class Blank(Reader):
    """Tensors of a source's shapes that hold what the memory held: for a model whose kernels are to be compiled."""

    def _fill(self, out: torch.Tensor, name: str, first: int, kept: torch.dtype) -> None:
        """Nothing."""

    def check(self) -> None:
        """Nothing is wrong with values that nobody reads."""
