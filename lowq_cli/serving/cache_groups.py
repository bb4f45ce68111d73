"""The kinds of state that a model's layers keep of a sequence, and how many blocks each kind takes."""

from dataclasses import dataclass

from lowq_cli.serving.block_pool import BlockPool, Name
from lowq_cli.serving.host_blocks import HostBlocks

REWIND = 16  # tokens by which a sequence can always be rewound, for wrong draft tokens


@dataclass(frozen=True)
class Group:
    """Layers with the same kind of state, which share block tables.

    window: number of last tokens whose keys and values the pages hold, 0 for all. recurrent: whether the layers have one state
    of fixed size instead of pages.
    """

    window: int = 0
    recurrent: bool = False

    def blocks(self, tokens: int, size: int, piece: int = 1) -> int:
        """Return the max. blocks of `size` tokens that a sequence of `tokens` tokens holds, with `piece` tokens per pass."""
        if self.recurrent:
            return 0
        whole = -(-tokens // size)
        # from the first token in the window of a token rewound by REWIND, to the last token of the piece
        return min(whole, -(-(self.window + REWIND - 2 + piece) // size) + 1) if self.window else whole

    def longest(self, blocks: int, size: int, tokens: int) -> int:
        """Return the max. tokens of a sequence, up to `tokens`, that fit into a pool of `blocks` blocks (one of them null)."""
        return tokens if self.blocks(tokens, size) < blocks else min(tokens, (blocks - 1) * size)


class PageGroup:
    """A group of layers with pages, and its pool.

    Args:
        places: number of places in host memory for blocks that the pool has no room for.
    Attributes:
        most: max. blocks that a sequence may hold at once; None where it holds all of its tokens.
    """

    def __init__(self, group: Group, blocks: int, size: int, piece: int, places: int = 0) -> None:
        self.window, self.size, self.pool = group.window, size, BlockPool(blocks)
        self.host = HostBlocks(places)
        self.most = min(group.blocks(1 << 62, size, piece), blocks - 1) if group.window else None

    def first(self, token: int) -> int:
        """Return the first block that a token at this position, or a later one, attends to."""
        return max(0, token - self.window + 1) // self.size if self.window else 0

    def find(self, name: Name) -> int:
        """Return the block of this name; minus its place if it is only in host memory; 0 if there is none."""
        return self.pool.find(name) or -self.host.find(name)

    def end(self, tokens: int, first: int) -> int:
        """Return the max. length of a sequence's block table for `tokens` tokens, if `first` is the first block it holds."""
        whole = -(-tokens // self.size)
        return whole if self.most is None else min(whole, first + self.most)
