"""Simulate a schedule of the server before it is measured on a GPU: the engine's own Scheduler and TokenBudget, and a clock.

    python benchmarks/serve_schedule.py [--users 16,64,128] [--loads rag-64,chats-128] [--set SLACK=2.5 EARLY_S=0]

A pass takes what results/h200/serve_8b.json has of it with an empty cache, and what passes under load in the same file took
beyond that: so much a slot that steps attend to, a pass with prompt tokens, and each of them (`fit`). The users are those of
serve_own.py: each sends its next request when its answer has ended. --loads: users of serve_load.LOADS, on an H100 (`h100`).
--clock, --one-server: other clocks, and the loads one after another. --set: other numbers for those of serving/token_budget.py
and EARLY_S; EARLY_S=inf launches each pass as soon as the one before the last was read. Writes results/serve_schedule.json.
"""

import argparse
import json
import statistics
from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from serve_load import LOADS, SEED, Answered, User, percentiles, plain, requests, users_of

from lowq_cli.engine.state import BLOCK
from lowq_cli.serving import pass_pipeline, scheduler, token_budget
from lowq_cli.serving.cache_groups import Group
from lowq_cli.serving.cache_manager import CacheManager
from lowq_cli.serving.continuous import MOST
from lowq_cli.serving.pass_sizes import RECORDED, TOTALS, PassSizes
from lowq_cli.serving.request import Request
from lowq_cli.serving.scheduler import Scheduler
from lowq_cli.serving.sequence import Sequence

RESULTS = Path(__file__).parent / "results"
COUNTS = {1: 8, 16: 64, 64: 192, 128: 320}  # -> requests that are answered, as in the measured file
CACHE = 300_032  # tokens, as there
HOST_S = 1e-4  # from the end of a pass until the host has read it
CLIENT_S = 2e-4  # from an answer's last token until its user's next request is there
V = 1 << 17
Row = dict[str, Any]


@dataclass(frozen=True)
class Clock:
    """Seconds of passes. empty: of (b == M, M) with little in the cache, others lie between; slot, mixed, token: as the first
    lines say; pair: of a prompt's token and one before it that it attends to, where `empty` has no attention of prompts."""

    empty: dict[tuple[bool, int], float]
    slot: float = 0.0
    mixed: float = 0.0
    token: float = 0.0
    pair: float = 0.0

    def seconds(self, b: int, M: int, slots: int, tokens: int, pairs: int = 0) -> float:
        riding = tokens and (b or self.pair)  # an H200's `empty` includes prompts' work where no sequence decodes
        more = self.mixed + self.token * tokens if riding else 0.0
        return self.alone(b == M, M) + self.slot * slots + more + self.pair * pairs

    def alone(self, stepping: bool, M: int) -> float:
        """Seconds of a pass whose cache is nearly empty, interpolated between measured sizes."""
        sizes = sorted(m for kind, m in self.empty if kind == stepping)
        low, high = max((m for m in sizes if m <= M), default=sizes[0]), min((m for m in sizes if m >= M), default=sizes[-1])
        share = (M - low) / (high - low) if high > low else 0.0
        return (1 - share) * self.empty[stepping, low] + share * self.empty[stepping, high]


def measured_clock(measured: Row) -> Clock:
    """Passes with an empty cache; of those that are recorded now and were not then, 512 rows were once, others lie between."""
    found = {}
    for name, ms in measured["start"]["pass_ms"].items():
        kind, rows = name.split()
        found[kind == "step", int(rows)] = ms / 1e3
    found[False, 512] = measured["deterministic_users_64"]["mixed"][0][2] / 1e3
    for M in (m for _, m in list(found) if 256 < m < RECORDED and m != 512):
        found.pop((False, M), None)
    return Clock(found)


