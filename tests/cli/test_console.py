"""Output fits the terminal: numbers stay whole, lines break between words, and the reader may close the pipe."""

import io
import json
import re
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout

import pytest

from lowq_cli import console
from lowq_cli.checkup import Check
from lowq_cli.commands.doctor import table_rows
from lowq_cli.commands.export import show
from lowq_cli.interop.exported import Exported

COLUMNS = ("shape", "kernel", ">time", ">GB/s", ">dense us")
ROWS = [("4096x14336", "triton/gemm_splitk", "1234.5", "3021", "1322.3"), ("64x64", "reference", "1.0", "5", "2.0")]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A function that makes stdout and stderr terminals of a width; it returns what is written to them."""
    with ExitStack() as streams:

        def make(columns):
            screen = Terminal()
            monkeypatch.setenv("COLUMNS", str(columns))
            streams.enter_context(redirect_stdout(screen))
            streams.enter_context(redirect_stderr(screen))
            return screen

        yield make


@pytest.mark.parametrize(("columns", "gone"), [(100, []), (57, []), (50, [">dense us"]), (44, [">dense us", ">GB/s"])])
def test_a_table_gives_up_its_spare_columns_before_a_number_breaks(terminal, columns, gone):
    screen = terminal(columns)
    console.table("", COLUMNS, ROWS, on_stdout=True, spare=(">dense us", ">GB/s"))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert max(map(len, shown.splitlines())) <= columns
    for i, name in enumerate(COLUMNS):
        for whole in (*name.lstrip(">").split(), *(row[i] for row in ROWS)):
            assert (whole in shown.split()) == (name not in gone), whole


def test_a_line_breaks_between_words_on_a_terminal_and_nowhere_else(terminal):
    path = "/a/folder/whose-name/is-longer/than-the/terminal-is/wide"
    line = f"wrote 8 entries to {path} in 1.4 s; 5 prompt tokens at 434/s"
    screen = terminal(44)
    console.say(line)
    assert screen.getvalue() == f"wrote 8 entries to\n  {path}\n  in 1.4 s; 5 prompt tokens at 434/s\n"
    log = io.StringIO()
    with redirect_stderr(log):
        console.say(line)
    assert log.getvalue() == line + "\n"


def test_doctor_gives_kernels_of_another_machine_one_row():
    absent = [Check(f"kernel cuda/{i}", None, "runs on cuda") for i in range(4)]
    checks = [Check("torch", True, "2"), *absent, Check("gpu", None, "none"), Check("kernel x", False, "wrong")]
    assert table_rows(checks) == [
        ("ok", "torch", "2"),
        ("-", "gpu", "none"),
        ("FAIL", "kernel x", "wrong"),
        ("-", "4 kernels", "runs on cuda"),
    ]


def test_numbers_that_json_has_no_word_for_are_null(capsys):
    """`json.dumps` writes NaN and Infinity, which jq, JavaScript and Go refuse."""
    console.out_json({"ppl": float("inf"), "rows": [{"kl": float("nan"), "n": 1}], "pair": (0.5, float("-inf")), "ok": True})
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert result == {"ppl": None, "rows": [{"kl": None, "n": 1}], "pair": [0.5, None], "ok": True}


def test_a_table_without_room_for_its_columns_becomes_a_paragraph_a_row(terminal):
    """At 40 columns one of them was left out."""
    screen = terminal(40)
    columns = ("weights", ">tensors", ">parameters", "scheme", ">bits each", ">size")
    console.table("demo -> out", columns, [("attention", 24, "1.2 M", "4-bit g64", "4.50", "663.6 kB")], on_stdout=True)
    shown = screen.getvalue()
    assert max(map(len, shown.splitlines())) <= 40
    for cell in ("attention:", "24,", "1.2 M,", "4-bit g64,", "4.50,", "663.6 kB"):
        assert cell in " ".join(shown.split())


def test_a_line_of_a_result_breaks_between_words(terminal):
    screen = terminal(44)
    console.out_line("serves in: lowq, transformers (with lowq installed), humming (lowq export)")
    assert screen.getvalue() == "serves in: lowq, transformers (with lowq\n  installed), humming (lowq export)\n"


def test_an_error_breaks_between_words_on_a_terminal(terminal):
    """At 80 columns "use one of ..., hummin / g": the terminal cut words."""
    screen = terminal(44)
    console.fail("--to ggml does not exist; use one of compressed-tensors, gptq")
    assert screen.getvalue() == "lowq: --to ggml does not exist; use one of\n  compressed-tensors, gptq\n"


def test_quiet_leaves_results_and_errors(capsys, monkeypatch):
    monkeypatch.setattr(console, "quiet", True)
    console.say("a hint")
    console.warn("a warning")
    console.table("", ("a",), [("x",)])
    with console.progress("work", 2) as advance:
        advance(1, "half")
    console.out("result")
    console.fail("error")
    assert capsys.readouterr() == ("result\n", "lowq: error\n")


def test_an_export_ends_with_the_next_command(capsys):
    show(Exported("my model.gguf", "gguf", 7_100_000, 42, ("llama.cpp",), ()))
    assert "or llama-cli -m 'my model.gguf'" in capsys.readouterr().err


@pytest.mark.parametrize(("columns", "width"), [("", 110), ("abc", 110), ("0", 110), ("-5", 110), ("60", 60)])
def test_columns_that_are_no_width_do_not_end_the_work(columns, width, monkeypatch):
    """They were an internal error of `lowq quantize 2> log`."""
    monkeypatch.setenv("COLUMNS", columns)
    console.stderr.cache_clear()
    try:
        assert console.stderr().width == width
    finally:
        console.stderr.cache_clear()


def test_help_inside_a_chat_fits_a_narrow_terminal(monkeypatch):
    from lowq_cli.commands.chat import INSIDE

    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "40")
    console.page(INSIDE)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert " ".join(stream.getvalue().split()) == " ".join(INSIDE.split())


@pytest.mark.parametrize("power", range(-2, 9))
def test_every_duration_has_a_unit(power):
    for digit in (1, 3.7, 9):
        number, unit = console.duration(digit * 10.0**power).split(" ")
        assert re.fullmatch(r"[\d.,]+|\d+:\d\d|\d+:\d\d:\d\d", number)
        assert unit == {0: "s" if "." in number else "days", 1: "min", 2: "h"}[number.count(":")]
