"""One sequence's guesses in the server: by n-grams, by a drafter on the device, or by both one after the other."""

from collections.abc import Sequence
from typing import Protocol

from lowq_cli.engine.drafts.drafter import Guess
from lowq_cli.engine.drafts.ngram import NGram
from lowq_cli.engine.drafts.rates import Rates
from lowq_kernels.decode.reference import MOST_DRAFTS


class TextDrafter(Protocol):
    """Guesses one sequence's next tokens in the server. chance: the chance that its next guess is right, 0 without a guess."""

    @property
    def chance(self) -> float: ...

    def begin(self, prompt: Sequence[int]) -> None: ...

    def extend(self, tokens: Sequence[int]) -> None: ...

    def guess(self, most: int) -> Guess: ...


class Guessed:
    """One sequence's guesses: those of a drafter on the device, or n-grams where these promise more tokens. N-grams also
    continue after the drafter's last guess, and so use rows that it leaves free.

    Attributes:
        shared, rates: Rates of the drafter's guesses, for all sequences and for this one. followed: whether the drafter on the
            device has read all rows of the sequence; it makes no guesses otherwise.
    """

    def __init__(self, shared: Rates, ngram: NGram) -> None:
        self.shared, self.rates, self.ngram, self.given = shared, Rates(shared.chances), ngram, list[int]()
        self.followed = True
        self._best: tuple[Guess, int] | None = None  # the guess, and how many of its tokens are the drafter's

    def begin(self, prompt: Sequence[int]) -> None:
        """Do what `HostDrafter.begin` does."""
        self.ngram.begin(prompt)
        self.given, self._best = [], None

    def extend(self, tokens: Sequence[int]) -> None:
        """Do what `HostDrafter.extend` does."""
        self.ngram.extend(tokens)
        self.given, self._best = [], None

    def give(self, tokens: Sequence[int]) -> None:
        """Take the drafter's guesses of the next tokens."""
        self.given, self._best = list(tokens), None

    @property
    def chance(self) -> float:
        """The chance that the first token of the guess is right."""
        return next(iter(self._found()[0].chances), 0.0)

    def guess(self, most: int) -> Guess:
        """Do what `HostDrafter.guess` does."""
        best = self._found()[0]
        return Guess(best.tokens[:most], best.chances[:most])

    def checked(self, n: int, accepted: int) -> None:
        """Record that the first n tokens of the guess were checked and `accepted` were right; call it before `extend`."""
        own_count = min(n, self._found()[1])
        for rates in (self.shared, self.rates) if own_count else ():
            rates.note(own_count, min(accepted, own_count))

    def _found(self) -> tuple[Guess, int]:
        if self._best is None:
            repeated, own_guess = self.ngram.guess(MOST_DRAFTS), self.given
            self._best = repeated, 0
            if own_guess and expected(self.rates.chances[: len(own_guess)]) >= expected(repeated.chances[: len(own_guess)]):
                more = self.ngram.after(own_guess, MOST_DRAFTS - len(own_guess))
                chances = [*self.rates.chances[: len(own_guess)], *more.chances]
                self._best = Guess([*own_guess, *more.tokens], chances), len(own_guess)
        return self._best


def expected(chances: Sequence[float]) -> float:
    """Return the expected number of right tokens of guesses with these chances."""
    total, sure = 0.0, 1.0
    for chance in chances:
        sure *= chance
        total += sure
    return total
