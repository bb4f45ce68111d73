"""docs/cuda.md: weights of values from a table compared with other tools' kernels. Results: <gpu>/table_peers.json."""

from math import prod

from pages import RESULTS, Row, part, read, table

FORMATS = {
    "nvfp4": ("NVFP4", "int4 g32"),
    "mxfp4": ("MXFP4", "int4 g32"),
    "nf4 g64": ("NF4 g64", "int4 g64"),
}  # and the grid compared with them
PEERS = {"marlin": "Marlin (vLLM 0.24)", "bitsandbytes": "bitsandbytes", "humming": "Humming", "cublas": "cuBLAS fp16"}


@part
def table_peers() -> str:
    """Of each format and number of rows: time over a grid's of as many bytes, and times as fast as each peer."""
    parts = []
    for path in sorted(RESULTS.glob("*/table_peers.json")):
        report = read(f"{path.parent.name}/table_peers.json")
        rows = [r for r in report["rows"] if "form" not in r]  # by a form that is no more
        layers = {(r["N"], r["K"]) for r in rows}
        lines = []
        for name, (title, grid) in FORMATS.items():
            for M in sorted({r["M"] for r in rows if r["format"] == name and r["peer"] == "lowq"}):
                ours = _times(rows, "lowq", name, M)
                over = _ratio(ours, _times(rows, "lowq", grid, M))
                peers = (_ratio(_times(rows, p, "fp16" if p == "cublas" else name, M), ours) for p in PEERS)
                lines.append((title, M, over, *(f"{r}x" if r else "" for r in peers)))
        told = f"{report['gpu']}, {report['date']} (torch {report['torch']}), fp16 (Marlin's MXFP4: bf16), one run"
        columns = ("format", ">M", ">time over a 4-bit grid's", *(f">as fast as {p}" for p in PEERS.values()))
        about = f"geometric means of {len(layers)} layers of an 8B and a 70B model; the grid has groups of 32, or NF4's 64"
        parts.append(f"{told}; {about}. FP4 of fewer rows takes the kernel of the fewest shown:\n\n{table(columns, lines)}")
    return "\n".join(parts)


def _times(rows: list[Row], peer: str, name: str, M: int) -> dict[tuple[int, int], float]:
    """Microseconds by layer."""
    return {(r["N"], r["K"]): r["us"] for r in rows if (r["peer"], r["format"], r["M"]) == (peer, name, M)}


def _ratio(a: dict[tuple[int, int], float], b: dict[tuple[int, int], float]) -> str:
    """The geometric mean of one's times over the other's; nothing where they have not all layers in common."""
    both = [a[k] / b[k] for k in a.keys() & b.keys()]
    return f"{'' if len(both) == 5 else f'{len(both)} layers: '}{prod(both) ** (1 / len(both)):.2f}" if both else ""
