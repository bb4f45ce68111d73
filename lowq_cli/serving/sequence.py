"""One request on its way through the engine: its tokens, and what it holds of the cache."""

from dataclasses import dataclass, field

from lowq_cli.engine.pictures import Shown, end_of_pass
from lowq_cli.serving.block_pool import START, Name
from lowq_cli.serving.guessing import TextDrafter
from lowq_cli.serving.request import Request


@dataclass
class Table:
    """A text's blocks of one page group, and how much of them stands in its row on the device.

    Attributes:
        blocks: block i holds tokens i * size .. (i + 1) * size - 1; 0 where it was given back. first: the first that is held.
        sent: blocks that stand in the device's row. cleared: of those, the ones set to 0 there. reach: entries there that may
            be another number than 0.
    """

    blocks: list[int] = field(default_factory=list)
    first: int = 0
    sent: int = 0
    cleared: int = 0
    reach: int = 0

    def changes(self) -> list[tuple[int, list[int]]]:
        """What to write into the device's row, (place, blocks) each; it is sent from now on."""
        n, found = len(self.blocks), []
        end = min(self.first, self.sent)
        if self.cleared < end:
            found.append((self.cleared, [0] * (end - self.cleared)))
        if self.sent < n or self.reach > n:
            found.append((self.sent, self.blocks[self.sent :] + [0] * (self.reach - n)))
        self.sent, self.cleared, self.reach = n, self.first, n
        return found

    def unsent(self) -> None:
        """The text has a row of which the device knows nothing."""
        self.sent = self.cleared = self.reach = 0


class Sequence:
    """One request on its way.

    Attributes:
        tokens: the prompt and what was drawn so far. prompt: how many of them were asked with.
        computed: tokens whose state is in the cache, or on its way there.
        ahead: tokens that are being drawn, which the host has not seen.
        tables: its blocks, by page group. names: of its blocks of tokens, as far as they were asked for; those of the first
            `named` blocks have been given to them.
        start: the name before its first block: what an adapter computes is no other's.
        slot: of the recurrent state, 0 while it has none. slot_sent: whether it stands in the row on the device.
        marks: numbers of prompt tokens after which a snapshot is to be taken. pending: snapshots (tokens, snapshot's slot) of
            which the host has not seen all tokens. drafts: (tokens, snapshot's slot) after each row of a draft but the last.
        drafting: whether a draft of it is on its way, until `rewind` says how much of it was right.
        drafter: what guesses its next tokens, or None. drafted, accepted: its drafts that were checked, those that were right.
        snapshot: name of the last snapshot that was taken while it ran.
        row: where its state stands on the device; while it is read, the row of its tables alone. -1: it waits.
        cached: tokens that were found in the cache when it was admitted first.
        started, done: whether its first token has gone out, and whether it has ended.
        failed: why it cannot go on, where it alone cannot.
        since, waited, first: its place in time, as `turns` has it.
        shown: the prompt's pictures, None for none.
        drawn_before: tokens that were drawn before it was put back to its prompt.
        rank: prompt tokens that the engine had read when its turn came, and its own: the least is read next; 0: none yet.
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
        self.drafted = self.accepted = 0
        self.snapshot: Name | None = None
        self.slot_sent = self.drafting = self.started = self.done = False
        self.since, self.waited, self.first = 0, 0, False
        self.failed: Exception | None = None
        self.shown: Shown | None = None
        self.drawn_before: list[int] = []

    def spelled(self, first: int, end: int) -> list[int]:
        """Tokens first .. end by what they are: those of pictures have numbers of their own."""
        if self.shown is None:
            return self.tokens[first:end]
        n = len(self.shown.names)
        return self.shown.names[first:end] + self.tokens[max(first, n) : max(end, n)]

    def whole_end(self, end: int) -> int:
        """Where a piece that could go to `end` ends: a picture that is seen whole is not cut, even if it goes on longer."""
        runs = self.shown.runs if self.shown is not None else []
        cut = end_of_pass(self.computed, end, runs)
        return cut if cut > self.computed else min((b for _, b in runs if b > self.computed), default=end)

    @property
    def repeated(self) -> int | None:
        """The token that comes next, where it was drawn before."""
        made = len(self.tokens) - self.prompt
        return self.drawn_before[made] if made < len(self.drawn_before) else None

    def repeat(self) -> None:
        """Back to the prompt: what was drawn is drawn again, by the same kernels."""
        drawn = self.tokens[self.prompt :]
        self.drawn_before = max(self.drawn_before, drawn, key=len)
        del self.tokens[self.prompt :]

    @property
    def remaining(self) -> int:
        """Tokens that it may still be given, those on their way not counted."""
        return self.request.max_tokens - (len(self.tokens) - self.prompt) - self.ahead

    def unsent(self) -> None:
        """It has a row of which the device knows nothing."""
        self.slot_sent = False
        for table in self.tables:
            table.unsent()
