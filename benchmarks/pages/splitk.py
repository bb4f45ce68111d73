"""docs/splitk.md, whole. Results: h100/{splitk_paper.json,ncu_splitk_1.txt,ncu_splitk_8.txt} (papers_speed.py splitk; ncu over
its --profile), h100/triton_vs_gemlite.json (frozen: its script raced a kernel that is deleted).
"""

import re
import statistics
from collections import Counter

from pages import RESULTS, Row, read
from pages.gemv import numbers

LARGE_M = 1024
RUNS = {"": "2026-11-21 about 04:30", "first": "a run before that"}  # of rows from before the script noted the time
COUNTERS = (  # ncu's names, and the section where a name occurs twice
    ("Duration", "us"),
    ("Grid Size", ""),
    ("Registers Per Thread", ""),
    ("Dynamic Shared Memory Per Block", "kB"),
    ("Block Limit Registers", "blocks"),
    ("Block Limit Shared Mem", "blocks"),
    ("Achieved Occupancy", "%"),
    ("Memory Throughput", "GB/s"),
    ("DRAM Throughput", "% of peak"),
    ("Compute (SM) Throughput", "% of peak"),
)


def counters(name: str) -> list[str]:
    """The values of COUNTERS in one ncu report, the last of a name that occurs in two units."""
    text = (RESULTS / "h100" / name).read_text()
    found = []
    for counter, _ in COUNTERS:
        values = re.findall(rf"^\s*{re.escape(counter)}\s+(?:\S+\s+)?([\d.,]+)\s*$", text, re.M)
        found.append(values[-1])
    return found


def split_table(rows: list[Row], M: int) -> tuple[str, list[float]]:
    """us per split factor and the gain of the best over SPLIT_K = 1, per size."""
    by_size: dict[int, dict[int, float]] = {}
    for r in rows:
        if r["M"] == M:
            by_size.setdefault(r["N"], {})[r["split_k"]] = r["us"]
    splits = sorted({s for t in by_size.values() for s in t})
    lines, gains = [], []
    for n, times in by_size.items():
        best = min(times, key=lambda s: times[s])
        gains.append(100 * (times[1] / times[best] - 1))
        lines.append([n, *(times.get(s, "") for s in splits), best, f"{gains[-1]:.0f}%"])
    return numbers(["N = K", *splits, "best", "gain"], lines), gains


def gemlite_table(rows: list[Row]) -> str:
    """GemLite's time over ours per scheme, shape and M."""
    Ms = sorted({r["M"] for r in rows})
    cells: dict[tuple[int, int, int, int], dict[int, str]] = {}
    for r in rows:
        if "gemlite_us" in r and "us" in r:
            ratio = f"{r['us']:.1f} ({r['gemlite_us'] / r['us']:.2f})"
            cells.setdefault((r["bits"], r["group"], r["N"], r["K"]), {})[r["M"]] = ratio
    body = [[f"{b}-bit g{g} {n}x{k}", *(found.get(m, "") for m in Ms)] for (b, g, n, k), found in cells.items()]
    return numbers(["", *(f"M={m}" for m in Ms)], body)


def runs(rows: list[Row]) -> str:
    """Which run the cells are from, counted."""
    by_run = Counter(RUNS.get(r.get("run", ""), r.get("run")) for r in rows)
    parts = ", ".join(f"{n} of {run}" for run, n in sorted(by_run.items()))
    return f"{len(rows)} cells are measured:\n{parts} (UTC); the result file says which run a cell is of."


def large_ratios(rows: list[Row]) -> dict[tuple[int, int, int], dict[tuple[int, int], float]]:
    """Our time over cuBLAS's from M = 1024 on: (N, K, M) -> (bits, group) -> ratio."""
    found: dict[tuple[int, int, int], dict[tuple[int, int], float]] = {}
    for r in rows:
        if r["M"] >= LARGE_M and "us" in r:
            found.setdefault((r["N"], r["K"], r["M"]), {})[r["bits"], r["group"]] = r["us"] / r["cublas_us"]
    return found


def median_large(rows: list[Row]) -> str:
    """The median of `large_ratios`."""
    return f"{statistics.median(v for found in large_ratios(rows).values() for v in found.values()):.3f}"


def large_table(rows: list[Row]) -> str:
    """`large_ratios`, a line per shape and M."""
    schemes = sorted({(r["bits"], r["group"]) for r in rows}, reverse=True)
    body = [
        [f"{n}x{k}, M={m}", *(f"{found[s]:.2f}" if s in found else "" for s in schemes)]
        for (n, k, m), found in sorted(large_ratios(rows).items())
    ]
    return numbers(["", *(f"{b}-bit g{g}" for b, g in schemes)], body)


