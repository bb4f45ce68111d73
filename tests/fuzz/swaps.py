"""Four models with memory for two: random requests, some cancelled; each answer depends only on its model and prompt.

    python tests/fuzz/swaps.py --requests 2000 --users 24 --out swaps.json
    python tests/fuzz/swaps.py --requests 500 --kills 20 --kv-host 32MB

--kills kills engines (whatever they are at: waiting for a model, loading, computing, copying their cache) and clients
while they ask, and at the end the server itself, in each phase of its own. --kv-host gives evicted blocks a place, with
prompts long enough to have some; the models are then in fp32, so that a text does not depend on how many rows a pass has.

Prints a JSON row, with --kills then one of the servers; ends with 1 where an answer was lost, wrong or another's, or an
engine was left behind.
"""

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file
from server_process import serving

from lowq_cli.files.source import DEMO
from lowq_cli.serving.catalog import size
from lowq_cli.serving.http.model_pool import WAIT_S
from lowq_cli.serving.http.place import PROCESS

NAMES = ("ash", "birch", "cedar", "doum")
PROMPTS = ("Once upon a time", "The king", "In the morning she", "It was", "A letter came", "Nobody knew", "At sea", "My dear")
TWO = 2 * PROCESS + (256 << 20)  # bytes: two of these models and their caches, not three
PATIENCE = WAIT_S + 60  # seconds after which a client gives a request up as lost; the server has refused it by then
BEGINNING = "There was a king who had a castle on the hill, and nobody in the village knew his name. " * 6  # two blocks
CLIENT = """
import json, socket, sys
address, phase, body = sys.argv[1].rsplit(":", 1), int(sys.argv[2]), sys.argv[3].encode()
head = b"POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body)
talk = socket.create_connection((address[0], int(address[1])))
talk.sendall((b"", head[:20], head + body[:9], head + body)[min(phase, 3)])
if phase > 3: talk.recv(1)
print(1, flush=True)
sys.stdin.read()
"""  # a client that stands still after it has sent nothing, half a head, half a body, all; after the first byte of its answer


def make_models(folder: Path, names: tuple[str, ...] = NAMES, dtype: torch.dtype | None = None) -> Path:
    """The bundled model under several names, some signs of its last norm turned, other ones in each: no two say the same."""
    tensors = load_file(DEMO / "model.safetensors")
    for i, name in enumerate(names):
        shutil.copytree(DEMO, folder / name, ignore=shutil.ignore_patterns("*.py", "*.txt", "__pycache__", "*.safetensors"))
        norm = tensors["model.norm.weight"]
        turned = torch.rand(norm.shape, generator=torch.Generator().manual_seed(i)) < 0.08
        own = tensors | {"model.norm.weight": torch.where(turned, -norm, norm)}
        if dtype is not None:
            own = {n: t.to(dtype) for n, t in own.items()}
            config = folder / name / "config.json"
            config.write_text(config.read_text().replace("bfloat16", str(dtype).removeprefix("torch.")))
        save_file(own, folder / name / "model.safetensors")
    return folder


def children(pid: int) -> list[int]:
    """The engines of a server: with a model, while one is loaded, and the one that waits for the next."""
    result = set[int]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has ended since
            result |= {int(p) for p in (task / "children").read_text().split()}
    return [p for p in sorted(result) if not ended(p) and b"spawn_main" in command(p)]


def command(pid: int) -> bytes:
    """The command line of a process; b"" once it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def files(pid: int) -> int:
    """Open files of a process without its TCP connections."""
    talks = {row.split()[9] for f in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{f}").read_text().splitlines()[1:]}
    links = [os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir()]
    return sum(link.removeprefix("socket:[").removesuffix("]") not in talks for link in links)


def ended(pid: int) -> bool:
    """Whether a process has ended; one that its parent has not waited for counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def rss_mb(pid: int) -> float:
    """Resident megabytes of one process."""
    output = Path(f"/proc/{pid}/status").read_text()
    return int(output.partition("VmRSS:")[2].split()[0]) / 1000


