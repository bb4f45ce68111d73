"""cpu/table: C++ products of codes that index a table of values, over the layout `cpu` (table.h).

x is rounded as in `packed`, in blocks of 32. A table is rounded to 13 bits and a sign times a power of two: e2m1 and iq4_nl
exactly, other values within 2^-13 of the largest. y does not depend on M, on the number of threads, or on other rows.
"""

import torch

from lowq_kernels.dispatch.registry import Config, register
from lowq_kernels.products.cpu import native
from lowq_kernels.products.reference import reference
from lowq_packers import tables
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.cpu import CHUNK, ROWS, chunks
from lowq_packers.scheme import TABLES


@register(
    "cpu/table",
    layouts=("cpu",),
    devices=("cpu",),
    tables=tuple(TABLES),
    bits=(4, 3, 2),
    zeros=("none",),
    refuse=native.refuse,
    rank=5,
)
def table(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) bf16 or fp16 -> (M, N)."""
    M = x.shape[0]
    if two_tables_in_a_tile(p):
        return reference(x, p, bias, config)
    y = torch.empty(M, p.N, dtype=x.dtype)
    if M == 0:
        return y
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    tensors, sizes = operands(p)
    native.product(tensors | {"x": x, "bias": bias, "y": y}, x.dtype, M=M, **sizes)
    return y


def two_tables_in_a_tile(p: PackedWeight) -> bool:
    """Whether some tile's rows have different tables, which table.h does not take."""
    T = 1 if p.table is None else p.table.shape[0]
    return T > 1 and p.N // T % ROWS != 0


def operands(p: PackedWeight) -> tuple[dict[str, torch.Tensor | None], dict[str, float]]:
    """The tensors of a weight by their names in args.h, and the numbers that follow from its shape."""
    s, T = p.scheme, 1 if p.table is None else p.table.shape[0]
    values, factor = tables.values(s, p.table), None if s.table == "fitted" else p.table
    group = chunks(p.K) * CHUNK if s.group_size == p.K else s.group_size
    sizes: dict[str, float] = {
        "N": p.N,
        "K": p.K,
        "bits": s.bits,
        "group": group,
        "groups": s.groups(p.K),
        "chunks": chunks(p.K),
    }
    scale = native.SCALES[s.scale] if s.scale in native.SCALES else native.DTYPES[p.scales.dtype]
    more = {"scale": scale, "tables": T, "apart": 0 if values.shape[0] == 1 else s.levels}
    return {"words": p.words, "scales": p.scales, "table": values, "factor": factor}, sizes | more
