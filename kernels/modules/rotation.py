"""The rotation of queries and keys in a vision tower as one operation; transformers takes about 14.

A head is cut into parts, and the values of a part are paired half a part away: x * cos + (-x2, x1) * sin. One part is the
usual rotation; two are Gemma 4's, one for rows and one for columns.
"""

import torch


@torch.library.custom_op("lowq::rotate_heads", mutates_args=())
def rotate_heads(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, wide: bool, parts: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (A, B, D) and k (A, fewer or as many, D) rotated by cos and sin, which broadcast to both. wide: each operation is in
    fp32 and the result is rounded once; else each operation rounds to the dtype of all four."""
    if q.is_cuda:
        from lowq_kernels.modules.rotation_triton import rotate

        return rotate(q, k, cos, sin, wide, parts)
    return definition(q, cos, sin, wide, parts), definition(k, cos, sin, wide, parts)


@rotate_heads.register_fake
def _(q, k, cos, sin, wide, parts=1):  # type: ignore[no-untyped-def]
    return torch.empty_like(q), torch.empty_like(k)


def definition(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, wide: bool, parts: int = 1) -> torch.Tensor:
    """As `rotate_heads`, for q or k."""
    dtype = x.dtype
    if wide:
        x, cos, sin = x.float(), cos.float(), sin.float()
    one, two = x.unflatten(-1, (parts, -1)).chunk(2, -1)
    return (x * cos + torch.cat((-two, one), -1).flatten(-2) * sin).to(dtype)
