"""docs/accuracy.md: other tools compared with lowq at equal bits. Results: accuracy/{peers,calibrated,data_free,mixed}.json."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from lowq_cli.plan.recipe import CALIB_TOKENS
from pages import Row, part, read, shown, table, versions
from pages.accuracy import PACKAGE, SHORT

GROUPS, WIDTHS = (64, 128), (4, 3, 2)
I_QUANTS, EXL3 = "llama.cpp IQ", "exllamav3 EXL3"  # how tools are named whose values are no grid
BELOW = 0.8  # of the i-quants' line, to be reached
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
    for r in read("accuracy/mixed.json")["rows"]:  # their KL divergence is of one text
        if r["method"] == "gptq" and r["part"] == "linears" and "group" in r:
            kl = {"wikitext2_test": r["kl"]}
            rows.append(r | {"method": "lowq gptq", "calib": "bundled", "calib_tokens": CALIB_TOKENS, "kl": kl})
    free = read("accuracy/data_free.json")["rows"]
    rows += [r | {"method": "hqq"} for r in free if (r["method"], r.get("stored")) == PACKAGE]
    rows = [r for r in rows if r["bits"] in WIDTHS and r["group"] in GROUPS]
    return rows + read("accuracy/peers.json")["rows"]


def _entry(r: Row) -> Entry:
    text = "none" if "calib" not in r else f"{'its own' if r['calib'] == 'self' else r['calib']}, {r['calib_tokens']:,}"
    scheme = f"{r['bits']}-bit g{r['group']}" if "group" in r else f"--bpw {r['target']:g}" if "target" in r else ""
    return Entry(r["model"], r["bpw"], r["method"], scheme, text, r["ppl"], r.get("kl", {}))


def unquantized() -> dict[tuple[str, str], float]:
    """(model, text) -> perplexity."""
    rows = read("accuracy/data_free.json")["rows"]
    return {(r["model"], text): ppl for r in rows if "bits" not in r for text, ppl in r["ppl"].items()}


def line(found: list[Entry], tool: str, model: str, of: Callable[[Entry], float | None]) -> list[tuple[float, float]]:
    """(bits, ln of what an entry lost) of a tool's types."""
    some = ((e.bpw, of(e)) for e in found if e.model == model and e.tool.startswith(tool))
    return sorted((bpw, math.log(lost)) for bpw, lost in some if lost)


def height(points: list[tuple[float, float]], at: float) -> float | None:
    """A line's second value at its first; None outside of it."""
    for (x0, y0), (x1, y1) in itertools.pairwise(sorted(points)):
        if x0 <= at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
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
        _to_exl3(found),
    ]
    for model, mine in itertools.groupby(found, key=lambda e: e.model):
        rows = []
        for e in mine:
            values = [*(f"{e.ppl[t]:,.2f}" for t in SHORT), *(shown(e.kl.get(t), ".4f") for t in SHORT)]
            rows.append((f"{e.bpw:.2f}", _bold(e), e.scheme, e.text, *values))
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


def _losses() -> dict[str, Callable[[Entry], float | None]]:
    """Column -> what an entry lost by it: KL divergence, or ln(perplexity / unquantized), on each text."""
    floor = unquantized()

    def kl(text: str, e: Entry) -> float | None:
        return e.kl.get(text)

    def loss(text: str, e: Entry) -> float:
        return math.log(e.ppl[text] / floor[e.model, text])

    return {f"{name}, {short}": partial(of, text) for name, of in (("KL", kl), ("loss", loss)) for text, short in SHORT.items()}


def _to_line(found: list[Entry]) -> str:
    """What was lost over what llama.cpp's i-quants lose at the same bits; how often that is under BELOW."""
    rows, losses, met = [], _losses(), dict[tuple[str, str, str], list[bool]]()
    for e in found:
        shares = []
        for name, of in losses.items():
            lost, y = of(e), height(line(found, I_QUANTS, e.model, of), e.bpw)
            shares.append(None if lost is None or y is None else lost / math.exp(y))
            if shares[-1] is not None and e.ours:
                met.setdefault((e.tool, e.text.split(",")[0], name.split(",")[0]), []).append(shares[-1] <= BELOW)
        if any(s is not None for s in shares) and not e.tool.startswith(I_QUANTS):
            rows.append((e.model, f"{e.bpw:.2f}", _bold(e), e.scheme, e.text, *(shown(s, ".2f") for s in shares)))
    told = (
        "What was lost over what llama.cpp's i-quants lose at the same bits (its logarithm straight between two of them):\n"
        f"KL divergence, and loss = ln(perplexity / unquantized). At or below {BELOW} of it:\n\n"
    )
    counts = [(*key, f"{sum(some)} of {len(some)}") for key, some in sorted(met.items())]
    columns = ("model", ">bits", "tool", "scheme", "text, tokens", *(f">{n}" for n in losses))
    return told + table(("lowq's method", "text", "by", "cells"), counts) + "\n" + table(columns, rows)


def _to_exl3(found: list[Entry]) -> str:
    """lowq's own-text checkpoints compared with the line of EXL3: in loss, in bits of equal loss, and in KL divergence."""
    rows, losses = [], {n: of for n, of in _losses().items() if n.startswith("loss")}
    divergences = [of for n, of in _losses().items() if n.startswith("KL")]
    for e in found:
        if not e.ours or "own" not in e.text:
            continue
        cells = []
        for of in losses.values():
            points, lost = line(found, EXL3, e.model, of), of(e)
            y = height(points, e.bpw)
            bits = height([(v, b) for b, v in points], math.log(lost)) if lost and lost > 0 else None
            cells += [
                shown(None if y is None or lost is None else lost - math.exp(y), "+.3f"),
                shown(None if bits is None else e.bpw - bits, "+.2f"),
            ]
        for of in divergences:
            y, lost = height(line(found, EXL3, e.model, of), e.bpw), of(e)
            cells.append(shown(None if y is None or lost is None else lost / math.exp(y), ".2f"))
        if any(cells):
            rows.append((e.model, f"{e.bpw:.2f}", e.tool, e.scheme, e.text, *cells))
    told = (
        "Compared with EXL3 (exllamav3's trellis), own text: ln(perplexity) above (+) or below EXL3 at equal bits,\n"
        "how many bits lowq takes more (+) or fewer for the same loss, and its KL divergence over EXL3's at equal bits; empty\n"
        "outside of what was measured of EXL3:\n\n"
    )
    columns = (
        "model",
        ">bits",
        "method",
        "scheme",
        "text, tokens",
        *(f">{what}, {t}" for t in SHORT.values() for what in ("ln ppl", "bits")),
        *(f">KL, {t}" for t in SHORT.values()),
    )
    return told + table(columns, rows)


def _bold(e: Entry) -> str:
    return f"**{e.tool}**" if e.ours else e.tool
