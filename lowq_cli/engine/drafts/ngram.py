"""Drafts without a model: what followed the last tokens where they stood before, in the prompt or in what was drawn.

The last tokens are looked up in tables of runs of SIZES tokens, longest first; from there on the guess is followed for as long
as it is right. How often guesses were right is counted by the length of what matched, also while nobody uses them: so it is
known what a draft is worth before the first one is checked.
"""

from collections.abc import Sequence
from typing import Protocol

from lowq_cli.engine.drafts.drafter import Guess

SIZES = (16, 8, 4, 2)  # tokens of the runs that are looked up
LONGEST = 64  # tokens of a match that are counted
# share of right guesses before anything is known, by the number of bits of the match's length: 1, 2 to 3, 4 to 7, and so on
PRIOR = (0.0, 0.1, 0.3, 0.55, 0.75, 0.85, 0.92, 0.95)
WEIGHT = 2.0  # guesses that this knowledge counts for
FADE = 0.98  # of a count at each new guess of its kind: what was true some hundred tokens ago is forgotten


class Past(Protocol):
    """Other texts, whose tokens a text may go on with."""

    def find(self, run: tuple[int, ...]) -> tuple[Sequence[int], int] | None:
        """A text and the place in it after these tokens, or None."""
        ...


class NGram:
    """The text's own tokens; where they do not help, those of `past`."""

    name = "ngram"

    def __init__(self, past: Past | None = None) -> None:
        self.tokens: list[int] = []
        self.past = past
        self.places: dict[tuple[int, ...], int] = {}  # a run -> the place after its last occurrence
        self.source: Sequence[int] = self.tokens
        self.place = -1  # of the guess in the source; -1: none
        self.length = 0  # tokens before it that are alike
        self.right = [p * WEIGHT for p in PRIOR]
        self.tried = [WEIGHT] * len(PRIOR)

    def begin(self, prompt: Sequence[int]) -> None:
        """As `HostDrafter.begin`; nothing is counted, for the model has not written it."""
        *before, last = prompt
        self.tokens += before
        for size in SIZES:  # by zip: of a prompt of 4,000 tokens this takes 3 ms, token by token 12
            runs = zip(*(self.tokens[i:] for i in range(size)), strict=False)
            self.places.update(zip(runs, range(size, len(self.tokens) + 1), strict=False))
        self._take(last)

    def extend(self, tokens: Sequence[int]) -> None:
        """As `HostDrafter.extend`."""
        for token in tokens:
            self._take(token)

    def guess(self, most: int) -> Guess:
        """As `HostDrafter.guess`."""
        if self.place < 0:
            return Guess()
        made, chances, place, own = list[int](), list[float](), self.place, self.source is self.tokens
        n = len(self.source)
        while len(made) < most and (place < n or own):
            made.append(self.source[place] if place < n else made[place - n])  # past its own end a text repeats the guess
            chances.append(self._chance(self.length + len(chances)))
            place += 1
        return Guess(made, chances)

    def after(self, tokens: Sequence[int], most: int) -> Guess:
        """Up to `most` tokens that may come once the text has gone on with these, by what the text itself repeats."""
        end = [*self.tokens[-LONGEST:], *tokens]
        place = next((p for size in SIZES if (p := self.places.get(tuple(end[-size:]), -1)) >= 0), -1) if most > 0 else -1
        if place < 0:
            return Guess()
        alike = next((i for i in range(min(place, len(end))) if self.tokens[place - 1 - i] != end[-1 - i]), len(end))
        made = self.tokens[place : place + most]
        return Guess(made, [self._chance(alike + i) for i in range(len(made))])

    @property
    def chance(self) -> float:
        """That the next token of the guess is right; 0 without a guess."""
        return self._chance(self.length) if self.place >= 0 else 0.0

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
        found = None
        for size in SIZES:
            if len(self.tokens) < size:
                continue
            run = tuple(self.tokens[-size:])
            if not followed and found is None:
                found = self._find(run)
            self.places[run] = len(self.tokens)
        if followed:
            self.place, self.length = self.place + 1, self.length + 1
        elif found is None:
            self.place = -1
        else:
            self.source, self.place = found
            self.length = self._alike()

    def _find(self, run: tuple[int, ...]) -> tuple[Sequence[int], int] | None:
        place = self.places.get(run, -1)
        if place >= 0:
            return self.tokens, place
        return None if self.past is None else self.past.find(run)

    def _alike(self) -> int:
        """Tokens before the guess that are those at the text's end."""
        n, most = len(self.tokens), min(self.place, len(self.tokens), LONGEST)
        return next((i for i in range(most) if self.source[self.place - 1 - i] != self.tokens[n - 1 - i]), most)
