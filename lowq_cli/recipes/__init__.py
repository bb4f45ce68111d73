"""Recipes that `--recipe NAME` knows: a TOML file each, whose first line says what it is for. docs/recipes.md has the keys."""

from functools import cache
from pathlib import Path


@cache
def names() -> tuple[str, ...]:
    """The names, smallest checkpoint first."""
    found = {p.stem for p in Path(__file__).parent.glob("*.toml")}
    return tuple(sorted(found, key=("small", "balanced", "best").index))


def path(name: str) -> Path | None:
    """The file of a recipe of that name; None where there is none."""
    return Path(__file__).with_name(f"{name}.toml") if name in names() else None
