"""Drafts without a model: the tokens that followed the last tokens where those occurred before, in prompt or answer.

The last tokens are looked up in tables of runs of SIZES tokens, longest first; the match is then followed as long as its
guesses are right. The share of right guesses is counted per length of the match, also while drafts are not used: so the worth
of a draft is known before the first one is checked.
"""

from collections.abc import Sequence
from typing import Protocol

from lowq_cli.engine.drafts.drafter import Guess

SIZES = (16, 8, 4, 2)  # lengths in tokens of the runs that are looked up
LONGEST = 64  # max. counted length of a match, in tokens
# assumed share of right guesses before any was checked, by the number of bits of the match's length: 1, 2 to 3, 4 to 7, ...
PRIOR = (0.0, 0.1, 0.3, 0.55, 0.75, 0.85, 0.92, 0.95)
WEIGHT = 2.0  # the assumed share counts as this many guesses
KINDS = tuple(min(n, LONGEST).bit_length() for n in range(2 * LONGEST))  # length of a match -> the index of its counts
FEW = 16  # with this many new tokens it is faster to index all of a size at once: for 4,000 tokens 3 ms instead of 12
FADE = 0.98  # a count is multiplied by this at each new guess of its length, which forgets guesses some hundred tokens ago


class Past(Protocol):
    """Other texts, from which guesses may be copied."""

    def find(self, run: tuple[int, ...]) -> tuple[Sequence[int], int] | None:
        """A text and the index in it after an occurrence of these tokens, or None."""
        ...


class NGram:
    """Guesses from the sequence's own tokens, or from `past` where those have no match."""

    name = "ngram"

    def __init__(self, past: Past | None = None) -> None:
        self.tokens: list[int] = []
        self.past = past
        self.places: dict[tuple[int, ...], int] = {}  # run -> index after its last occurrence, of runs in the indexed tokens
        self.indexed = 0  # number of tokens that are indexed: while guesses are right, nothing is looked up
        self.source: Sequence[int] = self.tokens
        self.place = -1  # index of the guess in the source; -1: no guess
        self.length = 0  # length of the match before it
        self.right = [p * WEIGHT for p in PRIOR]
        self.tried = [WEIGHT] * len(PRIOR)

    def begin(self, prompt: Sequence[int]) -> None:
        """As `HostDrafter.begin`; guesses are not counted, since the model did not write the prompt. A later call goes on with
        many tokens at once, in a quarter of the time of `extend`."""
        *before, last = prompt
        self.tokens += before
        self.place = -1
        self._take(last)

    def extend(self, tokens: Sequence[int]) -> None:
        """As `HostDrafter.extend`."""
        for token in tokens:
            self._take(token)

    def guess(self, most: int) -> Guess:
        """As `HostDrafter.guess`."""
        if self.place < 0:
            return Guess()
        guessed = list(self.source[self.place : self.place + most])
        while guessed and len(guessed) < most and self.source is self.tokens:  # past the sequence's end: repeat the guess
            guessed += guessed[: most - len(guessed)]
        return Guess(guessed, self._chances(self.length, len(guessed)))

    def after(self, tokens: Sequence[int], most: int) -> Guess:
        """Guess up to `most` tokens after appending `tokens`, from the sequence's own repetitions."""
        self.index(len(self.tokens))
        end = [*self.tokens[-LONGEST:], *tokens]
        place = next((p for size in SIZES if (p := self.places.get(tuple(end[-size:]), -1)) >= 0), -1) if most > 0 else -1
        if place < 0:
            return Guess()
        alike = next((i for i in range(min(place, len(end))) if self.tokens[place - 1 - i] != end[-1 - i]), len(end))
        guessed = self.tokens[place : place + most]
        return Guess(guessed, self._chances(alike, len(guessed)))

    def index(self, end: int) -> None:
        """Index the runs in the first `end` tokens."""
        for size in SIZES:
            first = max(0, self.indexed - size + 1)
            if end - self.indexed < FEW:
                for i in range(first, end - size + 1):
                    self.places[tuple(self.tokens[i : i + size])] = i + size
            else:
                runs = zip(*(self.tokens[first + i : end] for i in range(size)), strict=False)
                self.places.update(zip(runs, range(first + size, end + 1), strict=False))
        self.indexed = max(self.indexed, end)

    @property
    def chance(self) -> float:
        """The estimated probability that the guess's next token is right; 0 without a guess."""
        return self._chance(self.length) if self.place >= 0 else 0.0

    def _chances(self, length: int, n: int) -> list[float]:
        """The chances of n guesses in a row, the first of them after a match of `length` tokens."""
        shares, first = [r / t for r, t in zip(self.right, self.tried, strict=True)], min(length, LONGEST)
        return [shares[kind] for kind in KINDS[first : first + n]]

    def _chance(self, length: int) -> float:
        kind = min(length, LONGEST).bit_length()
        return self.right[kind] / self.tried[kind]

    def _take(self, token: int) -> None:
        followed = self.place >= 0 and self.place < len(self.source)
        if followed:
            right, kind = self.source[self.place] == token, min(self.length, LONGEST).bit_length()
            self.right[kind] = FADE * self.right[kind] + right
            self.tried[kind] = FADE * self.tried[kind] + 1
            followed = right
        self.tokens.append(token)
        if followed:
            self.place, self.length = self.place + 1, self.length + 1
            return
        self.index(len(self.tokens) - 1)  # without the runs that end with this token, which would find themselves
        runs = (tuple(self.tokens[-size:]) for size in SIZES if size <= len(self.tokens))
        match = next((found for run in runs if (found := self._find(run)) is not None), None)
        if match is None:
            self.place = -1
        else:
            self.source, self.place = match
            self.length = self._alike()

    def _find(self, run: tuple[int, ...]) -> tuple[Sequence[int], int] | None:
        place = self.places.get(run, -1)
        if place >= 0:
            return self.tokens, place
        return None if self.past is None else self.past.find(run)

    def _alike(self) -> int:
        """The number of tokens before the guess that equal those at the sequence's end."""
        n, most = len(self.tokens), min(self.place, len(self.tokens), LONGEST)
        return next((i for i in range(most) if self.source[self.place - 1 - i] != self.tokens[n - 1 - i]), most)
