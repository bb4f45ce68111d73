"""What docs/accuracy.md says of calibration, for render.py: a table of time and memory, and a count against a peer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "accuracy"
LAYERS = 16  # of Llama-3.2-1B


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


def against(rows: list[dict[str, Any]], method: str, peer: str) -> str:
    """In how many cells (model, bits, group, text) a method's perplexity is at most a peer's, and by how much it is above."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in rows:
        for text, ppl in r["ppl"].items():
            cells.setdefault((r["model"], r["bits"], r["group"], text), {})[r["method"]] = ppl
    both = {k: c for k, c in cells.items() if method in c and peer in c}
    above = {k: c[method] / c[peer] - 1 for k, c in both.items() if c[method] > c[peer]}
    told = (
        f"`{method}` is at or below `{peer}` in {len(both) - len(above)} of {len(both)} cells (model, width, group size, text)"
    )
    if above:
        widths = ", ".join(f"{b}" for b in sorted({k[1] for k in above}, reverse=True))
        told += f"; in the others, at {widths} bits, it is above by at most {max(above.values()):.2%}"
    return told + "."
