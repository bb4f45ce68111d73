"""docs/accuracy.md: what experts lose by their visits, and a hybrid by kind of tensor. Results: <device>/kinds.json."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from pages import RESULTS, Row, part, read, shown, table, versions

Expert = Sequence[float]  # layer, expert, visits while calibrating, visits while evaluated, error, error with drifted inputs


@part
def kinds() -> str:
    """A table of experts and one of kinds for each device that has measured them."""
    parts = []
    for path in sorted(RESULTS.glob("*/kinds.json")):
        report = read(f"{path.parent.name}/kinds.json")
        trained, told = report["trained"], f"{report['date']} on {report['device']} ({versions(report['versions'])})"
        for name, shape in (("mixture", _mixture), ("hybrid", _hybrid)):
            rows, run = [r for r in report["rows"] if r["part"] == name], trained[name]
            if rows:
                loss = f"loss {run['loss_before']:.2f} to {run['loss_after']:.2f}"
                facts = f"{run['parameters'] / 1e6:.1f}M parameters, trained on {run['tokens']:,} tokens ({loss})"
                parts.append(f"{name.capitalize()}, {told}: {facts}; perplexity {rows[0]['ppl']:.1f}.\n\n{shape(rows)}")
    return "\n".join(parts)


def _mixture(rows: list[Row]) -> str:
    """A table for each number of calibration tokens."""
    numbers = dict.fromkeys(r["calib_tokens"] for r in rows)
    return "\n".join(_experts([r for r in rows if r["calib_tokens"] == number]) for number in numbers)


def _experts(rows: list[Row]) -> str:
    """A row per method and width."""
    visits, *measured = rows
    shares = [s for of in visits["shares"] for s in of]
    told = f"Each of {visits['calib_tokens']:,} tokens visits two of a layer's experts; an expert gets {min(shares):.1%} to"
    told += f" {max(shares):.1%} of the visits.\n\n"
    free = {r["bits"]: r["experts"] for r in measured if r["method"] == "auto"}
    lines = []
    for r in measured:
        least, most = _quarters(r["experts"])
        plain = {(e[0], e[1]): e[4] for e in free.get(r["bits"], [])} if r["method"] != "auto" else {}
        over = [[*e[:4], e[4] / plain[e[0], e[1]]] for e in r["experts"] if plain]
        gains = _quarters(over) if over else (None, None)
        ends = (f"{r['least_over_most']:.2f}", *(shown(g, ".2f") for g in gains), f"{r['kl']:.3f}")
        lines.append((r["method"], f"{r['bits']}-bit g64", f"{least:.4f}", f"{most:.4f}", *ends))
    columns = ("method", "", ">error, least visited quarter", ">most visited quarter", ">least / most")
    return told + table((*columns, ">over auto's, least", ">most", ">KL"), lines)


def _quarters(experts: Iterable[Expert]) -> tuple[float, float]:
    """The geometric mean of the error over each layer's least and most visited quarter of experts."""
    layers, least, most = defaultdict(list), list[float](), list[float]()
    for e in experts:
        layers[e[0]].append(e)
    for some in layers.values():
        order = sorted(some, key=lambda e: e[2])
        count = max(1, len(order) // 4)
        least += [math.log(e[4]) for e in order[:count]]
        most += [math.log(e[4]) for e in order[-count:]]
    return math.exp(sum(least) / len(least)), math.exp(sum(most) / len(most))


def _hybrid(rows: list[Row]) -> str:
    """A row per kind, the costliest weights first."""
    cells = {(r["kind"], r["bits"]): r for r in rows if "kind" in r}
    widths = sorted({bits for _, bits in cells}, reverse=True)
    found = dict.fromkeys(k for k, _ in cells)  # in the order of the file, as some cost the same
    names = sorted(found, key=lambda k: (k.startswith("all"), -cells[k, widths[0]]["kl_per_million"]))
    lines = []
    for name in names:
        values = [f"{cells[name, b][key]:.3g}" for b in widths for key in ("kl", "kl_per_million")]
        lines.append((name, f"{cells[name, widths[0]]['weights']:,}", *values))
    columns = [f">{what}, {b} bits" for b in widths for what in ("KL", "per million")]
    return table(("kind", ">weights", *columns), lines)
