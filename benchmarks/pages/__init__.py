"""Rows of JSON -> Markdown: what the generated parts of the documentation are made with. benchmarks/render.py writes them.

One module a page. A function under `@part` makes the text between `<!-- lowq:ITS_NAME -->` and `<!-- /lowq:ITS_NAME -->`.
No number in a document is typed by hand.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PARTS: dict[str, Callable[[], str]] = {}
Row = dict[str, Any]
Part = TypeVar("Part", bound=Callable[[], str])


def part(f: Part) -> Part:
    """Have a function make the generated part of its name."""
    PARTS[f.__name__] = f
    return f


def read(name: str) -> Any:
    """A result file below benchmarks/results; of JSON lines, the list of them."""
    text = (RESULTS / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)


def results_of(device: str) -> Path:
    """The folder of results of a GPU by its name, or of "cpu"; a new one for a GPU that has none yet."""
    known = (d.name for d in RESULTS.iterdir() if d.name in device.lower())
    return RESULTS / next(known, device.lower().replace(" ", "-"))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], end: str = "\n") -> str:
    """A Markdown table; a column starting with '>' is right-aligned."""
    lines = ["| " + " | ".join(c.lstrip(">") for c in columns) + " |"]
    lines.append("|" + "|".join("---:" if c.startswith(">") else "---" for c in columns) + "|")
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + end


def shown(value: float | None, form: str = ".1f") -> str:
    """A number, or an empty cell."""
    return "" if value is None else format(value, form)


def milliseconds(row: dict[str, float], digits: int = 0) -> str:
    """The median and the p99 of times."""
    return f"{row['p50']:,.{digits}f} / {row['p99']:,.{digits}f}"


def versions(of: dict[str, str | None]) -> str:
    """`name version, name version`, of those that were installed."""
    return ", ".join(f"{k} {v}" for k, v in of.items() if v)
