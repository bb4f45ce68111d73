"""One text's guesses in the server: by n-grams, by a drafter on the device, or both one after the other."""

from collections.abc import Sequence
from typing import Protocol

from lowq_cli.engine.drafts.drafter import Guess
from lowq_cli.engine.drafts.drafting import FADE, WEIGHT
from lowq_cli.engine.drafts.ngram import NGram
from lowq_kernels.decode.reference import MOST_DRAFTS


class TextDrafter(Protocol):
    """What guesses one text's next tokens in the server. chance: that its next guess is right, 0 without one."""

    @property
    def chance(self) -> float: ...

    def begin(self, prompt: Sequence[int]) -> None: ...

    def extend(self, tokens: Sequence[int]) -> None: ...

    def guess(self, most: int) -> Guess: ...


class Rates:
    """How often guesses were right, by how many of the same round came before them. before: chances to begin with."""

    def __init__(self, before: Sequence[float]) -> None:
        self.begin(before)

    def begin(self, before: Sequence[float]) -> None:
        """Forget what was counted."""
        self.right, self.tried = [WEIGHT * chance for chance in before], [WEIGHT] * len(before)

    @property
    def chances(self) -> list[float]:
        """That each is right where those before it were."""
        return [r / t for r, t in zip(self.right, self.tried, strict=True)]

    def note(self, checked: int, accepted: int) -> None:
        """So many were checked, and the first `accepted` were right."""
        for i in range(min(accepted + 1, checked)):
            self.right[i], self.tried[i] = FADE * self.right[i] + (i < accepted), FADE * self.tried[i] + 1


class Guessed:
    """One text's guesses: those of a drafter on the device, or by n-grams where these promise more; n-grams also go on where
    the drafter's end, and so take rows that it leaves free.

    Attributes:
        shared, rates: of the drafter's guesses, for all texts and for this one.
    """

    def __init__(self, shared: Rates, ngram: NGram) -> None:
        self.shared, self.rates, self.ngram, self.given = shared, Rates(shared.chances), ngram, list[int]()
        self._best: tuple[Guess, int] | None = None  # and how many of its tokens are the drafter's

    def begin(self, prompt: Sequence[int]) -> None:
        """As `HostDrafter.begin`."""
        self.ngram.begin(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """As `HostDrafter.extend`."""
        self.ngram.extend(tokens)
        self.given, self._best = [], None

    def give(self, tokens: Sequence[int]) -> None:
        """The drafter's guesses of what comes next."""
        self.given, self._best = list(tokens), None

    @property
    def chance(self) -> float:
        """That the next token of the guess is right."""
        return next(iter(self._found()[0].chances), 0.0)

    def guess(self, most: int) -> Guess:
        """As `HostDrafter.guess`."""
        found = self._found()[0]
        return Guess(found.tokens[:most], found.chances[:most])

    def checked(self, n: int, accepted: int) -> None:
        """The first n tokens of the guess were checked, of which so many were right: before `extend`."""
        own = min(n, self._found()[1])
        for rates in (self.shared, self.rates) if own else ():
            rates.note(own, min(accepted, own))

    def _found(self) -> tuple[Guess, int]:
        if self._best is None:
            repeated, own = self.ngram.guess(MOST_DRAFTS), self.given
            self._best = repeated, 0
            if own and expected(self.rates.chances[: len(own)]) >= expected(repeated.chances[: len(own)]):
                more = self.ngram.after(own, MOST_DRAFTS - len(own))
                chances = [*self.rates.chances[: len(own)], *more.chances]
                self._best = Guess([*own, *more.tokens], chances), len(own)
        return self._best


def expected(chances: Sequence[float]) -> float:
    """Tokens that guesses with these chances bring."""
    total, sure = 0.0, 1.0
    for chance in chances:
        sure *= chance
        total += sure
    return total
