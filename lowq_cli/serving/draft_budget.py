"""Choose how many drafts of which sequences a pass checks, and keep ended answers as a source of guesses for others."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

PASS_GAIN = 1.05  # a pass with drafts must yield this many times the tokens per second of plain passes
REMEMBERED = 1 << 16  # max. tokens of ended answers to keep for guesses; each takes about 200 bytes
RUN = 8  # length, in tokens, of the runs by which ended answers are searched


def choose(
    chances: Iterable[tuple[int, Sequence[float]]],
    sequences: int,
    sizes: Sequence[int],
    seconds: Callable[[int], float],
    plain_s: float,
    latest: Mapping[int, float] | None = None,
) -> dict[int, int]:
    """Return the number of drafts by sequence of the pass with the most tokens per second; {} if plain passes are as good.

    chances: by sequence number, the chance that each draft is right if all before it are. sequences: how many step, with
    at least one row each. sizes: possible numbers of rows of a pass, ascending. seconds: rows -> seconds of a pass. plain_s:
    seconds of a pass without drafts. latest: by sequence number, the max. seconds of a pass that brings this sequence one
    token; with each further one that is expected it may take plain_s longer. None: no limit.
    """
    return _best(chances, sequences, sizes, seconds, plain_s, latest or {})[1]


def rounds(
    chances: Sequence[tuple[int, Sequence[float]]],
    sequences: int,
    sizes: Sequence[int],
    seconds: Callable[[int], float],
    plain_s: float,
    guess_s: float,
    latest: Mapping[int, float] | None = None,
) -> int:
    """Return how many tokens a drafter on the device should guess for each sequence; 0 where plain passes are as good.

    guess_s: seconds of one guess for all sequences. The other arguments are those of `choose`.
    """
    most, best, count = max((len(each) for _, each in chances), default=0), 0.0, 0
    for K in range(1, most + 1):
        some = [(number, each[:K]) for number, each in chances]
        slower = lambda rows, K=K: seconds(rows) + K * guess_s  # noqa: E731
        rate, _ = _best(some, sequences, sizes, slower, plain_s, latest or {})
        if rate > best:
            best, count = rate, K
    return count


def _best(
    chances: Iterable[tuple[int, Sequence[float]]],
    sequences: int,
    sizes: Sequence[int],
    seconds: Callable[[int], float],
    plain_s: float,
    latest: Mapping[int, float],
) -> tuple[float, dict[int, int]]:
    """Return (tokens per second, drafts by sequence) of `choose`; (0, {}) where plain passes are as good."""
    candidates = list[tuple[float, int]]()
    for number, each in chances:
        sure = 1.0
        for chance in each:
            sure *= chance
            candidates.append((-sure, number))
    candidates.sort(key=lambda one: one[0])  # likeliest first; a sequence's drafts stay in order
    best, most, taken, tokens = PASS_GAIN * sequences / plain_s if plain_s else 0.0, 0, 0, float(sequences)
    latest = dict(latest)
    for rows in sizes:
        if rows <= sequences:
            continue
        while taken < min(rows - sequences, len(candidates)):
            right, number = candidates[taken]
            tokens, taken = tokens - right, taken + 1
            if number in latest:
                latest[number] -= right * plain_s
        spent = seconds(rows)
        if tokens / spent > best and spent <= min(latest.values(), default=spent):
            best, most = tokens / spent, taken
        if taken == len(candidates):
            break
    counts: dict[int, int] = {}
    for _, number in candidates[:most]:
        counts[number] = counts.get(number, 0) + 1
    return best if most else 0.0, counts


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
