"""Example calls of each operation on random operands, for `lowq bench`. Each docstring explains the meaning of NxK."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lowq_kernels.activations import Act
from lowq_kernels.decode import kv, reference
from lowq_kernels.decode.attend import AttendCall
from lowq_kernels.decode.mixture import ExpertsCall
from lowq_kernels.dispatch.layouts import best_layout
from lowq_kernels.dispatch.measure import call_for, copies, random_weight
from lowq_kernels.dispatch.registry import AnyCall, KernelSpec, Op
from lowq_kernels.dispatch.timing import call_bytes, rotation
from lowq_kernels.dispatch.tuning import Shape
from lowq_kernels.fp8.call import Fp8Call
from lowq_kernels.modules.stack import Stack
from lowq_kernels.products.dense_call import DenseCall
from lowq_packers import fp8
from lowq_packers.errors import UsageError

HEAD, QUERIES = 128, 4  # attention: dims per head, query heads per key head
EXPERTS, TOP_K = 8, 2  # mixture: experts, and experts per token


@dataclass(frozen=True)
class Example:
    """A call, with operands for launches on distinct weights that exceed the cache, and its dense 16-bit counterpart."""

    call: AnyCall
    operands: list[tuple[Any, ...]]
    dense: list[Callable[[], object]]
    nbytes: float  # bytes that one launch must move
    flops: float
    layout: str = ""


def product(shape: Shape, M: int, device: torch.device, kernel: KernelSpec | None) -> Example:
    """x (M, K) times a packed weight (N, K), with activations in the form that the requested kernel expects."""
    layout = best_layout(shape.scheme, shape.N, shape.K, shape.dtype, device, kernel=kernel.name if kernel else None)
    act: Act = kernel.acts[0] if kernel else "none"
    x = torch.randn(M, shape.K, device=device).to(shape.dtype)
    operands = [(x, w, None) for w in copies(random_weight(shape, layout, device))]
    moved = call_bytes(M, shape.N, shape.K, shape.scheme.bits_per_weight())
    call = call_for(shape, M, layout, device, act)
    return Example(call, operands, _linear(x, _weights(shape, device)), moved, 2.0 * M * shape.N * shape.K, layout)


def fp8_product(shape: Shape, M: int, device: torch.device, kernel: KernelSpec | None) -> Example:
    """x (M, K) times an e4m3 weight (N, K) with 128x128 scales; x is also e4m3, with 1x128 scales, if the kernel expects it."""
    x, w = torch.randn(M, shape.K, device=device).to(shape.dtype), torch.randn(shape.N, shape.K, device=device)
    weight, rounded = fp8.quantize(w, (128, 128)), fp8.quantize(x, (1, 128))
    call = Fp8Call.of(rounded, weight, shape.dtype)
    operand: object = rounded
    if kernel and kernel.why_not(call):
        call, operand = Fp8Call.of(x, weight, shape.dtype), x
    weights = [weight] + [
        fp8.Fp8Matrix(weight.q.clone(), weight.scales, weight.block) for _ in range(rotation(weight.q.nbytes, device) - 1)
    ]
    operands = [(operand, w, None, shape.dtype) for w in weights]
    moved, plain = call_bytes(M, shape.N, shape.K, 8), _linear(x, _weights(shape, device))
    return Example(call, operands, plain, moved, 2.0 * M * shape.N * shape.K)


def dense(shape: Shape, M: int, device: torch.device, kernel: KernelSpec | None) -> Example:
    """x (M, K) times a weight (N, K) that is not packed."""
    x, weights = torch.randn(M, shape.K, device=device).to(shape.dtype), _weights(shape, device)
    operands, moved = [(x, w, None) for w in weights], call_bytes(M, shape.N, shape.K, 16)
    return Example(DenseCall.of(M, weights[0]), operands, _linear(x, weights), moved, 2.0 * M * shape.N * shape.K)


def attend(shape: Shape, M: int, device: torch.device, kernel: KernelSpec | None, kind: str = kv.PLAIN) -> Example:
    """One token of each of M sequences: heads of 128 dims, N query features, 4 query heads per key head, K full cache slots.

    kind: the caches' format (`kv.KINDS`); the dense call's caches are in 16 bits.
    """
    HQ, S = shape.N // HEAD, shape.K
    if shape.N % (HEAD * QUERIES):
        heads = f"heads of {HEAD}, {QUERIES} a key head"
        raise UsageError(f"attend takes --shape NxS: N features of queries in {heads}, S slots of the cache; not N={shape.N}")
    h = reference.Heads(HQ, HQ // QUERIES, HEAD, HEAD**-0.5)
    qkv = torch.randn(M, (HQ + 2 * h.HKV) * HEAD, device=device).to(shape.dtype)
    pos, angles = torch.full((M,), S - 1, dtype=torch.int32, device=device), torch.rand(S, HEAD, device=device)
    at = reference.Places(pos, angles.cos().to(shape.dtype), angles.sin().to(shape.dtype))
    moved = 2.0 * M * h.HKV * S * kv.slot_bytes(kind, HEAD, shape.dtype)
    first = torch.randn(2, M, h.HKV, S, HEAD, device=device).to(shape.dtype)
    caches = [first, *(first.clone() for _ in range(rotation(int(moved), device) - 1))]
    dense: list[Callable[[], object]] = [partial(reference.attend, qkv, k, v, at, h) for k, v in caches]
    operands = [(qkv, *(kv.holding(kind, x) for x in c), at, h) for c in caches]
    return Example(AttendCall.of(qkv, S, HEAD, h, kv=kind), operands, dense, moved, 4.0 * M * HQ * S * HEAD)


def experts(shape: Shape, M: int, device: torch.device, kernel: KernelSpec | None) -> Example:
    """A mixture's layer for M tokens: 2 of 8 experts per token, gate and up joined (N, K), down (K, N / 2)."""
    up = _stack(shape, device)
    down = _stack(Shape(shape.K, shape.N // 2, shape.scheme, shape.dtype), device)
    x = torch.randn(M, shape.K, device=device).to(shape.dtype)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(M)]).to(device)
    weights = torch.rand(M, TOP_K, device=device)
    read = min(EXPERTS, M * TOP_K) * 1.5 * shape.N * shape.K
    call = ExpertsCall.of(up, down, TOP_K, "silu", shape.dtype, M)
    moved, plain = read * shape.scheme.bits_per_weight() / 8, _linear(x, _weights(shape, device))
    return Example(call, [(x, ids, weights, up, down, "silu")], plain, moved, 3.0 * M * TOP_K * shape.N * shape.K)


def _stack(shape: Shape, device: torch.device) -> Stack:
    layout = best_layout(shape.scheme, shape.N, shape.K, shape.dtype, device)
    experts = [random_weight(shape, layout, device) for _ in range(EXPERTS)]
    zeros = None if experts[0].zeros is None else torch.stack([p.zeros for p in experts if p.zeros is not None])
    words, scales = torch.stack([p.words for p in experts]), torch.stack([p.scales for p in experts])
    return Stack(words, scales, zeros, None, shape.scheme, shape.N, shape.K, layout)


def _weights(shape: Shape, device: torch.device) -> list[torch.Tensor]:
    w = torch.randn(shape.N, shape.K, device=device, dtype=shape.dtype) / 64
    return [w, *(w.clone() for _ in range(rotation(w.nbytes, device) - 1))]


def _linear(x: torch.Tensor, weights: list[torch.Tensor]) -> list[Callable[[], object]]:
    """The dense matmul in x's dtype."""
    return [partial(torch.nn.functional.linear, x, w) for w in weights]


EXAMPLES: dict[Op, Callable[..., Example]] = {
    "product": product,
    "fp8_product": fp8_product,
    "dense": dense,
    "attend": attend,
    "experts": experts,
}
