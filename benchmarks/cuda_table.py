"""The tables of docs/cuda.md from measured rows: the tile kernels beside the best peer.

python benchmarks/cuda_table.py [--write]      # --write replaces what follows the marker in docs/cuda.md

Reads results/h100/: cuda_tile.json (cuda_tile.py, the run of PLAN) where it is there, the sweeps cuda_tile_mma.json and
cuda_tile_wgmma.json, cuda_tile_wgmma_early.json (earlier builds, for cells that no later run reached: marked "~"), and
peers.jsonl (Marlin, Machete, Humming, tinygemm, GemLite on the same kind of GPU, same protocol, another run).
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "h100"
MARKER = "<!-- table: python benchmarks/cuda_table.py -->\n"
RUNS = ("cuda_tile.json", "cuda_tile_mma.json", "cuda_tile_wgmma.json")
EARLY = "cuda_tile_wgmma_early.json"
NOT_PEERS = ("cublas_fp16", "read", "roofline", "fastgemv")  # fastgemv has one scale a tensor
Key = tuple[int, int, int]  # N, K, M


class Best(NamedTuple):
    """The fastest row of a cell: microseconds, kernel, cuBLAS of the same run (0: not measured), of an earlier build."""

    us: float
    kernel: str
    cublas: float
    early: bool

    def __str__(self) -> str:
        return f"{'~' if self.early else ''}{self.us:.1f}"


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of one result file; none where it is not there."""
    path = RESULTS / name
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def measured(bits: int) -> dict[Key, Best]:
    """(N, K, M) -> the fastest row at this width, fp16, group 128, float zeros; earlier builds only where nothing else is."""
    found: dict[Key, Best] = {}
    for name in (*RUNS, EARLY):
        late = set(found)
        for r in rows(name):
            key = r["N"], r["K"], r["M"]
            if r["bits"] != bits or r["group"] != 128 or r["dtype"] != "float16" or "us" not in r:
                continue
            if name == EARLY and key in late:
                continue
            kernel = r["kernel"].removeprefix("cuda/tile_")
            one = Best(r["us"], kernel, r.get("cublas_us") or 0.0, name == EARLY)
            found[key] = min(found.get(key, one), one)
    return found


def best_peers(bits: int) -> dict[Key, tuple[float, str]]:
    """(N, K, M) -> (microseconds, name) of the fastest peer."""
    best: dict[Key, tuple[float, str]] = {}
    for line in (RESULTS / "peers.jsonl").read_text().splitlines():
        r = json.loads(line)
        if r["peer"] not in NOT_PEERS and "us" in r and r["bits"] == bits:
            key = r["N"], r["K"], r["M"]
            best[key] = min(best.get(key, (math.inf, "")), (r["us"], r["peer"]))
    return best


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def grid(cells: dict[Key, str]) -> str:
    """(N, K, M) -> text, as a table: a row a layer, a column an M."""
    Ms = sorted({m for _, _, m in cells})
    layers = dict.fromkeys((n, k) for n, k, _ in sorted(cells))
    return table(["N x K", *(f"M={m}" for m in Ms)], [[f"{N}x{K}", *(cells.get((N, K, m), "") for m in Ms)] for N, K in layers])


def against_peers(bits: int) -> str:
    """One width: microseconds, kernel, times the best peer's; then how many are at or under it, and which are not."""
    mine, best = measured(bits), best_peers(bits)
    ratios = {k: b.us / best[k][0] for k, b in mine.items() if k in best}
    cells = {k: f"{b} {b.kernel}" + (f" {ratios[k]:.2f}" if k in ratios else "") for k, b in mine.items()}
    few = [math.log(r) for (_, _, m), r in ratios.items() if m <= 16]
    said = f"At or under the best peer in {sum(r <= 1 for r in ratios.values())} of {len(ratios)} cells measured"
    if few:
        said += f"; at M <= 16 {math.exp(-sum(few) / len(few)):.2f} times as fast as the best peer in geometric mean"
    over = [f"{n}x{k} M={m} ({r:.2f}, {best[n, k, m][1]})" for (n, k, m), r in ratios.items() if r > 1]
    missing = [k for k in best if k not in mine]
    said += "." + (f" Behind: {', '.join(over)}." if over else "")
    if missing:
        said += f" Not measured: the other {len(missing)} cells that have a peer."
    return f"{grid(cells)}\n\n{said}"


def against_own(bits: int) -> str:
    """A narrower width: microseconds, and times as fast as 4 bits."""
    mine, wide = measured(bits), measured(4)
    return grid({k: f"{b}" + (f" ({wide[k].us / b.us:.2f})" if k in wide else "") for k, b in mine.items()})


def against_cublas() -> str:
    """4 bits: microseconds, and times cuBLAS fp16's of the same run."""
    return grid({k: f"{b} ({b.us / b.cublas:.2f})" for k, b in measured(4).items() if b.cublas and k[2] >= 256})


ABOUT = """One H100 (SXM, 80 GB), torch 2.11.0+cu130; fp16, float zeros. A cell: microseconds of the best shipped config, its
kernel, and that time over the best peer's (under 1 is faster). ~: by an earlier build of the kernel; the one that ships was
not timed there."""


def text() -> str:
    """Everything that follows the marker."""
    parts = [
        ABOUT,
        "### 4 bits, group 128\n\n" + against_peers(4),
        "### 8 bits, group 128\n\n" + against_peers(8),
        *(f"### {b} bit{'s' * (b > 1)}, group 128 (times as fast as 4 bits)\n\n" + against_own(b) for b in (3, 2, 1)),
        "### Many rows against cuBLAS fp16 (4 bits; times cuBLAS's)\n\n" + against_cublas(),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    made = text()
    if parser.parse_args().write:
        page = ROOT.parent / "docs" / "cuda.md"
        page.write_text(page.read_text().split(MARKER)[0] + MARKER + "\n" + made)
    print(made)
