"""Draft heads: what is accepted of their guesses (<device>/draft_heads.json)."""

from pages import RESULTS, Row, part, read, table

EAGLE3 = (
    "4 to 5"  # tokens a round that EAGLE-3's authors give for their heads of 8B models, drafted as a tree (arXiv:2503.01840)
)
DEVICES = ("h100", "cpu")


def _rows(name: str, kind: str) -> list[tuple[str, Row]]:
    """(device, row) of a kind, of those devices that were measured on."""
    there = (d for d in DEVICES if (RESULTS / d / name).is_file())
    return [(d, r) for d in there for r in read(f"{d}/{name}")["rows"] if r["part"] == kind]


@part
def draft_heads() -> str:
    """Acceptance by position on greedy texts of the models themselves."""
    rows = _rows("draft_heads.json", "accepted")
    most = max(len(r["right"]) for _, r in rows)
    columns = ("model", "head", "trained on", "text", ">tokens a round", *(f">{j + 1} right" for j in range(most)))
    return (
        "Share of places where the first guesses are all what the model says there, and tokens of a round; greedy texts of 256 "
        f"tokens. EAGLE-3's authors publish {EAGLE3} tokens a round, for 8B models and guesses in a tree.\n\n"
        + table(columns, [_accepted(device, r, most) for device, r in rows])
    )


def _accepted(device: str, row: Row, most: int) -> tuple[str, ...]:
    made = row["trained"]
    how = f"{made['tokens']:,} tokens, {made['seconds'] / 60:.0f} min, {device}" if made else ""
    shares = [f"{100 * a:.0f}%" for a in row["right"]]
    return row["model"], row["head"], how, row["kind"], f"{row['tokens_per_round']:.2f}", *shares, *[""] * (most - len(shares))
