"""experts: a mixture layer for a few tokens in two launches that read only the chosen experts' packed weights (experts.cu).

Inputs   stacks of packed weights in the layout `tile`, experts along dim 0; ids and routing weights stay on the device
Launch   a grid of (tiles of 16 rows, slots or tokens), blocks of up to 16 warps, of which `parts` share a row of K
"""

import ctypes
import math
from functools import cache
from typing import NamedTuple

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import Kernel
from lowq_kernels.cuda.operands import TYPES, form, scales_zeros_bias, tables_of
from lowq_kernels.decode import launch
from lowq_kernels.decode.mixture import FEW_TOKENS
from lowq_kernels.dispatch.registry import Config, register
from lowq_kernels.modules.stack import ExpertsCall, Stack
from lowq_packers.layouts.tile import CHUNK, chunks
from lowq_packers.scheme import Scheme

PARAMETERS = (*(ctypes.c_void_p,) * 8, *(ctypes.c_int32,) * 8)
ACTS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 3}
DOWN = 2
MOST_WARPS, UP_WARPS = 16, 8  # max. warps per block of DOWN (the down product), of UP (gate and up)
UP_PRODUCTS = 2  # gate and up
AHEAD = {8: 4, 4: 8, 3: 4, 2: 4, 1: 4}  # bits -> chunks that a warp of experts.cu loads at once
TWO_OF_DOWN = 6  # with 4-bit weights, this many chunks in flight let two blocks of DOWN share a multiprocessor
BLOCKS_OF_UP = {8: 3, 4: 3, 3: 2, 2: 3, 1: 1}  # bits -> blocks of UP per multiprocessor, as registers allow
LIMIT = 96 << 10  # max. bytes of shared memory per block


def parts(K: int, bits: int, top_k: int | None = None) -> int:
    """Warps that share a row of K in a block of UP, or of DOWN for top_k experts."""
    most = UP_WARPS // UP_PRODUCTS if top_k is None else MOST_WARPS // top_k
    return max(1, min(math.ceil(chunks(K, bits) / AHEAD[bits]), most))


def groups_met(group: int, chunk: int, count: int) -> int:
    """Max. groups that `chunks` consecutive chunks overlap (the device code's function of that name); group 0: one per row."""
    if group == 0:
        return 1
    return count * chunk // group if chunk % group == 0 else (count * chunk - 1) // group + 2


class Cut(NamedTuple):
    """How UP, or DOWN for top_k experts, is cut.

    parts: warps that share a row. ahead: chunks that one asks for at once; once: whether those are all of its. group: the
    template argument GROUP. smem: bytes of a block: of each warp scales and zeros of those chunks, and x of its part of K.
    """

    parts: int
    ahead: int
    once: int
    group: int
    smem: int

    @classmethod
    def of(cls, K: int, scheme: Scheme, top_k: int | None = None) -> "Cut":
        bits, group, chunk = scheme.bits, 0 if scheme.groups(K) == 1 else scheme.group_size, CHUNK[scheme.bits]
        n = parts(K, bits, top_k)
        each, in_flight = math.ceil(chunks(K, bits) / n), AHEAD[bits]
        if top_k is not None and bits == 4 and (each <= TWO_OF_DOWN or scheme.table == "e2m1"):
            in_flight = TWO_OF_DOWN
        of_group = (16 if scheme.scale != "float" else 32) * (2 if scheme.zero != "none" else 1)
        of_warp = groups_met(group, chunk, in_flight) * of_group + each * chunk * 2
        return cls(n, in_flight, int(each <= in_flight), group, (top_k or UP_PRODUCTS) * n * of_warp)


