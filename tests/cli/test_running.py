"""A running server of this user answers `generate` and `run`: at once, with the same text, and never another user's."""

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import forking
import pytest

from lowq_cli import main, running
from lowq_cli.commands import generate
from lowq_cli.generation.running_server import request_body
from lowq_cli.running import Declined

PROMPTS = ("Once upon a time", "The king", "In the morning she went")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def lowq(*args, code=0, **how):
    done = forking.lowq(*args, **how)
    assert done.returncode == code, done.stderr
    return done


def left_behind(home):
    """Wait until the server left behind has ended."""
    until = time.monotonic() + 60
    while list((home / "state" / "lowq" / "run").glob("*.sock")):
        assert time.monotonic() < until
        time.sleep(0.05)


def heavy_libraries(*words):
    """Libraries that a command imports."""
    code = "import sys\nfrom lowq_cli import main\nassert main.main(sys.argv[1:]) == 0\n"
    code += "print(sorted({n.partition('.')[0] for n in sys.modules} & {'torch', 'transformers', 'numpy', 'uvicorn', 'http'}))"
    done = subprocess.run([sys.executable, "-P", "-c", code, *map(str, words)], capture_output=True, text=True, timeout=120)
    assert "by the running server" in done.stderr
    return done.stdout.splitlines()[-1]


def _asked(monkeypatch, **options):
    """What `lowq generate` with these options would ask a running server, and why it asks none."""
    seen = []
    monkeypatch.setattr(generate, "answer", lambda *given: seen.append(given))
    generate.generate(**{"checkpoint": "demo", "prompt": "x", "seed": 1, "temperature": 0.5} | options)
    folder, text, _, settings, seed, default, _, device, *_, here = seen[0]
    return request_body(folder, text, settings, seed, default, device), here


# Of each option of `generate` a value that is not its default, except of those that change no text (--json, --keep-alive).
OPTIONS = {"prompt": "y", "prompts": "p.jsonl", "image": ["a.png"], "chat": True, "max_new_tokens": 7, "temperature": 0.7}
OPTIONS |= {"top_p": 0.5, "top_k": 3, "repetition_penalty": 1.5, "no_think": True, "lora": "adapter", "seed": 2, "stop": ["a"]}
OPTIONS |= {"batch": 2, "device": "cpu", "threads": 1, "kv": "4", "act": "int8", "draft": "none", "deterministic": True}
OPTIONS |= {"explain": True, "profile": "times.json"}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_generate_reaches_the_running_server_or_none_is_asked(option, home, monkeypatch):
    monkeypatch.chdir(home)
    given = {option: OPTIONS[option]} | ({"prompt": None} if option == "prompts" else {})
    body, here = _asked(monkeypatch, **given)
    assert here or body != _asked(monkeypatch)[0]


def test_every_option_of_generate_is_tried():
    rest = {"checkpoint", "words", "keep_alive", "as_json"}
    assert set(inspect.signature(generate.generate).parameters) == OPTIONS.keys() | rest


@pytest.mark.slow
def test_the_same_text_comes_from_the_process_that_was_left_behind(home):
    how = ("--device", "cpu", "--max-new-tokens", 20)
    alone = [lowq("generate", "demo", "--prompt", p, *how).stdout for p in PROMPTS]
    drawn = lowq("run", "demo", PROMPTS[0], "--seed", 5, *how).stdout
    ended = lowq("generate", "demo", "--prompt", PROMPTS[0], "--stop", "the", *how).stdout
    output = lowq("generate", "demo", "--prompt", PROMPTS[0], "--explain", *how).stderr
    assert "computed in this process" in output
    first = lowq("generate", "demo", "--prompt", PROMPTS[0], *how, "--keep-alive", "5m")
    assert "by the running server (process" in first.stderr
    assert first.stdout == alone[0]
    assert heavy_libraries("generate", "demo", "--prompt", PROMPTS[0], *how) == "[]"
    assert [lowq("generate", "demo", "--prompt", p, *how).stdout for p in PROMPTS] == alone
    assert lowq("generate", "demo", "--prompt", PROMPTS[0], "--stop", "the", *how).stdout == ended

    message = json.loads(lowq("generate", "demo", "--prompt", PROMPTS[1], "--json", *how).stdout)
    plain = json.loads(lowq("generate", "demo", "--prompt", PROMPTS[1], "--json", "--threads", 1, *how).stdout)
    assert message["process"]
    assert "process" not in plain
    assert set(plain) - set(message) == set()
    for same in ("text", "tokens", "finish_reason", "prompt_tokens", "sampling", "kv"):
        assert message[same] == plain[same], same

    lowq("generate", "demo", "--prompt", "x", "--temperature", "-1", *how, code=2)
    long = lowq("generate", "demo", "--prompt", "word " * 3000, *how, code=2).stderr
    assert "shorten the prompt" in long
    for other in (("--kv", "4"), ("--threads", "1")):
        assert "process" not in lowq("generate", "demo", "--prompt", PROMPTS[0], *how, *other).stderr

    listed = json.loads(lowq("ps", "--json").stdout)["servers"]
    assert [(s["kept"], [m["name"] for m in s["models"]]) for s in listed] == [(True, ["demo"])]
    assert oct((home / "state" / "lowq" / "run").stat().st_mode)[-3:] == "700"
    lowq("run", "demo", PROMPTS[0], "--seed", 5, *how, "--keep-alive", "5m")  # of the packed one: another process
    assert lowq("run", "demo", PROMPTS[0], "--seed", 5, *how).stdout == drawn
    assert len(json.loads(lowq("ps", "--json").stdout)["servers"]) == 2
    lowq("stop", "nothing", code=3)
    assert len(json.loads(lowq("stop", "demo", "--json").stdout)["stopped"]) == 1
    lowq("stop")
    left_behind(home)


