"""A cache in few bits on a CPU: its codes in C++ (products/cpu/coded.h), and where kernels find a cache's slots."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lowq_kernels.decode.kv import Cache, Coded, part
from lowq_kernels.decode.reference import Heads
from lowq_kernels.products.cpu import native
from lowq_kernels.products.cpu.native import DTYPES, struct

LANES = 16  # head dims must be a multiple: whole vector registers in every instruction set
KINDS = {"fp8": 3, "4": 5}  # E4M3 and FOUR of args.h
AT_ONCE = 1 << 22  # bytes of fp32 keys, one copy per query head, that a prompt's attention decodes at once: they stay in caches
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
    if isinstance(cache, Coded):
        values, scales, kv = cache.codes, cache.scales, KINDS[cache.kind]
    elif cache.dtype in DTYPES:
        values, scales, kv = cache, None, DTYPES[cache.dtype]
    else:
        return None
    (block, head, *inner), width = values.stride(), values.shape[3]
    whole = inner == [width, 1] and block % width == head % width == 0
    block, head = block // width, head // width
    if scales is not None:
        n = scales.shape[3:].numel()
        whole &= scales.stride() == (block * n, head * n, n, 1)[: scales.dim()]
    return Slots(values, scales, kv, block, head) if whole else None


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
        D = x.shape[-1]
        tensors: dict[str, torch.Tensor | None] = {"x": x, "codes": codes, "scales": scales}
        native.run(native.CODES, CODES, x.dtype, tensors, n=x.numel() // D, D=D, kv=KINDS[self.kind], decodes=decodes)


def in_cpp(cache: Cache) -> Cache:
    """The same cache; if it holds codes and the library takes them, encoded and decoded by it."""
    takes = isinstance(cache, Coded) and cache.shape[3] % LANES == 0 and native.takes()
    return InCpp(cache.kind, cache.codes, cache.scales) if takes and isinstance(cache, Coded) else cache


def by_heads(
    attend: Callable[..., torch.Tensor],
    qkv: torch.Tensor,
    caches: tuple[Cache, Cache],
    where: tuple[Any, ...],
    n: int,
    h: Heads,
) -> torch.Tensor:
    """attend(qkv, k, v, *where, h) over n slots; of codes that the library takes, so many heads at once as AT_ONCE allows."""
    k, v = (in_cpp(cache) for cache in caches)
    G, x, parts = h.HQ // h.HKV, qkv.unflatten(-1, (-1, h.D)), []
    each = max(1, AT_ONCE // (4 * n * h.D * G))
    if not isinstance(k, InCpp) or each >= h.HKV:
        return attend(qkv, k, v, *where, h)
    for first in range(0, h.HKV, each):
        keys, queries = (slice(first * by, min(first + each, h.HKV) * by) for by in (1, G))
        rows = [x[..., : h.HQ, :][..., queries, :], *(t[..., keys, :] for t in x[..., h.HQ :, :].split(h.HKV, -2) if h.writes)]
        sinks, held = None if h.sinks is None else h.sinks[queries], (part(cache, (slice(None), keys)) for cache in (k, v))
        some = replace(h, HQ=rows[0].shape[-2], HKV=keys.stop - keys.start, sinks=sinks)
        parts.append(attend(torch.cat(rows, -2).flatten(-2), *held, *where, some))
    return torch.cat(parts, -1)
