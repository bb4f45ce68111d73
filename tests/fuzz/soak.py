"""Thousands of requests against `lowq serve`, many of them bad: is each answered, with its own text, and is memory flat?

    python tests/fuzz/soak.py demo --requests 20000 --users 16 --out soak.json

A third of the requests is broken off at a random moment (before the answer, in its middle), a tenth is malformed: bad JSON,
wrong types, bodies of 10 MB, prompts of 200,000 tokens, invalid UTF-8, half a body, a byte at a time. Every other answer is
held against the same prompt asked alone on the idle server, greedy; the server runs with --deterministic unless told otherwise,
so they must be equal; without it, one that differs must at least be no other prompt's. A tenth of the
requests comes before hostile clients do (`hostile`), who then hold connections, halves of bodies and unread answers until the
end: what honest clients waited in both parts is told. Exit code 1 if an answer is wrong or missing, anything fails in the
server, or something is left in it.
"""

import argparse
import asyncio
import json
import platform
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from hostile import beside
from server_process import serving

WORDS = ("the old man", "and", "a sea", "went", "to", "house", "in wood", "once", "king", "said", "she", "night", "ship",
         "of a time")  # fmt: skip
BAD = ("json", "types", "large", "long", "utf8", "half", "slow")
PATIENCE = 300.0  # seconds without an answer after which it counts as lost
Send = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]  # a request's body


@dataclass
class Seen:
    """The results of the run."""

    counts: Counter = field(default_factory=Counter)
    wrong: list = field(default_factory=list)
    different: list = field(default_factory=list)
    rss: list = field(default_factory=list)  # MB of the server's processes, once a second
    waits: list = field(default_factory=list)  # (number of the request, seconds) of every honest one that was answered


