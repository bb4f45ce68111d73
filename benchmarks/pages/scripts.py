"""The scripts of benchmarks/, each with the first line of its docstring, for benchmarks/README.md."""

import ast

from pages import ROOT, part, table


def _rows(folder: str) -> list[tuple[str, str]]:
    """(link, first line of the docstring) of every script in a folder of benchmarks/."""
    paths = sorted((ROOT / "benchmarks" / folder).glob("*.py"))
    firsts = [(ast.get_docstring(ast.parse(p.read_text())) or "").splitlines()[0] for p in paths]
    return [(f"[{p.name}]({folder}{p.name})", first) for p, first in zip(paths, firsts, strict=True)]


@part
def scripts() -> str:
    """Scripts that are run again and again."""
    return table(("script", "what it does"), _rows(""))


@part
def scripts_once() -> str:
    """Scripts of experiments that were run once."""
    return table(("script", "what it measured"), _rows("once/"))
