"""What docs/accuracy.md says of mixed widths: a table for render.py, and docs/img/mixed.svg.

    python benchmarks/mixed_page.py     draws the plot

The line that mixed widths are held against is the lower convex hull of all uniform schemes in (bits per weight,
ln(perplexity / unquantized perplexity)): what mixing two uniform checkpoints could reach at best.
"""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "accuracy"
TEXT = "wikitext2_test"
WHAT = {"all": "all weights, the embedding (which is the head) too", "linears": "linears alone"}
Point = tuple[float, float]


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


def series() -> dict[tuple[str, str, str], tuple[list[Point], list[dict[str, Any]]]]:
    """(model, part, method) -> uniform points, and the rows of mixed checkpoints."""
    mixed, free, calibrated = read("mixed.json"), read("data_free.json"), read("calibrated.json")
    dense = {r["model"]: r["ppl"][TEXT] for r in free["rows"] if "bits" not in r}
    found: dict[tuple[str, str, str], tuple[list[Point], list[dict[str, Any]]]] = {}
    for r in mixed["rows"]:
        uniform, rows = found.setdefault((r["model"], r["part"], r["method"]), ([], []))
        ln = math.log(r["ppl"][TEXT] / r.get("unquantized", dense[r["model"]]))
        rows.append(r | {"ln": ln}) if "target" in r else uniform.append((r["bpw"], ln))
    for (model, part, method), (uniform, _) in found.items():
        if part == "linears" and not uniform:  # measured in the tables above
            rows = calibrated["rows"] if method == "gptq" else free["rows"]
            uniform += [
                (r["bpw"], math.log(r["ppl"][TEXT] / dense[model]))
                for r in rows
                if r["model"] == model and 1 < r.get("bits", 0) < 8 and r["stored"] == "bfloat16"
                and r.get("calib", "bundled") == "bundled" and (method == "auto" or r["method"] == method)
            ]  # fmt: skip
    return found


def tables(table: Callable[..., str]) -> str:
    """A table per series."""
    parts, mixed_runs = [], read("mixed.json")["runs"]
    for (model, part, method), (uniform, rows) in series().items():
        line = hull(uniform)
        if not rows:
            continue
        lines = []
        for r in rows:
            height = at(line, r["bpw"])
            told = ("", "") if height is None else (f"{height:.4f}", f"{r['ln'] / height:.2f}")
            lines.append(
                (f"{r['target']:g}", f"{r['bpw']:.3f}", f"{r['ppl'][TEXT]:.2f}", f"{r['ln']:.4f}", *told,
                 f"{r['expected']:.4f}", f"{r['kl']:.4f}")
            )  # fmt: skip
        run = mixed_runs[rows[0]["run"]]
        read_tokens = run["tokens"] if isinstance(run["tokens"], int) else run["tokens"][TEXT]
        columns = ("--bpw", ">bits/weight", ">perplexity", ">ln ratio", ">uniform line", ">of the line", ">expected KL", ">KL")
        shown = "gptq" if method == "gptq" else "without data"
        told = f"{read_tokens:,} tokens of WikiText-2 on {run['device']}, {run['date']}, torch {run['versions']['torch']}"
        parts.append(f"### {model}, {shown}: {WHAT[part]}\n\n{told}\n\n{table(columns, lines)}")
    return "\n".join(parts)


def main() -> None:
    """Draw the plot."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "lowq"  # the same file from the same numbers
    shown = {k: v for k, v in series().items() if k[0] == "base"}
    parts = list(dict.fromkeys(part for _, part, _ in shown))
    figure = Figure(figsize=(5.4 * len(parts), 4))
    for axis, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        for (_, own, method), (uniform, rows) in shown.items():
            if own != part:
                continue
            colour, name = ("C0", "gptq") if method == "gptq" else ("C1", "without data")
            if uniform:
                axis.plot(
                    *zip(*uniform, strict=True), "s", color=colour, markersize=4, fillstyle="none", label=f"{name}, uniform"
                )
                axis.plot(*zip(*hull(uniform), strict=True), "--", color=colour, linewidth=0.8)
            points = [(r["bpw"], r["ln"]) for r in rows]
            axis.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, linewidth=1, label=f"{name}, --bpw")
        axis.set(title=f"base, {part}", xlabel="bits per weight", ylabel="ln(perplexity / unquantized)", yscale="log")
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "img" / "mixed.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
