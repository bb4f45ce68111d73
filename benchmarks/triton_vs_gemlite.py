"""The Triton family's best against GemLite and cuBLAS fp16 on one GPU, every cell by one protocol.

`PYTHONPATH=<unpacked gemlite 0.6.0.post2> python3 benchmarks/triton_vs_gemlite.py --out FILE.json` times, per scheme, shape
and M: lowq's strided-layout Triton kernels, GemLite, and x @ W^T in fp16. GemLite takes the config that its own table for
this GPU holds; where that has none, its autotuner measures, as its default mode "fast" does, GEMLITE_CONFIGS of each kernel:
those that win most often in that table, and some of its fast list (all of them take 3 s a cell, and there are 400 cells).
--choices FILE keeps what the autotuner chose, as GemLite's own JSON; the next run reads it and tunes only what is not in it.
Ours are those that `measure.candidates` allows, with --known FILE only those that won somewhere in FILE at that width and
the first of gemm_wide's by its model. --open times only the cells of --known where GemLite was faster or within NEAR of us,
those of many rows where cuBLAS was FAR ahead, those whose config is no more, then those that it lacks. Compiling is done
before, in worker processes; no timing shares the GPU with anything.
Outputs are checked against fp32. Rows of an existing FILE stay for cells that this run does not reach; `run` in a row says
which run it is from.
"""

import argparse
import copy
import datetime
import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from lowq_cli.tuning.benching import parse_shape
from lowq_kernels.dispatch import measure, registry
from lowq_kernels.dispatch.measure import Budget
from lowq_kernels.dispatch.precompile import Work, compile_all
from lowq_kernels.dispatch.registry import Call, Config, KernelSpec
from lowq_kernels.dispatch.timing import graph_time, rotation
from lowq_kernels.dispatch.tuning import Machine, Shape
from lowq_kernels.products.triton import gemm_wide
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

SHAPES = "4096x4096,28672x4096,4096x14336,8192x8192,57344x8192"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
SCHEMES = "4:128,4:64,8:128,8:64,2:128,2:64,1:128,1:64"
DEVICE = torch.device("cuda")
CELL = 4096 * 28672  # the largest M * N timed
LARGE_M, LARGE_COPIES = 1024, 4  # there products are bound by arithmetic: fewer copies of the weight will do
QUICK = (3, 200.0)  # replays and us each, to rank candidates
MOST, MOST_WIDE = 6, 3  # of the configs that won before, where those are all that is timed
TOLERANCE = 2e-3  # of ours, relative: the gate's for fp16
NEAR, FAR = 1.05, 1.1  # --open times cells again below this of GemLite's time over ours, or above this of ours over cuBLAS's
REST = 0.1  # seconds before a timing of many rows: the clock falls under the board's power limit
GEMLITE_CONFIGS = 8  # of each of its kernels
RUN = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
Cell = tuple[int, int, int, int, int]  # bits, group, N, K, M
Place = tuple[int, int, int, int]  # bits, group, N, K
Plan = list[tuple[Place, list[int]]]  # and the M's to time there
Choice = tuple[KernelSpec, Config]
Known = tuple[int, str, tuple[tuple[str, int], ...]]


