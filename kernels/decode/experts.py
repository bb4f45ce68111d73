"""experts: a mixture layer for a few tokens in two launches that read only the chosen experts' packed weights (experts.cu).

Inputs   stacks of packed weights in the layout `tile`, experts along dim 0; ids and routing weights stay on the device
Launch   a grid of (tiles of 16 rows, slots or tokens), blocks of up to 16 warps, of which `parts` share a row of K. A shared
         expert has blocks of its own in the first launch, and warps of its own in each block of the second
"""

import ctypes
import math
import struct
from functools import cache
from typing import NamedTuple

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import UNFOLDED, Folded, Kernel
from lowq_kernels.cuda.operands import TYPES, form, scales_zeros_bias, tables_of
from lowq_kernels.decode import launch
from lowq_kernels.decode.activation import UNGATED
from lowq_kernels.decode.mixture import FEW_TOKENS, ExpertsCall, many_slots
from lowq_kernels.dispatch.registry import Config, register
from lowq_kernels.modules.stack import Facts, Shared, Stack
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import CHUNK, chunks
from lowq_packers.scheme import Scheme

SHARED = struct.Struct("@5Q4i")  # experts.cu's Beside
PARAMETERS = (*(ctypes.c_void_p,) * 8, *(ctypes.c_int32,) * 8, Folded)  # Folded: of as many bytes as Beside
ACTS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 3}  # experts.cu's modes of UP; from ALONE on without a gate
DOWN, ALONE = 2, 4
ACTS |= {UNGATED + act: ALONE + i for i, act in enumerate(("silu", "gelu_tanh", "gelu", "relu", "relu2"))}
MOST_WARPS, UP_WARPS = 16, 8  # max. warps per block of DOWN (the down product), of UP (gate and up)
AHEAD = {8: 4, 4: 8, 3: 4, 2: 4, 1: 4}  # bits -> chunks that a warp of experts.cu loads at once
TWO_OF_DOWN = 6  # with 4-bit weights, this many chunks in flight let two blocks of DOWN share a multiprocessor
# Chunks in flight of UP with 4-bit weights, where a warp has more than AHEAD and there is no shared expert. us a launch with 4
# (8): gemma4/26b-a4b 8.7 (10.5), mixtral 43.6 (47.3); with shared experts glm4_moe 23.4 (21.4), granitemoehybrid 44.9 (37.0).
SOME = 4
# Max. warps per block of DOWN with 4-bit weights where there are more blocks than multiprocessors, so that two fit one. us a
# launch with 8 (16): gemma4/26b-a4b 4.5 (6.6), mixtral 21.9 (26.4), granitemoehybrid 17.5 (21.9); 2 us of each are gained by
# routing weights that are asked for early.
CROWDED_WARPS = 8
BLOCKS_OF_UP = {8: 3, 4: 3, 3: 2, 2: 3, 1: 1}  # bits -> blocks of UP per multiprocessor, as registers allow
LIMIT = 96 << 10  # max. bytes of shared memory per block
SHARED_WARPS = 20  # max. warps per block of DOWN with a shared expert
# Max. bytes of a shared expert's words that tokens after the first read again where it is computed with the others. us of a
# step with the others (apart): qwen3_5_moe, 1.6 MB, 2 tokens 320 (373), 4 tokens 437 (466), 8 tokens 663 (640); deepseek_v2,
# 8.7 MB, 2 tokens 473 (479), 4 tokens 732 (664); glm4_moe, 8.7 MB, 2 tokens 404 (405), 4 tokens 584 (560).
READ_AGAIN = 9_000_000


def products(act: str) -> int:
    """Products of UP: gate and up, or up alone."""
    return 1 if act.startswith(UNGATED) else 2


def parts(K: int, bits: int, top_k: int | None = None, warps: int = MOST_WARPS, of_up: int = 2) -> int:
    """Warps that share a row of K in a block of UP of so many products, or of DOWN for top_k experts, of so many warps."""
    most = UP_WARPS // of_up if top_k is None else warps // top_k
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
    def of(
        cls, K: int, scheme: Scheme, top_k: int | None = None, crowded: bool = False, shared: bool = False, of_up: int = 2
    ) -> "Cut":
        """crowded: DOWN has more blocks than there are multiprocessors. shared: there is a shared expert. of_up: `products`."""
        bits, group, chunk = scheme.bits, 0 if scheme.groups(K) == 1 else scheme.group_size, CHUNK[scheme.bits]
        narrow = crowded and bits == 4 and not scheme.table
        n = parts(K, bits, top_k, CROWDED_WARPS if narrow else MOST_WARPS, of_up)
        each, in_flight = math.ceil(chunks(K, bits) / n), AHEAD[bits]
        if top_k is None and bits == 4 and not scheme.table and each > in_flight and not shared:
            in_flight = SOME
        if top_k is not None and bits == 4 and not narrow and (each <= TWO_OF_DOWN or scheme.table == "e2m1"):
            in_flight = TWO_OF_DOWN
        of_group = (16 if scheme.scale != "float" else 32) * (2 if scheme.zero != "none" else 1)
        of_warp = groups_met(group, chunk, in_flight) * of_group + each * chunk * 2
        return cls(n, in_flight, int(each <= in_flight), group, (top_k or of_up) * n * of_warp)


