"""Which blocks of a paged cache belong to which texts: shared by equal beginnings, reused least recently used first.

A block that a text has filled is named by all tokens from the text's beginning to the block's end, so that equal names mean
equal beginnings. When the last text that holds it gives it back, it keeps its name and its contents until its place is needed:
a conversation that goes on finds what it said before. Block 0 is the null block, which no text holds; what has to be written,
and is never read, goes there.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

Name = bytes
START: Name = b""  # the name before a text's first block


def name_after(before: Name, tokens: Sequence[int]) -> Name:
    """The name of a block of these tokens after `before`: a digest of 256 bits, of which no two equal ones are known.

    Tokens of pictures are numbers below zero, of any size (`engine.pictures`).
    """
    own = repr(list(tokens)).encode() if min(tokens) < 0 else array("i", tokens).tobytes()
    return blake2b(before + own, digest_size=32).digest()


class BlockPool:
    """The host's record of `blocks` blocks, the null block among them.

    Attributes:
        free: blocks that no text holds, those that still have a name included.
        evicted: told the name and the block of what gives up its place, before anything is written there.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.evicted: Callable[[Name, int], None] = lambda name, block: None
        self._blank: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # named and not held, the least recently used first
        self._holders = [0] * blocks
        self._block: dict[Name, int] = {}
        self._name: dict[int, Name] = {}

    @property
    def free(self) -> int:
        """Blocks that `take` could give."""
        return len(self._blank) + len(self._idle)

    def find(self, name: Name) -> int:
        """The block of this name, or 0; nothing is taken."""
        return self._block.get(name, 0)

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these are free now, and would not be if they were held."""
        return sum(b > 0 and not self._holders[b] for b in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder of each, null blocks left out."""
        for block in filter(None, blocks):
            self._holders[block] += 1
            self._idle.pop(block, None)

    def take(self, after: int = 0) -> int | None:
        """A block for one holder, its contents of no use; None where all are held. `after`: best the one that follows this."""
        if after and after + 1 in self._blank:
            block = after + 1
            del self._blank[block]
        elif self._blank:
            block, _ = self._blank.popitem(last=False)
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            name = self._name.pop(block)
            del self._block[name]
            self.evicted(name, block)
        else:
            return None
        self._holders[block] = 1
        return block

    def give_back(self, blocks: Sequence[int]) -> None:
        """One holder fewer of each block of a text, first to last, null blocks left out."""
        for block in filter(None, reversed(blocks)):  # so that the end of a text is reused before its beginning
            self._holders[block] -= 1
            if self._holders[block] == 0:
                (self._idle if block in self._name else self._blank)[block] = None

    def unheld(self) -> list[tuple[Name, int]]:
        """Names and blocks that no text holds, the least recently used first."""
        return [(self._name[block], block) for block in self._idle]

    def name(self, block: int, name: Name) -> None:
        """Name a held block by its contents. Where another block has these contents already, that one keeps the name."""
        if self._block.setdefault(name, block) == block:
            self._name[block] = name
