"""Values of options that are no mistake of syntax: a negative number, an empty text, a device in place of a file."""

import inspect
import re

import pytest
import typer

from lowq_cli import main as cli
from lowq_cli.plan.recipe import make_recipe
from lowq_packers.errors import UsageError

WHOLE = ("bits", "group", "lm_head", "embedding", "vision", "widths", "overrides")
COMMANDS = {c.name: c.callback for c in cli.app.registered_commands}


@pytest.mark.parametrize("field", WHOLE)
@pytest.mark.parametrize("number", ["-64", "-1", "+7", " 24 ", "0", "1" + "0" * 30 + "1"])
def test_a_whole_number_that_does_not_fit_is_called_that(field, number):
    with pytest.raises(UsageError) as refused:
        make_recipe(**{field: [f"down_proj=4:{number}"] if field == "overrides" else number})
    assert "whole number" not in str(refused.value)
    assert str(int(number)) in str(refused.value)


def values():
    """(words of a command line, the parameter whose value in it is empty) of every option and argument that takes a text."""
    for command, function in COMMANDS.items():
        parameters = inspect.signature(function).parameters.values()
        taken = [(p, p.annotation.__metadata__[-1]) for p in parameters]
        needed = [p.name for p, _ in taken if p.default is p.empty]
        for p, info in taken:
            if not re.search(r"\bstr\b", str(p.annotation.__origin__)) or p.default == "" or p.name in cli.TEXTS:
                continue
            if isinstance(info, typer.models.ArgumentInfo):
                before = [a.name for a, i in taken if isinstance(i, typer.models.ArgumentInfo)]
                yield [command, *("x" for _ in before[: before.index(p.name)]), ""], p.name
            else:
                names = [n for n in (info.default, *(info.param_decls or ())) if str(n).startswith("--")]
                yield [command, *("x" for _ in needed), names[0] if names else f"--{p.name.replace('_', '-')}", ""], p.name


EMPTY = list(values())


@pytest.mark.parametrize("words", [w for w, _ in EMPTY], ids=[f"{w[0]}-{name}" for w, name in EMPTY])
def test_an_empty_value_is_refused_before_anything_is_read(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "is empty" in said or words[-2] in ("--keep-alive", "--act"), (
        said
    )  # these have checks of their own, which run before
    assert not list(tmp_path.iterdir())


def test_all_commands_are_tried():
    assert {w[0] for w, _ in EMPTY} >= COMMANDS.keys() - {"ps", "ls", "doctor"}
    assert {"out", "api_key", "to", "engine"} <= {name for _, name in EMPTY}
