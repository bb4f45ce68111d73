"""Draw docs/img/: accuracy.svg, mixed.svg, splitk_h100.png, bench_h100.png, from benchmarks/results/.

python benchmarks/plots.py [accuracy] [mixed] [splitk] [bench]    all of them unless named; anywhere; needs matplotlib
"""

import sys

import matplotlib
from matplotlib.figure import Figure
from pages import ROOT, read
from pages.mixed import TEXTS, at, hull, series

from lowq_cli.tuning import benching
from lowq_kernels.dispatch.timing import Roofline

IMAGES = ROOT / "docs" / "img"
FREE = {"hqq package": "s--", "rtn": "^:", "hqq": "d-.", "lsq": "o-"}
CALIBRATED = {"gptqmodel": "x--", "awq": "v:", "gptq": "o-", "learn": "*-"}
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
MIXED_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1)


def accuracy() -> None:
    """What quantizing adds to perplexity, by bits per weight: a panel per model, WikiText-2. (At 8 bits it is chance.)"""
    free, calibrated = (read(f"accuracy/{n}.json")["rows"] for n in ("data_free", "calibrated"))
    dense = {r["model"]: r["ppl"][TEXTS[0]] for r in free if r["method"] == "fp32"}
    series = {m: [r for r in free if r["method"] == m and r["stored"] == "float32"] for m in FREE}
    series |= {m: [r for r in calibrated if r["method"] == m and r["calib"] == "bundled"] for m in CALIBRATED}
    figure = Figure(figsize=(5.2 * len(dense), 4.4))
    panels = figure.subplots(1, len(dense), squeeze=False)
    for axis, (model, floor) in zip(panels[0], dense.items(), strict=True):
        for method, style in (FREE | CALIBRATED).items():
            rows = [r for r in series[method] if r["model"] == model and r["bits"] in (4, 3, 2)]
            points = sorted((r["bpw"], 100 * (r["ppl"][TEXTS[0]] / floor - 1)) for r in rows)
            told = f"{method}, calibrated" if method in CALIBRATED else method
            if points:
                axis.plot(*zip(*points, strict=True), style, markersize=4, linewidth=1, label=told)
        axis.set(title=f"{model}, WikiText-2 test", xlabel="bits per weight (16-bit scales and zeros)", yscale="log")
        axis.set_yticks(TICKS, [f"{t}%" for t in TICKS])
        axis.minorticks_off()
        axis.grid(alpha=0.2)
        axis.legend(frameon=False)
    panels[0][0].set_ylabel("perplexity above the unquantized model's")
    save(figure, "accuracy.svg")


def mixed() -> None:
    """A column per model and part, perplexity above and KL below."""
    shown = series()
    columns = list(dict.fromkeys((model, part) for model, part, _ in shown))
    figure = Figure(figsize=(3.6 * len(columns), 6.4))
    axes = figure.subplots(2, len(columns), squeeze=False)
    for column, panel in enumerate(columns):
        for axis, measure in zip(axes[:, column], (TEXTS[0], "kl"), strict=True):
            for key, found in shown.items():
                if key[:2] != panel:
                    continue
                colour, name = ("C1", "without data") if key[2] == "auto" else ("C0", key[2])
                if uniform := found.uniform[measure]:
                    hollow = {"color": colour, "markersize": 4, "fillstyle": "none"}
                    axis.plot(*zip(*uniform, strict=True), "s", label=f"{name}, uniform", **hollow)
                    line = hull(uniform)  # straight in these units, so a curve on an axis of logarithms
                    first, last = line[0][0], line[-1][0]
                    curve = [(x, at(line, x)) for i in range(201) for x in [min(first + (last - first) * i / 200, last)]]
                    axis.plot(*zip(*curve, strict=True), "--", color=colour, linewidth=0.8)
                points = [(r["bpw"], r["told"][measure]) for r in found.rows]
                axis.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, linewidth=1, label=f"{name}, --bpw")
            axis.set(yscale="log", xlabel="bits per weight")
            axis.set_yticks(MIXED_TICKS, [f"{t:g}" for t in MIXED_TICKS])
            axis.minorticks_off()
            axis.grid(alpha=0.2)
        axes[0][column].set_title(f"{panel[0]}, {panel[1]}")
    axes[0][0].set_ylabel("ln(perplexity / unquantized), WikiText-2")
    axes[1][0].set_ylabel("KL divergence from the original, nats")
    axes[0][0].legend(frameon=False, fontsize=8)
    save(figure, "mixed.svg")


def save(figure: Figure, name: str) -> None:
    """Write an SVG that is the same file for the same numbers."""
    matplotlib.rcParams["svg.hashsalt"] = "lowq"
    figure.tight_layout()
    figure.savefig(IMAGES / name, metadata={"Date": None})


def splitk() -> None:
    """Speed-up over SPLIT_K = 1 against the split factor, a line per size, a panel per M."""
    paper = read("h100/splitk_paper.json")
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, M in zip(axes, (1, 16), strict=True):
        for n in sorted({r["N"] for r in paper["splitk"]}):
            times = {r["split_k"]: r["us"] for r in paper["splitk"] if r["N"] == n and r["M"] == M}
            axis.plot(list(times), [times[1] / t for t in times.values()], marker="o", markersize=4, label=f"N = K = {n}")
        axis.axhline(1, color="grey", linewidth=1)
        axis.set(xscale="log", xlabel="SPLIT_K", title=f"M = {M}, 4 bits, groups of 128")
        axis.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("speed-up over SPLIT_K = 1")
    axes[0].legend(fontsize=8)
    figure.suptitle(paper["gpu"], fontsize=10)
    figure.savefig(IMAGES / "splitk_h100.png", dpi=130)


def bench() -> None:
    """The picture of `lowq bench --plot`, drawn again from its rows."""
    data = read("h100/bench.json")
    rows = [benching.Row(**r) for r in data["rows"]]
    benching.plot(rows, Roofline(data["gpu"], data["read_gbs"], data["tflops"]), IMAGES / "bench_h100.png")


if __name__ == "__main__":
    drawings = {f.__name__: f for f in (accuracy, mixed, splitk, bench)}
    for chosen in sys.argv[1:] or drawings:
        drawings[chosen]()
