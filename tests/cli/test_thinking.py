"""Thoughts of a model: dim on a terminal, on stderr, in a separate field of --json; and a model told not to think."""

import io
import json
import shutil
from contextlib import redirect_stdout

import forking
import pytest

from lowq_cli import thinking
from lowq_cli.engine.conversation import Conversation
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.prompts import encode, marks_of
from lowq_cli.files.source import DEMO
from lowq_cli.output.syntaxes import marks, syntax_by, syntax_of

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bundled model with a template that opens thoughts, which it never closes."""
    folder = tmp_path_factory.mktemp("models") / "thinks"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "*.txt", "__pycache__"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize("mark", ["<think>", "[THINK]", "<|channel>thought", "<|channel|>"])
def test_marks_go_to_another_process_as_data(mark):
    syntax = syntax_by(mark)
    assert marks(syntax, "x")["by"] == mark
    assert json.loads(json.dumps(marks(syntax, f"x{mark}"))) == marks(syntax, f"x{mark}")
    assert marks(syntax_of("plain", {}), "x") is None


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_thoughts_pale_and_a_pipe_on_stderr(capsys):
    pieces = ["<thi", "nk>\nhm\n</th", "ink>\n\nYes."]
    result = {"by": "<think>", "inside": False}
    thinking.write(pieces, result)
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("Yes.", "hm")
    with redirect_stdout(Terminal()) as terminal:
        thinking.write(pieces, result)
    out, err = terminal.getvalue(), capsys.readouterr().err
    assert (out.replace("\x1b[2m", "").replace("\x1b[22m", ""), err) == ("hm\n\nYes.", "")
    assert "\x1b[2mhm" in out
    assert thinking.split("".join(pieces), result) == ("hm", "Yes.")
    assert thinking.split("<think>x", None) == ("", "<think>x")


def test_a_prompt_that_is_not_to_be_thought_about(folder):
    _, tokenizer = ready(folder, "cpu")
    thinks, answers = (encode(tokenizer, "Hi", chat=True, think=think) for think in (None, False))
    assert tokenizer.decode(answers[len(thinks) :]).strip() == "</think>"
    assert [marks_of(tokenizer, ids)["inside"] for ids in (thinks, answers)] == [True, False]
    talk = Conversation(tokenizer, think=False)
    assert talk.prompt("Hi") == answers
    talk.add("Hi", "Yes.")
    talk.think_of("hm")
    assert talk.messages[-1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}


@pytest.mark.parametrize("think", [True, pytest.param(False, marks=pytest.mark.more)])
def test_the_commands(folder, think):
    """A model that never closes its thoughts says nothing but those, or its answer at once."""
    how = ["--device", "cpu", *([] if think else ["--no-think"])]
    requests = ["generate", folder, "--prompt", "Once upon a time", "--chat", "--max-new-tokens", "8", *how]
    whole = forking.lowq(*requests, "--json")
    assert whole.returncode == 0, whole.stderr
    result = json.loads(whole.stdout)
    assert bool(result["thoughts"]) == think
    assert bool(result["text"]) != think
    streamed = forking.lowq(*requests)
    output = streamed.stderr if think else streamed.stdout
    assert (result["thoughts"] or result["text"]).strip() in output
    talked = forking.lowq("chat", folder, "--max-new-tokens", "5", "--temperature", "0", *how, given="Once upon a time\n")
    assert talked.returncode == 0, talked.stderr
    assert bool(talked.stdout.strip()) != think