def fit(measured: Row, empty: Clock) -> tuple[Clock, list[Row]]:
    """The clock under load, by least squares of the relative error, and what it says of the passes it was fitted to."""
    rows = []
    for users in (16, 64, 128):
        trial = Simulation(Clock(empty.empty, 50e-9), plain(users, requests(V, SEED + users)))
        trial.run(COUNTS[users])
        slots = statistics.mean(s for n, s in trial.stepping if n >= 0.9 * users)
        found = [(True, *p) for p in measured[f"users_{users}"]["steps"]] + [
            (False, *p) for p in measured[f"users_{users}"]["mixed"] if users < p[0] <= 256
        ]
        for alone, M, n, ms in found:
            rows.append(
                (users, M, n, ms / 1e3, [slots, 0.0 if alone else 1.0, 0.0 if alone else M - users], empty.alone(alone, M))
            )
    weight = torch.tensor([r[2] ** 0.5 / r[3] for r in rows], dtype=torch.float64)
    A = torch.tensor([r[4] for r in rows], dtype=torch.float64)
    y = torch.tensor([r[3] - r[5] for r in rows], dtype=torch.float64)
    slot, mixed, token = torch.linalg.lstsq(A * weight[:, None], (y * weight)[:, None]).solution[:, 0].tolist()
    clock = Clock(empty.empty, slot, mixed, token)
    shown = [
        {"users": u, "rows": M, "passes": n, "measured_ms": round(1e3 * s, 2)}
        | {"model_ms": round(1e3 * (e + slot * a[0] + mixed * a[1] + token * a[2]), 2)}
        for u, M, n, s, a, e in rows
    ]
    return clock, shown


# What an H100's passes take beyond those with an empty cache, by serve_own.py's loads (h100/serve_8b.json): seconds of a slot
# that a step attends to (131 KB of an 8B's keys and values), of a prompt's token, and of a pair of one and a token before it.
SLOT, TOKEN, PAIR = 46e-9, 3e-6, 1.2e-9


# The same of an H200 (h200/serve_loads.json): steps of 16 and 64 users with documents take 40 and 37 ns a slot; 4,096 rows that
# read them take 99 to 100 ms, of which 81 with an empty cache and 8 for their pairs.
SLOT_H200, TOKEN_H200 = 40e-9, 2.6e-6
# What h200/http_loads_lowq.json has beyond that, in whose server LoRA adapters are loaded: seconds of a pass (one user's step:
# 2.03 instead of 1.60 ms), of a prompt's token, and from the client to the engine and back (82 instead of 75 ms together).
PASS_HTTP, TOKEN_HTTP, CLIENT_HTTP = 0.43e-3, 2e-6, 2e-3
# The same of h200/http_loads_schedule.json, whose server has no adapters and prompts' activations in e4m3: passes of 1,024 rows
# and more take 0.84 of their seconds in 16 bits, smaller ones from FEWEST_FP8 rows on up to 0.93; 4 ms to the client and back.
FP8, FEWEST_FP8, SLOT_FP8, TOKEN_FP8, PAIR_FP8, CLIENT_FP8 = 0.84, 97, 32e-9, 1e-6, 1e-9, 4e-3


def loaded(measured: Row, slot: float, token: float, more: float = 0.0) -> Clock:
    """A clock of passes with documents; sizes that were not measured are interpolated. more: seconds of every pass."""
    empty = {(b == M, M): more + ms / 1e3 for b, M, ms in measured["start"]["pass_ms"] if b in (M, 0) or M > RECORDED}
    return Clock(empty, slot, 0.0, token, PAIR)


def clock_of(name: str) -> Clock:
    """The clock of --clock."""
    if name == "h100":
        return loaded(json.loads((RESULTS / "h100" / "serve_8b.json").read_text()), SLOT, TOKEN)
    measured = json.loads((RESULTS / "h200" / "serve_loads.json").read_text())
    if name == "fp8":
        clock = loaded(measured, SLOT_FP8, TOKEN_FP8)
        shares = {M: FP8 + 0.1 * max(0, 1024 - M) / 1024 for _, M in clock.empty}
        empty = {(b, M): s * (1.0 if b or M < FEWEST_FP8 else shares[M]) for (b, M), s in clock.empty.items()}
        return Clock(empty, SLOT_FP8, 0.0, TOKEN_FP8, PAIR_FP8)
    http = name == "http"
    return loaded(measured, SLOT_H200, TOKEN_H200 + http * TOKEN_HTTP, http * PASS_HTTP)


