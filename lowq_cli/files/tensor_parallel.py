"""Check whether N tensor-parallel ranks can share a quantized checkpoint, by the rules of engines such as vLLM.

Only config and shapes are needed. Row-parallel weights (o_proj, down_proj) are split along K: each rank needs whole groups and
whole words. Other weights are split along N. q, k and v are fused, as are gate and up, and must have the same scheme.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from lowq_cli.files.shapes import text_config, whole
from lowq_packers.scheme import Scheme, fit_group

# families some of whose linear layers vLLM 0.32 makes without a name, or by a name that no checkpoint has
OTHER_LAYERS = ("falcon_h1", "gemma3n_text", "minicpm3")
ROW = ("o_proj", "down_proj", "out_proj", "w2", "dense_4h_to_h", "dense")


def shard_problems(
    config: Mapping[str, Any],
    schemes: Mapping[str, Scheme],
    shapes: Mapping[str, tuple[int, int]],
    ranks: int,
    packed_zeros: bool = True,
) -> list[str]:
    """A line for each matrix that `ranks` ranks cannot share, with a group size that works; [] if they can share all.

    packed_zeros: integer zeros are packed along N, as in other tools' formats.
    """
    problems: list[str | None] = [*fusion_problems(schemes)]
    heads = whole(text_config(config), "num_key_value_heads", "num_attention_heads")
    for name, scheme in schemes.items():
        N, K = shapes[name]
        leaf = name.rpartition(".")[2]
        if leaf in ROW:
            problems.append(row_problem(name, scheme, K, ranks))
        elif leaf != "lm_head":
            copies = heads if leaf in ("k_proj", "v_proj") and heads and ranks > heads else ranks  # few KV heads are replicated
            problems.append(column_problem(name, N, copies))
            if packed_zeros and not problems[-1]:
                problems.append(_packed_zeros_problem(name, scheme, N, copies))
    return [line for line in problems if line]


def fusion_problems(schemes: Mapping[str, Scheme]) -> list[str]:
    """A line for each set of weights that engines fuse but whose schemes differ."""
    members: dict[str, dict[str, Scheme]] = defaultdict(dict)
    for name, scheme in schemes.items():
        if fused := fused_name(name):
            members[fused][name] = scheme
    lines = []
    for fused, parts in members.items():
        if len(set(parts.values())) > 1:
            spelled = ", ".join(f"{n.rpartition('.')[2]} {s}" for n, s in list(parts.items())[:3])
            lines.append(f"{fused} is made of {spelled}, which must be one scheme")
    return lines


def fused_name(name: str) -> str | None:
    """The matrix into which engines fuse this one; None if it is not fused."""
    from lowq_packers.formats import FUSED  # imports torch

    stem, _, leaf = name.rpartition(".")
    return f"{re.sub('[.]experts[.][0-9]+$', '.experts', stem)}.{FUSED[leaf]}" if leaf in FUSED else None


def row_problem(name: str, s: Scheme, K: int, ranks: int) -> str | None:
    """Why `ranks` ranks cannot share a matrix along K, with a group size or rank count that works; None if they can."""
    if K % ranks:
        return f"{name}: K={K} is not a multiple of {ranks}"
    part = K // ranks
    if s.group_size != K and part % s.group_size:
        fitting = fit_group(part, s.group_size)
        way_out = f"--override '{name.rpartition('.')[2]}={s.bits}:{fitting}'" if fitting else "fewer ranks"
        return f"{name}: K={K} over {ranks} ranks is {part}, not a multiple of group_size={s.group_size}; use {way_out}"
    if part * s.bits % 32:
        return f"{name}: K={K} over {ranks} ranks is {part} {s.bits}-bit codes, not whole words; use fewer ranks"
    return None


def family_problem(model_type: str | None) -> str | None:
    """The reason why lowq's plugin for vLLM cannot serve a family; None if it can."""
    return f"some linear layers of vLLM's {model_type} are always dense; use lowq serve" if model_type in OTHER_LAYERS else None


def table_problem(name: str, s: Scheme) -> str | None:
    """The reason why lowq's own ranks cannot share a matrix of this scheme at all (vLLM's can); None if they can."""
    return f"{name} is {s}: lowq cannot split a weight with its own table among ranks; use one rank" if s.table_width else None


def column_problem(name: str, N: int, ranks: int) -> str | None:
    """The reason why `ranks` ranks cannot share a matrix along N; None if they can."""
    return f"{name}: N={N} is not a multiple of {ranks}" if N % ranks else None


def _packed_zeros_problem(name: str, s: Scheme, N: int, ranks: int) -> str | None:
    """As `column_problem`, for formats that pack integer zeros along N."""
    part = N // ranks
    if s.zero == "int" and part * s.bits % 32:
        return f"{name}: N={N} over {ranks} ranks is {part} {s.bits}-bit zeros, not whole words; quantize with --zero none"
    return None
