"""The rotation of queries and keys in a vision tower as one operation; transformers takes about 14.

Each value is multiplied by its cosine, and the other one of its pair, half a head away, by its sine: x * cos + (-x2, x1) * sin.
"""

import torch


@torch.library.custom_op("lowq::rotate_heads", mutates_args=())
def rotate_heads(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, wide: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k (A, B, D) rotated by cos and sin, which broadcast to them. wide: each operation is in fp32 and the result is
    rounded once; else each operation rounds to the dtype of all four."""
    if q.is_cuda:
        from lowq_kernels.modules.rotation_triton import rotate

        return rotate(q, k, cos, sin, wide)
    return definition(q, cos, sin, wide), definition(k, cos, sin, wide)


@rotate_heads.register_fake
def _(q, k, cos, sin, wide):  # type: ignore[no-untyped-def]
    return torch.empty_like(q), torch.empty_like(k)


def definition(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, wide: bool) -> torch.Tensor:
    """As `rotate_heads`, for q or k."""
    dtype = x.dtype
    if wide:
        x, cos, sin = x.float(), cos.float(), sin.float()
    one, two = x.chunk(2, -1)
    return (x * cos + torch.cat((-two, one), -1) * sin).to(dtype)
