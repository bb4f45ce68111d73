"""`lowq serve` as a process: who may come in, clients that leave or dawdle, a full queue, signals."""

import fcntl
import inspect
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from engine_processes import engines_of
from shallow import shallow

from lowq_cli import main
from lowq_cli.commands import serve
from lowq_cli.serving import catalog, engines
from lowq_cli.serving.engine_process import ApartEngine
from lowq_cli.serving.http import run
from lowq_kernels.decode.kv import KINDS
from lowq_packers.errors import UsageError

openai = pytest.importorskip("openai", reason="OpenAI's own package is not installed")

LOWQ = Path(sys.executable).with_name("lowq")
LONG_STREAM = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True, "extra_body": {"ignore_eos": True}}
LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}


def test_clients_need_the_key_and_sigterm_lets_answers_end(start):
    s = start("--api-key", "s3cret")
    bad = s.post("completions", {"prompt": "x"}, headers={"Authorization": "Bearer wrong"})
    assert (bad.status_code, bad.json()["error"]["code"]) == (401, "invalid_api_key")
    assert bad.headers["www-authenticate"] == "Bearer"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{s.url}/v1", api_key="x", max_retries=0).models.list()
    assert openai.OpenAI(base_url=f"{s.url}/v1", api_key="s3cret").models.list().data[0].id == "talk"
    assert httpx.get(f"{s.url}/metrics").status_code == 401
    assert httpx.get(f"{s.url}/health").status_code == 200
    assert httpx.get(s.url).status_code == 200
    chunks = iter(openai.OpenAI(base_url=f"{s.url}/v1", api_key="s3cret").completions.create(model="talk", **LONG_STREAM))
    next(chunks)
    s.process.send_signal(signal.SIGTERM)
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert s.process.wait(60) == 0
    s.said_last("stopped: 5 prompt tokens read, 200 generated")


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}],
    ids=["rebound", "foreign", "null"],
)
def test_pages_of_other_sites_do_not_come_in(server, headers):
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 403


def test_our_own_page_and_local_names_come_in(server):
    port = server.url.rpartition(":")[2]
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "localhost"):
        headers = {"Host": host, "Origin": f"http://{host}"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_place(server, streamed):
    server.idle()
    raw = json.dumps(LONG | {"stream": streamed}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        while not server.stats()["running"]:
            time.sleep(0.005)
        if streamed:
            assert s.recv(100).startswith(b"HTTP/1.1 200")
    server.idle()
    server.said_last("client left")
    assert int(server.said[-1].split("+ ")[1].split()[0]) < 400


def test_a_body_that_comes_a_byte_at_a_time_is_read(server):
    raw = b'{"prompt": "The", "max_tokens": 2}'
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw))
        for i in range(len(raw)):
            s.sendall(raw[i : i + 1])
            time.sleep(0.002)
        assert s.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_full_queue_says_when_to_come_again(server):
    server.idle()
    host, port = server.url.removeprefix("http://").split(":")
    raw = json.dumps(LONG | {"n": 100}).encode()
    held = []
    try:
        for _ in range(engines.WAITING // 100):
            held.append(socket.create_connection((host, int(port))))
            held[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        until = time.monotonic() + 30
        while (s := server.stats())["waiting"] + s["running"] < engines.WAITING // 100 * 100:
            assert time.monotonic() < until, s
            time.sleep(0.01)
        full = server.post("completions", LONG | {"n": 100})
        assert full.status_code == 429
        assert full.headers["retry-after"] == "1"
        assert full.json()["error"]["code"] == "rate_limit_exceeded"
        # running texts may go back to the queue, so both are counted; none of the hundred stays in the queue
        while (s := server.stats())["waiting"] + s["running"] > engines.WAITING // 100 * 100:
            assert time.monotonic() < until, s
            time.sleep(0.01)
    finally:
        for s in held:
            s.close()
    server.idle()


def test_answers_longer_than_the_grace_period_end_with_an_error(start):
    s = start("--grace", "0.3")
    client = openai.OpenAI(base_url=f"{s.url}/v1", api_key="-", max_retries=0)
    chunks = iter(
        client.completions.create(
            model="talk", prompt="Once", max_tokens=1000, stream=True, n=8, extra_body={"ignore_eos": True}
        )
    )
    next(chunks)
    s.process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="the server is stopping"):
        list(chunks)
    assert s.process.wait(60) == 0


def cli(*args):
    return main.main(["serve", *map(str, args)])


def test_an_address_that_is_taken_is_one_line(server, talk, capsys):
    assert cli(talk, "--port", server.url.rpartition(":")[2]) == 2
    assert "cannot listen on 127.0.0.1 port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--port", 65536), "must be from 0 to 65535"),
        (("--engine", "own", "--tp", 2), "are for vLLM"),
        (("--engine", "mine"), "must be one of auto, own, vllm"),
        (("--engine", "vllm", "--api-key", "x"), "vLLM is not given --api-key: only lowq's own engine takes that"),
        (("--tp", 2, "--draft", "ngram", "--strict"), "vLLM is not given --draft, --strict: only lowq's own engine takes that"),
        (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid"),
    ],
    ids=lambda v: "".join(map(str, v)) if isinstance(v, tuple) else "",
)
def test_mistakes_are_one_line(talk, flags, line, capsys):
    assert cli(talk, *flags) == 2
    assert line in capsys.readouterr().err


