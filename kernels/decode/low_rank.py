"""Low-rank additions to a product (LoRA), each row with its own adapter.

Maths   y[m, n] += x[m] A[a, p]^T B[a, n]^T,   a = adapters[m], p the part of the product that column n lies in; adapter 0 adds
        nothing
Shapes  x (M, K), y (M, N); A (S, P, R, K), B (S, N, R); adapters (M,) int32, 0 .. S - 1; factors of an adapter of lower rank
        end in zeros, scales are in B
"""

import torch

from lowq_kernels.decode.low_rank_factors import LowRank


def room(x: torch.Tensor, factors: LowRank) -> torch.Tensor | None:
    """Memory that `add_low_rank` needs, taken before the product's kernel is launched; None where no kernel runs."""
    if not x.is_cuda:
        return None
    from lowq_kernels.decode import low_rank_triton

    return low_rank_triton.room(x, factors)


def add_low_rank(
    y: torch.Tensor, x: torch.Tensor, factors: LowRank, adapters: torch.Tensor, t: torch.Tensor | None = None
) -> torch.Tensor:
    """y (M, N) with what adapters add, in place: the definition, and what runs where no kernel does.

    t: from `room`; y comes from a product of the same x that was launched between that call and this one.
    """
    if x.is_cuda:
        from lowq_kernels.decode.low_rank_triton import add_low_rank_rows

        return add_low_rank_rows(y, x, factors, adapters, t)
    for a in adapters.unique().tolist():
        if a:
            at = (adapters == a).nonzero()[:, 0]
            parts = zip(factors.A[a], factors.B[a].tensor_split(factors.ends[:-1]), strict=True)
            y.index_add_(0, at, torch.cat([(x[at] @ A.T) @ B.T for A, B in parts], 1))
    return y
