"""One request on its way through the engine: its tokens, and what it holds of the cache."""

from lowq_cli.serving.block_pool import START
from lowq_cli.serving.request import Request


class Sequence:
    """One request on its way.

    Attributes:
        tokens: the prompt and what was drawn so far. prompt: how many of them were asked with.
        computed: slots whose keys and values are in the cache, or on their way there.
        ahead: tokens that are being drawn, which the host has not seen.
        blocks: of the cache, in order; the first `named` of them have a name, the last such is called `name`.
        row: where its state stands on the device; while it is read, the row of its table alone. -1: it waits. sent: how many of
            its blocks stand in the table there.
        cached: tokens that were found in the cache when it was admitted first.
        failed: why it cannot go on, where it alone cannot.
        drawn_before: tokens that were drawn before it was put back to its prompt.
        rank: prompt tokens that the engine had read when this text was admitted, and its own: the least is read next.
    """

    def __init__(self, number: int, request: Request) -> None:
        self.number, self.request = number, request
        self.tokens, self.prompt = list(request.prompt), len(request.prompt)
        self.blocks: list[int] = []
        self.computed = self.ahead = self.named = self.sent = self.rank = 0
        self.name, self.row, self.cached = START, -1, -1
        self.started = self.done = False
        self.failed: Exception | None = None
        self.drawn_before: list[int] = []

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
    def room(self) -> int:
        """Tokens that it may still be given, those on their way not counted."""
        return self.request.max_tokens - (len(self.tokens) - self.prompt) - self.ahead
