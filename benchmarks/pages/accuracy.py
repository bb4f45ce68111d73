"""docs/accuracy.md: data-free methods and calibration. Results: accuracy/{data_free,calibrated,calibrate_time_*}.json."""

import math
from collections.abc import Iterable
from typing import Any

from lowq_cli import quantizers
from pages import RESULTS, Row, part, read, shown, table, versions

LAYERS = {"1B": 16, "8B": 32}  # of Llama 3's shapes
# Bits at group 64, method, and the most that ln(perplexity / unquantized) was to be as a share of the hqq package's on the base
# model and WikiText-2; set before anything was measured.
GOALS = ((4, "lsq", 0.9), (4, "gptq", 0.65), (4, "awq", 0.65), (3, "gptq", 0.42), (3, "learn", 0.42), (2, "gptq", 0.36),
         (2, "learn", 0.36))  # fmt: skip
# Base: bits, group -> perplexity to reach on WikiText-2 and the mix by any method, set before own text was measured.
REACH = {(4, 64): (35.85, 41.1), (3, 64): (36.6, 42.0), (2, 64): (40.5, 47.5), (2, 128): (42.0, 49.5), (1, 64): (150.0, None)}
SHORT = {"wikitext2_test": "WikiText-2", "mix_valid_sample": "mix"}
PACKAGE = ("hqq package", "float32")
Cells = dict[tuple[int, int], dict[tuple[str, str], float]]


@part
def accuracy() -> str:
    """Perplexity of the data-free methods compared with the hqq package, one table per model and text."""
    report = read("accuracy/data_free.json")
    dense, rows = _split(report["rows"])
    methods = list(dict.fromkeys(r["method"] for r in sorted(rows, key=lambda r: (r["method"] != "hqq package", r["method"]))))
    parts = [_measured(report)]
    for model, text, ppl in dense:
        lines = []
        for (bits, group), found in _cells(rows, model, text).items():
            values = [found.get((m, "float32")) for m in methods]
            least = min(v for v in values if v is not None)
            marked = [f"**{v:,.2f}**" if v == least else shown(v, ",.2f") for v in values]
            default = quantizers.default_method(bits, group)
            lines.append((f"{bits}-bit g{group}", *marked, default, shown(found.get((default, "bfloat16")), ",.2f")))
        columns = ("", *(f">{m}" for m in methods), "default", ">as stored")
        parts.append(f"### {model}, {text}: unquantized {ppl:.2f}\n\n{table(columns, lines)}")
    return "\n".join(parts)


@part
def calibrated() -> str:
    """What calibration gains: ln(perplexity / unquantized one) of the hqq package, lowq without data, calibrated methods."""
    report, free = read("accuracy/calibrated.json"), read("accuracy/data_free.json")["rows"]
    rows = [r for r in report["rows"] if r["calib"] == "bundled"]
    pairs = (("gptq", "gptqmodel"), ("awq", "gptqmodel"), ("learn", "gptq"), ("gptq --rotate", "gptq"))
    parts = [
        _measured(report),
        f"Calibration text: bundled, at most {max(r['calib_tokens'] for r in rows):,} tokens.\n",
        "Over all cells (model, width, group size, text) that were measured of both:\n",
        "\n".join(f"- {_against(rows, *pair)}" for pair in pairs) + "\n",
        "### Group 64: ln(perplexity / unquantized) as a share of the hqq package's\n",
        _goals(free, rows),
    ]
    methods = sorted({(r["method"], r["stored"]) for r in rows}, key=lambda m: (m[0] != "gptq", m))
    dense, data_free = _split(free)
    for model, text, floor in dense:
        others, lines = _cells(data_free, model, text), []
        for cell, found in _cells(rows, model, text).items():
            wanted = [PACKAGE, (quantizers.default_method(*cell), "bfloat16"), *methods]
            ppl = [(others[cell] | found).get(m) for m in wanted]
            hqq, *own = logs = [None if p is None else math.log(p / floor) for p in ppl]
            told = ["" if p is None else f"{p:,.2f} ({x:.4f})" for p, x in zip(ppl, logs, strict=True)]
            # at 8 bits the differences are chance
            ratios = ["" if x is None or hqq is None or cell[0] == 8 else f"{x / hqq:.2f}" for x in own]
            lines.append((f"{cell[0]}-bit g{cell[1]}", *told, *ratios))
        ours = ["without data", *(m for m, _ in methods)]
        columns = ["", ">hqq package", *(f">{m}" for m in ours), *(f">{m} / hqq" for m in ours)]
        if lines:
            parts.append(f"### {model}, {text}: unquantized {floor:.2f}\n\n{table(columns, lines)}")
    parts.append(f"### The model's own text, or another, compared with the bundled one\n\n{_other_texts(free, report)}")
    return "\n".join([*parts, f"### What was to be reached, base\n\n{_reached(report['rows'])}"])


