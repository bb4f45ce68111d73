"""The blocks of a paged cache and the sequences that hold them: shared by equal prefixes, reused least recently used first.

A block that a sequence has filled is named by all tokens from the sequence's start to the block's end, so that equal names
mean equal prefixes. When the last sequence that holds it gives it back, it keeps its name and its contents until the block is
needed: a conversation that continues finds its earlier tokens there. Block 0 is the null block, which no sequence holds; values
that have to be written but are never read go there.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

Name = bytes
START: Name = b""  # the name before a sequence's first block


def name_after(before: Name, tokens: Sequence[int]) -> Name:
    """Return the name of a block of these tokens after the name `before`: a 256-bit digest without known collisions.

    Tokens of images are numbers below zero, of any size (`engine.pictures`).
    """
    content = repr(list(tokens)).encode() if min(tokens) < 0 else array("i", tokens).tobytes()
    return blake2b(before + content, digest_size=32).digest()


class BlockPool:
    """The host's bookkeeping of `blocks` blocks, including the null block.

    Attributes:
        free: number of blocks that no sequence holds, including those that still have a name.
        blank: blocks that no sequence holds and that have no name.
        holders: the number of sequences that hold each block. names: the names of blocks that have one.
        evicted: called with the name and the number of a block that is reused, before anything is written there.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.evicted: Callable[[Name, int], None] = lambda name, block: None
        self.blank: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # named and not held, the least recently used first
        self.holders = [0] * blocks
        self._block: dict[Name, int] = {}
        self.names: dict[int, Name] = {}

    @property
    def free(self) -> int:
        """Number of blocks that `take` could return."""
        return len(self.blank) + len(self._idle)

    def find(self, name: Name) -> int:
        """Return the block of this name, or 0, without holding it."""
        return self._block.get(name, 0)

    def idle(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are free now and would be made unavailable by `hold`."""
        return sum(b > 0 and not self.holders[b] for b in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block, except null blocks."""
        for block in filter(None, blocks):
            self.holders[block] += 1
            self._idle.pop(block, None)

    def take(self, after: int = 0) -> int | None:
        """Return a block for one holder, with undefined contents; None if all are held. `after`: prefer the block after it."""
        if after and after + 1 in self.blank:
            block = after + 1
            del self.blank[block]
        elif self.blank:
            block, _ = self.blank.popitem(last=False)
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            name = self.names.pop(block)
            del self._block[name]
            self.evicted(name, block)
        else:
            return None
        self.holders[block] = 1
        return block

    def give_back(self, blocks: Sequence[int]) -> None:
        """Remove a holder from each block of a sequence, given first to last, except null blocks."""
        for block in filter(None, reversed(blocks)):  # reversed: the end of a sequence is reused before its start
            self.holders[block] -= 1
            if self.holders[block] == 0:
                (self._idle if block in self.names else self.blank)[block] = None

    def unheld(self) -> list[tuple[Name, int]]:
        """Return names and numbers of named blocks that no sequence holds, the least recently used first."""
        return [(self.names[block], block) for block in self._idle]

    def name(self, block: int, name: Name) -> None:
        """Name a held block by its contents. If another block has this name already, that one keeps it."""
        if self._block.setdefault(name, block) == block:
            self.names[block] = name
