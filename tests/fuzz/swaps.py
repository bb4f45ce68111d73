"""Four models over a memory for two: requests at random, some broken off; each answer is that of its model and prompt alone.

    python tests/fuzz/swaps.py --requests 2000 --users 24 --out swaps.json

Prints one JSON row; ends with 1 where an answer was lost, wrong or another's, or an engine was left behind.
"""

import argparse
import asyncio
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file

from lowq_cli.files.source import DEMO
from lowq_cli.serving.http.model_pool import PROCESS

NAMES = ("ash", "birch", "cedar", "doum")
PROMPTS = ("Once upon a time", "The king", "In the morning she", "It was", "A letter came", "Nobody knew", "At sea", "My dear")
TWO = 2 * PROCESS + (256 << 20)  # bytes: two of these models and their caches, not three
PATIENCE = 300.0  # seconds that one request may take


def make_models(folder: Path, names: tuple[str, ...] = NAMES) -> Path:
    """The bundled model under several names, some signs of its last norm turned, other ones in each: no two say the same."""
    tensors = load_file(DEMO / "model.safetensors")
    for i, name in enumerate(names):
        shutil.copytree(DEMO, folder / name, ignore=shutil.ignore_patterns("*.py", "*.txt", "__pycache__", "*.safetensors"))
        norm = tensors["model.norm.weight"]
        turned = torch.rand(norm.shape, generator=torch.Generator().manual_seed(i)) < 0.08
        save_file(tensors | {"model.norm.weight": torch.where(turned, -norm, norm)}, folder / name / "model.safetensors")
    return folder


def rss_mb(pid: int) -> float:
    """Resident megabytes of one process."""
    told = Path(f"/proc/{pid}/status").read_text()
    return int(told.partition("VmRSS:")[2].split()[0]) / 1000


async def ask(client: httpx.AsyncClient, model: str, prompt: str, tokens: int) -> str:
    """A whole answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    while True:
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code == 429:
            await asyncio.sleep(0.2)
            continue
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert told["model"] == model, told
        return told["choices"][0]["text"]


async def break_off(client: httpx.AsyncClient, model: str, prompt: str, after: float) -> None:
    """A client that leaves: while its model is loaded, while it waits, or while its answer streams."""
    body = {"model": model, "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
    try:
        async with asyncio.timeout(after), client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                pass
    except TimeoutError:
        pass


async def swaps(url: str, pid: int, requests: int, users: int, seed: int, tokens: int) -> dict[str, object]:
    """What happened."""
    rng, wrong, counts, rss, waits = random.Random(seed), [], {"answers": 0, "broken off": 0}, [], []
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=users + 4)) as client:
        alone = {(m, p): await ask(client, m, p, tokens) for m in NAMES for p in PROMPTS}
        assert len(set(alone.values())) > len(alone) * 3 // 4, "the models say the same"
        left = iter(range(requests))

        async def user() -> None:
            for number in left:
                model, prompt = rng.choice(NAMES), rng.choice(PROMPTS)
                if rng.random() < 0.15:
                    await break_off(client, model, prompt, rng.choice((0.01, 0.3, 2.0)))
                    counts["broken off"] += 1
                    continue
                began = time.monotonic()
                try:
                    text = await ask(client, model, prompt, tokens)
                except (httpx.HTTPError, AssertionError) as e:
                    wrong.append({"number": number, "lost": f"{type(e).__name__}: {e}"})
                    continue
                waits.append(time.monotonic() - began)
                counts["answers"] += 1
                if text != alone[model, prompt]:
                    whose = [m for m in NAMES if alone[m, prompt] == text]
                    wrong.append({"number": number, "model": model, "prompt": prompt, "text": text, "whose": whose})
                if number % 50 == 0:
                    rss.append(rss_mb(pid))

        began = time.monotonic()
        await asyncio.gather(*(user() for _ in range(users)))
        spent = time.monotonic() - began
        for _ in range(400):  # what was broken off last
            health = (await client.get("/health")).json()
            if not health["running"] and not health["waiting"]:
                break
            await asyncio.sleep(0.05)
        rows = (await client.get("/metrics")).text.splitlines()
        loads = {m[1]: float(m[2]) for r in rows if (m := re.match(r'lowq_model_loads_total\{model="(.*)"\} (.*)', r))}
        loaded = sum(m["loaded"] for m in (await client.get("/v1/models")).json()["data"])
    waits.sort()
    return {
        "requests": requests, "users": users, "seconds": round(spent, 1), "counts": counts, "wrong": len(wrong),
        "first_wrong": wrong[:5], "loads": loads, "loaded_at_the_end": loaded, "left": health,
        "rss_mb": {"quarter": round(rss[len(rss) // 4]), "end": round(rss[-1]), "peak": round(max(rss))},
        "wait_s": {"p50": round(waits[len(waits) // 2], 2), "p99": round(waits[int(len(waits) * 0.99)], 2)},
    }  # fmt: skip


def main() -> None:
    ask_ = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ask_.add_argument("--requests", type=int, default=2000)
    ask_.add_argument("--users", type=int, default=24)
    ask_.add_argument("--seed", type=int, default=1)
    ask_.add_argument("--tokens", type=int, default=12)
    ask_.add_argument("--out", type=Path)
    args = ask_.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        line = [sys.executable, "-P", "-c", "from lowq_cli.main import run; run()", "serve", "--models", folder, "--port", "0"]
        line += ["--device", "cpu", "--deterministic", "--cache-tokens", "2048", "--memory", str(TWO)]
        server, said = subprocess.Popen(line, stderr=subprocess.PIPE, text=True), list[str]()
        threading.Thread(target=said.extend, args=(server.stderr,), daemon=True).start()
        try:
            while not (url := next((m[1] for s in said if (m := re.search(r"listening on (http://\S+)", s))), None)):
                if server.poll() is not None:
                    sys.exit("".join(said))
                time.sleep(0.05)
            row = asyncio.run(swaps(url, server.pid, args.requests, args.users, args.seed, args.tokens))
        finally:
            server.terminate()
            row_code = server.wait(60)
    row |= {"exit_code": row_code, "internal_errors": sum("internal error" in s for s in said)}
    text = json.dumps(row, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)
    bad = (
        row["wrong"]
        or row["internal_errors"]
        or row_code
        or row["loaded_at_the_end"] > 2
        or any(row["left"][k] for k in ("running", "waiting"))
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