def _refuse(call: ExpertsCall) -> str | None:
    if call.activation not in ACTS:
        return f"activation {call.activation}"
    if call.top_k > MOST_WARPS:
        return f"{call.top_k} experts per token; this kernel takes at most {MOST_WARPS}"
    limit, of_up = min(LIMIT, gpu.of(call.capability).smem_block - 4096), products(call.activation)
    for (N, K, scheme, layout), down_of in ((call.gate_up, None), (call.down, call.top_k)):
        if scheme is None or layout != "tile":
            return "experts that are not packed in the layout tile"
        if K % 8 or (scheme.group_size % 16 and scheme.group_size != K):
            return f"rows of {K} in groups of {scheme.group_size}"
        if Cut.of(K, scheme, down_of, of_up=of_up).smem > limit:
            return f"rows of {K} are too long"
        if scheme.table_width and N % 32:
            return f"tables of {N} rows, or of half as many, which are not whole tiles of 16"
    N = call.gate_up[0]
    if N % (16 * of_up):
        return f"{N // of_up} rows of gate and of up, which are not whole tiles of 16"
    return _refuse_shared(call) if call.shared else None


def _refuse_shared(call: ExpertsCall) -> str | None:
    """Why the shared expert of a call cannot be computed with the others, or None."""
    assert call.shared is not None
    if call.biased:
        return "a shared expert next to experts with biases"
    if many_slots(call) or (call.M - 1) * sum(N * K * s.bits for N, K, s, _ in call.shared if s) > 8 * READ_AGAIN:
        return f"a shared expert of {call.M} tokens"
    for (_, K, scheme, _), (N, own_K, own, layout) in zip((call.gate_up, call.down), call.shared, strict=True):
        assert scheme is not None
        if own != scheme or layout != "tile" or scheme.table:
            return f"a shared expert of {own} in {layout}, where the others are of {scheme}"
        if own.groups(own_K) > scheme.groups(K) == 1 or N % 16:  # the instance for rows of one group
            return f"a shared expert of {N} x {own_K}"
    (N, K, *_), (_, inner, *_), of_up = *call.shared, products(call.activation)
    if call.gate_up[1] != K or of_up * inner != N or inner % 16 or call.down[0] != call.shared[1][0]:
        return "a shared expert of another width"
    limit = min(LIMIT, gpu.of(call.capability).smem_block - 4096)
    cuts = (SharedCut.of(call.gate_up, call.down, call.shared, call.top_k, crowded, of_up) for crowded in (False, True))
    return None if all(cut.fits(limit) for cut in cuts) else "a shared expert too wide"


class SharedCut(NamedTuple):
    """How a shared expert is computed with the others.

    up, down: how theirs are cut. rows: of blocks in UP's grid for each token. parts: warps of a block of DOWN. once: whether
    each of those loads all of its chunks at once. up_smem, down_smem: bytes of a block.
    """

    up: Cut
    down: Cut
    rows: int
    parts: int
    once: bool
    up_smem: int
    down_smem: int

    @classmethod
    def of(cls, gate_up: Facts, down: Facts, shared: tuple[Facts, Facts], top_k: int, crowded: bool, of_up: int) -> "SharedCut":
        (N, K, scheme, _), (_, of_down, down_scheme, _), (own_N, _, _, _), (_, inner, _, _) = gate_up, down, *shared
        assert scheme is not None
        assert down_scheme is not None
        up, to = Cut.of(K, scheme, shared=True, of_up=of_up), Cut.of(of_down, down_scheme, top_k, crowded)
        bits, chunk = down_scheme.bits, CHUNK[down_scheme.bits]
        count = chunks(inner, bits)
        parts = max(1, min(math.ceil(count / to.ahead), SHARED_WARPS - top_k * to.parts))
        each, each_of_up = math.ceil(count / parts), math.ceil(chunks(K, scheme.bits) / up.parts)
        of_warp = to.smem // (top_k * to.parts) + 2 * chunk * (each - math.ceil(chunks(of_down, bits) / to.parts))
        opening = of_up * up.parts * each_of_up * CHUNK[scheme.bits] * 2
        return cls(up, to, math.ceil(own_N / N), parts, each <= to.ahead, up.smem + opening, to.smem + parts * of_warp)

    def fits(self, limit: int) -> bool:
        """Whether a block's shared memory holds it, and its warps all that they load."""
        return max(self.up_smem, self.down_smem) <= limit and (self.once or not self.down.once) and self.parts > 0


