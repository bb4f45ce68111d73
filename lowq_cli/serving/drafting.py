"""How many drafts of which texts a pass checks, and what texts that ended lend to others' guesses."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

GAIN = 1.05  # times more tokens a second than by plain passes, of a pass with drafts
REMEMBERED = 1 << 16  # tokens of answers that others' guesses may come from; each takes about 200 bytes
RUN = 8  # tokens by which they are found


def choose(
    chances: Iterable[tuple[int, Sequence[float]]],
    texts: int,
    sizes: Sequence[int],
    seconds: Callable[[int], float],
    plain_s: float,
) -> dict[int, int]:
    """Drafts by text of the pass that brings the most tokens a second; none where plain passes are as good.

    chances: of texts by number, that each draft is right where all before it are. texts: all that step, each a row at least.
    sizes: rows that a pass may have, ascending, which take `seconds`; `plain_s`: of a pass without drafts.
    """
    return _best(chances, texts, sizes, seconds, plain_s)[1]


def rounds(
    chances: Sequence[tuple[int, Sequence[float]]],
    texts: int,
    sizes: Sequence[int],
    seconds: Callable[[int], float],
    plain_s: float,
    guess_s: float,
) -> int:
    """Guesses that a drafter on the device is to make for each text, of which each takes `guess_s` for all of them; 0 where
    plain passes are as good. The rest as in `choose`."""
    most, best, found = max((len(each) for _, each in chances), default=0), 0.0, 0
    for K in range(1, most + 1):
        some = [(number, each[:K]) for number, each in chances]
        rate, _ = _best(some, texts, sizes, lambda rows, K=K: seconds(rows) + K * guess_s, plain_s)  # type: ignore[misc]
        if rate > best:
            best, found = rate, K
    return found


def _best(
    chances: Iterable[tuple[int, Sequence[float]]],
    texts: int,
    sizes: Sequence[int],
    seconds: Callable[[int], float],
    plain_s: float,
) -> tuple[float, dict[int, int]]:
    """(tokens a second, drafts by text) of `choose`; 0 where plain passes are as good."""
    found = list[tuple[float, int]]()
    for number, each in chances:
        sure = 1.0
        for chance in each:
            sure *= chance
            found.append((-sure, number))
    found.sort(key=lambda one: one[0])  # the surest first: of each text a draft comes before those after it
    best, most, taken, tokens = GAIN * texts / plain_s if plain_s else 0.0, 0, 0, float(texts)
    for rows in sizes:
        if rows <= texts:
            continue
        while taken < min(rows - texts, len(found)):
            tokens -= found[taken][0]
            taken += 1
        if (rate := tokens / seconds(rows)) > best:
            best, most = rate, taken
        if taken == len(found):
            break
    counts: dict[int, int] = {}
    for _, number in found[:most]:
        counts[number] = counts.get(number, 0) + 1
    return best if most else 0.0, counts


class Answers:
    """What texts that ended have said, found by runs of RUN tokens: the oldest are forgotten first."""

    def __init__(self) -> None:
        self.texts: deque[list[int]] = deque()
        self.places: dict[int, tuple[list[int], int]] = {}
        self.tokens = 0

    def add(self, tokens: Sequence[int]) -> None:
        """A text has ended with these."""
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
        """As `ngram.Past`."""
        if len(run) != RUN or (found := self.places.get(hash(run))) is None:
            return None
        text, end = found
        return found if tuple(text[end - RUN : end]) == run else None  # a hash may be another run's

    def _forget(self, text: list[int]) -> None:
        self.tokens -= len(text)
        for end in range(RUN, len(text)):
            key = hash(tuple(text[end - RUN : end]))
            if self.places.get(key, (None,))[0] is text:
                del self.places[key]