class Simulation:
    """ContinuousEngine's thread on a GPU, without one."""

    def __init__(
        self,
        clock: Clock,
        users: list[User],
        gap: float = 0.0,
        prefer: str = token_budget.PREFER[0],
        client: float = CLIENT_S,
        after: "Simulation | None" = None,
    ) -> None:
        most = MOST["cuda"]
        self.sizes, self.budget = PassSizes(most), token_budget.TokenBudget(TOTALS, prefer)
        for s in self.sizes.steps:
            self.budget.note(s, s, clock.alone(True, s))
        for b in {0, *map(self.sizes.riding, self.sizes.steps)}:
            for t in (t for t in TOTALS if t > b):
                self.budget.note(b, t, clock.alone(False, t))
        if after:
            self.budget = after.budget
        cache = CacheManager([Group()], [1 + CACHE // BLOCK], BLOCK, TOTALS[-1])
        self.client = client
        self.clock, self.scheduler = clock, Scheduler(cache, most, self.sizes.bucket)
        self.users: dict[int, User] = {}  # by their texts
        self.coming = [(gap * i, user, next(user)) for i, user in enumerate(users)]
        self.now = self.free = self.due = 0.0
        self.flights: deque[tuple[float, list[Sequence], tuple[int, int], float]] = deque()
        self.answers: dict[int, Answered] = {}
        self.done: list[Answered] = []
        self.made = 0
        self.seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.stepping: list[tuple[int, int]] = []

    def run(self, count: int) -> Row:
        while len(self.done) < count:
            if not (self.scheduler.waiting or self.scheduler.active or self.flights):
                self.now = max(self.now, min(at for at, *_ in self.coming))
            self._take()
            if self._may_wait():
                until = min(self.due - scheduler.EARLY_S, min((at for at, *_ in self.coming), default=self.due))
                self.now = max(self.now, until)
                self._take()
            self._turn()
        first = [a.times[0][0] - a.sent + self.client - CLIENT_S for a in self.done]
        between = [b[0] - a[0] for d in self.done for a, b in pairwise(d.times)]
        row: Row = {"tokens_per_s": self.made / self.now, "ttft_ms": percentiles(first), "between_ms": percentiles(between)}
        return row | {"passes_ms": [(*k, len(s), round(1e3 * statistics.mean(s), 2)) for k, s in sorted(self.seconds.items())]}

    def _may_wait(self) -> bool:
        s = self.scheduler
        return bool(self.flights) and not (s.waiting or s.reading) and len(s.active) < len(s.running)

    def _take(self) -> None:
        for at, user, asked in [c for c in self.coming if c[0] <= self.now]:
            text = Sequence(len(self.answers) + 1, Request(tuple(asked.prompt), asked.new))
            self.scheduler.add([text])
            self.answers[text.number], self.users[text.number] = Answered(at), user
        self.coming = [c for c in self.coming if c[0] > self.now]

    def _turn(self) -> None:
        budget, load, riding = self.budget, self.scheduler.load, self.sizes.riding
        plan = self.scheduler.plan(
            lambda high, waiting: budget.prompt_tokens(*load(high, waiting, riding(high))),
            lambda high, waiting: budget.pauses(*load(high, waiting, riding(high))),
        )
        if plan is None:
            return self._land(0)
        launched = bool(plan.steps or plan.pieces)
        if launched:
            n = max((t.row + 1 for t in plan.steps), default=0)
            size = self.sizes.size(n, sum(end - first for _, _, first, end in plan.pieces))
            slots = sum(t.computed for t in plan.steps)
            pairs = sum((end - first) * (end + first) // 2 for _, _, first, end in plan.pieces)
            seconds = self.clock.seconds(*size, slots, sum(end - first for _, _, first, end in plan.pieces), pairs)
            if not plan.pieces:
                self.stepping.append((len(plan.steps), slots))
            self.free = max(self.free, self.now) + seconds
            self.flights.append((self.free, [*plan.steps, *plan.finishing], size, seconds))
            self.budget.stepped(len(plan.steps))
        self._land(1 if launched else 0)
        return None

    def _land(self, most: int) -> None:
        while len(self.flights) > most:
            end, drew, size, seconds = self.flights.popleft()
            behind, self.now = end < self.now, max(self.now, end) + HOST_S
            self.seconds[size].append(seconds)
            self.budget.note(*size, seconds)
            if self.flights:
                self.due = 0.0 if behind else self.now + pass_pipeline.SURE * self.budget.seconds(*self.flights[0][2])
            for text in drew:
                if text.done:
                    continue
                answer = self.answers[text.number]
                answer.times.append((end, 1))
                self.made += 1
                if self.scheduler.on_token(text, len(answer.times) + 3):
                    self.scheduler.end(text)
                    self.done.append(answer)
                    user = self.users.pop(text.number)
                    self.coming.append((end + self.client, user, user.send(text.tokens[text.prompt :])))


def change(settings: list[str]) -> None:
    """Numbers of serving/token_budget.py and serving/scheduler.py, as NAME=VALUE."""
    for name, value in (s.split("=") for s in settings):
        where = next(m for m in (token_budget, scheduler, pass_pipeline) if hasattr(m, name))
        setattr(where, name, float(value))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--users", default="1,16,64,128")
    ask.add_argument("--loads", default=",".join(LOADS))
    ask.add_argument("--prefer", default=token_budget.PREFER[0], choices=token_budget.PREFER)
    ask.add_argument("--clock", default="h100", choices=("h100", "h200", "http", "fp8"))
    ask.add_argument("--one-server", action="store_true", help="each load meets the TokenBudget that the one before has left")
    ask.add_argument("--seed", type=int, default=SEED)
    ask.add_argument("--gap", type=float, default=0.0, help="ms between the users' first requests")
    ask.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", dest="settings")
    ask.add_argument("--out", type=Path, default=RESULTS / "serve_schedule.json")
    args = ask.parse_args()
    change(args.settings)
    measured = json.loads((RESULTS / "h200" / "serve_8b.json").read_text())
    clock, fitted = fit(measured, measured_clock(measured))
    found: Row = {"date": datetime.now(UTC).isoformat("T", "seconds"), "of": "h200/serve_8b.json"}
    names = ("SLACK", "SHORT", "CROWDED", "PACE", "READ", "HURRY", "HURRIED", "ADVANCE", "LONGEST_S", "PAUSE_S")
    found |= {name: getattr(token_budget, name) for name in names}
    found["prefer"] = args.prefer
    found |= {"EARLY_S": scheduler.EARLY_S, "fitted": fitted}
    found |= {"slot_ns": 1e9 * clock.slot, "mixed_ms": 1e3 * clock.mixed, "token_us": 1e6 * clock.token}
    trials = {
        f"users_{n}": (Simulation(clock, plain(n, requests(V, SEED + n)), args.gap / 1e3, args.prefer), COUNTS[n])
        for n in map(int, filter(None, args.users.split(",")))
    }
    last: Simulation | None = None
    client = {"http": CLIENT_HTTP, "fp8": CLIENT_FP8}.get(args.clock, CLIENT_S)
    for name in filter(None, args.loads.split(",")):
        users = users_of(LOADS[name], V, args.seed)
        trial = Simulation(clock_of(args.clock), users, args.gap / 1e3, args.prefer, client, last)
        trials[name] = trial, LOADS[name].count
        last = trial if args.one_server else None
    for name, (trial, count) in trials.items():
        row = found[name] = trial.run(count)
        t, b = row["ttft_ms"], row["between_ms"]
        first, between = f"{t['p50']:.1f} / {t['p99']:.0f}", f"{b['p50']:.2f} / {b['p99']:.2f}"
        print(f"{name:10s}: {row['tokens_per_s']:6.0f} tokens/s, first token {first} ms, between {between} ms", flush=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
