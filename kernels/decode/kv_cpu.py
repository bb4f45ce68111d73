"""A cache in few bits on a CPU: its codes in C++ (products/cpu/coded.h), and where kernels find a cache's slots."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lowq_kernels.decode.kv import Cache, Coded
from lowq_kernels.products.cpu import native
from lowq_kernels.products.cpu.native import DTYPES, struct

LANES = 16  # head dims must be a multiple: whole vector registers in every instruction set
KINDS = {"fp8": 3, "4": 5}  # E4M3 and FOUR of args.h
CODES = struct("Codes", p="x codes scales", q="n", i="D kv decodes dtype threads")


class Slots(NamedTuple):
    """A cache as args.h has it. block, head: slots from a block, and from a head of a block, to the next one."""

    values: torch.Tensor
    scales: torch.Tensor | None
    kv: int
    block: int
    head: int


def slots_of(cache: Cache) -> Slots | None:
    """Where the library finds the slots of a cache (blocks, HKV, BLOCK, D); None where it does not."""
    coded = isinstance(cache, Coded)
    values, scales = (cache.codes, cache.scales) if isinstance(cache, Coded) else (cache, None)
    if not coded and cache.dtype not in DTYPES:  # type: ignore[union-attr]
        return None
    (*outer, slot, one), width = values.stride(), values.shape[3]
    block, head = (apart // width for apart in outer)
    closed = (slot, one) == (width, 1) and all(apart % width == 0 for apart in outer)
    if scales is not None:
        n = scales[0, 0, 0].numel()
        closed &= scales.stride() == ((block, head, 1) if n == 1 else (block * n, head * n, n, 1))
    return (
        Slots(values, scales, KINDS[cache.kind] if isinstance(cache, Coded) else DTYPES[values.dtype], block, head)
        if closed
        else None
    )


@dataclass(frozen=True)
class InCpp(Coded):
    """A cache that is encoded and decoded in C++: the definition's values, but for rounding."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        codes, scales = self.codes[index].contiguous(), self.scales[index].contiguous()
        x = torch.empty(*codes.shape[:-1], self.shape[3])
        self._run(x, codes, scales, decodes=True)
        return x

    def __setitem__(self, index: Any, x: torch.Tensor) -> None:
        x = x.contiguous()
        codes = torch.empty(*x.shape[:-1], self.codes.shape[-1], dtype=torch.uint8)
        scales = torch.empty(*x.shape[:-1], *self.scales.shape[3:], dtype=self.scales.dtype)
        self._run(x, codes, scales, decodes=False)
        self.codes[index], self.scales[index] = codes, scales

    def _run(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, decodes: bool) -> None:
        D, tensors = x.shape[-1], {"x": x, "codes": codes, "scales": scales}
        native.run(native.CODES, CODES, x.dtype, tensors, n=x.numel() // D, D=D, kv=KINDS[self.kind], decodes=decodes)


def in_cpp(cache: Cache) -> Cache:
    """The same cache; if it holds codes and the library takes them, encoded and decoded by it."""
    takes = isinstance(cache, Coded) and cache.shape[3] % LANES == 0 and native.takes()
    return InCpp(cache.kind, cache.codes, cache.scales) if takes and isinstance(cache, Coded) else cache
