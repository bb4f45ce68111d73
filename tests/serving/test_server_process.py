"""`lowq serve` as a process: who may come in, clients that leave or dawdle, a full queue, signals."""

import json
import signal
import socket
import sys
import time

import httpx
import pytest
import torch

from lowq_cli import main
from lowq_cli.serving import engines
from lowq_cli.serving.apart import ApartEngine

openai = pytest.importorskip("openai", reason="OpenAI's own package is not installed")

LONG_STREAM = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True, "extra_body": {"ignore_eos": True}}
LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}


def test_only_who_knows_the_key_comes_in_and_sigterm_lets_answers_end(start):
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
    assert s.process.wait(30) == 0
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


def test_a_full_queue_says_when_to_come_again(server, monkeypatch):
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
        before = server.stats()["waiting"]
        full = server.post("completions", LONG | {"n": 100})
        assert full.status_code == 429
        assert full.headers["retry-after"] == "1"
        assert full.json()["error"]["code"] == "rate_limit_exceeded"
        assert server.stats()["waiting"] <= before  # none of the hundred was left in the queue
    finally:
        for s in held:
            s.close()
    server.idle(seconds=30)


def test_what_takes_longer_than_the_grace_is_ended_and_told(start):
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
    assert s.process.wait(30) == 0


def cli(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["lowq", "serve", *map(str, args)])
    return main._run()


def test_an_address_that_is_taken_is_one_line(server, talk, monkeypatch, capsys):
    assert cli(monkeypatch, talk, "--port", server.url.rpartition(":")[2]) == 2
    assert "cannot listen on 127.0.0.1 port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--port", 65536), "must be from 0 to 65535"),
        (("--engine", "own", "--tp", 2), "are for vLLM"),
        (("--engine", "mine"), "must be one of auto, own, vllm"),
        (("--engine", "vllm", "--api-key", "x"), "are for lowq's own engine"),
        (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid"),
    ],
    ids=lambda v: "".join(map(str, v)) if isinstance(v, tuple) else "",
)
def test_mistakes_are_one_line(talk, flags, line, monkeypatch, capsys):
    assert cli(monkeypatch, talk, *flags) == 2
    assert line in capsys.readouterr().err


def test_the_plan_is_one_json_object(talk, monkeypatch, capsys):
    assert cli(monkeypatch, talk, "--port", 0, "--dry-run", "--json", "--quiet") == 0
    told = capsys.readouterr()
    plan = json.loads(told.out)
    assert (plan["model"], plan["longest"], plan["device"]) == ("talk", 1024, "cpu")
    assert not told.err


def test_an_engine_that_does_not_start_says_why(talk, monkeypatch, capsys):
    def start(self, sink, done=None):
        raise torch.OutOfMemoryError("while recording passes")

    monkeypatch.setattr(ApartEngine, "start", start)
    assert cli(monkeypatch, talk, "--port", 0, "--device", "cpu") == main.EXIT_NO_MEMORY
    assert "out of memory: while recording passes" in capsys.readouterr().err
