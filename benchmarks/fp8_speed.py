"""Part of fp8.py: times the block quantizer, block-scaled products, and products of 8-bit activations with packed codes."""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import ScalingType, scaled_mm

from lowq_kernels.activations import rounded
from lowq_kernels.dispatch.registry import Call, kernels, select
from lowq_kernels.dispatch.timing import graph_time, rotation
from lowq_kernels.fp8 import block_quant, gemm_triton, gemm_wgmma
from lowq_kernels.fp8.block_quant import fp8_block_quant
from lowq_kernels.fp8.call import Fp8Call
from lowq_packers import fp8
from lowq_packers.fp8 import FP8, Fp8Matrix
from lowq_packers.layouts import PackedWeight, pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Act

DEVICE = torch.device("cuda")
SIZES = (1024, 2048, 4096, 8192, 16384)
COMPILED = (1024, 4096, 16384)  # sizes that torch.compile's is timed at: tracing takes seconds a size
GEMMS = (  # N, K, M's
    (8192, 8192, (1, 16, 32, 64, 256, 1024, 2048, 4096, 8192)),
    (28672, 4096, (1, 64, 1024, 4096)),
    (4096, 14336, (1, 64, 1024)),
    (4096, 4096, (1, 64, 256, 1024)),
)
ACTS: tuple[Act, ...] = ("int8", "fp8")
CODES = (  # N, K, bits, group, M's
    *((8192, 8192, bits, 128, (64, 128, 256, 1024, 4096)) for bits in (8, 4, 3, 2)),
    (8192, 8192, 4, 64, (64, 256, 1024, 4096)),
    *((N, K, 4, 128, (64, 256, 1024)) for N, K, _ in GEMMS[1:]),
)
TOLERANCE = 5e-3
REST = 0.02  # seconds between two products' timings
Row = dict[str, Any]


