"""The Triton family's best against GemLite and cuBLAS fp16, every cell in one run on one GPU.

`PYTHONPATH=<unpacked gemlite 0.6.0.post2> python3 benchmarks/triton_vs_gemlite.py --out FILE.json` times, per scheme, shape and
M: lowq's strided-layout Triton kernels (each candidate of `lowq tune`; the winner), GemLite (its own autotuner in its default
mode "fast", 25 ms a config in place of 125 so that the run fits its lease), and x @ W^T in fp16.
Compiling is done before, in worker processes; no timing shares the GPU with anything. Outputs are checked against fp32.
"""

import argparse
import copy
import datetime
import functools
import json
import math
import multiprocessing
import statistics
import time

import torch

from lowq_cli import tuner
from lowq_kernels import measure
from lowq_kernels.measure import Budget
from lowq_kernels.registry import kernels
from lowq_kernels.timing import graph_time, rotation
from lowq_kernels.tuning import Machine, Shape
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
SCHEMES = ((4, 128), (4, 64), (8, 128), (2, 128), (1, 128))
DEVICE = torch.device("cuda")
CELL = 4096 * 28672  # the largest M * N timed


def quantized(N: int, K: int, bits: int, group: int) -> QuantizedTensor:
    """Codes, scales and float zeros, all drawn."""
    gen = torch.Generator(DEVICE).manual_seed(N + K)
    W_q = torch.randint(0, 2**bits, (N, K), dtype=torch.uint8, device=DEVICE, generator=gen)
    scales = (torch.rand(N, K // group, device=DEVICE, generator=gen) * 0.009 + 0.001).half()
    zeros = (torch.rand(N, K // group, device=DEVICE, generator=gen) * (2**bits - 1)).half()
    return QuantizedTensor(W_q, scales, zeros, bits, group, "float")


def gemlite_layers(q: QuantizedTensor, n: int) -> list[torch.nn.Module]:
    """n GemLite layers of one weight."""
    from gemlite.helper import A16Wn

    layer = A16Wn(device="cuda", dtype=torch.float16).from_weights(q.W_q, q.scales, q.zeros, q.bits, q.group_size)
    return [layer] + [copy.deepcopy(layer) for _ in range(n - 1)]


def quick_autotuner() -> None:
    """Have Triton's autotuner, which GemLite uses, measure each config for 25 ms."""
    import triton

    bench = functools.partial(triton.testing.do_bench, warmup=5, rep=20)
    type(triton.runtime.driver.active).get_benchmarker = lambda self: (
        lambda call, **how: bench(call, quantiles=how.get("quantiles"))
    )


def warm_gemlite(scheme: tuple[int, int]) -> None:
    """Compile GemLite's candidates for one scheme into Triton's cache on disk."""
    quick_autotuner()
    q = quantized(4096, 4096, *scheme)
    try:
        layer = gemlite_layers(q, 1)[0]
        for M in BATCHES:
            layer(torch.randn(M, 4096, device=DEVICE, dtype=torch.float16))
    except Exception as e:
        print("gemlite, warming", scheme, repr(e)[:200], flush=True)


def relative_error(y: torch.Tensor, ref: torch.Tensor) -> float:
    """||y - ref|| / ||ref||."""
    return ((y.float() - ref).norm() / ref.norm()).item()


def cells(scheme: tuple[int, int], N: int, K: int, batches: tuple[int, ...]) -> list[dict[str, object]]:
    """A row per M."""
    q = quantized(N, K, *scheme)
    dense = q.dequantize()
    shape = Shape(N, K, Scheme(*scheme), torch.float16)
    weights = measure.copies(pack(q, "strided"))
    layers = gemlite_layers(q, len(weights))
    fp16 = [dense.half() for _ in range(rotation(2 * N * K))]
    rows: list[dict[str, object]] = []
    for M in batches:
        if M * N > CELL:
            continue
        x = torch.randn(M, K, device=DEVICE, dtype=torch.float16) / 8
        ref = x.float() @ dense.t()
        best = measure.best(shape, M, weights, DEVICE)
        row: dict[str, object] = {"bits": scheme[0], "group": scheme[1], "N": N, "K": K, "M": M}
        if best is not None:
            spec, config = kernels()[best.kernel], best.config
            row |= {"kernel": best.kernel, "config": config, "us": best.us}
            row["rel_err"] = relative_error(spec.launch(x, weights[0], None, config), ref)
        try:
            row["gemlite_rel_err"] = relative_error(layers[0](x), ref)
            row["gemlite_us"] = round(graph_time([lambda w=w, x=x: w(x) for w in layers]), 2)
        except Exception as e:
            row["gemlite_failed"] = repr(e)[:200]
        row["cublas_us"] = round(graph_time([lambda w=w, x=x: x @ w.t() for w in fp16]), 2)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def summary(rows: list[dict[str, object]]) -> dict[str, object]:
    """Geometric mean of GemLite's time over ours, cells where we are slower, and large M against cuBLAS."""
    ratios = [r["gemlite_us"] / r["us"] for r in rows if "gemlite_us" in r and "us" in r]  # type: ignore[operator]
    large = [r["us"] / r["cublas_us"] for r in rows if r["M"] >= 1024 and "us" in r]  # type: ignore[operator]
    return {
        "cells": len(ratios),
        "geomean_speedup_over_gemlite": round(math.exp(statistics.fmean(map(math.log, ratios))), 3) if ratios else None,
        "slowest_against_gemlite": round(min(ratios), 3) if ratios else None,
        "cells_slower_than_gemlite": sum(r < 1 for r in ratios),
        "large_m_over_cublas": [round(min(large), 3), round(max(large), 3)] if large else None,
    }


def main() -> None:
    """Parse, warm, measure, write after every shape."""
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True)
    ap.add_argument("--seconds", type=float, default=1e9)
    a = ap.parse_args()
    budget = Budget(a.seconds)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=warm_gemlite, args=(s,)) for s in SCHEMES]
    for w in workers:
        w.start()
    shapes = [Shape(4096, 4096, Scheme(*s), torch.float16) for s in SCHEMES]
    tuner.compile_candidates(shapes, BATCHES, DEVICE, False, lambda n, of: None)
    for w in workers:
        w.join()
    print(f"compiled in {budget.spent:.0f} s", flush=True)
    quick_autotuner()
    here = Machine.here(DEVICE)
    facts = {
        "gpu": here.gpu,
        "capability": here.capability,
        "torch": here.torch,
        "triton": here.triton,
        "gemlite": "0.6.0.post2",
    }
    rows: list[dict[str, object]] = []
    for i, (N, K) in enumerate(SHAPES):
        for scheme in SCHEMES:
            if not budget.left or (i > 1 and scheme not in SCHEMES[:1]):
                continue
            try:
                rows += cells(scheme, N, K, BATCHES)
            except torch.OutOfMemoryError as e:
                print("memory", scheme, N, K, repr(e)[:100])
            torch.cuda.empty_cache()
            with open(a.out, "w") as f:
                date = datetime.date.today().isoformat()
                json.dump({**facts, "date": date, "summary": summary(rows), "rows": rows}, f, indent=0)
    print(json.dumps(summary(rows)), f"{time.monotonic() - budget.started:.0f} s")


if __name__ == "__main__":
    main()