@part
def calibrate_time() -> str:
    """A row per device and method: seconds per layer and per billion parameters, and the most memory held."""
    lines, told = [], []
    for path in sorted((RESULTS / "accuracy").glob("calibrate_time_*.json"), reverse=True):
        report = read(f"accuracy/{path.name}")
        told.append(f"{report['date']}, torch {report['versions']['torch']}")
        for r in report["rows"]:
            on_cpu = r["peak_gpu_bytes"] is None  # shared with others when this was measured: its own seconds count
            together = r.get("together_seconds", 0.0)  # what distill adds
            layer = (r["cpu_seconds"] if on_cpu else sum(r["layer_seconds"]) + together) / r["layers"]
            held = r["peak_gpu_bytes"] or r["peak_rss_bytes"]
            what = (r["device"].replace("1 threads", "1 thread"), r["method"], f"{r['bits']}-bit g{r['group']}")
            per_billion = layer * r["layers"] / r["params"] * 1e9
            shape = r.get("shape", "1B")
            times = (f"{layer:.1f}", f"{layer * LAYERS[shape]:,.0f}", f"{per_billion:,.0f}", f"{held / 1e9:.1f}")
            counted = ("", "", "")
            if "counted_bytes_all" in r:
                over = f"{r['seconds'] / r['estimated_seconds']:.2f}"
                counted = (f"{r['counted_bytes'] / 1e9:.1f}", f"{r['counted_bytes_all'] / 1e9:.1f}", over)
            lines.append((shape, *what, f"{r['calib_tokens']:,}", f"{r['layers']} of {LAYERS[shape]}", *times, *counted))
    columns = ("shape", "device", "method", "", ">tokens", ">layers run", ">s a layer", ">s for all", ">s per billion",
               ">peak GB", ">GB counted", ">GB counted for all", ">time over estimate")  # fmt: skip
    return f"Measured {'; '.join(told)}.\n\n{table(columns, lines)}"


def _split(rows: list[Row]) -> tuple[list[tuple[str, str, float]], list[Row]]:
    """(model, text, perplexity) of the unquantized models, and the quantized rows."""
    return [(r["model"], t, p) for r in rows if "bits" not in r for t, p in r["ppl"].items()], [r for r in rows if "bits" in r]


def _measured(report: Row) -> str:
    """Date, device and versions of the runs that a report's rows come from."""
    runs = [report["runs"][i] for i in sorted({r["run"] for r in report["rows"]})]
    told = [f"{r['date']} on {r['device']} ({versions(r['versions'])})" for r in runs]
    return f"Measured {'; '.join(told)}; windows of {runs[0]['window']} tokens.\n"


def _cells(rows: Iterable[Row], model: str, text: str) -> Cells:
    """(bits, group) -> (method, dtype of scales and zeros) -> perplexity, widest first."""
    cells: Cells = {}
    for r in sorted((r for r in rows if r["model"] == model), key=lambda r: (-r["bits"], r["group"])):
        cells.setdefault((r["bits"], r["group"]), {})[r["method"], r["stored"]] = r["ppl"][text]
    return cells


