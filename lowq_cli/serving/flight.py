"""A pass in flight: what was launched, and what the host reads of it when it has ended."""

import time

import torch

from lowq_cli.engine.moments import between, moment
from lowq_cli.serving.sampler import LogProbs, fetch
from lowq_cli.serving.sequence import Sequence


class Flight:
    """A pass in flight, created before its launch: the sequences that sample, their rows, its size for `TokenBudget.note`.

    Attributes:
        since: the host's time before the launch. rows, own: only in a pass with drafts, the number of rows of each sequence,
            and how many of its first drafts are those of the drafter on the device. followed: whether this drafter reads the
            pass. K: how many tokens it guesses after it, for the sequences `guessed`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.began, self.since = device, moment(device), time.perf_counter()
        self.rows, self.own, self.guessed = list[int](), list[int](), list[Sequence]()
        self.followed, self.once, self.K = False, False, 0

    def launched(
        self,
        places: list[tuple[int, Sequence]],
        token: torch.Tensor,
        logs: list[LogProbs],
        sound: torch.Tensor | None,
        size: tuple[int, int, bool],
    ) -> "Flight":
        """Record what was launched (sequences, their rows of the logits, which of these are `drawable`) and return self."""
        self.drew, self.logs, self.size = [(t, t.row, i) for i, t in places], logs, size
        self.tokens, self.sound = fetch(token), None if sound is None else fetch(sound)
        self.ended = moment(token.device)
        return self

    def guess(self, texts: list[Sequence], guesses: torch.Tensor | None, once: bool) -> None:
        """Record that the drafter has read the pass, and its guesses (n, K) of the next tokens of some sequences; None: it made
        none. once: whether it did work that later passes do not repeat."""
        if guesses is not None:
            self.guessed, self.guesses, self.K = texts, fetch(guesses), guesses.shape[1]
        self.followed, self.once, self.after = True, once, moment(self.device)

    def drafter_s(self) -> float:
        """Return the seconds that the drafter took to read the pass and to guess; call it once a later pass has ended."""
        return between(self.ended, self.after)

    def over(self) -> bool:
        """Return whether the pass has ended."""
        return isinstance(self.ended, float) or self.ended.query()

    def read(self) -> tuple[list[int], float]:
        """Return the newest token of every row and the seconds of the pass; waits for this pass only."""
        if not isinstance(self.ended, float):
            self.ended.synchronize()
        return self.tokens.tolist(), between(self.began, self.ended)