# Of each option of `serve` a value that is not its default, except of those that vLLM's own command line has no part in.
OPTIONS = {"models": ["m"], "config": "c.toml", "memory": "1GB", "keep_alive": "5m", "kv_host": "1GB", "lora": ["a=b"]}
OPTIONS |= {"local": True, "host": "0.0.0.0", "port": 1, "strict": True, "api_key": "x", "name": "x", "max_batch": 2}
OPTIONS |= {"cache_tokens": 9, "kv": "4", "draft": "none", "act": "int8", "prefer": "smooth", "deterministic": True}
OPTIONS |= {"allow_image_urls": True, "tp": 2, "pp": 2, "native": True, "args": "--seed 1"}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_serve_reaches_vllm_or_is_refused(option, talk, monkeypatch):
    seen, refused = [], ""
    monkeypatch.setattr(serve, "_serve_through_vllm", lambda *given: seen.append(given))
    serve.serve(str(talk), engine="vllm")
    try:
        serve.serve(str(talk), **{"engine": "vllm", option: OPTIONS[option]})
    except UsageError as e:
        refused = str(e)
    assert f"--{option.replace('_', '-')}:" in refused or seen[-1] != seen[0]


def test_every_option_of_serve_is_tried():
    rest = {"ckpt", "engine", "device", "grace", "dry_run", "as_json"}
    assert set(inspect.signature(serve.serve).parameters) == OPTIONS.keys() | rest


