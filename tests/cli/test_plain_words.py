"""A value of the wrong type, for every option of every command: one line in plain words, exit code 2, no library's phrases."""

import io
from inspect import signature
from typing import get_args

import pytest
import typer
from rich.console import Console

from lowq_cli import console, main

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


@pytest.mark.parametrize("width", [60, 80, 120])
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
