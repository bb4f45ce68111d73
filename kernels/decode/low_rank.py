"""Low-rank additions to a product (LoRA), each row with its own adapter.

Maths   y[m] += (x[m] A[a]^T) B[a]^T,   a = adapters[m]; adapter 0 adds nothing
Shapes  x (M, K), y (M, N); A (S, R, K), B (S, N, R); adapters (M,) int32, 0 .. S - 1; factors of an adapter of lower rank
        end in zeros, scales are in B
"""

import torch


def add_low_rank(y: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, adapters: torch.Tensor) -> torch.Tensor:
    """y (M, N) with what adapters add, in place: the definition, and what runs where no kernel does."""
    if x.is_cuda:
        from lowq_kernels.decode.low_rank_triton import add_low_rank_rows

        return add_low_rank_rows(y, x, A, B, adapters)
    for a in adapters.unique().tolist():
        if a:
            at = (adapters == a).nonzero()[:, 0]
            y.index_add_(0, at, (x[at] @ A[a].T) @ B[a].T)
    return y
