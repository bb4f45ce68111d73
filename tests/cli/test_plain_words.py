"""A value of the wrong type, for every option of every command: one line in plain words, exit code 2, no library's phrases."""

import ast
import io
import string
from inspect import signature
from pathlib import Path
from typing import get_args

import pytest
import typer
from rich.console import Console

from lowq_cli import console, main, sessions
from lowq_cli.serving.http import tools
from lowq_cli.serving.http.refusal import Refusal
from lowq_packers.errors import LowqError

COMMANDS = typer.main.get_command(main.app).commands
WRONG = ("abc", "", "1e999", "nan", "4.5", "-1", "99999999999999999999", "true", "\x00")
NUMBERS = [
    (name, option.opts[0])
    for name, command in COMMANDS.items()
    for option, parameter in zip(command.params, signature(command.callback).parameters.values(), strict=True)
    if option.opts[0].startswith("-") and get_args(parameter.annotation)[0] in (int, float, int | None, float | None)
]
PHRASES = ("Input should", "unable to parse", "pydantic", "Traceback", "internal error", "validation error")


@pytest.mark.parametrize(("command", "option"), NUMBERS, ids=lambda v: v)
def test_a_wrong_value_is_reported_in_plain_words(command, option, capsys):
    code, err = main.main([command, option, "abc"]), capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1), err
    assert not [p for p in PHRASES if p in err], err


def test_options_of_every_command_that_has_numbers_are_tried():
    assert len(NUMBERS) > 30
    assert {"quantize", "generate", "serve", "tune", "chat", "eval"} <= {command for command, _ in NUMBERS}


@pytest.mark.parametrize("text", WRONG)
def test_an_error_of_widths_names_the_other_option(text, capsys):
    assert main.main(["quantize", "demo", "--dry-run", "--bits", text]) == 2
    err = capsys.readouterr().err
    assert not [p for p in PHRASES if p in err]
    assert ("--bpw" in err) == (text not in ("-1", "99999999999999999999")), err


@pytest.mark.parametrize("width", [40, 50, 60, 80, 120])
def test_a_narrow_terminal_shows_bar_time_and_eta_and_cuts_the_name(width, monkeypatch):
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=width, height=24, color_system=None)
    monkeypatch.setattr(console, "stderr", lambda: terminal)
    monkeypatch.setattr(console, "quiet", False)
    with console.progress("quantize", 100) as advance:
        advance(40, "3/146 model.layers.0.mlp.down_proj error 0.0836 and more that no terminal has room for")
    row = next(r for r in shown.getvalue().replace("\r", "\n").split("\n") if "40%" in r)
    assert "eta" in row
    assert "0:00:0" in row
    assert len(row.split("\x1b")[0].rstrip()) <= width
    assert "3" in row.partition("eta")[2], row


def session_refused(name):
    """The refusal of a conversation's name; "" where it is accepted."""
    try:
        sessions.path_of(name)
    except LowqError as e:
        return str(e)
    return ""


def function_refused(name):
    """As `session_refused`, of a function that a request offers."""
    try:
        tools.read({"tools": [{"type": "function", "function": {"name": name}}]})
    except Refusal as e:
        return e.message
    return ""


@pytest.mark.parametrize("refused", [session_refused, function_refused])
@pytest.mark.parametrize("place", ["{}", "a{}", "a{}b"], ids=["first", "last", "between"])
def test_a_refused_name_hears_of_each_character_that_is_accepted(refused, place, monkeypatch, tmp_path):
    """`--session a.b` was accepted, while the refusal of others had no dot in its list of characters."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    _, limit, rest = refused("a b").partition("up to 64 letters, digits, and ")
    assert limit
    listed, _, not_first = rest.partition(", of which ")
    listed = set(listed.split()) - (set(not_first.split()) if place == "{}" else set())
    assert listed
    for c in string.printable:
        assert bool(refused(place.format(c))) != (c.isalnum() or c in listed), c
    assert (refused("a" * 64), bool(refused("a" * 65))) == ("", True)


ERRORS = ("LowqError", "UsageError", "SchemeError", "NotFoundError", "DamagedError", "DoesNotFitError", "UnsupportedError")
ERRORS += ("QualityError", "BusyError", "OverwrittenError", "Refusal", "Declined", "wrong", "say", "warn")
ROOT = Path(__file__).parents[2]


def messages():
    """(place, the literal text with {} for values) of every message that is written in the sources."""
    for path in sorted(p for folder in ("lowq_cli", "packers", "kernels") for p in (ROOT / folder).rglob("*.py")):
        for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            if name not in ERRORS:
                continue
            for value in (v for v in call.args if isinstance(v, ast.Constant | ast.JoinedStr)):
                parts = value.values if isinstance(value, ast.JoinedStr) else [value]
                text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts)
                if " " in text:
                    yield f"{path.relative_to(ROOT)}:{call.lineno}", text


def test_messages_have_one_form():
    """One line without a dot at its end, as the way out often is a command; nothing is left open or doubled."""
    all_of_them = list(messages())
    assert len(all_of_them) > 700
    for place, text in all_of_them:
        assert text == text.rstrip(), place
        assert not text.endswith((".", ";", ",", "!")) or text.endswith("..."), f"{place}: {text}"
        assert not any(wrong in text for wrong in (" ;", " ,", ";;", ",,", "; ;")), f"{place}: {text}"
        for one, other in ("()", "[]"):
            assert text.count(one) == text.count(other), f"{place}: {text}"
