"""The tables of docs/cuda.md from the measured rows: best time of the CUDA kernels in each cell, 4 bits, group 128.

python benchmarks/cuda_table.py [--write]      # --write replaces what follows the marker in docs/cuda.md
"""

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent
MARKER = "<!-- table: python benchmarks/cuda_table.py -->\n"
SHAPES = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


def measured(prefix: str) -> dict[tuple[int, int, int], tuple[float, str]]:
    """(N, K, M) -> (microseconds, kernel): the fastest row of any result file by a kernel whose name starts so."""
    results = ROOT / "results" / "h100"
    rows = json.loads((results / "bench.json").read_text())["rows"]
    rows += json.loads((results / "cuda_tile_wgmma.json").read_text())["rows"]
    for machine in json.loads((results / "tune_llama3_8b.json").read_text())["machines"]:
        rows += machine["entries"]
    best: dict[tuple[int, int, int], tuple[float, str]] = {}
    for r in rows:
        if r["bits"] == 4 and r["group"] == 128 and r["kernel"].startswith(prefix) and "us" in r:
            key = (r["N"], r["K"], r["M"])
            best[key] = min(best.get(key, (float("inf"), "")), (r["us"], r["kernel"].split("/")[1]))
    return best


def table() -> str:
    """Markdown: the tile kernels, a row a layer and a column an M; then the GEMVs beside them at M = 1."""
    best = measured("cuda/tile")
    lines = ["| N x K | " + " | ".join(f"M={m}" for m in ROWS) + " |", "|---|" + "---|" * len(ROWS)]
    for N, K in SHAPES:
        found = (best.get((N, K, m)) for m in ROWS)
        cells = ["" if cell is None else f"{cell[0]:.1f} {cell[1].removeprefix('tile_')}" for cell in found]
        lines.append(f"| {N}x{K} | " + " | ".join(cells) + " |")
    kernels = ("cuda/tile", "cuda/gemv_rows", "cuda/gemv_warp32")
    lines += ["", "At M = 1 beside the GEMVs of the source systems, each by its best config:", ""]
    lines += ["| N x K | " + " | ".join(k.removeprefix("cuda/") for k in kernels) + " |", "|---|" + "---|" * len(kernels)]
    for N, K in SHAPES:
        times = [measured(k).get((N, K, 1)) for k in kernels]
        if all(times):
            lines.append(f"| {N}x{K} | " + " | ".join(f"{t[0]:.1f}" for t in times if t) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    text = table()
    if parser.parse_args().write:
        page = ROOT.parent / "docs" / "cuda.md"
        page.write_text(page.read_text().split(MARKER)[0] + MARKER + "\n" + text)
    print(text)