def compile_quantizer(x: torch.Tensor, B: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantizer as one would write it in torch: for torch.compile."""
    n = x.shape[0] // B
    v = x.view(n, B, n, B)
    s = v.abs().amax((1, 3), keepdim=True).float() / 448
    return (v / s).to(FP8).view(x.shape), s


def check(name: str, y: torch.Tensor, ref: torch.Tensor) -> float:
    """The relative error; raises if it is above TOLERANCE."""
    error = ((y.float() - ref).norm() / ref.norm()).item()
    if not error < TOLERANCE:
        raise AssertionError(f"{name}: error {error}")
    return error


def same_bits(a: Fp8Matrix, b: Fp8Matrix) -> bool:
    """Whether two quantizers agree to the last bit."""
    return torch.equal(a.q.view(torch.uint8), b.q.view(torch.uint8)) and torch.equal(a.scales, b.scales)


def quantizer_rows() -> Iterator[Row]:
    """us per size and plan."""
    for n in SIZES:
        xs = [torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(rotation(2 * n * n))]
        plans = {f"tile, {p['num_warps']} warps": p for p in block_quant.TILE_PLANS}
        plans |= {"walk, 32x32": block_quant.STRIDE_PLANS[0], "ours": block_quant.plan_for(n, n, (256, 256))}
        wanted = fp8.quantize(xs[0], (256, 256)) if n <= 4096 else None
        row: Row = {"n": n, "plan": plans["ours"]}
        for name, plan in plans.items():
            got = fp8_block_quant(xs[0], (256, 256), plan)
            if wanted and not same_bits(got, wanted):
                raise AssertionError(f"{name} at {n}: other bits than the definition")
            row[name] = graph_time([partial(fp8_block_quant, x, (256, 256), plan) for x in xs], 8)
        for name, block in (("128x128", (128, 128)), ("1x128", (1, 128))):
            row[name] = graph_time([partial(fp8_block_quant, x, block) for x in xs], 8)
        row["cast"] = graph_time([lambda x=x: x.to(FP8) for x in xs], 8)  # type: ignore[misc]
        if n in COMPILED:
            torch._dynamo.reset()
            compiled = torch.compile(compile_quantizer, dynamic=False)
            row["compile"] = graph_time([partial(compiled, x) for x in xs], 8)
        yield row
        del xs


def fp8_weights(N: int, K: int) -> tuple[list[Fp8Matrix], list[Fp8Matrix], list[Fp8Matrix]]:
    """Copies of one weight that outgrow the cache, in blocks of 128, of 256, and per channel."""
    n = max(2, min(6, math.ceil(256e6 / (N * K))))
    W = torch.randn(N, K, device=DEVICE)
    found = []
    for block in ((128, 128), (256, 256), (1, K)):
        w = fp8.quantize(W, block)
        found.append([Fp8Matrix(w.q.clone(), w.scales.clone(), block) for _ in range(n)])
    return found[0], found[1], found[2]


def gemm_rows(cells: Sequence[tuple[int, int, tuple[int, ...]]]) -> Iterator[Row]:
    """us per shape, M and kernel, and the error of each against fp32. cells: (N, K, M's)."""
    for N, K, Ms in cells:
        w128, w256, rowwise = fp8_weights(N, K)
        for M in Ms:
            x0 = torch.randn(M, K, device=DEVICE, dtype=torch.bfloat16)
            row: Row = {"N": N, "K": K, "M": M, "error": {}}
            calls: dict[str, list[Callable[[], object]]] = {}

            def timed(
                name: str,
                call: Callable[[Fp8Matrix], torch.Tensor],
                ws: list[Fp8Matrix],
                x: Fp8Matrix,
                row: Row = row,
                calls: dict[str, list[Callable[[], object]]] = calls,
            ) -> None:
                row["error"][name] = check(f"{name} {row}", call(ws[0]), x.dequantize() @ ws[0].dequantize().T)
                calls[name] = [partial(call, w) for w in ws]

            xs = [fp8_block_quant(x0, x_block) for _, x_block, _ in block_pairs(K)]
            x128, xrow = xs[0], xs[2]
            for (name, _, _), x, ws in zip(block_pairs(K), xs, (w128, w256, rowwise), strict=True):
                config = select(Fp8Call.of(x, ws[0], torch.bfloat16), "cuda/fp8_gemm")[1]
                row.setdefault("config", {})[name] = config
                timed(name, lambda w, x=x, c=config: gemm_wgmma.fp8_gemm(x, w, None, torch.bfloat16, c), ws, x)  # type: ignore[misc]
            c = gemm_triton.config_for(M, N, K)
            timed("triton", lambda w, c=c: gemm_triton.fp8_gemm(x128, w, None, torch.bfloat16, c), w128, x128)  # type: ignore[misc]  # noqa: B023
            channel = rowwise[0].scales.t()
            timed(
                "torch, per channel",
                lambda w: torch._scaled_mm(xrow.q, w.q.t(), scale_a=xrow.scales, scale_b=channel, out_dtype=torch.bfloat16),  # noqa: B023
                rowwise,
                xrow,
            )
            if M > 1:  # cuBLASLt refuses one row
                scales = x128.scales.t().contiguous().t()
                how = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
                timed(
                    "torch, 128x128",
                    lambda w: scaled_mm(x128.q, w.q.t(), scales, how[0], w.scales.t(), how[1], output_dtype=torch.bfloat16),  # noqa: B023
                    w128,
                    x128,
                )
            row["us"] = in_turn(calls)
            yield row


def block_pairs(K: int) -> list[tuple[str, fp8.Block, fp8.Block]]:
    """The ways to scale a product: name, blocks of x, blocks of W."""
    return [("128x128", (1, 128), (128, 128)), ("256x256", (256, 256), (256, 256)), ("per channel", (1, K), (1, K))]


def in_turn(calls: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
    """us of each name, the median of three: forwards, backwards and forwards again, with rests. Without them the clock falls
    from 1.98 to 1.5 GHz, by how much depends on what ran just before."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for names in (list(calls), list(calls)[::-1], list(calls)):
        for name in names:
            time.sleep(REST)
            found[name].append(graph_time(calls[name], 4))
    return {name: round(statistics.median(times), 2) for name, times in found.items()}


def codes_rows(cells: Sequence[tuple[int, int, int, int, tuple[int, ...]]]) -> Iterator[Row]:
    """us over the `tile` layout: 8-bit activations (x's rounding included; the config that dispatch takes, and the best one),
    what dispatch takes for 16-bit activations, the rounding of x alone, and cuBLAS fp16. cells: (N, K, bits, group, M's)."""
    for N, K, bits, group, Ms in cells:
        dense = [torch.randn(N, K, device=DEVICE).half() for _ in range(max(2, min(4, math.ceil(256e6 / (2 * N * K)))))]
        gen = torch.Generator(DEVICE).manual_seed(bits)
        W_q = torch.randint(0, 1 << bits, (N, K), device=DEVICE, dtype=torch.uint8, generator=gen)
        scales, zeros = (torch.rand(2, N, K // group, device=DEVICE, generator=gen) * 0.009 + 0.001).half()
        qt = QuantizedTensor(W_q, scales, (zeros * 100 * ((1 << bits) - 1)).half(), bits, group)
        W, copies = qt.dequantize(), repeated(pack(qt, "tile"), rotation(N * K * bits // 8))
        for M in Ms:
            x = torch.randn(M, K, device=DEVICE).half()
            row: Row = {"bits": bits, "group": group, "N": N, "K": K, "M": M, "error": {}, "config": {}}
            spec, config = select(Call.of(x, copies[0]))
            check(spec.name, spec.launch(x, copies[0], None, config), x.float() @ W.T)
            row["a16"] = graph_time([lambda p=p: spec.launch(x, p, None, config) for p in copies], 6)  # type: ignore[misc]  # noqa: B023
            row["a16_kernel"] = spec.name
            row["rounding"] = {act: graph_time([partial(rounded, x, act)] * 4, 6) for act in ACTS}
            row["cublas"] = graph_time([lambda w=w: x @ w.T for w in dense], 6)  # type: ignore[misc]  # noqa: B023
            for act in ACTS:
                spec8, call = kernels()[f"cuda/tile_{act}"], Call.of(x, copies[0], act)
                if spec8.why_not(call):
                    continue
                ref, times = rounded(x.float(), act) @ W.T, {}
                legal = spec8.legal_configs(call)
                for c in legal:
                    row["error"][act] = check(f"{act} {c}", spec8.launch(x, copies[0], None, c), ref)
                    times[json.dumps(c)] = graph_time([partial(spec8.launch, x, p, None, c) for p in copies], 3)
                row[act] = times[json.dumps(spec8.default_config(call, legal))]
                row["config"][act] = min(times, key=lambda c: times[c])
                row[f"{act}_best"] = times[row["config"][act]]
            yield row


def repeated(p: PackedWeight, n: int) -> list[PackedWeight]:
    """p and n - 1 copies of its words."""
    return [p, *(replace(p, words=p.words.clone()) for _ in range(n - 1))]