def test_a_model_that_was_made_anew_is_not_answered_by_the_server_that_loaded_the_old_one(home):
    """Such as a checkpoint that is quantized once more into its folder: its text came from the weights of before."""
    how = ("--prompt", PROMPTS[0], "--device", "cpu", "--max-new-tokens", 20, "--temperature", 0)
    model, texts = home / "m", []
    for bits, fresh in ((4, ()), (2, ("--fresh",))):
        lowq("quantize", "demo", "--bits", bits, "--method", "rtn", "--out", model, *fresh)
        texts.append(lowq("generate", model, *how).stdout)
        if not fresh:
            assert "by the running server" in lowq("generate", model, *how, "--keep-alive", "5m").stderr
    assert texts[0] != texts[1]
    (server,) = json.loads(lowq("ps", "--json").stdout)["servers"]
    os.kill(server["process"], signal.SIGHUP)
    until = time.monotonic() + 60
    while "by the running server" not in (done := lowq("generate", model, *how)).stderr:
        assert (done.stdout, time.monotonic() < until) == (texts[1], True)
    assert done.stdout == texts[1]
    lowq("stop")
    left_behind(home)


def test_idleness_ends_it(home):
    lowq("generate", "demo", "--prompt", "Once", "--device", "cpu", "--max-new-tokens", 2, "--keep-alive", "1s")
    left_behind(home)
    log = (home / "state" / "lowq" / "run" / "last.log").read_text()
    assert log == ""


@pytest.mark.parametrize("command", [("generate", "demo", "--prompt", "Once"), ("run", "demo", "Once"), ("chat", "demo")])
def test_a_time_that_is_none_is_refused_before_anything_is_loaded(command, home):
    assert "--keep-alive = soon is not a time; write it as 30s" in lowq(*command, "--keep-alive", "soon", code=2).stderr


def test_a_server_that_cannot_stay_is_reported(home):
    how = ["--device", "cpu", "--max-new-tokens", "2"]
    output = lowq("generate", "demo", "--prompt", "Once", *how, "--draft", "none", "--keep-alive", "1m").stderr
    assert "no server is left running: --threads, --act, --draft" in output


def test_no_command_finds_a_socket_before_it_is_listened_at(home, monkeypatch):
    seen, listen = [], socket.socket.listen

    def listens(self, *backlog):
        with pytest.raises(Declined, match="no server of yours"):
            running.ask({"path": "m"})
        seen.append(1)
        listen(self, *backlog)

    monkeypatch.setattr(socket.socket, "listen", listens)
    before = os.umask(0o077)
    try:
        with running.listen():
            assert seen
            assert len(running.sockets()) == 1
            running.connect(running.sockets()[0]).close()
    finally:
        os.umask(before)
        running.forget()
    assert not list((home / "state" / "lowq" / "run").iterdir())


def test_sockets_of_other_users_and_dead_processes_are_ignored(home):
    assert running.sockets() == []
    bound = running.listen()
    path = running.folder() / f"{os.getpid()}.sock"
    assert running.sockets() == [path]
    path.chmod(0o666)  # other users may write there
    assert running.sockets() == []
    path.chmod(0o600)
    running.folder().chmod(0o755)
    assert running.sockets() == []
    running.folder().chmod(0o700)
    bound.close()
    with pytest.raises(Declined, match="does not answer"):
        running.ask({})
    assert not path.exists()  # it was of a process that has ended
    with pytest.raises(Declined, match="no server of yours"):
        running.ask({})


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a socket to another user")
def test_a_socket_of_another_user_is_not_asked(home):
    bound = running.listen()
    path = running.folder() / f"{os.getpid()}.sock"
    os.chown(path, 65534, 65534)
    assert running.sockets() == []
    bound.close()


