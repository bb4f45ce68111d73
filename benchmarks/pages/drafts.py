"""Draft heads: what is accepted of their guesses, and what guesses take (<device>/draft_heads.json, drafts_heads.json)."""

from pages import RESULTS, Row, part, read, table

EAGLE3 = (
    "4 to 5"  # tokens a round that EAGLE-3's authors give for their heads of 8B models, drafted as a tree (arXiv:2503.01840)
)


@part
def draft_heads() -> str:
    """Acceptance by position on greedy texts of the models themselves."""
    found = read("h100/draft_heads.json")
    rows = [r for r in found["rows"] if r["part"] == "accepted"]
    most = max(len(r["right"]) for r in rows)
    columns = ("model", "head", "trained", "text", ">tokens a round", *(f">{j + 1} right" for j in range(most)))
    lines = [_accepted(r, most) for r in rows]
    about = f"{found['device']}, {found['date']}, torch {found['torch']}"
    return (
        f"Share of places where the first guesses are all what the model says there, and tokens of a round of 7 guesses; greedy texts of "
        f"256 tokens ({about}). EAGLE-3's authors publish {EAGLE3} tokens a round, for 8B models and guesses in a tree.\n\n"
        f"{table(columns, lines)}"
    )


def _accepted(row: Row, most: int) -> tuple[str, ...]:
    made = row["trained"]
    how = f"{made['tokens'] / 1e6:.1f}M tokens, {made['seconds']:.0f} s" if made else ""
    shares = [f"{100 * a:.0f}%" for a in row["right"]]
    return row["model"], row["head"], how, row["kind"], f"{row['tokens_per_round']:.2f}", *shares, *[""] * (most - len(shares))


@part
def draft_heads_speed() -> str:
    """Texts with a trained head beside those without."""
    path = RESULTS / "h100" / "drafts_heads.json"
    rows = [r for r in read(f"h100/{path.name}")["rows"] if r["part"] == "speed"]
    columns = ("model", "head", "text", ">tokens/s without", ">with", ">times", ">tokens a step", ">accepted")
    lines = [
        (
            r["model"],
            r["head"],
            r["kind"],
            f"{r['tokens_per_s_without']:,.0f}",
            f"{r['tokens_per_s']:,.0f}",
            f"{r['times']:.2f}x",
            f"{r['tokens_per_pass']:.2f}",
            f"{100 * r['accepted'] / max(r['drafted'], 1):.0f}%",
        )
        for r in rows
    ]
    return table(columns, lines)


@part
def draft_heads_steps() -> str:
    """Microseconds of guesses."""
    found = read("h100/draft_heads.json")
    rows = [r for r in found["rows"] if r["part"] == "steps"]
    columns = ("model", "head", ">texts", ">a step", ">with what the head reads", ">1 guess", ">2", ">4")
    keys = ("step_us", "step_read_us", "guesses_1_us", "guesses_2_us", "guesses_4_us")
    return table(columns, [(r["model"], r["head"], r["batch"], *(f"{r[k]:.0f}" for k in keys)) for r in rows])
