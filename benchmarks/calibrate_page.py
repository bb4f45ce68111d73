"""What docs/accuracy.md says of the time and memory that calibration takes: a table for render.py."""

import json
from collections.abc import Callable
from pathlib import Path

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
            held = r["peak_gpu_bytes"] or r["peak_rss_bytes"]
            lines.append(
                (r["device"], r["method"], f"{r['bits']}-bit g{r['group']}", f"{r['calib_tokens']:,}", r["layers"],
                 f"{layer:.1f}", f"{layer * LAYERS:,.0f}", f"{layer * r['layers'] / r['params'] * 1e9:,.0f}", f"{held / 1e9:.1f}")
            )  # fmt: skip
    columns = (
        "device", "method", "", ">tokens", ">layers run", ">s a layer", f">s for {LAYERS} layers", ">s per billion", ">peak GB",
    )  # fmt: skip
    return f"Measured {'; '.join(told)}.\n\n{table(columns, lines)}"
