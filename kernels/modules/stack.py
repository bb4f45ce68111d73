"""Stack: the packed weights of a mixture's experts side by side, so that one kernel can find any of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from lowq_kernels.dispatch.registry import matmul
from lowq_kernels.optional import optional
from lowq_packers.layouts import PackedWeight, repack
from lowq_packers.scheme import Scheme


@dataclass(frozen=True)
class Stack:
    """The weights (N, K) of several experts in one layout, experts along dim 0. scheme None: `words` (E, N, K) is dense."""

    words: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    aux: torch.Tensor | None
    scheme: Scheme | None
    N: int
    K: int
    layout: str

    def expert(self, e: int) -> PackedWeight:
        """Expert e's packed weight: views."""
        assert self.scheme is not None
        assert self.scales is not None
        zeros, aux = (None if t is None else t[e] for t in (self.zeros, self.aux))
        return PackedWeight(self.words[e], self.scales[e], zeros, self.scheme, self.N, self.K, self.layout, aux)

    def product(self, x: torch.Tensor, e: int) -> torch.Tensor:
        """x (M, K) times expert e's weight -> (M, N)."""
        if self.scheme is None:
            return nn.functional.linear(x, self.words[e].to(x.dtype))
        return matmul(x, self.expert(e))

    def take(self, experts: torch.Tensor) -> "Stack":
        """Copies of the chosen experts, in their order."""
        scales, zeros, aux = (None if t is None else t[experts] for t in (self.scales, self.zeros, self.aux))
        return replace(self, words=self.words[experts], scales=scales, zeros=zeros, aux=aux)

    def repacked(self, layout: str) -> "Stack":
        """The same weights in another layout, expert by expert."""
        if layout == self.layout:
            return self
        moved = [repack(self.expert(e), layout) for e in range(self.words.shape[0])]
        fields = zip(*((p.words, p.scales, p.zeros, p.aux) for p in moved), strict=True)
        words, scales, zeros, aux = (None if f[0] is None else torch.stack(f) for f in fields)
        assert words is not None
        return replace(self, words=words, scales=scales, zeros=zeros, aux=aux, layout=layout)


def fused(up: Stack, down: Stack, top_k: int, act: str, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """The kernel that computes a mixture from the chosen experts alone, where there is one for this device and shape."""
    if not up.words.is_cuda:
        return None
    found = optional("lowq_kernels.decode.experts", "cuda")
    return None if found is None or found.why_not(up, down, top_k, act, dtype, up.words.device) else found.experts
