"""Measure lowq's own engine under the users of serve_load.py, without HTTP. benchmarks/results/<gpu>/serve_SHAPE.json.

    python benchmarks/serve_own.py --work /dev/shm/x [--shape 8b] [--parts start,same,load,deterministic,prompts] [--users 1,16]

One model of random codes (vllm_speed.make's, 4 bits, groups of 128, 16-bit embedding and head), loaded once. `start`: seconds
until requests are taken, and what each pass takes. `first`: the first requests. `same`: greedy texts side by side, beside those
of the decoder that answers one alone. `load`: users in a closed loop. `loads`: those of serve_load.LOADS (--loads). `long`:
long prompts. `prompts`: 1,000 lines of mixed lengths, by the engine and in batches of equal shape as `generate --prompts` did.
`draws`: users who ask for top-k and top-p, for penalties, for a mask (that allows all: its price is that a pass waits for the
one before). `preemption`: 64 users and a cache for 40 of their texts. `deterministic`: the same kernels for all.
"""

import argparse
import gc
import json
import queue
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pages import results_of
from serve_load import LOADS, LONGEST_NEW, LONGEST_PROMPT, SEED, Asked, User, closed_loop, plain, requests, users_of
from serve_schedule import change
from vllm_speed import USERS, make

from lowq_cli.engine import stream
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.open_model import ready
from lowq_cli.evaluate.eight_bits import apply_act
from lowq_cli.serving.engines import engine_of
from lowq_cli.serving.request import Draw, Event, Mask, Request, Words
from lowq_cli.serving.token_budget import PREFER

PARTS = ("start", "same", "load", "deterministic", "prompts")
LINES = 1000
TEXTS, NEW = 24, 64  # of `same`
Row = dict[str, Any]


class Engine:
    """An engine and its events; passes: the seconds of every pass by (rows that step, all rows)."""

    def __init__(self, model: Any, **how: Any) -> None:
        began = time.perf_counter()
        self.engine = engine_of(model, 2 * LINES, **how)
        self.made_s = time.perf_counter() - began
        self.events: queue.SimpleQueue[list[tuple[int, Event]]] = queue.SimpleQueue()
        self.engine.start(self.events.put)
        self.ready_s = time.perf_counter() - began
        self.passes: dict[tuple[int, int, bool], list[float]] = defaultdict(list)
        note = self.engine.passes.token_budget.note

        def noted(steps: int, rows: int, seconds: float, adapted: bool = False) -> None:
            self.passes[steps, rows, adapted].append(seconds)
            note(steps, rows, seconds, adapted)

        self.engine.passes.token_budget.note = noted

    def send(self, asked: Asked) -> None:
        number = self.engine.submit(Request(tuple(asked.prompt), asked.new, **self.ways(asked)))
        self.names[number] = asked.number

    def step(self) -> list[tuple[int, list[int], bool]]:
        got = self.events.get(timeout=120)
        return [(self.names[n], [] if e.token is None else [e.token], bool(self.ended(e))) for n, e in got]

    engine: Any  # a ContinuousEngine, whose passes are looked into
    names: dict[int, int]
    ways: Callable[[Asked], Row] = staticmethod(lambda asked: {})  # how requests of a load are drawn

    @staticmethod
    def ended(event: Event) -> str | None:
        if event.finish_reason == "error":
            raise RuntimeError(event.message)
        return event.finish_reason

    def load(self, users: list[User], count: int) -> Row:
        self.names = {}
        self.passes.clear()
        busy, steps = self.engine.stats().busy_s, self.engine.stats().steps
        row = closed_loop(users, count, self.send, self.step)
        row["passes"], row["busy_s"] = self.engine.stats().steps - steps, self.engine.stats().busy_s - busy
        row["device_s"] = sum(map(sum, self.passes.values()))
        row["passes_ms"] = [(b, M, len(s), round(1e3 * sum(s) / len(s), 2)) for (b, M, _), s in sorted(self.passes.items())]
        for number in list(self.names):
            self.engine.cancel(number)
        while self.engine.stats().running or self.engine.stats().waiting:
            time.sleep(0.01)
        while not self.events.empty():
            self.events.get()
        return row

    def answers(self, asked: list[Asked]) -> list[list[int]]:
        numbers = [self.engine.submit(Request(tuple(a.prompt), a.new)) for a in asked]
        found: dict[int, list[int]] = {n: [] for n in numbers}
        left = set(numbers)
        while left:
            for n, e in self.events.get(timeout=120):
                found[n] += [e.token] if e.token is not None else []
                left -= {n} if self.ended(e) else set()
        return [found[n] for n in numbers]


