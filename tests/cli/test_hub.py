"""Models of the hub, by the hub's own client in a process of its own: a server on this machine, or none; a cache on disk."""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from safetensors.torch import save_file

SHA = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = {"a.weight": torch.ones(512, 1024)}  # 2 MB: far more than its header
REFUSALS = {"gated": (403, "GatedRepo"), "none": (404, "RepoNotFound"), "odd": (400, "Odd")}
OPEN = """
import json, sys
from lowq_cli.files.source import open_source
for model, headers_only in json.loads(sys.argv[1]):
    try:
        source, read = open_source(model, headers_only), ""
        try:
            source.read("a.weight")
        except Exception as e:
            read = str(e)
        found = {"headers": {n: [h.dtype, *h.shape] for n, h in source.headers.items()}, "read": read}
    except Exception as e:
        found = {"error": type(e).__name__, "code": getattr(e, "exit_code", None), "said": str(e)}
    print(json.dumps(found))
"""


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file(WEIGHTS, folder / "model.safetensors")
    return folder


class Hub(BaseHTTPRequestHandler):
    """What the client asks of the hub for org/model, org/pickles and those of REFUSALS."""

    folder: Path
    sent: Counter  # bytes by path

    def do_GET(self):
        model = self.path.split("?")[0].removeprefix("/api/models").split("/")[2]
        if model in REFUSALS:
            status, code = REFUSALS[model]
            return self.answer(status, b"", {"X-Error-Code": code})
        names = ["config.json", "pytorch_model.bin" if model == "pickles" else "model.safetensors"]
        if "/tree/" in self.path:
            files = [n for n in names if (self.folder / n).exists()]
            rows = [{"type": "file", "path": n, "oid": n, "size": (self.folder / n).stat().st_size} for n in files]
            return self.answer(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})
        if self.path.startswith("/api/"):
            facts = {"id": f"org/{model}", "sha": SHA, "siblings": [{"rfilename": n} for n in names]}
            return self.answer(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})
        name = self.path.rsplit("/", 1)[1]
        if name not in names:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = (self.folder / name).read_bytes()
        if part := self.headers.get("Range"):
            first, last = part.removeprefix("bytes=").split("-")
            content = content[int(first) : int(last) + 1]
        return self.answer(206 if part else 200, content, {"ETag": f'"{name}"', "X-Repo-Commit": SHA})

    do_HEAD = do_GET

    def answer(self, status, content, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
            self.sent[self.path.split("?")[0]] += len(content)

    def log_message(self, *_):
        pass


def opened(endpoint, cache, *asked):
    """What `open_source` gave for (model, headers only) each, in a process that knows this hub and this cache alone."""
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", OPEN, json.dumps(asked)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def nowhere():
    """An address at which nothing answers."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # bound and not listening: a connection is refused
        yield f"http://127.0.0.1:{s.getsockname()[1]}"


def test_without_a_network_the_cache_is_read_and_missing_files_are_named(nowhere, tmp_path):
    for model in ("whole", "damaged", "half", "bare"):
        root = tmp_path / f"models--org--{model}"
        write_model(root / "snapshots" / SHA)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(SHA)
        index = json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "model.safetensors")})
        (root / "snapshots" / SHA / "model.safetensors.index.json").write_text(index)
    at = {p.name.removeprefix("models--org--"): p / "snapshots" / SHA for p in tmp_path.iterdir()}
    weights = at["damaged"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:60])
    (at["half"] / "config.json").unlink()
    (at["bare"] / "model.safetensors").unlink()
    requests = [("absent", False), ("absent", True), ("half", True), ("bare", True), ("whole", True), ("damaged", True)]
    *missing, whole, damaged = opened(nowhere, tmp_path, *((f"org/{m}", h) for m, h in requests))
    for result in missing:  # of a snapshot that holds a part, too, the hub is asked
        assert result["error"] == "NotFoundError"
        assert "not in the local cache; go online, give a model folder, or use: demo" in result["said"]
    assert (whole["headers"], whole["read"]) == ({"a.weight": ["F32", 512, 1024]}, "")
    assert damaged["error"] == "DamagedError"


def test_a_dry_run_fetches_config_and_headers_only_and_refusals_are_told_apart(tmp_path):
    handler = type("Local", (Hub,), {"folder": write_model(tmp_path / "model"), "sent": Counter()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        requests = [("org/model", True), ("org/gated", True), ("org/none", False), ("org/pickles", True), ("org/odd", True)]
        made, gated, none, pickles, odd = opened(f"http://127.0.0.1:{server.server_port}", tmp_path / "cache", *requests)
        server.shutdown()
    assert made["headers"] == {"a.weight": ["F32", 512, 1024]}
    assert "only the headers" in made["read"]
    assert sum(handler.sent.values()) < 400_000
    assert "hf auth login" in gated["said"]
    assert "has no model org/none" in none["said"]
    assert (pickles["error"], pickles["code"]) == ("UnsupportedError", 5)
    assert odd["said"].startswith("cannot fetch org/odd: ")
    assert "\n" not in odd["said"]


def test_what_is_wrong_with_the_cache_is_not_told_of_the_network(tmp_path):
    handler = type("Local", (Hub,), {"folder": write_model(tmp_path / "model"), "sent": Counter()})
    (tmp_path / "cache").write_text("a file in its place")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        requests = [("org/model", False), ("org/model", True)]
        for result in opened(f"http://127.0.0.1:{server.server_port}", tmp_path / "cache", *requests):
            assert (result["error"], result["code"]) == ("NotFoundError", 3)
            assert result["said"].startswith("cannot fetch org/model: ")
            assert f"{tmp_path / 'cache'}" in result["said"]
        server.shutdown()


def test_a_second_download_of_a_model_waits_and_says_for_which_process(tmp_path):
    asked, go_on = Event(), Event()

    class Slow(Hub):
        folder, sent = write_model(tmp_path / "model"), Counter()

        def do_GET(self):
            if self.command == "GET" and self.path.endswith("model.safetensors"):
                asked.set()
                go_on.wait(60)
            super().do_GET()

        do_HEAD = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_CACHE": str(tmp_path / "cache")}
        env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        line = [sys.executable, "-c", OPEN, json.dumps([("org/model", False)])]
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
        first = subprocess.Popen(line, **how)
        try:
            assert asked.wait(60)
            second = subprocess.Popen(line, **how)
            said = next((text for text in second.stderr if "waiting" in text), "")
            go_on.set()
            outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
        finally:
            go_on.set()
            first.kill()
            first.wait()
        server.shutdown()
    assert said == f"process {first.pid} is downloading org/model; waiting for it, because this command needs the same files\n"
    assert [json.loads(text)["headers"] for text in outputs] == [{"a.weight": ["F32", 512, 1024]}] * 2
    assert Slow.sent["/org/model/resolve/" + SHA + "/model.safetensors"] < 3_000_000  # once
