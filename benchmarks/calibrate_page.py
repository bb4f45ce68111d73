"""What docs/accuracy.md says of calibration, for render.py: against the hqq package, against a peer, other texts, time."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "accuracy"
LAYERS = 16  # of Llama-3.2-1B
Row = dict[str, Any]
# Bits at group 64, method, and the most that ln(perplexity / unquantized) was to be as a share of the hqq package's on the base
# model and WikiText-2; set before anything was measured.
GOALS = ((4, "lsq", 0.9), (4, "gptq", 0.65), (4, "awq", 0.65), (3, "gptq", 0.42), (3, "learn", 0.42), (2, "gptq", 0.36),
         (2, "learn", 0.36))  # fmt: skip
SHORT = {"wikitext2_test": "WikiText-2", "mix_valid_sample": "mix"}


def times(table: Callable[..., str]) -> str:
    """A row per device and method: seconds per layer and per billion parameters, and the most memory held."""
    lines, told = [], []
    for path in sorted(RESULTS.glob("calibrate_time_*.json"), reverse=True):
        report = json.loads(path.read_text())
        told.append(f"{report['date']}, torch {report['versions']['torch']}")
        for r in report["rows"]:
            on_cpu = r["peak_gpu_bytes"] is None  # shared with others when this was measured: its own seconds count
            layer = (r["cpu_seconds"] if on_cpu else sum(r["layer_seconds"])) / r["layers"]
            device = r["device"].replace("1 threads", "1 thread")
            held = r["peak_gpu_bytes"] or r["peak_rss_bytes"]
            lines.append(
                (device, r["method"], f"{r['bits']}-bit g{r['group']}", f"{r['calib_tokens']:,}", r["layers"],
                 f"{layer:.1f}", f"{layer * LAYERS:,.0f}", f"{layer * r['layers'] / r['params'] * 1e9:,.0f}",
                 f"{held / 1e9:.1f}")
            )  # fmt: skip
    columns = (
        "device", "method", "", ">tokens", ">layers run", ">s a layer", f">s for {LAYERS} layers", ">s per billion", ">peak GB",
    )  # fmt: skip
    return f"Measured {'; '.join(told)}.\n\n{table(columns, lines)}"


def against(rows: list[Row], method: str, peer: str) -> str:
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


def goals(free: list[Row], calibrated: list[Row], table: Callable[..., str]) -> str:
    """At group 64, ln(perplexity / unquantized) as a share of the hqq package's, beside the goal. calibrated: on one text."""
    rows = [r for r in free + calibrated if r.get("group", 64) == 64]
    found = {(r["model"], r.get("bits"), r["method"], r.get("stored")): r["ppl"] for r in rows}
    places = [(r["model"], text) for r in free if "bits" not in r for text in SHORT]
    lines = []
    for bits, method, goal in GOALS:
        shares = []
        for model, text in places:
            mine, package = (found.get((model, bits, *m)) for m in ((method, "bfloat16"), ("hqq package", "float32")))
            floor = found[model, None, "fp32", None][text]
            shares.append(f"{math.log(mine[text] / floor) / math.log(package[text] / floor):.2f}" if mine and package else "")
        lines.append((f"{bits}-bit g64", method, *shares, f"{goal:g}"))
    return table(("", "method", *(f">{model}, {SHORT[text]}" for model, text in places), ">goal"), lines)


def other_texts(free: list[Row], calibrated: list[Row], table: Callable[..., str]) -> str:
    """Checkpoints calibrated on another text, beside the bundled one and none: perplexity on each text."""
    from lowq_cli import quantizers

    lines = []
    for r in (r for r in calibrated if r["calib"] != "bundled"):
        same = [o for o in free + calibrated if all(o.get(k) == r[k] for k in ("model", "bits", "group", "stored"))]
        default = quantizers.default_method(r["bits"], r["group"])
        none = next(o for o in same if "calib" not in o and o["method"] == default)
        bundled = next(o for o in same if o.get("calib") == "bundled" and o["method"] == r["method"])
        shown = [f"{o['ppl'][text]:,.2f}" for text in SHORT for o in (none, bundled, r)]
        lines.append((r["model"], f"{r['bits']}-bit g{r['group']}", r["method"], r["calib"], f"{r['calib_tokens']:,}", *shown))
    which = ("without data", "bundled", "this text")
    columns = [f">{name}, {w}" for name in SHORT.values() for w in which]
    return table(("model", "", "method", "this text", ">tokens", *columns), lines)