def same(engine: Engine, model: Any, tokenizer: Any, asked: list[Asked]) -> Row:
    """How much of each text is as if it had been asked alone: of the engine itself, and of the decoder."""
    together = engine.answers(asked)
    alone = [engine.answers([a])[0] for a in asked]
    decoder, by_decoder = decoder_of(model), []
    for a in asked:
        g = stream(model, tokenizer, a.prompt, max_new_tokens=a.new, decoder=decoder)
        list(g)
        by_decoder.append(g.tokens[0])
    return {"texts": len(asked), "tokens": sum(map(len, together)), "equal_tokens_of_engine_alone": alike(together, alone)} | {
        "equal_tokens_of_decoder": alike(together, by_decoder),
        "again": alike(together, engine.answers(asked)),
    }


def alike(some: list[list[int]], others: list[list[int]]) -> int:
    """Tokens until the first that differs, of all texts."""
    return sum(next((i for i, (a, b) in enumerate(zip(s, o, strict=False)) if a != b), len(s)) for s, o in zip(some, others))  # noqa: B905


def long(engine: Engine, vocabulary: int) -> list[Row]:
    """Seconds until the first token of long prompts, so many at once."""
    rows = []
    for n, tokens in ((1, 4400), (8, 4400), (1, 32000)):
        g = torch.Generator().manual_seed(n + tokens)
        asked = [Asked(i, torch.randint(3, vocabulary, (tokens,), generator=g).tolist(), 1) for i in range(n)]
        began = time.perf_counter()
        engine.answers(asked)
        rows.append({"prompts": n, "tokens": tokens, "seconds": time.perf_counter() - began})
    return rows


