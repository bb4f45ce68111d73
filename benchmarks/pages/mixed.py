"""docs/accuracy.md: mixed widths. Results: accuracy/{mixed,data_free}.json.

The line that mixed widths are held against is the lower convex hull of all uniform schemes, for each measure its own: what
mixing two uniform checkpoints could reach at best. Measures: ln(perplexity / unquantized perplexity) on each text, and the KL
divergence from the original model on the first.
"""

import itertools
import math
from dataclasses import dataclass, field

from pages import Row, part, read, table

TEXTS = ("wikitext2_test", "mix_valid_sample")
MEASURES = {TEXTS[0]: "WikiText-2", TEXTS[1]: "mix", "kl": "KL"}
WHAT = {"all": "all weights, the embedding (which is the head) too", "linears": "linears alone"}
Point = tuple[float, float]


@dataclass
class Series:
    """What was measured of one model, part and method. uniform: measure -> points. rows: of mixed checkpoints, with `told`."""

    uniform: dict[str, list[Point]] = field(default_factory=lambda: {m: [] for m in MEASURES})
    rows: list[Row] = field(default_factory=list)

    def share(self, row: Row, measure: str) -> float | None:
        """A row's measure over the line's height there; None outside of it."""
        height = at(hull(self.uniform[measure]), row["bpw"])
        return None if height is None else row["told"][measure] / height


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
    dense = {r["model"]: r["ppl"] for r in read("accuracy/data_free.json")["rows"] if "bits" not in r}
    found: dict[tuple[str, str, str], Series] = {}
    for r in read("accuracy/mixed.json")["rows"]:
        mine = found.setdefault((r["model"], r["part"], r["method"]), Series())
        told = {t: math.log(r["ppl"][t] / dense[r["model"]][t]) for t in TEXTS} | {"kl": r["kl"]}
        if "target" in r:
            mine.rows.append(r | {"told": told})
        else:
            for measure, value in told.items():
                mine.uniform[measure].append((r["bpw"], value))
    return {k: s for k, s in found.items() if s.rows}


def named(method: str) -> str:
    """A method as a reader would name it."""
    return "without data" if method == "auto" else method


def summary() -> str:
    """How many points lie below the lines, which do not, and how far the plan's sum of errors is from the measured KL."""
    below, count, above, missed = dict.fromkeys(MEASURES, 0), dict.fromkeys(MEASURES, 0), [], []
    for (model, weights, method), found in series().items():
        for r in found.rows:
            missed.append(1 - r["expected"] / r["kl"])
            for measure, name in MEASURES.items():
                share = found.share(r, measure)
                count[measure] += share is not None
                below[measure] += share is not None and share < 1
                if share is not None and share >= 1:
                    above.append(f"{model}, {weights}, {named(method)}, {r['target']:g} bits: {name} {share:.2f} of the line")
    lines = [f"Points below the line: {', '.join(f'{n} {below[m]} of {count[m]}' for m, n in MEASURES.items())}."]
    lines += ["Not below: " + "; ".join(above) + "."] * bool(above)
    lines += [f"The plan's expected KL is {min(missed):.0%} to {max(missed):.0%} below the measured one."]
    return "\n\n".join(lines) + "\n"


@part
def mixed() -> str:
    """What --bpw gains over uniform widths: what all points say together, then a table per series."""
    parts, runs = [summary()], read("accuracy/mixed.json")["runs"]
    columns = ("--bpw", ">bits/weight", ">WikiText-2", ">of the line", ">mix", ">of the line", ">expected KL", ">KL",
               ">of the line")  # fmt: skip
    for (model, weights, method), found in series().items():
        lines = []
        for r in found.rows:
            one, two, kl = ("" if (share := found.share(r, m)) is None else f"{share:.2f}" for m in MEASURES)
            ppl, bits = [f"{r['ppl'][t]:.2f}" for t in TEXTS], (f"{r['target']:g}", f"{r['bpw']:.3f}")
            lines.append((*bits, ppl[0], one, ppl[1], two, f"{r['expected']:.4f}", f"{r['kl']:.4f}", kl))
        run = runs[found.rows[0]["run"]]
        told = f"On {run['device']}, {run['date']}, torch {run['versions']['torch']}."
        parts.append(f"### {model}, {named(method)}: {WHAT[weights]}\n\n{told}\n\n{table(columns, lines)}")
    return "\n".join(parts)


@part
def bounds() -> str:
    """How close to its bound `--max-kl` and `--max-ppl` land."""
    report = read("accuracy/bounds.json")
    rows = []
    for r in report["rows"]:
        limit = f"--max-kl {r['max_kl']:g}" if r.get("max_kl") else f"--max-ppl {r['max_ppl']:g}%"
        limit += f" --fit {r['fit'] / 1e6:g}MB" if r.get("fit") else ""
        unit = "" if r.get("max_kl") else "%"
        cells = (
            f"{r['measured']:.4g}{unit}",
            f"{r['of_limit']:.1%}",
            r["rounds"],
            f"{r['bpw']:.3f}",
            f"{r['one_bit_more']:.2g}{unit}",
        )
        rows.append((r["model"], limit, *cells))
    near = sum(0.9 <= r["of_limit"] <= 1 for r in report["rows"])
    found = f"{near} of {len(rows)} cases land within 10% under their bound ({report['gpu'] or 'CPU'}, {report['date']}).\n\n"
    columns = ("model", "asked", ">measured", ">of the bound", ">rounds", ">bits per weight", ">one bit more, expected")
    return found + table(columns, rows)
