"""The table of docs/cuda.md from the measured rows: best time of the CUDA tile kernels in each cell, 4 bits, group 128.

python benchmarks/cuda_table.py [--write]      # --write replaces what follows the marker in docs/cuda.md
"""

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent
MARKER = "<!-- table: python benchmarks/cuda_table.py -->\n"
SHAPES = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


def measured() -> dict[tuple[int, int, int], tuple[float, str]]:
    """(N, K, M) -> (microseconds, kernel): the fastest row of any result file."""
    results = ROOT / "results" / "h100"
    rows = json.loads((results / "bench.json").read_text())["rows"]
    rows += json.loads((results / "cuda_tile_wgmma.json").read_text())["rows"]
    for machine in json.loads((results / "tune_llama3_8b.json").read_text())["machines"]:
        rows += machine["entries"]
    best: dict[tuple[int, int, int], tuple[float, str]] = {}
    for r in rows:
        if r["bits"] == 4 and r["group"] == 128 and r["kernel"].startswith("cuda/tile") and "us" in r:
            key = (r["N"], r["K"], r["M"])
            best[key] = min(best.get(key, (float("inf"), "")), (r["us"], r["kernel"].removeprefix("cuda/tile_")))
    return best


def table() -> str:
    """Markdown: one row a layer, one column an M; an empty cell was not measured."""
    best = measured()
    lines = ["| N x K | " + " | ".join(f"M={m}" for m in ROWS) + " |", "|---|" + "---|" * len(ROWS)]
    for N, K in SHAPES:
        cells = [f"{best[N, K, m][0]:.1f} {best[N, K, m][1]}" if (N, K, m) in best else "" for m in ROWS]
        lines.append(f"| {N}x{K} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    text = table()
    if parser.parse_args().write:
        page = ROOT.parent / "docs" / "cuda.md"
        page.write_text(page.read_text().split(MARKER)[0] + MARKER + "\n" + text)
    print(text)
