"""docs/accuracy.md: other tools beside lowq at equal bits. Results: accuracy/{peers,calibrated,data_free}.json."""

import itertools
import math
from typing import NamedTuple

from pages import Row, part, read, shown, table, versions
from pages.accuracy import PACKAGE, SHORT

GROUPS, WIDTHS = (64, 128), (4, 3, 2)
CODEBOOKS = "llama.cpp IQ"  # what names a tool whose values are no grid
MIX = "mix_valid_sample"


class Entry(NamedTuple):
    """One checkpoint, judged. kl: empty where it was not measured."""

    model: str
    bpw: float
    tool: str
    scheme: str
    text: str
    ppl: dict[str, float]
    kl: dict[str, float]

    @property
    def ours(self) -> bool:
        """Whether lowq made it."""
        return self.tool.startswith("lowq")


def entries() -> list[Entry]:
    """All that is measured of 2 to 4 bits at groups of 64 and 128, most bits first; of lowq's, what its own text gave."""
    found = {e[:5]: e for e in map(_entry, _rows())}
    return sorted(found.values(), key=lambda e: (e.model, -e.bpw, e.kl.get(MIX, math.inf), e.ppl[MIX]))


def _rows() -> list[Row]:
    """Rows by the names of peers.json; those of that file last, since they have the KL divergence besides."""
    rows = []
    for r in read("accuracy/calibrated.json")["rows"]:
        if r["method"] == "gptqmodel":  # whole zeros, of as many bits as a code
            rows.append(r | {"method": "GPTQModel", "bpw": r["bits"] + (16 + r["bits"]) / r["group"]})
        elif r["calib"] == "self":
            rows.append(r | {"method": f"lowq {r['method']}"})
    free = read("accuracy/data_free.json")["rows"]
    rows += [r | {"method": "hqq"} for r in free if (r["method"], r.get("stored")) == PACKAGE]
    rows = [r for r in rows if r["bits"] in WIDTHS and r["group"] in GROUPS]
    return rows + read("accuracy/peers.json")["rows"]


def _entry(r: Row) -> Entry:
    text = "none" if "calib" not in r else f"{'its own' if r['calib'] == 'self' else r['calib']}, {r['calib_tokens']:,}"
    scheme = f"{r['bits']}-bit g{r['group']}" if "group" in r else ""
    return Entry(r["model"], r["bpw"], r["method"], scheme, text, r["ppl"], r.get("kl", {}))


def line(found: list[Entry], model: str, text: str) -> list[tuple[float, float]]:
    """(bits, ln KL) of llama.cpp's types with a codebook."""
    return sorted((e.bpw, math.log(e.kl[text])) for e in found if e.model == model and e.tool.startswith(CODEBOOKS))


def height(points: list[tuple[float, float]], bpw: float) -> float | None:
    """ln KL of a line there; None outside of it."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= bpw <= x1:
            return y0 + (y1 - y0) * (bpw - x0) / (x1 - x0)
    return None


@part
def peers() -> str:
    """How lowq stands to each peer and to the line of llama.cpp's i-quants, and a table per model."""
    found = entries()
    report = read("accuracy/peers.json")
    runs = [report["runs"][i] for i in sorted({r["run"] for r in report["rows"]})]
    told = dict.fromkeys(f"{r['date']} on {r['device']} ({versions(r['versions'])})" for r in runs)
    parts = [
        f"Measured {'; '.join(told)}; rows without KL as the other tables of this page.\n",
        _standing(found),
        _to_line(found),
    ]
    for model, mine in itertools.groupby(found, key=lambda e: e.model):
        rows = []
        for e in mine:
            tool = f"**{e.tool}**" if e.ours else e.tool
            values = [*(f"{e.ppl[t]:,.2f}" for t in SHORT), *(shown(e.kl.get(t), ".4f") for t in SHORT)]
            rows.append((f"{e.bpw:.2f}", tool, e.scheme, e.text, *values))
        names = list(SHORT.values())
        columns = (">bits", "tool", "scheme", "text, tokens", *(f">{n}" for n in names), *(f">KL, {n}" for n in names))
        parts.append(f"### {model}: every tool\n\n{table(columns, rows)}")
    return "\n".join(parts)


def _standing(found: list[Entry]) -> str:
    """Perplexities of each peer's checkpoints against the least that lowq reaches in as many bits or fewer."""
    lines = []
    theirs = sorted((e for e in found if not e.ours), key=lambda e: e.tool)
    for tool, some in itertools.groupby(theirs, key=lambda e: e.tool):
        cells, worse = 0, []
        for e, (t, short) in itertools.product(some, SHORT.items()):
            least = min((o.ppl[t] for o in found if o.ours and o.model == e.model and o.bpw <= e.bpw), default=None)
            if least is not None:
                cells += 1
                if least > e.ppl[t]:
                    worse.append(f"{e.model}, {e.bpw:.2f} bits, {short}: {least / e.ppl[t] - 1:.1%}")
        if cells:
            lines.append((tool, f"{cells - len(worse)} of {cells}", "; ".join(worse)))
    told = "In as many bits or fewer, all counted, lowq's perplexity is at or below:\n\n"
    return told + table(("peer", "cells", "above in"), lines)


def _to_line(found: list[Entry]) -> str:
    """KL divergence over that of llama.cpp's i-quants at the same bits."""
    rows = []
    for e in found:
        heights = {t: height(line(found, e.model, t), e.bpw) for t in e.kl}
        shares = [f"{e.kl[t] / math.exp(y):.2f}" for t in SHORT if (y := heights.get(t)) is not None]
        if shares and not e.tool.startswith(CODEBOOKS):
            rows.append((e.model, f"{e.bpw:.2f}", e.tool, e.scheme, *shares))
    told = "KL divergence over that of llama.cpp's i-quants at the same bits (ln KL between two of them, straight by bits):\n\n"
    return told + table(("model", ">bits", "tool", "scheme", *(f">{n}" for n in SHORT.values())), rows)
