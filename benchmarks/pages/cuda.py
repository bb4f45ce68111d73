"""docs/cuda.md: the tile kernels compared with the best peer. Results: h100/cuda_tile.json (cuda_tile.py, the run of PLAN),
h100/peers.jsonl (Marlin, Machete, Humming, tinygemm, GemLite on the same kind of GPU, same protocol, another run).
"""

import math
from functools import cache
from statistics import geometric_mean
from typing import NamedTuple

from pages import part, read, table

LAYERS = ((4096, 4096), (4096, 14336), (8192, 8192), (28672, 4096), (57344, 8192))  # the peers'
NOT_PEERS = ("cublas_fp16", "read", "roofline", "fastgemv")  # fastgemv has one scale a tensor
GROUPS = {64: "groups of 64", 32: "groups of 32", 0: "one group a row"}
Key = tuple[int, int, int]  # N, K, M


class Cell(NamedTuple):
    """One row of the run: microseconds, the kernel that dispatch chose, cuBLAS, and the time of reading W alone."""

    us: float
    kernel: str
    cublas: float
    read: float

    def __str__(self) -> str:
        return f"{self.us:.1f}"


@cache
def measured_cells(bits: int, group: int = 128) -> dict[Key, Cell]:
    """(N, K, M) -> the cell at this width and group size (0: a row is one group), fp16, float zeros."""
    found: dict[Key, Cell] = {}
    for r in read("h100/cuda_tile.json")["rows"]:
        size = 0 if r["group"] == r["K"] else r["group"]
        if (r["bits"], size, r["dtype"]) == (bits, group, "float16") and "us" in r:
            kernel = r["kernel"].removeprefix("cuda/tile_")
            found[r["N"], r["K"], r["M"]] = Cell(r["us"], kernel, r["cublas_us"], r["read_us"])
    return found


def of_peers(cells: dict[Key, Cell]) -> dict[Key, Cell]:
    """Those at the layers and rows of x that peers were measured at."""
    return {k: c for k, c in cells.items() if k[:2] in LAYERS and k[2].bit_count() == 1}


def best_peers(bits: int) -> dict[Key, tuple[float, str]]:
    """(N, K, M) -> (microseconds, name) of the fastest peer."""
    best: dict[Key, tuple[float, str]] = {}
    for r in read("h100/peers.jsonl"):
        if r["peer"] not in NOT_PEERS and "us" in r and r["bits"] == bits:
            key = r["N"], r["K"], r["M"]
            best[key] = min(best.get(key, (math.inf, "")), (r["us"], r["peer"]))
    return best


def grid(cells: dict[Key, str]) -> str:
    """(N, K, M) -> text, as a table: a row a layer, a column an M."""
    Ms = sorted({m for _, _, m in cells})
    layers = dict.fromkeys((n, k) for n, k, _ in sorted(cells))
    rows = [[f"{N}x{K}", *(cells.get((N, K, m), "") for m in Ms)] for N, K in layers]
    return table(["N x K", *(f"M={m}" for m in Ms)], rows, end="")


def against_peers(bits: int) -> str:
    """One width: microseconds, kernel, times the best peer's; then how many are at or under it, and which are not."""
    mine, best = of_peers(measured_cells(bits)), best_peers(bits)
    ratios = {k: c.us / best[k][0] for k, c in mine.items() if k in best}
    cells = {k: f"{c} {c.kernel}" + (f" {ratios[k]:.2f}" if k in ratios else "") for k, c in mine.items()}
    few = [r for (_, _, m), r in ratios.items() if m <= 16]
    said = f"At or under the best peer in {sum(r <= 1 for r in ratios.values())} of {len(ratios)} cells"
    said += f"; at M <= 16 {1 / geometric_mean(few):.2f} times as fast as the best peer in geometric mean."
    over = [f"{n}x{k} M={m} ({r:.2f}, {best[n, k, m][1]})" for (n, k, m), r in ratios.items() if r > 1]
    missing = [f"{n}x{k} M={m}" for n, k, m in best if (n, k, m) not in mine]
    said += (f" Behind: {', '.join(over)}." if over else "") + (f" Not measured: {', '.join(missing)}." if missing else "")
    return f"{grid(cells)}\n\n{said}"


def against_reading() -> str:
    """4 bits: times what the mere reading of the words, scales and zeros takes."""
    cells = {k: c.us / c.read for k, c in of_peers(measured_cells(4)).items() if k[2] <= 16}
    by_m = {m: [r for k, r in cells.items() if k[2] == m] for m in sorted({k[2] for k in cells})}
    means = ", ".join(f"M = {m} {geometric_mean(ratios):.2f}" for m, ratios in by_m.items())
    return f"{grid({k: f'{r:.2f}' for k, r in cells.items()})}\n\nGeometric means: {means}."


def against_own(bits: int) -> str:
    """A narrower width: microseconds, and times as fast as 4 bits."""
    mine, wide = of_peers(measured_cells(bits)), measured_cells(4)
    return grid({k: f"{c}" + (f" ({wide[k].us / c.us:.2f})" if k in wide else "") for k, c in mine.items() if k[2] <= 256})


def against_wide_groups(group: int) -> str:
    """4 bits in another group size: microseconds, and times what groups of 128 take."""
    wide = measured_cells(4)
    return grid({k: f"{c} ({c.us / wide[k].us:.2f})" for k, c in measured_cells(4, group).items() if k in wide})


def against_cublas(bits: int) -> str:
    """Microseconds, and times cuBLAS fp16's of the same run."""
    return grid({k: f"{c} ({c.us / c.cublas:.2f})" for k, c in of_peers(measured_cells(bits)).items() if k[2] >= 256})


def elsewhere() -> str:
    """4 bits: other layers and rows of x, and times as fast as cuBLAS fp16. Nothing was ever tuned to Gemma's."""
    there = of_peers(measured_cells(4))
    return grid({k: f"{c} ({c.cublas / c.us:.2f})" for k, c in measured_cells(4).items() if k not in there})


ABOUT = """One H100 (SXM, 80 GB), torch 2.11.0+cu130; fp16, float zeros, what dispatch picks without a table, all in one run.
A cell: microseconds, the kernel, and that time over the best peer's (under 1 is faster). From M = 256 on a timing, ours and
cuBLAS's, comes after 0.1 s of rest and ends within 25 ms: an H100 under such load lowers its clocks after 25 to 60 ms."""


@part
def cuda_tables() -> str:
    """All of them."""
    parts = [
        ABOUT,
        "### 4 bits, group 128\n\n" + against_peers(4),
        "### 4 bits, times what reading the weight takes\n\n" + against_reading(),
        "### 8 bits, group 128\n\n" + against_peers(8),
        *(f"### {b} bit{'s' * (b > 1)}, group 128 (times as fast as 4 bits)\n\n" + against_own(b) for b in (3, 2, 1)),
        *(f"### 4 bits, {name} (times what groups of 128 take)\n\n" + against_wide_groups(g) for g, name in GROUPS.items()),
        *(f"### {b} bits, many rows (times what cuBLAS fp16 takes)\n\n" + against_cublas(b) for b in (4, 8)),
        "### Layers of Qwen2.5-7B, Mistral-7B, Llama-3.2-1B, Gemma-3-27B, 4 bits (times as fast as cuBLAS)\n\n" + elsewhere(),
    ]
    return "\n\n".join(parts) + "\n"
