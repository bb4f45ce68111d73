"""Right answers about pictures by width."""

import json

from pages import RESULTS, part, table


@part
def pictures_right() -> str:
    """The small model that was trained on drawn pictures (pictures.json)."""
    found = json.loads((RESULTS / "pictures.json").read_text())
    n, m = found["pictures"], found["model"]
    cells = []
    for r in found["rows"]:
        widths = ("16, another picture shown", "16") if r.get("swapped") else (f"{r['bits']}", f"{r['vision']}")
        size = f"{r['bytes'] / 1e6:.1f} MB" if "bytes" in r else ""
        cells.append((*widths, size, *(f"{100 * r[k]:.1f}%" for k in ("names", "colours", "pairs"))))
    head = (
        f"The model is a toy that was made for this table (`benchmarks/pictures_train.py`): a tower and projector of "
        f"{m['sight'] / 1e6:.1f} M parameters in the form of Mistral 3 before a Llama of {m['text'] / 1e6:.1f} M that was "
        f"trained on text; trained for {m['seconds'] / 60:.0f} minutes on one core of a CPU, on {m['alone']:,} drawings "
        f"without the Llama and {m['answers']:,} with it: digits of dots and three shapes in four colours, 64 x 64 pixels.\n"
        f"Right answers about {n} drawings that it was not trained on, as `lowq quantize --bits B --vision V` makes it by "
        f"itself (of two drawings at once, {n // 2} pairs, all four words have to be right; who guesses has 18% of the names "
        f"and 25% of the colours right):\n\n"
    )
    columns = ("text, bits", "tower, bits", ">files", ">which digit or shape", ">its colour", ">two drawings")
    return head + table(columns, cells)
