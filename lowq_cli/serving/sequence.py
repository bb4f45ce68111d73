"""A sequence: one request in the engine, its tokens, and its cache blocks and slots."""

from dataclasses import dataclass, field

from lowq_cli.engine.pictures import Shown, end_of_pass
from lowq_cli.serving.block_pool import START, Name
from lowq_cli.serving.guessing import TextDrafter
from lowq_cli.serving.request import Request
from lowq_kernels.decode.reference import MOST_DRAFTS

MANY = 2 * MOST_DRAFTS  # more new tokens than passes in flight can bring: the drafter was not used in the meantime


@dataclass
class Table:
    """A sequence's blocks of one page group, and how many of them have been sent to its row on the device.

    Attributes:
        blocks: block i holds tokens i * size .. (i + 1) * size - 1; 0 where it was given back. first: index of the first block
            still held.
        sent: entries sent to the device's row. cleared: first entries that are set to 0 there. reach: entries there that may
            be other than 0.
    """

    blocks: list[int] = field(default_factory=list)
    first: int = 0
    sent: int = 0
    cleared: int = 0
    reach: int = 0

    def changes(self) -> list[tuple[int, list[int]]]:
        """Return the changes to write into the device's row, as (place, blocks) pairs, and mark them as sent."""
        n, writes = len(self.blocks), []
        end = min(self.first, self.sent)
        if self.cleared < end:
            writes.append((self.cleared, [0] * (end - self.cleared)))
        if self.sent < n or self.reach > n:
            writes.append((self.sent, self.blocks[self.sent :] + [0] * (self.reach - n)))
        self.sent, self.cleared, self.reach = n, self.first, n
        return writes

    def unsent(self) -> None:
        """Mark the whole table as not sent, after the sequence got another row."""
        self.sent = self.cleared = self.reach = 0


class Sequence:
    """One request in the engine.

    Attributes:
        tokens: the prompt and the tokens sampled so far. prompt: number of prompt tokens.
        computed: tokens whose state is in the cache, or will be after the passes in flight.
        ahead: tokens in flight, which the host has not read.
        tables: its blocks, by page group. names: names of its blocks of tokens, as far as they were needed; those of the first
            `named` blocks have been set in the pools.
        start: the name before its first block; with an adapter it differs, so that only sequences of one adapter share blocks.
        slot: slot of the recurrent state, 0 while it has none. slot_sent: whether it has been sent to the device's row.
        marks: numbers of prompt tokens after which a snapshot is to be taken. pending: snapshots (tokens, snapshot's slot) of
            which the host has not read all tokens. drafts: (tokens, snapshot's slot) after each row of a draft but the last.
        drafting: whether a draft of it is in flight, until `rewind` says how much of it was right.
        drafter: guesses its next tokens, or None. fed: number of tokens that it has been given.
        drafted, accepted: numbers of draft tokens checked, and of right ones. lead_s: the seconds by which passes with drafts
            have made it earlier than plain ones would have.
        snapshot: name of the last snapshot that was taken while it ran.
        row: the row of its state on the device; during prefill, the row of its tables only. -1: it waits.
        cached: tokens that were found in the cache when it was first admitted.
        started, done: whether its first token has been sent, and whether it has ended.
        failed: the error that ends this sequence only, or None.
        since, waited, first: its wait, as defined in `fairness.Queued`.
        shown: the prompt's images, None for none.
        drawn_before: tokens that were sampled before a preemption took it back to its prompt.
        rank: prompt tokens that the engine had prefilled when its turn came, plus its own: the lowest rank is prefilled
            first; 0: not set yet.
    """

    def __init__(self, number: int, request: Request, start: Name = START) -> None:
        self.number, self.request = number, request
        self.tokens, self.prompt = list(request.prompt), len(request.prompt)
        self.tables: list[Table] = []
        self.names, self.start = list[Name](), start
        self.computed = self.ahead = self.named = self.slot = self.rank = 0
        self.row = self.cached = -1
        self.marks: list[int] = []
        self.pending: list[tuple[int, int]] = []
        self.drafts: list[tuple[int, int]] = []
        self.drafter: TextDrafter | None = None
        self.drafted = self.accepted = self.fed = 0
        self.lead_s = 0.0
        self.snapshot: Name | None = None
        self.slot_sent = self.drafting = self.started = self.done = False
        self.since, self.waited, self.first = 0, 0, False
        self.failed: Exception | None = None
        self.shown: Shown | None = None
        self.drawn_before: list[int] = []

    @property
    def behind(self) -> bool:
        """Whether the drafter lacks many tokens, since no drafts were wanted for a while."""
        return self.drafter is not None and len(self.tokens) - self.fed > MANY

    def feed(self) -> None:
        """Give the drafter the tokens that it lacks."""
        if self.drafter is None or self.fed >= len(self.tokens):
            return
        if not self.fed:
            self.drafter.begin(self.tokens[: self.prompt])
        new, self.fed = self.tokens[max(self.fed, self.prompt) :], len(self.tokens)
        if len(new) > MANY:
            self.drafter.begin(new)
        elif new:
            self.drafter.extend(new)

    def spelled(self, first: int, end: int) -> list[int]:
        """Return tokens first .. end - 1 for names of blocks: tokens of images are replaced by numbers unique to the image."""
        if self.shown is None:
            return self.tokens[first:end]
        n = len(self.shown.names)
        return self.shown.names[first:end] + self.tokens[max(first, n) : max(end, n)]

    def whole_end(self, end: int) -> int:
        """Return where a piece up to `end` has to end: an image that has to be in one piece is not split, even beyond `end`."""
        runs = self.shown.runs if self.shown is not None else []
        cut = end_of_pass(self.computed, end, runs)
        return cut if cut > self.computed else min((b for _, b in runs if b > self.computed), default=end)

    @property
    def repeated(self) -> int | None:
        """The next token if it was sampled before a preemption, else None."""
        count = len(self.tokens) - self.prompt
        return self.drawn_before[count] if count < len(self.drawn_before) else None

    def repeat(self) -> None:
        """Go back to the prompt, to sample the same tokens again with the same kernels."""
        drawn = self.tokens[self.prompt :]
        self.drawn_before = max(self.drawn_before, drawn, key=len)
        del self.tokens[self.prompt :]

    @property
    def remaining(self) -> int:
        """Number of tokens that it may still get, without those in flight."""
        return self.request.max_tokens - (len(self.tokens) - self.prompt) - self.ahead

    def unsent(self) -> None:
        """Mark its tables and slot as not sent, after it got another row."""
        self.slot_sent = False
        for table in self.tables:
            table.unsent()
