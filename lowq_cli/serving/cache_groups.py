"""The kinds of state that a model's layers keep of a text, and how many blocks each kind takes."""

from dataclasses import dataclass

from lowq_cli.serving.block_pool import BlockPool, Name
from lowq_cli.serving.host_blocks import HostBlocks

REWIND = 16  # tokens by which a text can always be taken back: rows of a draft that were wrong


@dataclass(frozen=True)
class Group:
    """Layers whose state is kept in one way, and which share block tables.

    window: pages of keys and values hold the last so many tokens, 0 is all. recurrent: no pages, but one state of fixed size.
    """

    window: int = 0
    recurrent: bool = False

    def blocks(self, tokens: int, size: int, piece: int = 1) -> int:
        """Blocks of `size` tokens that a text of `tokens` tokens holds at most, of which `piece` are computed at once."""
        if self.recurrent:
            return 0
        whole = -(-tokens // size)
        # from the first token that the window of a token taken back by REWIND sees to the last of the piece
        return min(whole, -(-(self.window + REWIND - 2 + piece) // size) + 1) if self.window else whole

    def longest(self, blocks: int, size: int, tokens: int) -> int:
        """Tokens of the longest text, up to `tokens`, for which a pool of so many blocks (one of them null) has room."""
        return tokens if self.blocks(tokens, size) < blocks else min(tokens, (blocks - 1) * size)


class PageGroup:
    """A group of layers with pages, and its pool.

    Args:
        places: in host memory, for blocks that the pool has no room for.
    Attributes:
        most: blocks that a text may hold at once; None where it holds all of its tokens.
    """

    def __init__(self, group: Group, blocks: int, size: int, piece: int, places: int = 0) -> None:
        self.window, self.size, self.pool = group.window, size, BlockPool(blocks)
        self.host = HostBlocks(places)
        self.most = min(group.blocks(1 << 62, size, piece), blocks - 1) if group.window else None

    def first(self, token: int) -> int:
        """The first block that a token at this position, or a later one, attends to."""
        return max(0, token - self.window + 1) // self.size if self.window else 0

    def find(self, name: Name) -> int:
        """The block of this name; minus its place, if it is in host memory alone; 0 where there is none."""
        return self.pool.find(name) or -self.host.find(name)

    def end(self, tokens: int, first: int) -> int:
        """Blocks, counted from a text's beginning, that it may have for so many tokens while `first` is the first it holds."""
        whole = -(-tokens // self.size)
        return whole if self.most is None else min(whole, first + self.most)