class Run:
    """The counts of the run so far."""

    def __init__(self, url: str, pid: int, args: argparse.Namespace) -> None:
        self.url, self.pid, self.args, self.rng = url, pid, args, random.Random(args.seed)
        self.wrong: list[dict[str, object]] = []
        self.counts = {"answers": 0, "broken off": 0, "told of a death": 0, "engines killed": 0, "clients killed": 0}
        self.prompts = [BEGINNING * bool(args.kv_host) + p for p in PROMPTS]
        self.rss: list[float] = []
        self.waits: list[float] = []

    async def ask(self, client: httpx.AsyncClient, model: str, prompt: str) -> str:
        """A whole answer. Asked again where the queue is full, or, with --kills, where an engine has died."""
        body = {"model": model, "prompt": prompt, "max_tokens": self.args.tokens, "temperature": 0, "ignore_eos": True}
        while True:
            answer = await client.post("/v1/completions", json=body)
            dead = (
                self.args.kills
                and answer.status_code in (500, 503)
                and re.search("was killed|has ended|ended with", answer.text)
            )
            if answer.status_code == 429 or dead:
                self.counts["told of a death"] += bool(dead)
                await asyncio.sleep(min(1.0, float(answer.headers.get("retry-after", 0.2))))
                continue
            assert answer.status_code == 200, answer.text
            output = answer.json()
            assert output["model"] == model, output
            return output["choices"][0]["text"]

    async def user(self, client: httpx.AsyncClient, left: Iterator[int], alone: dict[tuple[str, str], str]) -> None:
        """One user's requests."""
        for number in left:
            model, prompt = self.rng.choice(NAMES), self.rng.choice(self.prompts)
            if self.rng.random() < 0.15:
                await break_off(client, model, prompt, self.rng.choice((0.01, 0.3, 2.0)))
                self.counts["broken off"] += 1
                continue
            began = time.monotonic()
            try:
                text = await self.ask(client, model, prompt)
            except (httpx.HTTPError, AssertionError) as e:
                self.wrong.append({"number": number, "lost": f"{type(e).__name__}: {e}"})
                continue
            self.waits.append(time.monotonic() - began)
            self.counts["answers"] += 1
            if text != alone[model, prompt]:
                whose = [m for m in NAMES if alone[m, prompt] == text]
                self.wrong.append({"number": number, "model": model, "prompt": prompt[-20:], "text": text, "whose": whose})
            self.rss.append(rss_mb(self.pid))

    async def kill(self) -> None:
        """Kill an engine at each of --kills moments of the run, and at the same time a client in each phase of its request."""
        for i in range(self.args.kills):
            while self.counts["answers"] + self.counts["broken off"] < self.args.requests * i // (self.args.kills + 1):
                await asyncio.sleep(0.02)
            body = json.dumps({"model": self.rng.choice(NAMES), "prompt": self.prompts[0], "max_tokens": 200, "stream": True})
            line = (sys.executable, "-c", CLIENT, self.url.removeprefix("http://"), str(i % 5), body)
            client = await asyncio.create_subprocess_exec(*line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert client.stdout is not None
            if i % 5 == 4:  # its answer may wait for a model that is swapped or has died
                await asyncio.sleep(self.rng.random())
            else:
                await client.stdout.readline()
            client.kill()
            await client.wait()
            engines = children(self.pid)
            if engines:
                victim = self.rng.choice(engines)
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    self.counts["engines killed"] += 1
            self.counts["clients killed"] += 1


async def break_off(client: httpx.AsyncClient, model: str, prompt: str, after: float) -> None:
    """A client that leaves: while its model is loaded, while it waits, or while its answer streams."""
    body = {"model": model, "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
    try:
        async with asyncio.timeout(after), client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                pass
    except TimeoutError:
        pass


async def swaps(url: str, pid: int, args: argparse.Namespace) -> dict[str, object]:
    """The counts of the run."""
    run, limits = Run(url, pid, args), httpx.Limits(max_connections=args.users + 4)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
        alone = {(m, p): await run.ask(client, m, p) for m in NAMES for p in run.prompts}
        assert len(set(alone.values())) > len(alone) * 3 // 4, "the models say the same"
        before, began = files(pid), time.monotonic()
        left = (n for n in range(args.requests) if time.monotonic() < began + args.seconds)
        killer = asyncio.create_task(run.kill())
        await asyncio.gather(*(run.user(client, left, alone) for _ in range(args.users)))
        killer.cancel()
        with suppress(asyncio.CancelledError):
            await killer
        spent = time.monotonic() - began
        for _ in range(400):  # what was broken off last
            health = (await client.get("/health")).json()
            if not health["running"] and not health["waiting"]:
                break
            await asyncio.sleep(0.05)
        rows = (await client.get("/metrics")).text.splitlines()
        loads = {m[1]: float(m[2]) for r in rows if (m := re.match(r'lowq_model_loads_total\{model="(.*)"\} (.*)', r))}
        hits = sum(float(m[1]) for r in rows if (m := re.match(r"lowq_kv_host_hit_tokens_total\{.*\} (.*)", r)))
        loaded = sum(m["loaded"] for m in (await client.get("/v1/models")).json()["data"])
        open_files = {"start": before, "end": files(pid)}
    waits, rss = sorted(run.waits), run.rss
    return {
        "requests": run.counts["answers"] + run.counts["broken off"] + sum("lost" in w for w in run.wrong), "users": args.users,
        "seconds": round(spent, 1), "counts": run.counts,
        "wrong": len(run.wrong), "first_wrong": run.wrong[:5], "loads": loads, "loaded_at_the_end": loaded, "left": health,
        "rss_mb": {"quarter": round(rss[len(rss) // 4]), "end": round(rss[-1]), "peak": round(max(rss))},
        "files": open_files, "host_hit_tokens": hits,
        "wait_s": {"p50": round(waits[len(waits) // 2], 2), "p99": round(waits[int(len(waits) * 0.99)], 2)},
    }  # fmt: skip


def arguments(args: argparse.Namespace, folder: str) -> list[str]:
    """Those of a server of the models in a folder."""
    line = ["--models", folder, "--device", "cpu"]
    line += ["--memory", str(TWO + (size(args.kv_host, "--kv-host") if args.kv_host else 0))]
    if args.kv_host:
        return [*line, "--kv-host", args.kv_host, "--cache-tokens", "640"]
    return [*line, "--deterministic", "--cache-tokens", "2048"]


def kill_server(args: argparse.Namespace, folder: str) -> list[dict[str, object]]:
    """Kill a server with two models while it loads a third, while it answers, while it unloads; its engines end, too."""
    result = []
    for phase in ("loading", "answering", "unloading"):
        with serving(*arguments(args, folder)) as (server, url, _):
            body = {"prompt": BEGINNING, "max_tokens": 400 if phase == "answering" else 1, "ignore_eos": True}
            asking = [
                threading.Thread(target=_quietly, args=(url, body | {"model": m}), daemon=True)
                for m in (NAMES[:2] if phase == "answering" else NAMES[: 3 if phase == "loading" else 4])
            ]
            for thread in asking:
                thread.start()
            expected = {"loading": "loading", "answering": "ready", "unloading": "draining"}[phase]
            until = time.monotonic() + 60
            while time.monotonic() < until:
                states = [m["state"] for m in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]]
                if expected in states and (phase != "loading" or "ready" in states):
                    break
            engines = children(server.pid)
            server.kill()
            began = time.monotonic()
            while (alive := [p for p in engines if not ended(p)]) and time.monotonic() < began + 60:
                time.sleep(0.05)
            result.append({"phase": phase, "seen": expected in states, "engines": len(engines), "left": len(alive)})
            result[-1]["seconds"] = round(time.monotonic() - began, 1)
    return result


def _quietly(url: str, body: dict[str, object]) -> None:
    with suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)


def main() -> None:
    ask_ = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ask_.add_argument("--requests", type=int, default=2000)
    ask_.add_argument("--users", type=int, default=24)
    ask_.add_argument("--seed", type=int, default=1)
    ask_.add_argument("--tokens", type=int, default=12)
    ask_.add_argument("--kills", type=int, default=0)
    ask_.add_argument("--kv-host", default="")
    ask_.add_argument("--seconds", type=float, default=float("inf"), help="begin no further request after so long")
    ask_.add_argument("--out", type=Path)
    args = ask_.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder), dtype=torch.float32 if args.kv_host else None)
        with serving(*arguments(args, folder)) as (server, url, output):
            row = asyncio.run(swaps(url, server.pid, args))
        row |= {"exit_code": server.returncode, "internal_errors": sum("internal error" in s for s in output)}
        print(json.dumps(row, indent=1), flush=True)
        row["servers_killed"] = kill_server(args, folder) if args.kills else []
    if args.kills:
        print(json.dumps(row["servers_killed"], indent=1))
    if args.out:
        args.out.write_text(json.dumps(row, indent=1) + "\n")
    bad = (
        row["wrong"]
        or row["internal_errors"]
        or row["exit_code"]
        or row["loaded_at_the_end"] > 2
        or any(row["left"][k] for k in ("running", "waiting"))
        or any(s["left"] for s in row["servers_killed"])
        or (args.kv_host and not row["host_hit_tokens"])
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