def quantized(N: int, K: int, bits: int, group: int, device: torch.device = DEVICE) -> QuantizedTensor:
    """Codes, scales and float zeros, all drawn."""
    gen = torch.Generator(device).manual_seed(N + K)
    W_q = torch.randint(0, 2**bits, (N, K), dtype=torch.uint8, device=device, generator=gen)
    scales = (torch.rand(N, K // group, device=device, generator=gen) * 0.009 + 0.001).half()
    zeros = (torch.rand(N, K // group, device=device, generator=gen) * (2**bits - 1)).half()
    return QuantizedTensor(W_q, scales, zeros, bits, group, "float")


# ---- GemLite ----


def gemlite_layers(q: QuantizedTensor, n: int) -> list[torch.nn.Module]:
    """n GemLite layers of one weight."""
    from gemlite.helper import A16Wn

    layer = A16Wn(device=q.W_q.device.type, dtype=torch.float16).from_weights(q.W_q, q.scales, q.zeros, q.bits, q.group_size)
    return [layer] + [copy.deepcopy(layer) for _ in range(n - 1)]


@cache
def few_configs() -> None:
    """Leave GEMLITE_CONFIGS configs to each of GemLite's kernels, half of them the most frequent winners of its own table."""
    import triton
    from gemlite import core
    from gemlite.triton_kernels import gemm_kernels, gemm_splitK_kernels, gemv_revsplitK_kernels, gemv_splitK_kernels

    for module in (gemm_kernels, gemm_splitK_kernels, gemv_revsplitK_kernels, gemv_splitK_kernels):
        won = Counter(map(_frozen, core.GEMLITE_TRITON_CONFIG_CACHE.get(module.MATMUL_TYPE, {}).values()))
        for kernel in module.__dict__.values():
            if isinstance(kernel, triton.runtime.Autotuner):
                fast, names = kernel.configs, set(kernel.configs[0].kwargs)
                popular = [_config(dict(c), names) for c, _ in won.most_common(GEMLITE_CONFIGS // 2)]
                kernel.configs = popular + fast[:: max(1, len(fast) // (GEMLITE_CONFIGS - len(popular)))]


@cache
def quick_autotuner() -> None:
    """Have Triton's autotuner, which GemLite uses, time each config over 8 calls, every one behind a flushed cache."""
    import triton

    flush = torch.empty(256 << 18, dtype=torch.int32, device=DEVICE)

    def benchmarker(call: Callable[[], object], **how: object) -> list[float]:
        call()
        spans = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(8)]
        for start, stop in spans:  # queued behind each other, so that launching from Python is not timed
            flush.zero_()
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        return [statistics.median(start.elapsed_time(stop) for start, stop in spans)] * 3

    type(triton.runtime.driver.active).get_benchmarker = lambda self: benchmarker


def _frozen(config: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(config.items()))


def _config(entry: dict[str, Any], names: set[str]) -> Any:
    """A row of GemLite's table as the Triton config that its autotuner takes."""
    import triton

    kept = {k: v for k, v in entry.items() if k in names}
    return triton.Config(kept, num_warps=entry["num_warps"], num_stages=entry["num_stages"])


@cache
def read_choices(path: Path | None) -> bool:
    """Have GemLite take what its autotuner chose in an earlier run; False where there is none."""
    from gemlite.core import GemLiteLinear

    return path is not None and path.exists() and bool(GemLiteLinear.load_config(str(path)))


def warm_gemlite(place: Place, rows: Sequence[int], choices: Path | None = None) -> None:
    """Compile GemLite's candidates for one scheme and shape (its kernels are compiled per N and K) into Triton's cache."""
    bits, group, N, K = place
    try:
        few_configs()
        quick_autotuner()
        read_choices(choices)
        layer = gemlite_layers(quantized(N, K, bits, group), 1)[0]
        for M in rows:
            layer(torch.randn(M, K, device=DEVICE, dtype=torch.float16))
    except Exception as e:
        print("gemlite", place, repr(e)[:200], flush=True)


# ---- ours ----


def candidates(call: Call, known: set[Known]) -> list[Choice]:
    """Kernels and configs to time: all that tuning would, or some `known` to win near this call and gemm_wide's likely."""
    allowed = [(s, c) for s, c in measure.candidates(call, exhaustive=bool(known)) if s.name.startswith("triton/")]
    if not known:
        return allowed
    wide = [(s, c) for s, c in allowed if s.name == "triton/gemm_wide"]
    wide.sort(key=lambda t: gemm_wide.cost(call, t[1]))
    near = {(name, bare(c)) for m, name, c in known if m / 2 <= call.M <= m * 2}
    seen = {(name, c) for m, name, c in known if m == call.M}
    like = [(s, c) for s, c in allowed if (s.name, bare(tuple(sorted(c.items())))) in near]
    like.sort(key=lambda t: (t[0].name, tuple(sorted(t[1].items()))) not in seen)
    return [t for t in like if t[0].name != "triton/gemm_wide"][:MOST] + wide[:MOST_WIDE]


def bare(config: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """A config without its split: how far to split depends on the shape."""
    return tuple((k, v) for k, v in config if k != "SPLIT_K")


def winners(path: Path | None, bits: int) -> set[Known]:
    """(M, kernel, config) that won in a result file of this script at this width."""
    rows = json.loads(path.read_text())["rows"] if path else []
    return {(r["M"], r["kernel"], tuple(sorted(r["config"].items()))) for r in rows if r["bits"] == bits and "kernel" in r}


def rested(calls: Sequence[Callable[[], object]], M: int) -> float:
    """us by the full protocol, behind a rest where there are many rows."""
    if M >= LARGE_M:
        torch.cuda.synchronize()
        time.sleep(REST)
    return graph_time(calls)


def best(
    found: list[Choice], x: torch.Tensor, weights: list[Any], ref: torch.Tensor
) -> tuple[float, KernelSpec, Config] | None:
    """The fastest of them that are right, ranked quickly, then the first two by the full protocol."""
    ranked = []
    for spec, config in found:
        try:
            error = relative_error(spec.launch(x, weights[0], None, config), ref)
            if not error < TOLERANCE:
                raise AssertionError(f"relative error {error}")
            us = graph_time([lambda w=w, f=spec.launch, c=config: f(x, w, None, c) for w in weights], *QUICK)
            ranked.append((us, spec, config))
        except Exception as e:
            print("FAILED", spec.name, config, repr(e)[:160], flush=True)
    ranked.sort(key=lambda t: t[0])
    final = [
        (rested([lambda w=w, f=spec.launch, c=config: f(x, w, None, c) for w in weights], x.shape[0]), spec, config)
        for us, spec, config in ranked[:2]
        if us <= 1.1 * ranked[0][0]
    ]
    return min(final, key=lambda t: t[0], default=None)


def ours(plan: Plan, known: dict[int, set[Known]]) -> list[Work]:
    """What to compile of ours. A split of k is no part of a binary, but whether there is one is; of sizes what divides them."""
    work = {}
    for (bits, group, N, K), rows in plan:
        for M in rows:
            call = measure.call_for(Shape(N, K, Scheme(bits, group), torch.float16), M, "strided", DEVICE)
            for spec, config in candidates(call, known[bits]):
                free = spec.name in ("triton/gemm_wide", "triton/gemv_splitk")
                alike = config | {"SPLIT_K": min(config["SPLIT_K"], 2)} if free else config
                item = Work.of(spec.name, alike, call.scheme, "strided", torch.float16, M, 4096, 4096)
                work[item] = item
    return list(work)


# ---- the table ----


def relative_error(y: torch.Tensor, ref: torch.Tensor) -> float:
    """||y - ref|| / ||ref||."""
    return ((y.float() - ref).norm() / ref.norm()).item()


def all_cells(schemes: Sequence[tuple[int, int]], shapes: Sequence[tuple[int, int]]) -> Plan:
    """Every cell, shape by shape."""
    return [((*s, N, K), [M for M in BATCHES if M * N <= CELL]) for N, K in shapes for s in schemes]


def open_cells(plan: Plan, rows: list[dict[str, Any]]) -> Plan:
    """The cells of a plan to time: GemLite is near, rows are many and cuBLAS far ahead, the config is no more, not in `rows`.

    In this order of their places, each of which is set up once.
    """
    known = {place(r): r for r in rows if "us" in r and "gemlite_us" in r}
    near = {c for c, r in known.items() if r["gemlite_us"] < NEAR * r["us"]}
    far = {c for c, r in known.items() if r["M"] >= LARGE_M and r["us"] > FAR * r["cublas_us"]}
    gone = {c for c, r in known.items() if r["config"] not in registry.kernels()[r["kernel"]].configs}
    found: dict[Place, list[int]] = {}
    for kind in (near, far, gone, {(*p, M) for p, ms in plan for M in ms} - set(known)):
        for where in [p for p, ms in plan if any((*p, M) in kind for M in ms)]:
            found.setdefault(where, [])
    return [(p, [M for M in dict(plan)[p] if (*p, M) not in set(known) - near - far - gone]) for p in found]


def cells(
    where: Place, Ms: Sequence[int], known: set[Known], dense_us: dict[tuple[int, int, int], float], budget: Budget
) -> list[dict[str, Any]]:
    """A row per M, until the budget ends; cuBLAS times are kept in `dense_us` for the other schemes of the shape."""
    scheme, (N, K) = where[:2], where[2:]
    q = quantized(N, K, *scheme)
    dense = q.dequantize()
    shape = Shape(N, K, Scheme(*scheme), torch.float16)
    weights = measure.copies(pack(q, "strided"))
    layers = gemlite_layers(q, len(weights))
    fp16 = [dense.half() for _ in range(min(LARGE_COPIES, rotation(2 * N * K)))]
    rows: list[dict[str, Any]] = []
    for M in Ms:
        if not budget.left:
            continue
        n = LARGE_COPIES if M >= LARGE_M else len(weights)
        x = torch.randn(M, K, device=DEVICE, dtype=torch.float16) / 8
        ref = x.float() @ dense.t()
        row: dict[str, Any] = {"bits": scheme[0], "group": scheme[1], "N": N, "K": K, "M": M, "run": RUN}
        ours = best(candidates(measure.call_for(shape, M, "strided", DEVICE), known), x, weights[:n], ref)
        if ours is not None:
            us, spec, config = ours
            row |= {"kernel": spec.name, "config": config, "us": round(us, 2)}
            row["rel_err"] = relative_error(spec.launch(x, weights[0], None, config), ref)
        try:
            row["gemlite_rel_err"] = relative_error(layers[0](x), ref)
            row["gemlite_us"] = round(rested([lambda w=w, x=x: w(x) for w in layers[:n]], M), 2)
        except Exception as e:
            row["gemlite_failed"] = repr(e)[:200]
        if (N, K, M) not in dense_us:
            dense_us[N, K, M] = round(rested([lambda w=w, x=x: x @ w.t() for w in fp16], M), 2)
        row["cublas_us"] = dense_us[N, K, M]
        rows.append(row)
        print(f"{budget.spent:.1f} s", json.dumps(row), flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, object]:
    """Geometric mean of GemLite's time over ours, cells where we are slower, and large M against cuBLAS."""
    ratios = [r["gemlite_us"] / r["us"] for r in rows if "gemlite_us" in r and "us" in r]
    large = [r["us"] / r["cublas_us"] for r in rows if r["M"] >= LARGE_M and "us" in r]
    return {
        "cells": len(ratios),
        "geomean_speedup_over_gemlite": round(statistics.geometric_mean(ratios), 3) if ratios else None,
        "slowest_against_gemlite": round(min(ratios), 3) if ratios else None,
        "cells_slower_than_gemlite": sum(r < 1 for r in ratios),
        "large_m_over_cublas": [round(min(large), 3), round(max(large), 3)] if large else None,
    }


def place(row: dict[str, Any]) -> Cell:
    """What a row is about."""
    return row["bits"], row["group"], row["N"], row["K"], row["M"]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put rows into the file, in the order of SCHEMES and SHAPES, over older ones of the same cells."""
    here = Machine.here(DEVICE)
    facts = {"gpu": here.gpu, "capability": here.capability, "torch": here.torch, "triton": here.triton}
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    found = {place(r): r for r in [*old, *rows]}
    order = [(*map(int, s.split(":")), *parse_shape(n)) for n in SHAPES.split(",") for s in SCHEMES.split(",")]
    kept = sorted(found.values(), key=lambda r: (order.index(place(r)[:4]), r["M"]))
    date = datetime.date.today().isoformat()
    whole = {**facts, "gemlite": "0.6.0.post2", "date": date, "summary": summary(kept), "rows": kept}
    path.write_text(json.dumps(whole, indent=0))


def main() -> None:
    """Parse, compile, measure, write after every shape."""
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--known", type=Path, help="a result file: time only what won there")
    ap.add_argument("--schemes", default=SCHEMES)
    ap.add_argument("--shapes", default=SHAPES)
    ap.add_argument("--seconds", type=float, default=1e9)
    ap.add_argument("--workers", type=int, default=15)
    ap.add_argument("--open", action="store_true", help="only cells of --known where GemLite is near, and those it lacks")
    ap.add_argument("--warm", action="store_true", help="all kernels are in Triton's cache already")
    ap.add_argument("--choices", type=Path, help="what GemLite's autotuner chose: read and added to")
    a = ap.parse_args()
    budget = Budget(a.seconds)
    schemes = [(int(b), int(g)) for b, g in (s.split(":") for s in a.schemes.split(","))]
    known = {bits: winners(a.known, bits) for bits, _ in schemes}
    plan = all_cells(schemes, [parse_shape(s) for s in a.shapes.split(",")])
    if a.open:
        plan = open_cells(plan, json.loads(a.known.read_text())["rows"])
    print(f"{sum(len(ms) for _, ms in plan)} cells", flush=True)
    if not a.warm:
        context = multiprocessing.get_context("spawn")
        with context.Pool(min(a.workers, len(plan))) as pool:
            theirs = pool.starmap_async(partial(warm_gemlite, choices=a.choices), plan, chunksize=1)
            print(f"ours: {compile_all(ours(plan, known), workers=a.workers)} kernels after {budget.spent:.0f} s", flush=True)
            theirs.get()
        print(f"compiled after {budget.spent:.0f} s", flush=True)
    from gemlite.core import GemLiteLinear

    few_configs()
    quick_autotuner()
    read_choices(a.choices)
    dense_us: dict[tuple[int, int, int], float] = {}
    for where, ms in plan:
        if not budget.left:
            break
        try:
            write(a.out, cells(where, ms, known[where[0]], dense_us, budget))
        except torch.OutOfMemoryError as e:
            print("memory", where, repr(e)[:100])
        torch.cuda.empty_cache()
        if a.choices:
            GemLiteLinear.cache_config(str(a.choices))
    print(json.dumps(summary(json.loads(a.out.read_text())["rows"])), f"{time.monotonic() - budget.started:.0f} s")


if __name__ == "__main__":
    main()
