"""docs/families.md: every causal language model, tiny. Result: accuracy/families.json (`python -m tests.families`)."""

import sys
from collections import Counter

from pages import ROOT, part, read, table


@part
def folders() -> str:
    """Published folders: what each is, and the steps taken with it."""
    found = read("accuracy/folders.json")
    steps = [k for k in found["rows"][0] if k not in ("family", "architecture", "vocabulary", "class", "template")]
    whole = sum(all(row[s] != "fails" for s in steps) for row in found["rows"])
    told = f"{len(found['rows'])} folders, {len(steps)} steps each (transformers {found['transformers']}, {found['date']}): "
    told += f"{whole} whole.\n\n"
    marks = {"yes": "+", "fails": "FAILS"}
    cells = [
        (
            row["family"],
            f"`{row['architecture']}`",
            row["vocabulary"],
            row["class"],
            row["template"],
            *(marks.get(row[s], "-") for s in steps),
        )
        for row in found["rows"]
    ]
    return told + table(("folder", "architecture", "vocabulary", "tokenizer class", "template", *steps), cells)


@part
def families() -> str:
    """How many come through, and the rows of all."""
    sys.path.insert(0, str(ROOT / "tests" / "families"))
    from known import EXCEPTIONS

    found = read("accuracy/families.json")
    rows = found["rows"]
    told = f"{len(rows)} model types of transformers {found['transformers']} (torch {found['torch']}, {found['date']}): "
    decoders = Counter(r["decoder"] for r in rows if r["family"] not in EXCEPTIONS)
    fused = f"{decoders['fused']} of them in the fused decoder"
    told += f"{len(rows) - len(EXCEPTIONS)} come through, {fused}; {len(EXCEPTIONS)} do not.\n\n"
    kept = table(("does not", "why"), [(f"`{family}`", why) for family, why in sorted(EXCEPTIONS.items())])
    cells = [
        (f"`{r['family']}`", f"{r['coverage']:.0%}", f"{r['off']:.1%}", f"{r['exact']:.0e}", r["decoder"])
        for r in rows
        if r["family"] not in EXCEPTIONS
    ]
    return told + kept + "\n" + table(("comes through", ">packed", ">logits off", ">dequantized", "decoder"), cells)


@part
def ranges() -> str:
    """How the part of the suite that depends on transformers came out on its versions."""
    rows = read("ranges.json")["rows"]
    named = list(rows[-1]["parts"])

    def cell(counts: dict[str, int]) -> str:
        bad = counts.get("failed", 0) + counts.get("error", 0)
        done = f"{counts.get('passed', 0)}"
        return f"{done}, **{bad} failed**" if bad else done

    cells = [(r["transformers"], r["torch"], r["date"], *(cell(r["parts"].get(name, {})) for name in named)) for r in rows]
    return table(("transformers", "torch", "date", *(f">{name}" for name in named)), cells)
