"""docs/recipes.md: the recipes that lowq knows by name, and the keys of one."""

import inspect
import re
from dataclasses import MISSING, fields

from pages import part, table


@part
def presets() -> str:
    """The files of `--recipe NAME`."""
    from lowq_cli import recipes

    found = []
    for name in recipes.names():
        file = recipes.path(name)
        assert file is not None
        what, _, keys = file.read_text().partition("\n")
        found.append(f"**{name}**: {what.removeprefix('# ')}\n\n```toml\n{keys.strip()}\n```\n")
    return "\n".join(found)


@part
def recipe_keys() -> str:
    """Every key of a recipe, with its default and its meaning as `Recipe` documents them."""
    from lowq_cli.plan.recipe import Recipe

    text = inspect.getdoc(Recipe) or ""
    said = re.findall(r"^    ([a-z_, ]+): (.*(?:\n        .*)*)", text.partition("Args:")[2], re.MULTILINE)
    meaning = {name: " ".join(what.split()) for names, what in said for name in names.split(", ")}
    rows = []
    for f in fields(Recipe):
        spelled = str(f.default).lower() if isinstance(f.default, bool) else str(f.default).strip("()")
        default = "" if f.default in (None, (), MISSING) else f"`{spelled}`"
        rows.append((f"`{f.name}`", default, meaning[f.name].replace("|", "\\|")))
    return table(("key", "default", "meaning"), rows)