def test_long_paths_work(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("long" * 30)))
    bound = running.listen()
    with running.connect(running.sockets()[0]) as talk:
        other, _ = bound.accept()
        talk.sendall(b"x")
        assert other.recv(1) == b"x"
        other.close()
    bound.close()
    running.forget()
    assert running.sockets() == []


LAST = {"finish_reason": "stop", "tokens": [1, 2], "ttft_s": 0.1, "decode_tps": 2.0, "prefill_tps": 3.0}


@pytest.mark.parametrize("size", [0, 1, 7, 1000])
def test_an_answer_comes_whole_or_in_chunks(home, size):
    """uvicorn writes it in chunks where httptools is installed; a line may end anywhere in a chunk. 0: it is not in chunks."""
    body = b"".join(json.dumps(line).encode() + b"\n" for line in ({"process": 1}, {"text": "a"}, {"text": "b"}, LAST))
    sent = b"HTTP/1.1 200 OK\r\n" + b"transfer-encoding: chunked\r\n" * bool(size) + b"\r\n"
    for part in [body[i : i + size] for i in range(0, len(body), size)] if size else []:
        sent += b"%x\r\n%s\r\n" % (len(part), part)
    sent += b"0\r\n\r\n" if size else body
    bound = running.listen()

    def answer():
        other, _ = bound.accept()
        other.recv(1 << 16)
        other.sendall(sent)
        other.close()

    thread = threading.Thread(target=answer)
    thread.start()
    reply = running.ask({})
    assert (list(reply), reply.facts, reply.tokens) == (["a", "b"], {"process": 1}, [[1, 2]])
    thread.join()
    bound.close()
    running.forget()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "half",
    [
        CHUNKED,
        CHUNKED + b'1d\r\n{"process": 1}\n{"text": "a"}\n\r\n8\r\n{"te',
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b'HTTP/1.1 200 OK\r\n\r\n{"process": 1}\n{"text": "a"}\n',
    ],
)
def test_a_server_that_dies_while_it_answers(home, half):
    """Before its first piece the command does the work itself; after it, half a text is an error and no text."""
    bound = running.listen()

    def answer():
        other, _ = bound.accept()
        other.recv(1 << 16)
        other.sendall(half)
        other.close()

    thread = threading.Thread(target=answer)
    thread.start()
    if b"text" not in half:
        with pytest.raises(Declined):
            running.ask({})
    else:
        pieces = iter(running.ask({}))
        assert next(pieces) == "a"
        with pytest.raises(running.LowqError, match="has ended"):
            next(pieces)
    thread.join()
    bound.close()
    running.forget()


def test_its_paths_are_not_served_to_others(home):
    """Over TCP /lowq/ does not exist, whatever headers a client sends."""
    from saying import Saying, byte_tokenizer, served_by
    from starlette.testclient import TestClient

    from lowq_cli.serving.http.app import make_app

    with TestClient(make_app(served_by(Saying([65]), byte_tokenizer()))) as client:
        for path in ("/lowq/info", "/lowq/stop", "/lowq/text"):
            assert client.post(path, json={}).status_code == 404
            assert client.get(path).status_code == 404


def test_a_state_folder_that_cannot_be_written_names_the_way_out(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert main.main(["generate", "demo", "--prompt", "Once", "--device", "cpu", "--keep-alive", "9s"]) == 2
    assert capsys.readouterr().err.endswith("Not a directory; name another state folder: XDG_STATE_HOME=DIR\n")


def test_commands_that_begin_at_once_leave_one_server_of_a_model_behind(home, monkeypatch):
    def until_all_asked(body):
        (home / f"asked-{os.getpid()}").touch()
        end = time.monotonic() + 20
        while len(list(home.glob("asked-*"))) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        if not (home / body["path"]).exists():
            raise Declined("none")
        return "reply"

    def leave(model, keep_alive, flags):
        with (home / "starts").open("a") as file:
            file.write(f"{model}\n")
        time.sleep(0.2)
        (home / model).touch()
        return ""

    monkeypatch.setattr(running, "ask", until_all_asked)
    monkeypatch.setattr(running, "leave_behind", leave)
    pids = [forking.fork(lambda m=m: running.ask_or_leave({"path": m, "kv": "16"}, "5m", "cpu")) for m in ("a", "b", "a")]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    assert sorted((home / "starts").read_text().split()) == ["a", "b"]
