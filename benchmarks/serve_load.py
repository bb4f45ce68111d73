"""Part of the server benchmarks: users, each of whom sends the next request when the last one is answered.

    from serve_load import LOADS, requests, users_of, closed_loop

The plain load: prompts and answers of lognormal lengths (medians 300 and 200 tokens, sigma 0.6, seeded). LOADS has others by
name: questions with documents, conversations of agents that begin with one text, short chats. Prompts are random token ids and
answers go on to their length, so that every engine does the same work. serve_own.py and vllm_speed.py run them in engines,
serve_http.py the plain one against servers.
"""

import itertools
import math
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

MEDIAN_PROMPT, MEDIAN_NEW, SIGMA = 300, 200, 0.6
LONGEST_PROMPT, LONGEST_NEW = 2000, 1000  # of 1,000 draws one is longer
SEED = 19


@dataclass(frozen=True)
class Asked:
    """One request: a prompt's token ids and how many tokens to answer."""

    number: int
    prompt: list[int]
    new: int


@dataclass
class Answered:
    """When a request was sent, and when which number of its tokens came: seconds of the same clock."""

    sent: float
    times: list[tuple[float, int]] = field(default_factory=list)


def requests(vocabulary: int, seed: int = SEED) -> Iterator[Asked]:
    """Without end, the same for the same seed. Ids from 3 on: those before are special in most vocabularies."""
    rng = random.Random(seed)

    def length(median: int, longest: int) -> int:
        return max(1, min(longest, round(rng.lognormvariate(math.log(median), SIGMA))))

    for number in itertools.count():
        prompt, new = length(MEDIAN_PROMPT, LONGEST_PROMPT), length(MEDIAN_NEW, LONGEST_NEW)
        yield Asked(number, [rng.randrange(3, vocabulary) for _ in range(prompt)], new)


User = Generator[Asked, list[int], None]  # what one user sends, each request after the tokens of the answer to the last


@dataclass(frozen=True)
class Load:
    """Users of a kind.

    users: at once. count: requests that are answered. prompt, new: median tokens of what a user says and is answered. spread:
    sigma of the former, 0.3 of the latter. common: tokens that all conversations begin with. turns: requests of a conversation,
    each with all before it.
    """

    users: int
    count: int
    prompt: int
    new: int
    spread: float
    common: int = 0
    turns: int = 1


LOADS = {
    "rag-1": Load(1, 8, 3200, 120, 0.1),
    "rag-16": Load(16, 96, 3200, 120, 0.1),
    "rag-64": Load(64, 192, 3200, 120, 0.1),
    "agents-16": Load(16, 128, 150, 120, 0.5, common=1500, turns=6),
    "agents-64": Load(64, 512, 150, 120, 0.5, common=1500, turns=6),
    "chats-128": Load(128, 512, 60, 300, 0.3),
}


def users_of(load: Load, vocabulary: int, seed: int = SEED) -> list[User]:
    """The users of a load, the same for the same seed."""
    common, numbers = random.Random(seed), itertools.count()
    start = [common.randrange(3, vocabulary) for _ in range(load.common)]

    def user(rng: random.Random) -> User:
        while True:
            text = list(start)
            for _ in range(load.turns):
                said = max(1, round(rng.lognormvariate(math.log(load.prompt), load.spread)))
                new = max(1, round(rng.lognormvariate(math.log(load.new), 0.3)))
                text += [rng.randrange(3, vocabulary) for _ in range(said)]
                text += yield Asked(next(numbers), list(text), new)

    return [user(random.Random(f"{seed} {i}")) for i in range(load.users)]


def plain(users: int, asked: Iterator[Asked]) -> list[User]:
    """So many users who send what comes next."""

    def user() -> User:
        while True:
            yield next(asked)

    return [user() for _ in range(users)]


def under_way(users: int, steps: int = 2000) -> tuple[int, ...]:
    """Tokens in the cache of each user's text after so many steps."""
    asked = requests(vocabulary=4)
    texts = [(next(asked), 0) for _ in range(users)]
    for _ in range(steps):
        texts = [(t, n + 1) if n < t.new else (next(asked), 0) for t, n in texts]
    return tuple(len(t.prompt) + n for t, n in texts)


def closed_loop(
    users: Sequence[User],
    count: int,
    send: Callable[[Asked], None],
    step: Callable[[], list[tuple[int, list[int], bool]]],
) -> dict[str, Any]:
    """Keep a request of each user under way until `count` are answered; a row of what they saw.

    Args:
        send: hand a request to the engine.
        step: let the engine go on; (number, new tokens, whether it is done) of each request that got some.
    Returns:
        tokens_per_s until then, of all answers; ttft_ms and between_ms (p50, p99) of the answered ones: from sending to the
        first token, and between tokens, those that come together a gap of 0.
    """
    began, under_way, done, made = time.perf_counter(), dict[int, tuple[User, Answered, list[int]]](), list[Answered](), 0

    def ask(user: User, request: Asked) -> None:
        under_way[request.number] = user, Answered(time.perf_counter()), []
        send(request)

    for user in users:
        ask(user, next(user))
    while len(done) < count:
        found = step()
        now = time.perf_counter()
        for number, tokens, ended in found:
            user, answered, answer = under_way[number]
            made += len(tokens)
            answer += tokens
            if tokens:
                answered.times.append((now, len(tokens)))
            if ended:
                del under_way[number]
                done.append(answered)
                ask(user, user.send(answer))
    return row_of(len(users), count, time.perf_counter() - began, made, done)


def row_of(users: int, count: int, seconds: float, made: int, done: Sequence[Answered]) -> dict[str, Any]:
    """What users of a closed loop saw: `made` tokens of all answers in so many seconds, and the times of the answered ones."""
    first = [a.times[0][0] - a.sent for a in done]
    between = [gap for a in done for gap in _gaps(a.times)]
    row = {"users": users, "requests": count, "seconds": seconds, "tokens_per_s": made / seconds}
    return row | {"ttft_ms": percentiles(first), "between_ms": percentiles(between)}


def _gaps(times: list[tuple[float, int]]) -> Iterator[float]:
    for (before, _), (now, tokens) in itertools.pairwise(times):
        yield now - before
        yield from [0.0] * (tokens - 1)


def percentiles(seconds: list[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds: the smallest value that so many are not above."""
    ordered = sorted(seconds)
    return {f"p{p}": 1e3 * ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in (50, 99)} if ordered else {}
