"""One sequence's guesses in the server: by n-grams, by a drafter on the device, or by both one after the other."""

from collections.abc import Sequence
from typing import Protocol

from lowq_cli.engine.drafts.drafter import GUESSED, Guess
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

    The drafter guesses after each pass on the device; the host reads its guesses only after the sequence's last pass in flight.
    Before, GUESSED stands for each of them, and n-grams go on from the tokens that the host knows.

    Attributes:
        shared, rates: Rates of the drafter's guesses, for all sequences and for this one. followed: whether the drafter on the
            device has read all rows of the sequence; it makes no guesses otherwise.
    """

    def __init__(self, shared: Rates, ngram: NGram) -> None:
        self.shared, self.rates, self.ngram, self.given = shared, Rates(shared.chances), ngram, list[int]()
        self.followed, self._made = True, 0
        self._best: Guess | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        """Do what `HostDrafter.begin` does."""
        self.ngram.begin(prompt)
        self.given, self._best = [], None

    def extend(self, tokens: Sequence[int]) -> None:
        """Do what `HostDrafter.extend` does."""
        self.ngram.extend(tokens)
        self.given, self._best = [], None

    @property
    def made(self) -> int:
        """How many guesses of the drafter there are after the last pass that was launched."""
        return self._made

    @made.setter
    def made(self, n: int) -> None:
        self.given, self._made, self._best = [], n, None

    def give(self, tokens: Sequence[int]) -> None:
        """Take the drafter's guesses of the next tokens."""
        self.made = len(tokens)
        self.given = list(tokens)

    @property
    def chance(self) -> float:
        """The chance that the first token of the guess is right."""
        return next(iter(self._found().chances), 0.0)

    def guess(self, most: int) -> Guess:
        """Do what `HostDrafter.guess` does."""
        best = self._found()
        return Guess(best.tokens[:most], best.chances[:most], min(best.own, most))

    def unread(self, most: int) -> Guess:
        """Return up to `most` of the drafter's guesses, which the host has not read."""
        n = min(most, self.made)
        return Guess([GUESSED] * n, self.rates.chances[:n], n)

    def checked(self, own: int, accepted: int) -> None:
        """Record that a guess was checked, whose first `own` tokens were the drafter's, and that `accepted` were right."""
        for rates in (self.shared, self.rates) if own else ():
            rates.note(own, min(accepted, own))

    def _found(self) -> Guess:
        if self._best is None:
            own = self.unread(self.made)
            # n-grams cannot promise more than their first token's chance
            if not own.own or expected(own.chances) < own.own * self.ngram.chance:
                own = better(own, self.ngram.guess(MOST_DRAFTS))
            if own.own and self.given:
                more = self.ngram.after(self.given, MOST_DRAFTS - own.own)
                own = Guess([*self.given, *more.tokens], [*own.chances, *more.chances], own.own)
            self._best = own
        return self._best


def better(own: Guess, repeated: Guess) -> Guess:
    """Return the guess of which more tokens are expected to be right: a drafter's, or as many tokens of one by n-grams."""
    return own if own.own and expected(own.chances) >= expected(repeated.chances[: own.own]) else repeated


def expected(chances: Sequence[float]) -> float:
    """Return the expected number of right tokens of guesses with these chances."""
    total, sure = 0.0, 1.0
    for chance in chances:
        sure *= chance
        total += sure
    return total
