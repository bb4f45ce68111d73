"""lowq batch: every request of a file is answered once, as a server answers it, however often the command is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import forking
import pytest

from lowq_cli.files.folder import BusyError
from lowq_cli.files.locks import lock
from lowq_cli.serving.http.batch_file import answered, held, read
from lowq_packers.errors import UsageError

LOWQ = Path(sys.executable).with_name("lowq")


def request(name, body=None, **more):
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body or {"prompt": "x"}, **more})


def batch(*args, **how):
    return forking.lowq("batch", *args, "--device", "cpu", **how)


def test_answers_are_those_of_the_server_and_a_killed_batch_goes_on(server, talk, tmp_path):
    file, out = tmp_path / "asked.jsonl", tmp_path / "asked.answers.jsonl"
    bodies = {f"r{i}": {"prompt": f"Once {i}", "max_tokens": 24, "temperature": 0, "ignore_eos": True} for i in range(60)}
    lines = [request(name, body) for name, body in bodies.items()]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "temperature": 0}
    lines += [request("chat", chat, url="/v1/chat/completions"), request("bad", {"prompt": "x", "max_tokens": -1})]
    lines += [request("nowhere", {}, url="/v1/nothing"), request("other", {"prompt": "x", "model": "gpt"})]
    file.write_text("\n".join(lines))
    one = ("--device", "cpu", "--max-batch", "1")  # side by side, sums would differ in their last bits
    process = subprocess.Popen([LOWQ, "batch", file, talk, *one], stderr=subprocess.PIPE)
    until = time.monotonic() + 120
    while not (out.exists() and out.read_bytes().count(b"\n") > 5):
        assert time.monotonic() < until
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    with out.open("ab") as f:
        f.write(b'{"id": "half')  # as it may be where a disk was full
    done = batch(file, talk, "--json", "--max-batch", 1)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in out.read_text().splitlines()]
    result = {row["custom_id"]: row["response"] for row in rows}
    assert len(rows) == len(result) == len(lines)
    for name, body in list(bodies.items())[::7]:
        expected = server.post("completions", body).json()["choices"][0]["text"]
        assert result[name]["body"]["choices"][0]["text"] == expected
    assert result["chat"]["body"]["choices"][0]["message"]["role"] == "assistant"
    refused = {name: row["status_code"] for name, row in result.items() if row["status_code"] != 200}
    assert refused == {"bad": 400, "nowhere": 404, "other": 404}
    again = json.loads(batch(file, talk, "--json").stdout)
    assert (again["answered"], again["refused"], again["requests"]) == (0, 0, len(lines))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nonsense", "is not JSON"),
        ("[1]", "must be an object with custom_id"),
        (request("a", other=1), "must be an object with custom_id"),
        (request(1), "must be texts"),
        (request("a", method="GET"), "must be texts, and method POST"),
        (request("a") + "\n" + request("a"), "line 2 of f has the custom_id 'a' of another line"),
        (request("a", {"prompt": "x", "stream": True}), "asks for a stream"),
        ("", "holds no requests"),
    ],
)
def test_invalid_lines_are_refused(line, why):
    with pytest.raises(UsageError, match=why):
        read(line, "f")


def test_failed_requests_are_sent_again_and_another_file_is_refused(tmp_path):
    def row(name, status):
        return json.dumps({"custom_id": name, "response": {"status_code": status, "body": {}}}).encode() + b"\n"

    out = tmp_path / "a.jsonl"
    assert answered(out) == set()
    out.write_bytes(row("a", 200) + row("b", 503) + row("c", 400) + row("d", 429) + b'{"custom')
    assert answered(out) == {"a", "c"}
    assert out.read_bytes() == row("a", 200) + row("c", 400)
    out.write_text("my diary\n")
    with pytest.raises(UsageError, match="does not hold answers"):
        answered(out)
    assert out.read_text() == "my diary\n"


@pytest.mark.parametrize("content", ["my diary", request("a"), "{", '{"id": "x", "text": 1}', "[]"])
def test_a_file_of_another_kind_is_left_alone_without_a_last_newline_too(tmp_path, content):
    out = tmp_path / "notes.txt"
    out.write_text(content)
    beginning = '{"id":"batch_req_'.startswith(content)
    with nullcontext() if beginning else pytest.raises(UsageError, match="does not hold answers"), held(out):
        pass
    assert beginning or out.read_text() == content


def test_one_command_at_a_time_writes_a_file_of_answers(tmp_path):
    out = tmp_path / "a.jsonl"
    row = json.dumps({"custom_id": "a", "response": {"status_code": 200, "body": {}}}).encode() + b"\n"
    for before in (b"", row, row + b'{"id":"batch'):  # the last one is replaced while it is held
        out.write_bytes(before)
        with held(out) as (f, done):
            assert done == ({"a"} if before else set())
            with pytest.raises(BusyError, match="another lowq is writing"), held(out):
                pass
            f.write(row)
        assert out.read_bytes() == (row + row if before else row)
    out.unlink()
    with held(out), pytest.raises(BusyError, match="another lowq is writing"), held(out):
        pass
    assert not list(tmp_path.iterdir())
    with held(out) as (f, done):
        assert not done
        assert not out.exists()
        for many in (1, 2):
            f.write(row)
            assert out.read_bytes() == many * row
            with pytest.raises(BusyError, match="another lowq is writing"), held(out):
                pass
    out.unlink()
    with held(out) as (f, _):
        out.write_text("my diary\n")
        with pytest.raises(UsageError, match="another program"):
            f.write(row)
    assert out.read_text() == "my diary\n"
    out.unlink()
    with pytest.raises(UsageError, match="cannot write to"), held(tmp_path / "none" / "a.jsonl"):
        pass
    os.mkfifo(out)
    with pytest.raises(UsageError, match="not a regular file"), held(out):
        pass


@pytest.mark.parametrize("stream", [{}, {"stream": None}, {"stream": False}])
def test_paths_that_stream_by_themselves_answer_whole(stream):
    for url in ("/api/chat", "/api/generate"):
        assert read(request("a", {"prompt": "x"} | stream, url=url), "f")[0].body["stream"] is False


def test_a_checkpoint_in_the_place_of_the_requests_hears_of_the_order(tmp_path):
    done = batch(tmp_path, "requests.jsonl")
    assert done.returncode == 2
    assert done.stderr == f"lowq: {tmp_path} is a folder; the file of requests comes first: lowq batch FILE CKPT\n"


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path):
    (tmp_path / "f.jsonl").write_text(request("a"))
    done = batch(tmp_path / "f.jsonl", tmp_path / "none")
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "f.answers.jsonl").exists()


def is_locked(folder):
    """Whether a process holds the lock of a file in the folder."""
    for path in folder.iterdir():
        with path.open("ab") as f:
            if lock(f.fileno()) is False:
                return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_batch_that_is_ended_before_its_first_answer_leaves_no_file(number, talk, tmp_path):
    file, out = tmp_path / "f.jsonl", tmp_path / "f.answers.jsonl"
    file.write_text(request("a", {"prompt": "x", "max_tokens": 4096, "ignore_eos": True}))
    process = subprocess.Popen([LOWQ, "batch", file, talk, "--device", "cpu"], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while len(list(tmp_path.iterdir())) == 1:
        assert time.monotonic() < until
        assert process.poll() is None
    process.send_signal(number)
    killed = number == signal.SIGKILL
    assert process.wait(60) == (-number if killed else 128 + number)
    assert not out.exists()
    while killed and is_locked(tmp_path):  # by a process that the killed one had forked, until it runs its program
        assert time.monotonic() < until
    with held(out) as (_, done):  # the next command goes on with what a killed one has left
        assert not done
    assert list(tmp_path.iterdir()) == [file]
