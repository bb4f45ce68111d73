"""A device drafter attached to the static decoder of one sequence: its inputs from prompts and steps, and its guesses."""

from collections.abc import Sequence

import torch

from lowq_cli.engine.drafts.drafter import DeviceDrafter, DraftRows
from lowq_kernels.decode.reference import MOST_DRAFTS

Hidden = dict[int, torch.Tensor]
AHEAD = 3 * MOST_DRAFTS  # slots past the last token: for a step that runs ahead, its rows, and the guesses after them


class Attached:
    """A drafter and its guesses. guesses (MOST_DRAFTS,) int64: the next step's drafts, at a fixed address."""

    def __init__(self, drafter: DeviceDrafter, device: torch.device) -> None:
        self.drafter, self.device = drafter, device
        self.taps = tuple(i for i in drafter.layers if i >= 0)
        self.shifted = bool(drafter.layers)  # heads read the token after a row, models the row's own token
        self.guesses = torch.zeros(MOST_DRAFTS, dtype=torch.int64, device=device)
        self.last: Hidden = {}  # the hidden states (1, H) of a prompt's last token

    def hidden(self, y: torch.Tensor, taps: Sequence[torch.Tensor]) -> Hidden:
        """The hidden states of a pass of the model, by layer; -1: its output y."""
        return dict(zip(self.taps, taps, strict=True)) | {-1: y}

    def read(self, ids: torch.Tensor, start: int, rows: int, hidden: Hidden) -> None:
        """Give the drafter rows start .. start + rows of a prompt ids (n,)."""
        n, end = ids.shape[0], start + rows
        known = min(end, n - 1) - start if self.shifted else rows
        if known > 0:
            of = ids[start + 1 : start + 1 + known] if self.shifted else ids[start : start + known]
            pos = torch.arange(start, start + known, dtype=torch.int32, device=self.device)
            there = DraftRows(pos, torch.zeros(known, dtype=torch.int64, device=self.device), known)
            self.drafter.read(of, {i: h[:known] for i, h in hidden.items()}, there)
        if end == n:
            self.last = {i: h[-1:].clone() for i, h in hidden.items()}

    def begin(self, token: torch.Tensor, pos: torch.Tensor) -> None:
        """Make the first guesses, after the prompt's last token and the drawn `token` (1,) at `pos` (1,)."""
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.guess(token, self.last, pos - 1, first, self.drafter.most)

    def guess(self, drawn: torch.Tensor, hidden: Hidden, pos: torch.Tensor, last: torch.Tensor, K: int) -> None:
        """Guess after a step's T rows at `pos`. drawn (T,): the tokens drawn after the rows. last (1,): the last right row."""
        T, K = drawn.shape[0], min(K, self.drafter.most)
        there = DraftRows(pos, torch.zeros(T, dtype=torch.int64, device=self.device), T)
        self.guesses[:K].copy_(self.drafter.draft(drawn, hidden, there, last, K)[0])
