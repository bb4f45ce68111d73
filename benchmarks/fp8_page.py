"""The tables of docs/fp8.md, from results/h100/fp8_rows.jsonl (four runs on one day) and results/cpu/fp8.json (fp8.py).

A row of the first file is one timing: what, name (of a peer, or of our kernel with its config), shape, us, relative error.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from lowq_packers.fp8 import FP8, Block, Fp8Matrix, scale_shape

RESULTS = Path(__file__).parent / "results"
Markdown = Callable[[Sequence[str], Iterable[Sequence[object]]], str]
Row = dict[str, Any]


def _rows(what: str) -> list[Row]:
    lines = (RESULTS / "h100" / "fp8_rows.jsonl").read_text().splitlines()[1:]
    return [r for r in map(json.loads, lines) if r["what"] == what]


def _mean(ratios: Sequence[float]) -> str:
    """Geometric mean."""
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}"


def head(markdown: Markdown) -> str:
    """What was measured, where and when."""
    h = json.loads((RESULTS / "h100" / "fp8_rows.jsonl").read_text().splitlines()[0])
    return f"{h['gpu']}, torch {h['torch']}, triton {h['triton']}, {h['date']}.\n"


def quantizer(markdown: Markdown) -> str:
    """us per size, and how far from the cast that moves the same bytes. The last run of each name counts."""
    from lowq_kernels.fp8.block_quant import plan_for

    us = {(r["n"], r["name"]): r["us"] for r in _rows("quant")}
    sizes = sorted({n for n, _ in us})
    names = {f"256 {json.dumps(plan_for(n, n, (256, 256)))}": n for n in sizes}
    peers = {
        "cast": "cast",
        "torch.compile": "compile",
        "tile, 4 warps": '256 {"PLAN": "tile", "num_warps": 4}',
        "tile, 8 warps": '256 {"PLAN": "tile", "num_warps": 8}',
        "walk, 32x32": '256 {"PLAN": "stride", "SUB_M": 32, "SUB_K": 32, "num_warps": 4}',
    }
    lines, ratios = [], {p: [] for p in peers}  # type: ignore[var-annotated]
    for n in sizes:
        ours = us[n, next(k for k in names if k == f"256 {json.dumps(plan_for(n, n, (256, 256)))}")]
        found = {p: us[n, name] for p, name in peers.items()}
        for p, t in found.items():
            ratios[p].append(t / ours)
        lines.append((f"{n} x {n}", f"{ours:.1f}", *(f"{t:.1f}" for t in found.values()), f"{3 * n * n / ours / 1e3:,.0f}", f"{100 * found['cast'] / ours:.0f}%"))  # fmt: skip  # noqa: E501
    columns = ("bf16 in", ">ours", *(f">{p}" for p in peers), ">GB/s", ">of the cast")
    told = ", ".join(f"{_mean(r)} ({p})" for p, r in ratios.items() if p != "cast")
    return markdown(columns, lines) + f"\nGeometric means of their time over ours: {told}.\n"


def _matrix(M: int, K: int, block: Block) -> Fp8Matrix:
    q = torch.empty(M, K, dtype=FP8, device="meta")
    return Fp8Matrix(q, torch.empty(scale_shape(q.shape, block), device="meta"), block)


def _shipped(rows: list[Row], M: int, N: int, K: int, name: str, blocks: tuple[Block, Block]) -> float | None:
    """us of the config that the kernel takes today; the best one measured where that one was not."""
    from lowq_kernels.fp8.gemm_wgmma import config_for

    c = dict(config_for(_matrix(M, K, blocks[0]), _matrix(N, K, blocks[1])))
    band = c.pop("BAND")
    wanted = {f"{name} {json.dumps(c)}", f"{name} band {band} {json.dumps(c)}"}
    mine = [r["us"] for r in rows if r["name"].startswith(name + " ")]
    return next((r["us"] for r in reversed(rows) if r["name"] in wanted), min(mine, default=None))


def gemm(markdown: Markdown) -> str:
    """us per shape and M."""
    every = _rows("gemm")
    lines, ratios = [], {"triton": [], "small": [], "large": [], "large 256": []}  # type: ignore[var-annotated]
    for N, K, M in sorted({(r["N"], r["K"], r["M"]) for r in every}, key=lambda s: (-s[0] * s[1], s)):
        rows = [r for r in every if (r["N"], r["K"], r["M"]) == (N, K, M)]
        ours = _shipped(rows, M, N, K, "cuda" if M <= 64 else "cuda 128", ((1, 128), (128, 128)))
        wide = _shipped(rows, M, N, K, "cuda 256", ((256, 256), (256, 256)))
        triton = min((r["us"] for r in rows if r["name"].startswith("splitk")), default=None)
        peer, rowwise = (
            next((r["us"] for r in reversed(rows) if r["name"] == n), None) for n in ("torch_block128", "torch_rowwise")
        )
        if ours is None:
            continue
        if triton:
            ratios["triton"].append(triton / ours)
        if peer:
            ratios["small" if M <= 64 else "large"].append(peer / ours) if M <= 64 or M >= 1024 else None
            if wide and M >= 1024:
                ratios["large 256"].append(peer / wide)
        shown = ["" if t is None else f"{t:.1f}" for t in (ours, wide, triton, peer, rowwise)]
        lines.append((f"{N} x {K}", M, *shown, f"{2 * M * N * K / ours / 1e6:,.0f}"))
    columns = ("N x K", ">M", ">128x128", ">256x256", ">triton SplitK", ">torch, 128x128", ">torch, per channel", ">TFLOP/s")
    worst = max(r["err"] for r in every if r["err"] and r["name"].startswith("cuda"))
    told = (
        f"\nGeometric means of their time over ours: M <= 64 {_mean(ratios['triton'])} (Triton) and {_mean(ratios['small'])} "
        f"(torch); M >= 1024 {_mean(ratios['large'])} (torch), with 256x256 blocks {_mean(ratios['large 256'])}. Largest "
        f"relative error of ours against fp32: {worst:.1e} (bf16 output).\n"
    )
    return markdown(columns, lines) + told


def int8(markdown: Markdown) -> str:
    """us of A8Wn (best config) beside 16-bit activations."""
    rows = _rows("int8")
    cublas = {r["M"]: r["us"] for r in rows if r["name"] == "cublas16"}
    lines = []
    for bits, M in sorted({(r["bits"], r["M"]) for r in rows}, key=lambda c: (-c[0], c[1])):
        mine = [r for r in rows if (r["bits"], r["M"]) == (bits, M)]
        a8 = min(r["us"] for r in mine if r["name"].startswith("int8"))
        a16 = next(r["us"] for r in mine if r["name"].startswith("a16"))
        lines.append((f"A8W{bits}", M, f"{a8:.1f}", f"{a16:.1f}", f"{cublas[M]:.1f}"))
    return markdown(("", ">M", ">int8", ">16 bits, tile", ">cuBLAS fp16"), lines)


def _cpu() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "cpu" / "fp8.json").read_text())
    return found


def error(markdown: Markdown) -> str:
    """Relative error on real activations."""
    names = ["1x128, 128x128", "256x256", "per token, channel", "int8 x alone"]
    lines = [
        (r["layer"], f"{r['N']} x {r['K']}", f"{r['largest_over_rms']:.0f}", *(f"{r[n]:.4f}" for n in names))
        for r in _cpu()["error"]
    ]
    return markdown(("layer", "N x K", ">largest / rms of x", *(f">{n}" for n in names)), lines)


def perplexity(markdown: Markdown) -> str:
    """Perplexity per format and mode."""
    rows = _cpu()["perplexity"]
    base = rows[0]["none"]
    lines = []
    for r in rows:
        cells = [f"{r[m]:.3f} ({100 * (r[m] / base - 1):+.2f}%)" if m in r else "" for m in ("none", "int8", "fp8")]
        lines.append((r["format"], *cells))
    table = markdown(("weights", ">activations 16 bits", ">int8", ">fp8"), lines)
    return table + f"\nThe first {rows[0]['tokens']:,} tokens, on a CPU, {_cpu()['date']}: differences under 1% are chance.\n"


PARTS: dict[str, Callable[[Markdown], str]] = {f.__name__: f for f in (head, quantizer, gemm, int8, error, perplexity)}
