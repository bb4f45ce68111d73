"""docs/accuracy.md: what each part of distill is worth. Results: <device>/shares.json."""

from collections.abc import Iterable, Sequence
from statistics import mean

from pages import RESULTS, Row, part, read, table, versions

TEXTS = {"wikitext2_test": "WikiText-2", "mix_valid_sample": "mix"}
PARTS = {  # the row's word -> what was left out
    "codes": "codes stay", "scales": "scales and zeros stay", "norms": "norms of the layers stay",
    "outside": "embedding, head and last norm stay", "passes": "half of the passes", "parts": "all passes read one part",
    "near": "codes start amid their intervals", "straight": "nothing; codes start where weights lie",
    "faster": "nothing; codes at a faster rate", "walked": "all training",
}  # fmt: skip
Pair = tuple[Row, Row]


@part
def shares() -> str:
    """For each device that has measured it, a table of the training's parts and one of curvature and placing."""
    told = []
    for path in sorted(RESULTS.glob("*/shares.json")):
        report = read(f"{path.parent.name}/shares.json")
        rows = report["rows"]
        facts = {(r["model"], r["calib_tokens"], r["passes"], r["batch"], r["tokens"]) for r in rows}
        told.append(f"Measured {report['date']} on {path.parent.name} ({versions(report['versions'])}).")
        for model, calib, passes, batch, tokens in sorted(facts):
            about = f"{model}, linears alone, {calib:,} tokens of its own text"
            about += f", {passes} passes of {batch * 512:,} tokens a step; KL on {tokens:,} tokens of each text."
            mine = [r for r in rows if (r["model"], r["calib_tokens"]) == (model, calib)]
            told += [about, _training(mine), _others(mine)]
    return "\n\n".join(told) + "\n"


def _training(rows: Sequence[Row]) -> str:
    """A row per width and part left out of the training."""
    lines = []
    mine = [r for r in rows if r["start"] == "own" and "bits" in r]
    for bits in sorted({r["bits"] for r in mine}, reverse=True):
        some = [r for r in mine if r["bits"] == bits]
        whole = [r for r in some if r["left_out"] == "whole"]
        lines.append((_width(whole[0]), "nothing", *_kl(whole), "", ""))
        for name, words in PARTS.items():
            without = [r for r in some if r["left_out"] == name]
            lines += [("", words, *_kl(without), *_over(_pairs(without, whole)))] * bool(without)
    columns = ("", "left out", *_named("KL"), *_named("over the whole"))
    return table(columns, lines, end="")


def _others(rows: Sequence[Row]) -> str:
    """A row per width and part that is not of the training, before and after it: the KL without the part over that with it."""
    lines = []
    for what, (with_it, without) in {
        "two-sided rounding (yaqa)": ("yaqa", "gptq"),
        "placed": ("placed", "uniform"),
    }.items():
        for bits in (3, 2):
            for left_out, when in (("walked", "before training"), ("whole", "after")):
                cells = [r for r in rows if r["left_out"] == left_out]
                pairs = _pairs(_of(cells, bits, without), _of(cells, bits, with_it))
                if pairs:
                    kl = _kl([b for _, b in pairs])
                    lines.append(
                        (
                            _width(pairs[0][0]),
                            _placed(pairs) if what == "placed" else what,
                            when,
                            *_kl([a for a, _ in pairs]),
                            *kl,
                            *_over(pairs),
                        )
                    )
    columns = ("", "part", "", *_named("KL without"), *_named("KL with"), *_named("without over with"))
    return table(columns, lines, end="")


def _of(rows: Iterable[Row], bits: int, what: str) -> list[Row]:
    """Rows of a width by their rounding, or by how widths were chosen. The product's rounding is yaqa at 3 bits, gptq at 2."""
    own = "yaqa" if bits == 3 else "gptq"
    if what == "placed":
        return [r for r in rows if r.get("bpw") == bits + 0.5]
    some = [r for r in rows if r.get("bits") == bits]
    if what == "uniform":
        return [r for r in some if r["start"] == "own"]
    return [r for r in some if r["start"] == what or (r["start"] == "own" and what == own)]


def _pairs(without: Iterable[Row], with_it: Iterable[Row]) -> list[Pair]:
    """Rows of the same seed."""
    others = {r["seed"]: r for r in with_it}
    return [(r, others[r["seed"]]) for r in without if r["seed"] in others]


def _placed(pairs: Sequence[Pair]) -> str:
    """What a budget chose, by the first seed's text."""
    row = pairs[0][1]
    chosen = ", ".join(f"{number} matrices {scheme}" for scheme, number in row["schemes"].items())
    return f"`--bpw {row['bpw']:g}`: {chosen} ({row['spent']:.3f} bits a weight)"


def _width(row: Row) -> str:
    return f"{row['bits']}-bit g{row['group']}"


def _named(what: str) -> list[str]:
    return [f">{what}, {name}" for name in TEXTS.values()]


def _kl(rows: Sequence[Row]) -> list[str]:
    """Each seed's KL divergence, on each text."""
    return [" ".join(f"{r['kl'][text]:.4f}" for r in rows) for text in TEXTS]


def _over(pairs: Sequence[Pair]) -> list[str]:
    """The mean over the seeds of the first row's KL divergence over the second's, and the seeds' ratios, on each text."""
    cells = []
    for text in TEXTS:
        ratios = [a["kl"][text] / b["kl"][text] for a, b in pairs]
        each = " (" + ", ".join(f"{x:.2f}" for x in ratios) + ")" if len(ratios) > 1 else ""
        cells.append(f"{mean(ratios):.2f}{each}" if ratios else "")
    return cells
