"""docs/accuracy.md: weights that are values of a table, compared with grids of as many bits. Results: accuracy/tables.json."""

from pages import Row, part, read, table, versions
from pages.accuracy import SHORT

KINDS = {"float": "grid with zeros", "none": "grid without", "fitted": "table fitted to the matrix", "nf4": "nf4"}
KINDS |= {"e2m1/e8m0": "MXFP4", "e2m1/e4m3": "NVFP4", "fitted/e4m3": "fitted table, e4m3 scales"}
METHODS = ("rtn", "lsq", "gptq")
GRIDS = ("float", "none")


@part
def value_tables() -> str:
    """Perplexities of every kind by method, and how the best table of as many bits stands to the best grid."""
    report = read("accuracy/tables.json")
    parts = [f"Perplexity on {' / '.join(SHORT.values())}.\n"]
    for model in dict.fromkeys(r["model"] for r in report["rows"]):
        rows = [r for r in report["rows"] if r["model"] == model]
        (whole,) = (r for r in rows if r["method"] == "fp32")
        cells = {(r["bpw"], r["bits"], r["measure"], r["group"], r["method"]): r for r in rows if r is not whole}
        lines = []
        for bpw, bits, kind, group in sorted({k[:4] for k in cells}, key=lambda k: (-k[0], -k[1], k[2] != GRIDS, k[2:])):
            found = (cells.get((bpw, bits, kind, group, m)) for m in METHODS)
            lines.append((f"{bpw:.2f}", f"{bits}-bit g{group}", KINDS[kind], *(_shown(r) if r else "" for r in found)))
        columns = (">bits", "codes", "values", *(f">{m}" for m in METHODS))
        run = report["runs"][rows[0]["run"]]
        told = f"{run['date']} on {run['device']} ({versions(run['versions'])}), {run['tokens']:,} tokens of each text"
        parts.append(f"**{model}**, {_shown(whole)} in fp32, measured {told}:\n\n{table(columns, lines)}")
        ratios = [(bpw, *r) for bpw in sorted({k[0] for k in cells}, reverse=True) if (r := _ratio(cells, bpw))]
        said = "; ".join(f"{' / '.join(f'{100 * (x - 1):+.1f}%' for x in r)} at {bpw:.2f} bits" for bpw, *r in ratios)
        if said:
            parts.append(f"With gptq the perplexity of the best table, relative to the best grid of as many bits: {said}.\n")
    return "\n".join(parts)


def _shown(r: Row) -> str:
    return " / ".join(f"{r['ppl'][t]:.2f}" for t in SHORT)


def _ratio(cells: dict[tuple[float, int, str, int, str], Row], bpw: float) -> list[float]:
    """Each text's perplexity by the best table over that by the best grid; both best by all texts together."""

    def best(grids: bool) -> Row | None:
        found = [r for k, r in cells.items() if k[0] == bpw and k[4] == "gptq" and (k[2] in GRIDS) == grids]
        return min(found, key=lambda r: sum(r["ppl"].values()), default=None)

    ours, theirs = best(grids=False), best(grids=True)
    return [ours["ppl"][t] / theirs["ppl"][t] for t in SHORT] if ours and theirs else []