def expression(scheme: Scheme, T: int, mode: int, cut: Cut, crowded: bool = True, shared: bool = False) -> str:
    """The template instance of experts.cu. crowded: there are more blocks than multiprocessors."""
    two = crowded and scheme.bits == 4 and cut.ahead == TWO_OF_DOWN and not shared
    blocks = 2 if two else 1
    if mode != DOWN and not (scheme.bits == 4 and cut.ahead == SOME):
        blocks = BLOCKS_OF_UP[scheme.bits]
    more = ", 1" if shared else ""
    return f"experts<{scheme.bits}, {T}, {cut.group}, {form(scheme)}, {mode}, {cut.ahead}, {cut.once}, {blocks}{more}>"


@cache
def _kernel(instance: str, device: int, threads: int, serialize: bool) -> Kernel:
    return Kernel("experts.cu", instance, device, threads, PARAMETERS, smem=LIMIT, serialize=serialize)


class _Addition(NamedTuple):
    """The shared expert's part of one launch. h (M, inner): written by UP, read by DOWN. rows: of UP's grid."""

    weight: PackedWeight
    h: torch.Tensor
    opening: torch.Tensor | None
    rows: int
    parts: int
    smem: int

    def packed(self, dtype: torch.dtype) -> bytes:
        """The kernel's argument."""
        scales, zeros, _ = scales_zeros_bias(self.weight, None, dtype)
        tensors = (self.weight.words, scales, zeros, self.opening, self.h)
        count = chunks(self.weight.K, self.weight.scheme.bits)
        sizes = (self.h.shape[1], count, scales.shape[1], self.rows or self.parts)
        return SHARED.pack(*(0 if t is None else t.data_ptr() for t in tensors), *sizes)


def _launch(
    x: torch.Tensor, s: Stack, ids: torch.Tensor, weights: torch.Tensor | None, y: torch.Tensor, mode: int, top_k: int,
    more: _Addition | None = None,
) -> None:  # fmt: skip
    assert s.scheme is not None
    assert s.scales is not None
    p = s.side_by_side()
    scales, zeros, bias = scales_zeros_bias(p, s.bias, x.dtype)
    tables, each = tables_of(p)
    companions = tables if s.scheme.table else zeros
    bits, down_of, of_up = s.scheme.bits, top_k if mode == DOWN else None, 1 if mode >= ALONE else 2
    on, tiles = gpu.here(x.device.index), math.ceil(y.shape[1] / 16)
    crowded = tiles * y.shape[0] > on.sms
    cut = Cut.of(s.K, s.scheme, down_of, crowded and down_of is not None, more is not None, of_up)
    instance = expression(s.scheme, TYPES[x.dtype], mode, cut, crowded, more is not None)
    serialize = launch.enabled and on.dependent_launch
    warps, rows, smem = (down_of or of_up) * cut.parts, y.shape[0], cut.smem
    if more is not None:
        warps, rows, smem = warps + (more.parts if down_of else 0), rows + more.rows, more.smem
    of_W = (s.words.data_ptr(), scales.data_ptr(), *(0 if t is None else t.data_ptr() for t in (companions, bias)))
    pointers = (*of_W, ids.data_ptr(), 0 if weights is None else weights.data_ptr(), x.data_ptr(), y.data_ptr())
    sizes = (y.shape[1], s.K, chunks(s.K, bits), scales.shape[1], s.words.shape[1], top_k, cut.parts, each)
    addition = UNFOLDED if more is None else more.packed(x.dtype)
    _kernel(instance, x.device.index, 32 * warps, serialize)(tiles, rows, smem, *pointers, *sizes, addition)


@register("cuda/experts", op="experts", min_capability=gpu.LEAST, preferred_m=(1, FEW_TOKENS), refuse=_refuse)
def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Stack, down: Stack, act: str, config: Config,
    shared: Shared | None = None,
) -> torch.Tensor:  # fmt: skip
    """For each row of x (M, H) the sum over its experts ids (M, top_k) int64 of weights (M, top_k) * down(act(gate x) * up x),
    and a shared expert's, if there is one.

    act: one of ACTS (`activation.gated`, `activation.activated`). fp32 inside; h = act(gate) * up, or act(up), and y are
    rounded to x's dtype.
    """
    M, top_k = ids.shape
    ids, weights, x = ids.contiguous(), weights.float().contiguous(), x.contiguous()
    h = torch.empty(M * top_k, gate_up.N // products(act), dtype=x.dtype, device=x.device)
    y = torch.empty(M, down.N, dtype=x.dtype, device=x.device)
    if not M:
        return y
    to_h, to_y = None, None
    if shared is not None:
        crowded = math.ceil(down.N / 16) * M > gpu.here(x.device.index).sms
        cut = SharedCut.of(gate_up.facts, down.facts, shared.facts, top_k, crowded, products(act))
        own = torch.empty(M, shared.down.K, dtype=x.dtype, device=x.device)
        to_h = _Addition(shared.gate_up, own, shared.opening, M * cut.rows, 0, cut.up_smem)
        to_y = _Addition(shared.down, own, None, 0, cut.parts, cut.down_smem)
    _launch(x, gate_up, ids, None, h, ACTS[act], top_k, to_h)
    _launch(h, down, ids, weights, y, DOWN, top_k, to_y)
    return y
