"""Every command that a message of lowq prints: its options exist, inserted values are quoted, and it runs as printed."""

import ast
import re
import shlex
import shutil
from pathlib import Path

import click
import forking
import pytest
import typer

from lowq_cli import main
from lowq_cli.files.source import DEMO

ROOT = Path(__file__).parents[2]
COMMANDS = typer.main.get_command(main.app).commands
PART = r"(?: (?:--?[a-z][\w-]*|'[^']*'|\"[^\"]*\"|[A-Z]{2,}\b|demo\b|\x00\d+\x00|[\w.-]+/[\w./-]+|\d+))*"
LINE = re.compile(rf"\blowq ({'|'.join(COMMANDS)})\b({PART})")
VERB, ADJACENT = re.compile(rf"\blowq (?:{'|'.join(COMMANDS)})\b"), re.compile(r"[\"']\s*f?[\"']")  # literals joined by Python
QUOTED = ("as_argument", "shlex.quote", "shlex.join")
# Put in unquoted: options or names of formats that lowq itself spells; a repository's name, which the hub checked.
OWN = {"first", "held[0]", "targets.get(engine).export", "command", "repo", "name"}


def messages():
    """(file, line, text) of every string in the sources but docstrings; what is put in stands as its number between two \\0."""
    for folder in ("lowq_cli", "kernels", "packers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if not VERB.search(ADJACENT.sub("", text)):  # to parse all files takes two seconds
                continue
            tree = ast.parse(text)
            inside = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in ast.walk(n) if v is not n}
            inside |= {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    values = [v for v in node.values if isinstance(v, ast.FormattedValue)]
                    text = "".join(v.value if isinstance(v, ast.Constant) else f"\0{values.index(v)}\0" for v in node.values)
                    yield path, node.lineno, text, [ast.unparse(v.value) for v in values]
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                    yield path, node.lineno, node.value, []


PRINTED = [
    pytest.param(verb[1], verb[2], values, id=f"{path.relative_to(ROOT)}:{line}")
    for path, line, text, values in messages()
    for verb in LINE.finditer(text)
]


def test_the_messages_are_found():
    assert len(PRINTED) > 25
    assert {p.values[0] for p in PRINTED} >= {"quantize", "export", "tune", "generate", "inspect", "eval", "doctor", "rm", "ls"}


@pytest.mark.parametrize(("verb", "rest", "values"), PRINTED)
def test_a_printed_command_has_options_that_exist_and_quoted_values(verb, rest, values):
    for i in map(int, re.findall("\0(\\d+)\0", rest)):
        assert values[i].startswith(QUOTED) or values[i] in OWN or "as_argument(" in values[i], values[i]
    words = shlex.split(re.sub("\0\\d+\0", "X", rest))
    options = {o: p for p in COMMANDS[verb].params if p.param_type_name == "option" for o in (*p.opts, *p.secondary_opts)}
    for word in words:
        assert not word.startswith("-") or word in options, f"lowq {verb} has no {word}"
    if any(not w.startswith("-") for w in words):  # more than the name of an option
        try:
            COMMANDS[verb].make_parser(click.Context(COMMANDS[verb])).parse_args(words)
        except Exception as e:  # typer has a click of its own
            if "requires an argument" not in str(e):  # whose word the sentence may go on with
                pytest.fail(f"lowq {verb}{rest}: {e}")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A working folder with a model and checkpoints in folders that a shell would split."""
    folder = tmp_path_factory.mktemp("work here")
    shutil.copytree(DEMO, folder / "my model", ignore=shutil.ignore_patterns("*.py", "*.txt", "__pycache__"))
    for zero, out in (("none", "its 4 bits"), ("float", "its zeros")):
        line = ("quantize", "my model", "--bits", "4", "--zero", zero, "--method", "rtn", "--out", out, "--quiet")
        assert forking.lowq(*line, cwd=folder).returncode == 0
    return folder


def commands_in(text):
    """The command lines in a message, each up to the end of its line, or to where the sentence goes on."""
    matches = re.findall(rf"(lowq (?:{'|'.join(COMMANDS)})\b(?:[^\n;,`(]|'[^']*')*)", text)
    return [shlex.split(line.strip()) for line in matches]


RTN = ("quantize", "my model", "--bits", "4", "--method", "rtn")
PROVOKED = {  # the message -> what provokes it, and how its command begins
    "not quantized": (("tune", "my model"), "run: lowq quantize"),
    "quantized already": (("quantize", "its 4 bits"), "run: lowq generate"),
    "other bits": (("quantize", "its 4 bits"), "for other bits: lowq quantize"),
    "no such folder": (("push", "me/my", "--ckpt", "./not there", "--dry-run"), "lowq quantize MODEL --out"),
    "exports": (("export", "its zeros", "--to", "compressed-tensors"), "from the original: lowq quantize"),
    "other engines": ((*RTN, "--zero", "none", "--out", "once more"), "other engines: lowq export"),
    "for one engine": ((*RTN, "--zero", "float", "--out", "and more"), "lowq quantize"),
    "what comes next": (("tune", "its 4 bits", "--device", "cpu", "--batch", "1"), "next: lowq generate"),
}  # fmt: skip


@pytest.mark.parametrize("what", PROVOKED)
def test_a_printed_command_runs_in_another_working_folder(here, tmp_path, what):
    words, start = PROVOKED[what]
    output = forking.lowq(*words, cwd=here).stderr
    assert start in output, output
    lines = [c for c in commands_in(output) if " ".join(c).startswith(start[start.index("lowq") :])]
    assert lines
    for i, line in enumerate(lines):
        given = [str(here / "my model") if w == "MODEL" else w for w in line[1:]]
        more = {"quantize": ["--dry-run"], "export": ["--out", str(tmp_path / f"out {i}")], "generate": []}[given[0]]
        if given[0] == "generate" and "--prompt" not in given:
            more = ["--prompt", "Once", "--max-new-tokens", "1"]
        ran = forking.lowq(*given, *more, cwd=tmp_path)
        assert ran.returncode == 0, f"{shlex.join(line)}: {ran.stderr}"