def page() -> str:
    """The whole page."""
    paper = read("h100/splitk_paper.json")
    versus = read("h100/triton_vs_gemlite.json")
    one, gains_one = split_table(paper["splitk"], 1)
    sixteen, gains_sixteen = split_table(paper["splitk"], 16)
    every = gains_one + gains_sixteen
    names = [f"{c} ({u})" if u else c for c, u in COUNTERS]
    profile = numbers(
        ["M = 16, 4096x4096", "SPLIT_K = 1", "SPLIT_K = 8"],
        list(zip(names, counters("ncu_splitk_1.txt"), counters("ncu_splitk_8.txt"), strict=True)),
    )
    best_split = {r["N"]: r["us"] for r in sorted(paper["splitk"], key=lambda r: -r["us"]) if r["M"] == 1}
    gemv: dict[int, dict[str, float]] = {}
    for r in paper["gemv"]:
        gemv.setdefault(r["N"], {})[r["kernel"].removeprefix("triton/")] = r["us"]
    schedules = ("gemv", "gemv_revsplitk", "gemv_splitk")
    gemv_rows = [[n, *(t[s] for s in schedules), best_split[n]] for n, t in gemv.items()]
    s, tile = versus["summary"], ", ".join(f"{k} {v}" for k, v in paper["tile"].items())
    large, middle = s["large_m_over_cublas"], median_large(versus["rows"])
    behind = s["cells_slower_than_gemlite"]
    return f"""# SplitK, measured again

Generated by `benchmarks/render.py`; do not edit. {paper["gpu"]}, torch {paper["torch"]},
triton {paper["triton"]}, {paper["date"]}; a plain read of memory reaches {paper["read_gbs"]} GB/s there. Times are microseconds
inside a CUDA graph on weights that no cache holds (`kernels/dispatch/timing.py`), every output checked against fp32.

## The paper's experiment

Hoque et al. 2024 (arXiv:2402.00025) cut the reduced dimension K of a W4A16 product into SPLIT_K ranges, so that a skinny
product fills the GPU. Their abstract reports a gain of 65% on average on an A100, and of 124% on average and 295% at most on
an H100. Here `triton/gemm_splitk` runs one fixed tile with SPLIT_K 1 (data parallel) to 16: {tile}
(the paper's has 32 columns).
Over the {len(every)} cells below the best split gains {sum(every) / len(every):.0f}% on average, {max(every):.0f}% at most.

M = 1:

{one}

M = 16:

{sixteen}

![speed-up by split factor](img/splitk_h100.png)

What changed: the paper adds partial sums with fp16 atomics on a zeroed output, and their order differs from run to run.
Here each program writes its partial in fp32, the last one to arrive adds them in order (`kernels/products/triton/partial.py`):
two runs give the same bits, and no launch fills zeros.

Their Table 7 asks why, with the profiler. The same counters, of one launch alone at ncu's fixed clocks with flushed caches
(so its durations do not compare with those above):

{profile}

One tile per 64 columns makes 64 programs for 132 multiprocessors; eight ranges make 512. Registers, not shared memory, bound
the programs that share a multiprocessor.

## One row of x: GEMV, RevSplitK, SplitK

Best registered config of each schedule, next to the best split of the tensor-core kernel above (M = 1):

{numbers(["N = K", *schedules, "gemm_splitk, fixed tile"], gemv_rows)}

## The family against GemLite {versus["gemlite"]}

Same GPU, same protocol ({versus["date"]}): our microseconds, in brackets GemLite's time over ours. Geometric mean over
{s["cells"]} cells {s["geomean_speedup_over_gemlite"]}x; the least is {s["slowest_against_gemlite"]}x, cells below 1: {behind}.
GemLite runs the config of its own H100 table where that has the shape, else the best of nine that its autotuner times: the
most frequent winners of that table and some of its default list. Every output of both is checked against fp32, and each
side's times and cuBLAS's are of one run. {runs(versus["rows"])}

This race is history: from 5 rows on most winners of ours are `triton/gemm_wide`, a kernel for Hopper alone that is deleted, for
the CUDA kernels over `tile` were ahead of it there in every cell ([cuda.md](cuda.md); benchmarks/notes/triton.md).

In this table the family takes from M = 1024 on {large[0]} to {large[1]} times as long as cuBLAS in fp16, the median {middle}:

{large_table(versus["rows"])}

{gemlite_table(versus["rows"])}

## What `lowq bench` shows

All kernels competing (the CUDA ones over the `tile` layout win here):

![lowq bench on an H100](img/bench_h100.png)
"""