def _refuse(call: ExpertsCall) -> str | None:
    if call.act not in ACTS:
        return f"activation {call.act}"
    if call.top_k > MOST_WARPS:
        return f"{call.top_k} experts per token; this kernel takes at most {MOST_WARPS}"
    limit = min(LIMIT, gpu.of(call.capability).smem_block - 4096)
    for (N, K, scheme, layout), down_of in ((call.gate_up, None), (call.down, call.top_k)):
        if scheme is None or layout != "tile":
            return "experts that are not packed in the layout tile"
        if K % 8 or (scheme.group_size % 16 and scheme.group_size != K):
            return f"rows of {K} in groups of {scheme.group_size}"
        if Cut.of(K, scheme, down_of).smem > limit:
            return f"rows of {K} are too long"
        if scheme.table_width and N % 32:
            return f"tables of {N} rows, or of half as many, which are not whole tiles of 16"
    N = call.gate_up[0]
    return f"{N // 2} rows of gate and of up, which are not whole tiles of 16" if N % 32 else None


def expression(scheme: Scheme, T: int, mode: int, cut: Cut, crowded: bool = True) -> str:
    """The template instance of experts.cu. crowded: there are more blocks than multiprocessors."""
    two = crowded and scheme.bits == 4 and cut.ahead == TWO_OF_DOWN
    blocks = BLOCKS_OF_UP[scheme.bits] if mode != DOWN else 2 if two else 1
    return f"experts<{scheme.bits}, {T}, {cut.group}, {form(scheme)}, {mode}, {cut.ahead}, {cut.once}, {blocks}>"


@cache
def _kernel(instance: str, device: int, threads: int, serialize: bool) -> Kernel:
    return Kernel("experts.cu", instance, device, threads, PARAMETERS, smem=LIMIT, serialize=serialize)


def _launch(
    x: torch.Tensor, s: Stack, ids: torch.Tensor, weights: torch.Tensor | None, y: torch.Tensor, mode: int, top_k: int
) -> None:
    assert s.scheme is not None
    assert s.scales is not None
    p = s.side_by_side()
    scales, zeros, bias = scales_zeros_bias(p, s.bias, x.dtype)
    tables, each = tables_of(p)
    companions = tables if s.scheme.table else zeros
    bits, down_of = s.scheme.bits, top_k if mode == DOWN else None
    on, cut, tiles = gpu.here(x.device.index), Cut.of(s.K, s.scheme, down_of), math.ceil(y.shape[1] / 16)
    instance = expression(s.scheme, TYPES[x.dtype], mode, cut, tiles * y.shape[0] > on.sms)
    serialize = launch.enabled and on.dependent_launch
    grid = (tiles, y.shape[0], cut.smem)
    of_W = (s.words.data_ptr(), scales.data_ptr(), *(0 if t is None else t.data_ptr() for t in (companions, bias)))
    pointers = (*of_W, ids.data_ptr(), 0 if weights is None else weights.data_ptr(), x.data_ptr(), y.data_ptr())
    sizes = (y.shape[1], s.K, chunks(s.K, bits), scales.shape[1], s.words.shape[1], top_k, cut.parts, each)
    _kernel(instance, x.device.index, 32 * (down_of or UP_PRODUCTS) * cut.parts, serialize)(*grid, *pointers, *sizes)


@register("cuda/experts", op="experts", min_capability=gpu.LEAST, preferred_m=(1, FEW_TOKENS), refuse=_refuse)
def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Stack, down: Stack, act: str, config: Config
) -> torch.Tensor:
    """For each row of x (M, H) the sum over its experts ids (M, top_k) int64 of weights (M, top_k) * down(act(gate x) * up x).

    act: one of ACTS (`activation.gated`). fp32 inside; h = act(gate) * up and y are rounded to x's dtype.
    """
    M, top_k = ids.shape
    ids, weights, x = ids.contiguous(), weights.float().contiguous(), x.contiguous()
    h = torch.empty(M * top_k, gate_up.N // 2, dtype=x.dtype, device=x.device)
    y = torch.empty(M, down.N, dtype=x.dtype, device=x.device)
    if M:
        _launch(x, gate_up, ids, None, h, ACTS[act], top_k)
        _launch(h, down, ids, weights, y, DOWN, top_k)
    return y
