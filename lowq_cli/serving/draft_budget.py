"""Choose how many drafts of which sequences a pass checks, and keep ended answers as a source of guesses for others."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

PASS_GAIN = 1.05  # a pass with drafts must yield this many times the tokens per second of plain passes
REMEMBERED = 1 << 16  # max. tokens of ended answers to keep for guesses; each takes about 200 bytes
RUN = 8  # length, in tokens, of the runs by which ended answers are searched


class Choice(NamedTuple):
    """The drafts of a pass. rate: its tokens per second, 0.0 without drafts. counts: the number of drafts by sequence."""

    rate: float
    counts: dict[int, int]


def choose(
    chances: Iterable[tuple[int, Sequence[float]]],
    sequences: int,
    sizes: Sequence[int],
    seconds: Callable[[int], float],
    plain_s: float,
    latest: Mapping[int, float] | None = None,
    guess_s: float = 0.0,
) -> Choice:
    """Return the drafts of the pass with the most tokens per second; none if plain passes are as good.

    chances: by sequence number, the chance that each draft is right if all before it are. sequences: how many step, with
    at least one row each. sizes: possible numbers of rows of a pass, ascending. seconds: rows -> seconds of a pass. plain_s:
    seconds of a pass without drafts. latest: by sequence number, the max. seconds of a pass that brings this sequence one
    token; with each further one that is expected it may take plain_s longer. None: no limit. guess_s: seconds in which the
    next draft of all sequences is guessed, if it is still to be.
    """
    given = [(number, each) for number, each in chances if each]
    if not given or not plain_s:
        return Choice(0.0, {})
    numbers, longest = [number for number, _ in given], max(len(each) for _, each in given)
    table = np.zeros((len(given), longest))
    for i, (_, each) in enumerate(given):
        table[i, : len(each)] = each
    sure = table.cumprod(1).ravel()
    order = np.argsort(-sure, kind="stable")[: np.count_nonzero(sure)]  # likeliest first; a sequence's drafts stay in order
    right, of, most = sure[order].cumsum(), order // longest, len(order)
    guessed = np.maximum.accumulate(order % longest + 1)
    options = list[tuple[float, int, float]]()
    for rows in sizes:
        n = min(rows - sequences, most)
        if n > 0:
            spent = seconds(rows) + guess_s * float(guessed[n - 1])
            options.append((-(sequences + float(right[n - 1])) / spent, n, spent))
        if n == most:
            break
    for rate, n, spent in sorted(options):
        if -rate <= PASS_GAIN * sequences / plain_s:
            break
        won = plain_s * np.bincount(of[:n], sure[order[:n]], len(given))
        if spent <= _last(latest or {}, dict(zip(numbers, won.tolist(), strict=True))):
            counts = np.bincount(of[:n], minlength=len(given)).tolist()
            return Choice(-rate, {number: count for number, count in zip(numbers, counts, strict=True) if count})
    return Choice(0.0, {})


def _last(latest: Mapping[int, float], won: Mapping[int, float]) -> float:
    """Return the max. seconds of a pass. won: by sequence number, the seconds of plain passes that its drafts save."""
    return min((seconds + won.get(number, 0.0) for number, seconds in latest.items()), default=math.inf)


class Answers:
    """The tokens of ended answers, searched by runs of RUN tokens; the oldest answers are dropped first."""

    def __init__(self) -> None:
        self.texts: deque[list[int]] = deque()
        self.places: dict[int, tuple[list[int], int]] = {}
        self.tokens = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Add the tokens of an answer that has ended."""
        text = list(tokens[:REMEMBERED])
        if len(text) <= RUN:
            return
        self.texts.append(text)
        self.tokens += len(text)
        for end in range(RUN, len(text)):
            self.places[hash(tuple(text[end - RUN : end]))] = text, end
        while self.tokens > REMEMBERED:
            self._forget(self.texts.popleft())

    def find(self, run: tuple[int, ...]) -> tuple[Sequence[int], int] | None:
        """Return the answer that contains this run and the place after it, as `ngram.Past` asks for."""
        if len(run) != RUN or (place := self.places.get(hash(run))) is None:
            return None
        text, end = place
        return place if tuple(text[end - RUN : end]) == run else None  # different runs may have the same hash

    def _forget(self, text: list[int]) -> None:
        self.tokens -= len(text)
        for end in range(RUN, len(text)):
            key = hash(tuple(text[end - RUN : end]))
            if self.places.get(key, (None,))[0] is text:
                del self.places[key]