class Client:
    """HTTP/1.1 without a library, for requests that no client sends: one request per connection."""

    def __init__(self, url: str) -> None:
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)

    def head(self, path: str, length: int | None) -> bytes:
        what = "POST" if length is not None else "GET"
        more = f"Content-Type: application/json\r\nContent-Length: {length}\r\n" if length is not None else ""
        return f"{what} {path} HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n{more}\r\n".encode()

    async def ask(
        self, path: str, raw: bytes | None = None, send: Send | None = None, leave_after: int | None = None
    ) -> tuple[int | None, bytes]:
        """(status, body); leave_after: how many pieces of the answer are read before leaving, with (None, b""), or None."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(self.head(path, None if raw is None else len(raw)))
            if raw is not None and send is None:
                writer.write(raw)
            elif raw is not None and send is not None:
                await send(writer, raw)
            if leave_after is not None:
                for _ in range(leave_after):
                    await reader.read(256)
                return None, b""
            with suppress(ConnectionError):  # it has heard enough of a body that is too large; its answer is there all the same
                await writer.drain()
            answer = await reader.read(-1)
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        if b"chunked" in head.lower():
            body = b"".join(re.split(rb"(?:^|\r\n)[0-9a-f]+\r\n", body))
        return int(head.split()[1]), body


def text_of(body: bytes, streamed: bool) -> str | None:
    """The text of an answer, or None where it is none."""
    if not streamed:
        return json.loads(body)["choices"][0]["text"]
    lines = [line[6:] for line in body.decode().split("\n\n") if line.startswith("data: ")]
    if not lines or lines[-1].strip() != "[DONE]":
        return None
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


async def half(writer: asyncio.StreamWriter, raw: bytes) -> None:
    writer.write(raw[: len(raw) // 2])
    await writer.drain()


async def slowly(writer: asyncio.StreamWriter, raw: bytes) -> None:
    for i in range(len(raw)):
        writer.write(raw[i : i + 1])
        await writer.drain()
        await asyncio.sleep(0.001)


async def one(
    client: Client, rng: random.Random, number: int, prompts: list[str], tokens: int, alone: list[str | None], seen: Seen
) -> None:
    """A request of a random kind."""
    at = rng.randrange(len(prompts))
    streamed = rng.random() < 0.5
    body = {"prompt": prompts[at], "max_tokens": tokens, "temperature": 0, "stream": streamed}
    raw, path, kind = json.dumps(body).encode(), "/v1/completions", rng.random()
    if kind < 1 / 3:
        wait = rng.random() * 0.2

        async def leave(writer: asyncio.StreamWriter, raw: bytes) -> None:
            writer.write(raw)
            await writer.drain()
            await asyncio.sleep(wait)

        await client.ask(path, raw, leave, leave_after=rng.choice((0, 0, 1, 2, 4)))
        seen.counts["left"] += 1
        return
    if kind < 1 / 3 + 0.1:
        bad = BAD[number % len(BAD)]
        raws = {
            "json": raw[:-1] + b",",
            "types": json.dumps(body | {"temperature": [1], "n": "two"}).encode(),
            "large": json.dumps(body | {"prompt": "x" * (10 << 20)}).encode(),
            "long": json.dumps(body | {"prompt": "word " * 200_000}).encode(),
            "utf8": raw.replace(b'"prompt": "', b'"prompt": "\xff\xfe'),
        }
        if bad == "half":
            await client.ask(path, raw, half, leave_after=0)
            seen.counts["half"] += 1
            return
        status, answer = await client.ask(path, raws.get(bad, raw), slowly if bad == "slow" else None)
        expected = {"large": 413, "slow": 200}.get(bad, 400)
        seen.counts[f"{bad} {status}"] += 1
        if status != expected or (bad != "slow" and "error" not in json.loads(answer)):
            seen.wrong.append({"kind": bad, "status": status, "body": answer[:300].decode(errors="replace")})
        if bad != "slow":
            return
    else:
        asked = time.monotonic()
        status, answer = await client.ask(path, raw)
        seen.waits.append((number, time.monotonic() - asked))
    text = text_of(answer, streamed) if status == 200 else None
    seen.counts["equal" if text == alone[at] else "different"] += 1
    if text != alone[at]:
        mixed_up = text is None or text in alone
        (seen.wrong if mixed_up else seen.different).append({"prompt": prompts[at], "text": text, "alone": alone[at]})


async def together(client: Client, prompts: list[str], tokens: int, alone: list[str | None], seen: Seen) -> None:
    """The first prompts in one request: they run at once however slow the machine is, and compete for a small cache."""
    few = prompts[:8]
    status, answer = await client.ask(
        "/v1/completions", json.dumps({"prompt": few, "max_tokens": tokens, "temperature": 0}).encode()
    )
    texts = [c["text"] for c in json.loads(answer)["choices"]] if status == 200 else []
    if texts != alone[: len(few)]:
        seen.different.append({"prompt": few, "text": texts, "alone": alone[: len(few)]})


def alone_until(count: int) -> int:
    """The number of the first request during which hostile clients run."""
    return count // 10


def spread(waits: list[float]) -> dict[str, float]:
    """Half of all waits, and all but a hundredth, are no longer: ms."""
    ordered = sorted(waits) or [0.0]
    return {f"p{p}": round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 1) for p in (50, 99)}


def prompts_of(rng: random.Random, count: int) -> list[str]:
    """Different prompts, some of them with a beginning in common that is longer than a block of the cache."""
    common = " ".join(rng.choice(WORDS) for _ in range(100))
    results = []
    for i in range(count):
        own = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(2, 60)))
        results.append(f"{common} {own}" if i % 3 == 0 else f"{i} {own}")
    return results


async def soak(
    url: str, pid: int, count: int, users: int, seconds: float, seed: int, tokens: int, different: int, hostile: bool
) -> tuple[Seen, float, dict[str, Any], dict[str, float]]:
    """All requests to `different` prompts, `users` at a time, or as many as `seconds` allow."""
    rng, client, seen, until = random.Random(seed), Client(url), Seen(), time.monotonic() + seconds
    prompts, alone = prompts_of(rng, different), []
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        alone.append(text_of((await client.ask("/v1/completions", json.dumps(body).encode()))[1], False))
    await together(client, prompts, tokens, alone, seen)
    numbers, done = iter(range(count)), False
    guests: list[asyncio.Task[None]] = []

    async def user() -> None:
        for number in numbers:
            if time.monotonic() > until:
                return
            if number == alone_until(count) and hostile:
                guests.append(asyncio.create_task(beside(client.host, client.port, seed)))
            try:
                await asyncio.wait_for(
                    one(client, random.Random(f"{seed} {number}"), number, prompts, tokens, alone, seen), PATIENCE
                )
            except (OSError, ValueError, IndexError, TimeoutError) as e:
                seen.wrong.append({"number": number, "lost": f"{type(e).__name__}: {e}"})
            seen.counts["all"] += 1

    async def watch() -> None:
        while not done:
            processes = [pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]  # the engine's among them
            output = [Path(f"/proc/{p}/status").read_text() for p in processes]
            seen.rss.append(sum(int(t.partition("VmRSS:")[2].split()[0]) for t in output) / 1000)
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    began = time.monotonic()
    await asyncio.gather(*(user() for _ in range(users)))
    spent, done = time.monotonic() - began, True
    await watching
    for guest in guests:
        guest.cancel()
    for _ in range(200):  # what was broken off last
        health = json.loads((await client.ask("/health"))[1])
        if not health["running"] and not health["waiting"]:
            break
        await asyncio.sleep(0.05)
    page = (await client.ask("/metrics"))[1].decode()
    rows = [line for line in page.splitlines() if not line.startswith("#") and "_bucket" not in line]
    metrics = dict(re.sub(r'\{model="[^"]*"\}|model="[^"]*",', "", line).rsplit(" ", 1) for line in rows)
    return seen, spent, health, {k: float(v) for k, v in metrics.items()}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ask.add_argument("model")
    ask.add_argument("--requests", type=int, default=20_000)
    ask.add_argument("--users", type=int, default=16)
    ask.add_argument("--seconds", type=float, default=1e9, help="stop asking after so long")
    ask.add_argument("--tokens", type=int, default=24, help="of an answer")
    ask.add_argument("--prompts", type=int, default=48, help="different ones")
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--device", default="auto")
    ask.add_argument("--args", default="--deterministic", help="more flags of lowq serve")
    ask.add_argument("--honest", action="store_true", help="no hostile clients beside")
    ask.add_argument("--out", type=Path)
    args = ask.parse_args()
    with serving(args.model, "--device", args.device, *args.args.split()) as (server, url, lines):
        run = soak(
            url, server.pid, args.requests, args.users, args.seconds, args.seed, args.tokens, args.prompts, not args.honest
        )
        seen, spent, health, metrics = asyncio.run(run)
    code = server.returncode
    if "--deterministic" in args.args:
        seen.wrong += seen.different
    early = seen.rss[len(seen.rss) // 4]
    row = {
        "model": Path(args.model).name, "engine": next(s for s in lines if "engine: " in s).strip(),
        "flags": args.args, "users": args.users,
        "requests": seen.counts["all"], "seconds": round(spent, 1), "counts": dict(sorted(seen.counts.items())),
        "wrong": len(seen.wrong), "first_wrong": seen.wrong[:5], "internal_errors": sum("internal error" in s for s in lines),
        "failed": metrics.get('lowq_requests_total{outcome="failed"}', 0.0), "left_in_engine": health,
        "cache_usage": metrics["lowq_cache_usage_ratio"], "preemptions": metrics["lowq_preemptions_total"],
        "prefix_hit_tokens": metrics["lowq_prefix_cache_hit_tokens_total"], "tokens": metrics["lowq_generation_tokens_total"],
        "rss_mb": {"after_a_quarter": round(early), "end": round(seen.rss[-1]), "peak": round(max(seen.rss))},
        "hostile": not args.honest,
        "wait_ms": {
            "alone": spread([s for n, s in seen.waits if n < alone_until(args.requests)]),
            "beside": spread([s for n, s in seen.waits if n >= alone_until(args.requests)]),
        },
        "exit_code": code, "machine": f"{platform.machine()}, {platform.processor() or 'CPU'}", "date": str(date.today()),
    }  # fmt: skip
    print(json.dumps(row, indent=1, ensure_ascii=False))
    if args.out:
        args.out.write_text(json.dumps(row, indent=1, ensure_ascii=False) + "\n")
    good = not (row["wrong"] or row["internal_errors"] or row["failed"] or code or health["running"] or health["waiting"])
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
