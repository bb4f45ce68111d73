"""A step's routers and experts in C++ (products/cpu/mixture.h).

In torch a router is 5 to 20 small operations, and experts are a search for the tokens of each expert and two products an expert
in use; both also keep a step from being replayed as one call (`Repeated`). What mixture.h does not take is computed by torch.
"""

import ctypes
from typing import Any

import torch

from lowq_kernels.decode import cpu, router
from lowq_kernels.decode.activation import ACTIVATIONS, UNGATED
from lowq_kernels.decode.route import Routing
from lowq_kernels.decode.router import RouterFacts
from lowq_kernels.decode.rows_cpu import NORM, norm_fields, norms_fit
from lowq_kernels.modules.stack import Stack
from lowq_kernels.products.cpu import dense, native, packed, table
from lowq_kernels.products.cpu.native import DTYPES, Args, struct

ROUTE = struct(
    "Route",
    ("norm", NORM),
    p="x weight scale logits_bias choice_bias each ids weights",
    i="M E H top_k groups kept top2 normed sigmoid usual normalise rounded "
    "weight_kind scale_kind logits_kind choice_kind each_kind dtype threads",
    f="sum_eps factor",
)
MOST = 2  # max. rows of a router: of 128 experts, 2,048 wide, 4 rows take 45 us here and 42 us in torch, 1 row 25 and 40
APART = ctypes.c_int64 * 5
EXPERTS = struct(
    "Experts",
    ("up", Args),
    ("down", Args),
    *((name, ctypes.c_void_p) for name in ("x", "ids", "weights", "y")),
    ("up_apart", APART),
    ("down_apart", APART),
    i="M top_k E act alone dtype threads",
)


def route_by(x: torch.Tensor, f: RouterFacts) -> tuple[torch.Tensor, torch.Tensor]:
    """As `router.route_by`; of experts with equal scores the first are chosen. Torch computes more than `MOST` rows."""
    r = Routing.of(x, f)
    M, E, H, top_k = r.sizes
    vectors = {"logits": f.logits_bias, "choice": f.choice_bias, "each": f.each}
    sized = all(t is None or t.numel() == E for t in vectors.values()) and (f.scale is None or f.scale.numel() == H)
    usual = not f.beyond
    exact = not usual or f.weight.dtype in (x.dtype, torch.float32)  # else x would be rounded to the router's dtype first
    tensors = (x, f.weight, f.scale, *vectors.values())
    if M > MOST or not sized or not exact or not norms_fit(f.norm, H) or not native.takes(*tensors):
        return router.route_by(x, f)
    kinds = {
        f"{name}_kind": DTYPES[t.dtype]
        for name, t in (*vectors.items(), ("weight", f.weight), ("scale", f.scale))
        if t is not None
    }
    groups = {"groups": f.groups[0], "kept": f.groups[1], "top2": f.group_score == "top2"}
    facts: dict[str, Any] = {
        "sigmoid": f.score == "sigmoid",
        "usual": usual,
        "normed": f.norm is not None,
        "norm": norm_fields(f.norm),
    }
    numbers = {name: getattr(f, name) for name in ("normalise", "rounded", "sum_eps", "factor")}
    pointers = {"x": x, "weight": f.weight, "scale": f.scale, "logits_bias": f.logits_bias, "choice_bias": f.choice_bias}
    pointers |= {"each": f.each, "ids": r.ids, "weights": r.weights}
    sizes = {"M": M, "E": E, "H": H, "top_k": top_k}
    native.run(native.ROUTE, ROUTE, x.dtype, pointers, **sizes, **kinds, **groups, **facts, **numbers)
    return r.ids, r.weights


def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: Stack, down: Stack, act: str) -> torch.Tensor | None:
    """As `mixture.mixture`, or None where mixture.h does not take the call."""
    ungated, act = act.startswith(UNGATED), act.removeprefix(UNGATED)
    known = act in ACTIVATIONS or (act in cpu.ACTS and not ungated)
    fits = ids.dtype == torch.int64 and weights.dtype == torch.float32 and ids.is_contiguous() and weights.is_contiguous()
    if not known or not fits or x.dtype not in dense.HALVES or x.dim() != 2 or not x.shape[0] or not native.takes(x):
        return None
    first, last = (_product(stack, x.dtype) for stack in (up, down))
    if first is None or last is None:
        return None
    y = torch.empty(x.shape[0], down.N, dtype=x.dtype)
    tensors: dict[str, torch.Tensor | None] = {"x": x, "ids": ids, "weights": weights, "y": y}
    numbers: dict[str, Any] = {"up": first[0], "down": last[0], "up_apart": first[1], "down_apart": last[1]}
    numbers |= {"M": x.shape[0], "top_k": ids.shape[1], "E": up.words.shape[0], "act": cpu.ACTS.index(act), "alone": ungated}
    native.run(native.EXPERTS, EXPERTS, x.dtype, tensors, **numbers)
    return y


def _product(stack: Stack, dtype: torch.dtype) -> tuple[ctypes.Structure, Any] | None:
    """Expert 0's product, and the bytes from an expert's tensors to the next one's; None where the library has no product."""
    s, meta, tensors, numbers = stack.scheme, dtype, dict[str, Any](), dict[str, Any]()
    if s is None:
        tensors, numbers = {"words": stack.words}, {"N": stack.N, "K": stack.K, "bits": 16}
        if stack.words.dtype != dtype:
            return None
    elif stack.layout != "cpu" or s.table == "fitted":
        return None
    else:
        p = stack.expert(0)
        if s.table and table.two_tables_in_a_tile(p):
            return None
        tensors, numbers = table.operands(p) if s.table else packed.operands(p)
        meta = dtype if s.table else p.scales.dtype
        numbers |= {} if s.table else {"digits": 2}
    every = {"words": stack.words, "scales": stack.scales, "zeros": stack.zeros, "bias": stack.bias, "factor": stack.table}
    biased = stack.bias is None or stack.bias.dtype == meta
    if not biased or not all(t is None or t.is_contiguous() for t in every.values()):
        return None
    pointers = {name: t.data_ptr() for name, t in (tensors | {"bias": stack.bias}).items() if t is not None}
    apart = APART(*(0 if t is None else t.stride(0) * t.element_size() for t in every.values()))
    return Args(**pointers, **numbers, meta=DTYPES[meta], dtype=DTYPES[dtype]), apart