def prompts(engine: Engine, model: Any, tokenizer: Any, vocabulary: int, lines: int, static: bool) -> Row:
    """So many lines, all asked at once; `static`: and in batches of 64, those whose turn it is, until the longest has ended."""
    asked = list(islice(requests(vocabulary, SEED - 1), lines))
    tokens = sum(a.new for a in asked)
    began = time.perf_counter()
    answers = engine.answers(asked)
    seconds = time.perf_counter() - began
    assert sum(map(len, answers)) == tokens
    row = {"lines": lines, "new_tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}
    if static:
        decoder = decoder_of(model)
        began, part = time.perf_counter(), asked[: lines // 4]
        for i in range(0, len(part), 64):
            some = part[i : i + 64]
            g = stream(model, tokenizer, [a.prompt for a in some], max_new_tokens=max(a.new for a in some), decoder=decoder)
            for _ in g.pieces():
                pass
        seconds = time.perf_counter() - began
        made = sum(a.new for a in part)
        row |= {"static_lines": len(part), "static_seconds": seconds, "static_tokens_per_s": made / seconds}
    return row


class Anything(Mask):
    """A mask that allows every token."""

    recipe = ""

    def fill(self, words: Words) -> None:
        words[:] = -1

    def accept(self, token: int) -> None:
        pass


WAYS: dict[str, Callable[[Asked], Row]] = {
    "top_k_top_p": lambda a: {"draw": Draw(temperature=1.0, top_k=50, top_p=0.9, seed=a.number)},
    "penalty": lambda a: {"draw": Draw(frequency_penalty=0.5)},
    "mask": lambda a: {"mask": Anything()},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the checkpoint")
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--parts", default="start,same,load")
    parser.add_argument("--users", default=",".join(map(str, USERS)))
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--requests", type=float, default=1.0, help="share of USERS' requests that are answered")
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--running", type=int)
    parser.add_argument("--prefer", default=PREFER[0], choices=PREFER)
    parser.add_argument("--act", default="none", help="how layers round what prompts' products take")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", dest="settings", help="as serve_schedule.py takes"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    change(args.settings)
    device, parts = args.device, args.parts.split(",")
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    out = args.out or results_of(name) / f"serve_{args.shape}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    found: Row = {
        "device": name,
        "date": datetime.now(UTC).isoformat("T", "seconds"),
        "shape": args.shape,
        "set": args.settings,
        "act": args.act,
        "prefer": args.prefer,
    }
    found |= {p: version(p) for p in ("lowq", "torch")}

    def count(users: int) -> int:
        return max(users, int(USERS[users] * args.requests))

    def part(what: str, work: Callable[[], Any]) -> None:
        try:
            found[what] = work()
        except Exception:
            found[what] = {"failed": traceback.format_exc()}
        print(what, json.dumps(found[what]), flush=True)
        out.write_text(json.dumps(found, indent=1) + "\n")

    folder = args.work / f"lowq-{args.shape}-4"
    if not folder.exists():
        make(folder, args.shape, 4, device)
    began = time.perf_counter()
    model, tokenizer = ready(str(folder), device)
    apply_act(model, tokenizer, args.act)
    found["load_s"] = round(time.perf_counter() - began, 2)
    V = model.get_output_embeddings().weight.shape[0]
    how: Row = {"prefer": args.prefer} | ({"running": args.running} if args.running else {})
    # not all there is: the decoder of `same` and `prompts` needs a cache, too
    engine = Engine(model, cache_tokens=100 * (LONGEST_PROMPT + LONGEST_NEW), **how)
    e = engine.engine
    found["start"] = {"made_s": round(engine.made_s, 2), "ready_s": round(engine.ready_s, 2), "limits": vars(e.limits)}
    known = sorted(e.passes.token_budget.known.items())
    found["start"]["pass_ms"] = [(b, M, round(1e3 * s, 3)) for (b, M, _), s in known]
    print("start", json.dumps(found["start"]), flush=True)
    if "first" in parts:
        part("first", lambda: [engine.load(plain(1, requests(V, seed)), 1) for seed in (1, 2, 3)])
    if "same" in parts:
        asked = [Asked(a.number, a.prompt, NEW) for a in islice(requests(V), TEXTS)]
        part("same", lambda: same(engine, model, tokenizer, asked))
    if "load" in parts:
        for users in map(int, args.users.split(",")):
            part(f"users_{users}", partial(engine.load, plain(users, requests(V, SEED + users)), count(users)))
    if "loads" in parts:
        for name in args.loads.split(","):
            part(name, partial(engine.load, users_of(LOADS[name], V), LOADS[name].count))
    if "long" in parts:
        part("long", lambda: long(engine, V))
    if "prompts" in parts:
        part("prompts", lambda: prompts(engine, model, tokenizer, V, args.lines, True))
    if "draws" in parts:
        for way, ways in WAYS.items():
            engine.ways = ways
            for users in map(int, args.users.split(",")):
                part(f"{way}_users_{users}", partial(engine.load, plain(users, requests(V, SEED + users)), count(users)))
    engine.engine.stop(0)
    if "preemption" in parts or "deterministic" in parts:
        del engine, e
        gc.collect()
        torch.cuda.empty_cache() if device == "cuda" else None
    if "preemption" in parts:
        narrow = Engine(model, cache_tokens=40 * 480, **how)
        part("preemption", partial(narrow.load, plain(64, requests(V, SEED + 64)), count(64)))
        found["preemption"]["preemptions"] = narrow.engine.stats().preemptions
        out.write_text(json.dumps(found, indent=1) + "\n")
        narrow.engine.stop(0)
        del narrow
    if "deterministic" in parts:
        gc.collect()
        torch.cuda.empty_cache() if device == "cuda" else None
        fixed = Engine(model, deterministic=True, **how)
        asked = [Asked(a.number, a.prompt, NEW) for a in islice(requests(V), TEXTS)]
        part("deterministic_same", lambda: {"alone": alike(fixed.answers(asked), [fixed.answers([a])[0] for a in asked])})
        for users in (1, 64):
            part(f"deterministic_users_{users}", partial(fixed.load, plain(users, requests(V, SEED + users)), count(users)))
        fixed.engine.stop(0)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