def test_a_draft_head_is_not_offered_as_a_model(talk, tmp_path):
    for name, config in (
        ("head", {"architectures": ["LlamaForCausalLMEagle3"]}),
        ("odd", []),
        ("model", {"model_type": "llama"}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    offered = catalog.gather(catalog.Config(), [str(tmp_path)])
    assert {"odd", "model"} <= offered.keys()
    assert "head" not in offered


def test_the_plan_shows_the_cache_of_the_model_and_not_of_the_command_line(talk, tmp_path, capsys):
    file = tmp_path / "models.toml"
    file.write_text(f'default = "a"\n[models.a]\npath = "{talk}"\nkv = "fp8"\n')
    words = ["serve", "--config", str(file), "--kv", "4", "--device", "cpu", "--port", "0", "--dry-run", "--json", "--quiet"]
    assert main.main(words) == 0
    assert json.loads(capsys.readouterr().out)["kv"] == "fp8"


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("max_batch = 2000", "max_batch = 2000 must be from 1 to 1024"),
        ('draft = "ngrm"', "draft = ngrm must be auto, ngram, mtp, none"),
        ('draft = "mtp"', "leave draft = mtp out"),
    ],
)
def test_a_value_of_the_file_that_loading_refuses_is_named_as_the_file_has_it(
    setting, line, talk, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(catalog, "_written", list)  # else models that other tests wrote answer instead
    file = tmp_path / "models.toml"
    file.write_text(f'[models.a]\npath = "{talk}"\n{setting}\n')
    assert main.main(["serve", "--config", str(file), "--device", "cpu", "--port", "0", "--dry-run"]) in (2, 3, 5)
    told = capsys.readouterr().err
    assert f"{file}: models.a: " in told
    assert line in told
    assert "--" not in told.splitlines()[-1].replace(str(file), "")


def test_a_file_takes_the_kinds_of_caches_that_there_are():
    assert tuple(KINDS) == catalog.KV


@pytest.mark.parametrize(
    ("tokens", "has", "note"),
    [
        (None, 4096, ""),
        (128, 128, ""),
        (10, 64, "10 were asked for, but a cache has whole blocks of 64"),
        (65, 128, "65 were asked for, but a cache has whole blocks of 64"),
        (5000, 4096, "5,000 were asked for, but 4 requests of 1,024 tokens take no more"),
        (10**12, 4096, "1,000,000,000,000 were asked for, but 4 requests of 1,024 tokens take no more"),
    ],
)
def test_another_cache_than_was_asked_for_is_said(tokens, has, note, talk, capsys):
    asked = () if tokens is None else ("--cache-tokens", tokens)
    assert cli(talk, "--port", 0, "--device", "cpu", "--max-batch", 4, "--dry-run", "--json", *asked) == 0
    output = capsys.readouterr()
    plan = json.loads(output.out)
    assert (plan["cache_tokens"], plan["cache_tokens_asked"]) == (has, tokens)
    assert note in output.err
    assert bool(note) == ("asked for" in output.err)


def test_a_cache_that_memory_cuts_short_is_said():
    plan = {"cache_tokens_asked": 9000, "cache_tokens": 640, "running": 4, "longest": 1024, "reason": ""}
    assert serve._cache_note(plan) == "; 9,000 were asked for, but no more fit into memory"
    assert "this engine does not use --cache-tokens" in serve._cache_note(plan | {"reason": "a"})


def test_the_plan_is_one_json_object(talk, capsys):
    assert cli(talk, "--port", 0, "--dry-run", "--json", "--quiet") == 0
    output = capsys.readouterr()
    plan = json.loads(output.out)
    assert (plan["model"], plan["longest"], plan["device"]) == ("talk", 1024, "cpu")
    assert not output.err


def test_an_engine_that_does_not_start_says_why(talk, monkeypatch, capsys):
    def start(self, sink, done=None):
        raise torch.OutOfMemoryError("while recording passes")

    monkeypatch.setattr(ApartEngine, "start", start)
    assert cli(talk, "--port", 0, "--device", "cpu") == main.EXIT_NO_MEMORY
    assert "out of memory: while recording passes" in capsys.readouterr().err


def engine_of(server):
    """The engine's process of a server's, which has no other."""
    (result,) = engines_of(server.process.pid)
    return result


def test_idle_connections_do_not_end_service_nor_flood_the_log(start):
    """More of them than there are file descriptors."""
    s = start(ready=False)
    resource.prlimit(s.process.pid, resource.RLIMIT_NOFILE, (256, 256))
    s.wait_ready()
    address = ("127.0.0.1", int(s.url.rpartition(":")[2]))
    held = [socket.create_connection(address) for _ in range(400)]
    for some in held[::2]:
        some.sendall(b"GET /health HT")
    for _ in range(5):
        assert s.stats()["status"] == "ok"
    assert s.post("completions", {"prompt": "Once", "max_tokens": 2}).status_code == 200
    for some in held:
        some.close()
    assert s.stop() == 0
    assert len(s.said) < 12, s.said


@pytest.mark.parametrize("how", ["dead", "full", "stalled"])
def test_a_log_that_takes_no_line_costs_no_answer(talk, how):
    """Its reader has died, its disk is full, or its reader reads no more: answers come, and SIGTERM is obeyed."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)  # else it holds 64 KiB of lines
    stderr = open("/dev/full", "w") if how == "full" else writer  # noqa: SIM115
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [LOWQ, "serve", talk, "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen(list(map(str, line)), stderr=stderr, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=60)
                break
            except httpx.TransportError:
                assert time.monotonic() < until
                time.sleep(0.05)
        os.close(writer)
        if how == "dead":
            os.close(reader)
        with httpx.Client(timeout=60) as client:
            for _ in range(100 if how == "stalled" else 3):  # more than 4 KiB of lines
                refused = client.post(f"http://127.0.0.1:{port}/v1/completions", content=b"no JSON")
                assert refused.status_code == 400
            answer = client.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "Once", "max_tokens": 2})
        assert answer.status_code == 200
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        if how != "dead":
            os.close(reader)
        if how == "full":
            stderr.close()


def test_an_engine_that_does_not_read_is_reported_and_sigterm_ends_it(start_on, tmp_path):
    """Stopped, with more prompts than a pipe holds: /ready says so, requests are refused, and the process ends in time."""
    short = {"SILENT_S": 1.5, "ENDS_S": 1.0}  # instead of 10 s each
    s = start_on(shallow(tmp_path / "one", layers=1), "--grace", "0", bounds=short)
    engine = engine_of(s)
    os.kill(engine, signal.SIGSTOP)
    address = ("127.0.0.1", int(s.url.rpartition(":")[2]))
    held = []
    for i in range(30):  # of 64 KiB that a pipe holds
        raw = json.dumps({"prompt": [(i + j) % 8000 for j in range(1000)], "max_tokens": 1}).encode()
        held.append(socket.create_connection(address))
        held[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    until = time.monotonic() + 60
    while (ready := httpx.get(f"{s.url}/ready", timeout=60)).status_code == 200:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert "has not answered for" in ready.json()["status"]
    assert httpx.get(f"{s.url}/health", timeout=60).status_code == 200  # the process itself is well
    refused = s.post("completions", {"prompt": "Once", "max_tokens": 1})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "has not answered for" in refused.json()["error"]["message"]
    assert engine_of(s) == engine  # none stands by: a server of one model loads no other
    os.kill(engine, signal.SIGCONT)
    for some in held:
        assert some.recv(1000).startswith(b"HTTP/1.1 200")
        some.close()
    assert httpx.get(f"{s.url}/ready", timeout=60).status_code == 200
    os.kill(engine, signal.SIGSTOP)
    assert s.stop(seconds=short["ENDS_S"] + run.DRAIN_S + run.LATE_S + 5) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def test_the_second_server_on_a_port_fails_before_it_loads(talk):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = list(map(str, [LOWQ, "serve", talk, "--port", port, "--device", "cpu"]))
    both = [subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) for _ in range(2)]
    try:
        until = time.monotonic() + 60
        while not (ended := [p for p in both if p.poll() is not None]):
            assert time.monotonic() < until
            time.sleep(0.02)
        (loser,) = ended
        output = loser.stderr.read()
        assert loser.returncode == 2
        assert output.count("\n") == 1
        assert f"cannot listen on 127.0.0.1 port {port}" in output
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=120).status_code == 200
    finally:
        for p in both:
            p.kill()


def test_systemd_is_notified_when_the_server_is_ready_and_when_it_stops(start, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as output:
        output.bind(str(tmp_path / "notify"))
        output.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        s = start()
        assert output.recv(100) == b"READY=1"
        assert s.stop() == 0
        assert output.recv(100) == b"STOPPING=1"


def test_no_process_imports_modules_of_the_working_folder(talk, tmp_path):
    """A model's folder, say, with files named as modules are: the engine's process imported the first of them."""
    for name in ("types", "runpy", "pickle", "socket", "tempfile", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    line = [LOWQ, "serve", talk, "--port", "0", "--dry-run", "--device", "cpu"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
