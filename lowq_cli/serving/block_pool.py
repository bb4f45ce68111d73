"""Which blocks of a paged cache belong to whom: shared by equal beginnings of texts, given back least recently used first.

A block that a text has filled is named by its tokens and by the name of the block before it, so that equal names mean equal
beginnings. When the last text that holds it ends, it keeps its name and its contents until its place is needed: a conversation
that goes on finds what it said before. Block 0 belongs to nobody; what has to be written, and is never read, goes there.
"""

from collections import OrderedDict
from collections.abc import Sequence

START = 0  # the name before a text's first block
Name = int


class BlockPool:
    """The host's book of `blocks` blocks of `size` slots, number 0 apart.

    Attributes:
        free: blocks that nobody holds, those that still have a name included.
    """

    def __init__(self, blocks: int, size: int) -> None:
        self.blocks, self.size = blocks, size
        self._blank: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._kept: OrderedDict[int, None] = OrderedDict()  # named and held by nobody, the least recently used first
        self._holders = [0] * blocks
        self._named: dict[tuple[Name, tuple[int, ...]], tuple[int, Name]] = {}  # -> the block and its own name
        self._key: dict[int, tuple[Name, tuple[int, ...]]] = {}  # of a named block
        self._last_name = START

    @property
    def free(self) -> int:
        """Blocks that `take` could give."""
        return len(self._blank) + len(self._kept)

    def find(self, tokens: Sequence[int]) -> tuple[list[int], Name]:
        """The longest row of whole blocks that hold the beginning of `tokens`, and the name of the last; nothing is taken."""
        found, name = [], START
        for first in range(0, len(tokens) - self.size + 1, self.size):
            entry = self._named.get((name, tuple(tokens[first : first + self.size])))
            if entry is None:
                break
            found.append(entry[0])
            name = entry[1]
        return found, name

    def held(self, blocks: Sequence[int]) -> int:
        """How many of these somebody holds: to hold them too costs nothing that is free."""
        return sum(self._holders[b] > 0 for b in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """One more holder of each."""
        for block in blocks:
            self._holders[block] += 1
            self._kept.pop(block, None)

    def take(self, after: int = 0) -> int | None:
        """A block for one holder, its contents of no use; None where all are held. `after`: best the one that follows this."""
        if after and after + 1 in self._blank:
            block = after + 1
            del self._blank[block]
        elif self._blank:
            block, _ = self._blank.popitem(last=False)
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
            del self._named[self._key.pop(block)]
        else:
            return None
        self._holders[block] = 1
        return block

    def give_back(self, blocks: Sequence[int]) -> None:
        """One holder fewer of each block of a text, first to last."""
        for block in reversed(blocks):  # so that the end of a text is forgotten before its beginning
            self._holders[block] -= 1
            if self._holders[block] == 0:
                (self._kept if block in self._key else self._blank)[block] = None

    def name(self, block: int, before: Name, tokens: Sequence[int]) -> Name:
        """Name a held block that is filled with `tokens`, after the block called `before`; the name of these contents.

        Where another block has these contents already, that one keeps the name.
        """
        key = (before, tuple(tokens))
        if key not in self._named:
            self._last_name += 1
            self._named[key] = block, self._last_name
            self._key[block] = key
        return self._named[key][1]