def _against(rows: list[Row], method: str, peer: str) -> str:
    """In how many cells (model, bits, group, text) a method's perplexity is at most a peer's, and how far above where not."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in rows:
        for text, ppl in r["ppl"].items():
            cells.setdefault((r["model"], r["bits"], r["group"], text), {})[r["method"]] = ppl
    both = {k: c for k, c in cells.items() if method in c and peer in c}
    above: dict[int, list[float]] = {}
    for key, c in both.items():
        if c[method] > c[peer]:
            above.setdefault(key[1], []).append(c[method] / c[peer] - 1)
    count = sum(map(len, above.values()))
    told = f"`{method}` is at or below `{peer}` in {len(both) - count} of {len(both)} cells"
    if above:
        by_width = [f"{max(m):.2%} at {b} bits ({len(m)} cells)" for b, m in sorted(above.items(), reverse=True)]
        told += f"; else above it by at most {', '.join(by_width)}".replace("(1 cells)", "(1 cell)")
    return told + "."


def _goals(free: list[Row], calibrated: list[Row]) -> str:
    """At group 64, ln(perplexity / unquantized) as a share of the hqq package's, and the goal. calibrated: on one text."""
    rows = [r for r in free + calibrated if r.get("group", 64) == 64]
    found = {(r["model"], r.get("bits"), r["method"], r.get("stored")): r["ppl"] for r in rows}
    places = [(model, text) for model, text, _ in _split(free)[0] if text in SHORT]
    lines = []
    for bits, method, goal in GOALS:
        shares = []
        for model, text in places:
            mine, package = (found.get((model, bits, *m)) for m in ((method, "bfloat16"), PACKAGE))
            floor = found[model, None, "fp32", None][text]
            shares.append(f"{math.log(mine[text] / floor) / math.log(package[text] / floor):.2f}" if mine and package else "")
        lines.append((f"{bits}-bit g64", method, *shares, f"{goal:g}"))
    return table(("", "method", *(f">{model}, {SHORT[text]}" for model, text in places), ">goal"), lines)


def _other_texts(free: list[Row], report: Row) -> str:
    """Checkpoints calibrated on another text, on the bundled one and on none: perplexity on each text; where own text loses."""
    lines, calibrated, cells, worse = [], report["rows"], 0, []
    for r in (r for r in calibrated if r["calib"] != "bundled"):
        same = [o for o in free + calibrated if all(o.get(k) == r[k] for k in ("model", "bits", "group", "stored"))]
        default = quantizers.default_method(r["bits"], r["group"])
        none = next(o for o in same if "calib" not in o and o["method"] == default)
        bundled = next((o for o in same if o.get("calib") == "bundled" and o["method"] == r["method"]), None)
        ppl = [o and o["ppl"][text] for text in SHORT for o in (none, bundled, r)]
        text = "its own" if r["calib"] == "self" else r["calib"]
        about = (r["model"], f"{r['bits']}-bit g{r['group']}", r["method"])
        lines.append(
            (*about, text, f"{r['calib_tokens']:,}", report["runs"][r["run"]]["device"], *(shown(p, ",.2f") for p in ppl))
        )
        if bundled and r["calib"] == "self":
            cells += len(SHORT)
            above = {short: r["ppl"][t] / bundled["ppl"][t] - 1 for t, short in SHORT.items()}
            worse += [f"{', '.join(about)}, {short}: {more:.2%}" for short, more in above.items() if more > 0]
    which = ("without data", "bundled", "this text")
    columns = [f">{name}, {w}" for name in SHORT.values() for w in which]
    told = f"Own text is at or below the bundled one in {cells - len(worse)} of {cells} cells measured of both"
    told += f"; above in {'; '.join(worse)}.\n\n" if worse else ".\n\n"
    return told + table(("model", "", "method", "this text", ">tokens", "on", *columns), lines)


def _reached(calibrated: list[Row]) -> str:
    """The cells of REACH beside what is least there, on both texts together, of all that a text was given to."""
    lines = []
    for (bits, group), goal in REACH.items():
        found = [r for r in calibrated if (r["model"], r["bits"], r["group"]) == ("base", bits, group)]
        best = min(found, key=lambda r: math.prod(r["ppl"][text] for text in SHORT))
        goals = (shown(g, ".4g") or "none" for g in goal)
        told = [f"{best['ppl'][text]:,.2f} ({g})" for text, g in zip(SHORT, goals, strict=True)]
        lines.append((f"{bits}-bit g{group}", best["method"], best["calib"], f"{best['calib_tokens']:,}", *told))
    return table(("", "least by", "text", ">tokens", *(f">{name} (goal)" for name in SHORT.values())), lines)
