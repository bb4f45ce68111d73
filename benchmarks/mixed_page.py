"""What docs/accuracy.md says of mixed widths: a table for render.py, and docs/img/mixed.svg.

    python benchmarks/mixed_page.py     draws the plot

The line that mixed widths are held against is the lower convex hull of all uniform schemes, for each measure its own: what
mixing two uniform checkpoints could reach at best. Measures: ln(perplexity / unquantized perplexity) on each text, and the KL
divergence from the original model on the first.
"""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "accuracy"
TEXTS = ("wikitext2_test", "mix_valid_sample")
MEASURES = (*TEXTS, "kl")
WHAT = {"all": "all weights, the embedding (which is the head) too", "linears": "linears alone"}
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1)
Point = tuple[float, float]


@dataclass
class Series:
    """What was measured of one model, part and method. uniform: measure -> points. rows: of mixed checkpoints, with `told`."""

    uniform: dict[str, list[Point]] = field(default_factory=lambda: {m: [] for m in MEASURES})
    rows: list[dict[str, Any]] = field(default_factory=list)


def read(name: str) -> dict[str, Any]:
    """A result file."""
    return json.loads((RESULTS / name).read_text())


def hull(points: list[Point]) -> list[Point]:
    """The lower convex hull, by bits."""
    found: list[Point] = []
    for p in sorted(points):
        while len(found) > 1 and _turn(found[-2], found[-1], p) <= 0:
            found.pop()
        found.append(p)
    return found


def _turn(a: Point, b: Point, c: Point) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def at(line: list[Point], bpw: float) -> float | None:
    """The line's height; None outside of it."""
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        if x0 <= bpw <= x1:
            return y0 + (y1 - y0) * (bpw - x0) / (x1 - x0)
    return None


def series() -> dict[tuple[str, str, str], Series]:
    """By (model, part, method)."""
    dense = {r["model"]: r["ppl"] for r in read("data_free.json")["rows"] if "bits" not in r}
    found: dict[tuple[str, str, str], Series] = {}
    for r in read("mixed.json")["rows"]:
        mine = found.setdefault((r["model"], r["part"], r["method"]), Series())
        told = {t: math.log(r["ppl"][t] / dense[r["model"]][t]) for t in TEXTS} | {"kl": r["kl"]}
        if "target" in r:
            mine.rows.append(r | {"told": told})
        else:
            for measure, value in told.items():
                mine.uniform[measure].append((r["bpw"], value))
    return {k: s for k, s in found.items() if s.rows}


def summary() -> str:
    """How many points lie below the lines, which do not, and how far the plan's sum of errors is from the measured KL."""
    names = ("WikiText-2", "mix", "KL")
    below, above = dict.fromkeys(MEASURES, 0), []
    count = dict(below)
    missed = []
    for (model, part, method), found in series().items():
        for r in found.rows:
            missed.append(1 - r["expected"] / r["kl"])
            for name, measure in zip(names, MEASURES, strict=True):
                height = at(hull(found.uniform[measure]), r["bpw"])
                if height is None:
                    continue
                count[measure] += 1
                if (share := r["told"][measure] / height) < 1:
                    below[measure] += 1
                else:
                    shown = "without data" if method == "auto" else method
                    above.append(f"{model}, {part}, {shown}, {r['target']:g} bits: {name} {share:.2f} of the line")
    counts = ", ".join(f"{n} {below[m]} of {count[m]}" for n, m in zip(names, MEASURES, strict=True))
    lines = [f"Points below the line: {counts}."]
    if above:
        lines += ["Not below: " + "; ".join(above) + "."]
    lines += [f"The plan's expected KL is {min(missed):.0%} to {max(missed):.0%} below the measured one."]
    return "\n\n".join(lines) + "\n"


def tables(table: Callable[..., str]) -> str:
    """What they say together, then a table per series."""
    parts, runs = [summary()], read("mixed.json")["runs"]
    for (model, part, method), found in series().items():
        lines = []
        for r in found.rows:
            shares = []
            for measure in MEASURES:
                height = at(hull(found.uniform[measure]), r["bpw"])
                shares.append("" if height is None else f"{r['told'][measure] / height:.2f}")
            lines.append(
                (f"{r['target']:g}", f"{r['bpw']:.3f}", f"{r['ppl'][TEXTS[0]]:.2f}", shares[0], f"{r['ppl'][TEXTS[1]]:.2f}",
                 shares[1], f"{r['expected']:.4f}", f"{r['kl']:.4f}", shares[2])
            )  # fmt: skip
        run = runs[found.rows[0]["run"]]
        columns = (
            "--bpw", ">bits/weight", ">WikiText-2", ">of the line", ">mix", ">of the line", ">expected KL", ">KL",
            ">of the line",
        )  # fmt: skip
        shown = "without data" if method == "auto" else method
        told = f"On {run['device']}, {run['date']}, torch {run['versions']['torch']}."
        parts.append(f"### {model}, {shown}: {WHAT[part]}\n\n{told}\n\n{table(columns, lines)}")
    return "\n".join(parts)


def main() -> None:
    """Draw the plot: a column per model and part, perplexity above and KL below."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "lowq"  # the same file from the same numbers
    shown = series()
    panels = list(dict.fromkeys((model, part) for model, part, _ in shown))
    figure = Figure(figsize=(3.6 * len(panels), 6.4))
    axes = figure.subplots(2, len(panels), squeeze=False)
    for column, panel in enumerate(panels):
        for axis, measure in zip(axes[:, column], (TEXTS[0], "kl"), strict=True):
            for key, found in shown.items():
                if key[:2] != panel:
                    continue
                colour, name = ("C1", "without data") if key[2] == "auto" else ("C0", key[2])
                uniform = found.uniform[measure]
                if uniform:
                    axis.plot(*zip(*uniform, strict=True), "s", color=colour, markersize=4, fillstyle="none",
                              label=f"{name}, uniform")  # fmt: skip
                    line = hull(uniform)  # straight in these units, so a curve on an axis of logarithms
                    first, last = line[0][0], line[-1][0]
                    curve = [(x, at(line, x)) for i in range(201) for x in [min(first + (last - first) * i / 200, last)]]
                    axis.plot(*zip(*curve, strict=True), "--", color=colour, linewidth=0.8)
                points = [(r["bpw"], r["told"][measure]) for r in found.rows]
                axis.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, linewidth=1, label=f"{name}, --bpw")
            axis.set(yscale="log", xlabel="bits per weight")
            axis.set_yticks(TICKS, [f"{t:g}" for t in TICKS])
            axis.minorticks_off()
            axis.grid(alpha=0.2)
        axes[0][column].set_title(f"{panel[0]}, {panel[1]}")
    axes[0][0].set_ylabel("ln(perplexity / unquantized), WikiText-2")
    axes[1][0].set_ylabel("KL divergence from the original, nats")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "img" / "mixed.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
