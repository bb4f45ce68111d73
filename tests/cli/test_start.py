"""The console script: plain requests go to a running server without Typer, and mean the same as with it."""

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lowq_cli import cached_models, running, start, state
from lowq_cli.main import main
from lowq_packers.errors import LowqError

PLAIN = (
    "generate m --prompt Hi",
    "generate m Hi",
    "generate --prompt Hi m --chat --no-think --max-new-tokens 3",
    "generate m Hi --temperature 0.5 --top-p 0.9 --top-k 40 --repetition-penalty 1.1 --seed 7",
    r"generate m Hi --stop a\n --stop b --device cpu --kv 4",
    "run m --prompt Hi --seed 3",
    "run m 'Hi there' --temperature 1 --max-new-tokens 9 --no-think --device cuda",
)
OTHERS = (
    "", "chat m", "--debug generate m Hi", "generate", "generate m", "generate Hi --prompt", "generate m Hi more",
    "generate m -", "generate m --prompt -", "generate m Hi --json", "generate m Hi --explain",
    "generate m Hi --keep-alive 5m", "generate m Hi -h", "generate m Hi --max-new-tokens 0",
    "generate m Hi --max-new-tokens ten", "generate m Hi --max-new-tokens=4", "generate m ''",
    "generate m Hi --seed 1 --seed 2", "generate m Hi --temperature -1", "generate m Hi --temperature 1e3",
    "generate m Hi -- x", "generate m Hi --threads 1", "generate m Hi --prompts f", "generate m Hi --image f.png",
    "generate m --prompt ''", "run m", "run m photo.jpg", "run m Hi", "run m 'Hi there' --kv 4",
    "run m 'Hi there' --chat", "run m 'Hi there' --recipe small", "run m 'Hi there' --top-k 4",
)  # fmt: skip


def words(line):
    return shlex.split(line)


@pytest.fixture
def body(monkeypatch):
    """The last request to a running server, which is refused."""
    last = {}

    def ask(body, keep_alive, device):
        last.clear()
        last.update(body)
        raise LowqError("enough")

    monkeypatch.setattr(running, "ask_or_leave", ask)
    monkeypatch.setattr(running, "sockets", lambda: [Path("a.sock")])
    monkeypatch.setattr(state, "run_of", lambda model, recipe: "/there")
    return last


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("line", PLAIN)
def test_a_plain_request_is_the_one_that_typer_reads(line, cached, body, capsys, monkeypatch):
    """cached: the model's name is one of the cache."""
    monkeypatch.setattr(cached_models, "model_path", lambda name: "/cache/m" if cached and name == "m" else name)
    line = [*words(line), *([] if "--seed" in line else ["--seed", "5"])]
    assert main(line) == LowqError.exit_code
    expected = dict(body)
    with pytest.raises(LowqError, match="enough"):
        start.answered(line)
    assert body == expected
    assert expected["prompt"] in ("Hi", "Hi there")


@pytest.mark.parametrize("line", OTHERS)
def test_everything_else_is_left_to_the_command_line(line, body):
    assert start.answered(words(line)) is None
    assert not body


def test_a_picture_with_blanks_in_its_name_is_no_text(body, tmp_path):
    (tmp_path / "my photo.jpg").write_bytes(b"")
    assert start.answered(["run", "m", str(tmp_path / "my photo.jpg")]) is None


def test_without_a_seed_each_request_has_another():
    assert len({start.plain(["generate", "m", "Hi"]).seed for _ in range(9)}) > 1


class Serving:
    """A server of one answer; `half`: it ends before the answer does."""

    def __init__(self, home, half=False):
        self.folder, self.half = home / "lowq" / "run", half
        self.folder.mkdir(parents=True, mode=0o700)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(str(self.folder / "1.sock"))
        (self.folder / "1.sock").chmod(0o600)
        self.socket.listen()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            talk, _ = self.socket.accept()
            with talk, talk.makefile("rb") as given:
                while given.readline().strip():
                    pass
                facts = {"process": 1, "prompt_tokens": 2, "sampling": {"temperature": 0.0}, "sampling_from": {}, "marks": None}
                end = {"finish_reason": "length", "tokens": [4, 5], "ttft_s": 0.01, "decode_tps": 100.0, "prefill_tps": 9.0}
                lines = [facts, {"text": "Once"}, *([] if self.half else [{"text": " more"}, end])]
                talk.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(json.dumps(one).encode() + b"\n" for one in lines))


@pytest.fixture
def lowq(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def run(*arguments, **how):
        line = [sys.executable, "-X", "importtime", "-c", "from lowq_cli.start import run; run()", *arguments]
        return subprocess.run(line, stdout=how.get("stdout", subprocess.PIPE), stderr=subprocess.PIPE, text=True, timeout=60)

    return run


def test_an_answer_imports_no_command_line(lowq, tmp_path):
    Serving(tmp_path)
    done = lowq("generate", "m", "Hi")
    assert (done.returncode, done.stdout) == (0, "Once more\n")
    assert "2 new tokens at 100.0/s (--max-new-tokens); by the running server (process 1)" in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert {"lowq_cli.start", "lowq_cli.running"} <= imported
    assert not imported & {"typer", "pydantic", "torch", "lowq_cli.commands", "lowq_cli.main", "lowq_cli.output.syntaxes"}


def test_an_answer_that_breaks_off_is_reported_once(lowq, tmp_path):
    Serving(tmp_path, half=True)
    done = lowq("generate", "m", "Hi")
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, done.stdout) == (LowqError.exit_code, "Once")
    assert said == ["lowq: the server that was answering has ended; run the command again"]


def test_a_reader_that_has_left_is_no_error(lowq, tmp_path):
    Serving(tmp_path)
    there, away = os.pipe()
    os.close(there)
    with open(away, "w") as closed:
        done = lowq("generate", "m", "Hi", stdout=closed)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


INTERRUPTS = """
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "pydantic_core" or name == "typer.models":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from lowq_cli.start import run
run()
"""


@pytest.mark.parametrize("given", [[], ["--json"]], ids=["line", "json"])
def test_ctrl_c_while_the_command_line_is_imported_is_one_line(given):
    line = [sys.executable, "-c", INTERRUPTS, "ls", *given]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "lowq: interrupted\n")
    assert done.stdout == ('{"error": "interrupted", "exit_code": 130}\n' if given else "")
