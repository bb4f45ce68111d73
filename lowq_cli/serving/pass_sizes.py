"""The sizes of a model's passes, in rows, and which of them are recorded.

On a GPU there are few sizes, padded with null rows. On a CPU a pass has exactly the rows it needs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from lowq_packers.arch.parts import Images

# Max. rows of a recorded pass: launching an 8B's kernels one by one takes 6 to 15 ms, computing a pass of 512 rows 10.5 ms.
RECORDED = 1024
# Sizes, in rows, of passes with prompt tokens. Sizes that are not recorded cost nothing, and a prompt of 3,200 tokens in a pass
# of 4,096 rows took 28% longer than necessary; products work on tiles of up to 256 rows.
TOTALS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, *range(1280, 4097, 256))
# Sizes of passes without steps that are recorded as well for models that see: one picture of 1,024 rows and its text. Launching
# an 8B's kernels for them took the host 53 ms on an H200, which computes them in 30.
PICTURED = (1152, 1280)
RIDING = 8  # min. rows that step in a pass with prompt tokens; their number is this times a power of two


@dataclass
class PassSizes:
    """The sizes of passes: `steps`, rows of passes without prompt tokens, and `totals`, all rows of those with; both ascending.

    most: max. rows that step. padded: whether there are few sizes. fixed: whether steps have one size, prompts have one size,
    and no pass mixes them. images: the model's conventions for images. kinds: whether passes are with LoRA adapters, for each
    kind. most_recorded: max. rows of a recorded pass with prompt tokens. largest: max. rows of any recorded pass.
    """

    most: int
    padded: bool = True
    fixed: bool = False
    images: Images | None = None
    kinds: tuple[bool, ...] = (False,)
    most_recorded: int = RECORDED
    largest: float = math.inf

    def __post_init__(self) -> None:
        self.steps = [self.most] if self.fixed else buckets(self.most)
        self.totals = (512,) if self.fixed else TOTALS if self.images is None else tuple(sorted({*TOTALS, *PICTURED}))

    def bucket(self, n: int) -> int:
        """Return the rows that a step of n sequences computes."""
        return next(s for s in self.steps if s >= n) if self.padded and n else n

    def riding(self, n: int) -> int:
        """Return the rows that a step of n sequences takes in a pass with prompt tokens."""
        if not self.padded or not n:
            return n
        return min(max(RIDING, 1 << (n - 1).bit_length()), self.most)

    def size(self, n: int, tokens: int = 0) -> tuple[int, int]:
        """Return the rows that step, and all rows, of a pass of the first n rows and this many prompt tokens."""
        if not tokens:
            return self.bucket(n), self.bucket(n)
        M = (b := self.riding(n)) + tokens
        return b, next(t for t in self.totals if t >= M) if self.padded else M

    def recorded(self) -> Iterator[tuple[int, int]]:
        """Yield (rows that step, all rows) of every pass to record, in the order in which they are needed."""
        yield from ((s, s) for s in self.steps if s <= self.largest)
        riding = (0,) if self.fixed else sorted({self.riding(s) for s in (0, *self.steps)})
        yield from ((b, M) for M in self.totals for b in riding if b < M <= min(self.most_recorded, self.largest))

    @property
    def keys(self) -> list[tuple[int, int, bool]]:
        """The passes to record of each kind, those without adapters first."""
        return [(b, M, adapted) for adapted in self.kinds for b, M in self.recorded()]

    @property
    def timed(self) -> list[tuple[int, int, bool]]:
        """The passes to time, those that are not recorded last.

        Of the recorded ones with prompts, for each number of rows the one with the most rows that step: with fewer a pass
        takes up to 10% less (8B on an H200), and timing all 59 passes took 1.4 s. Larger ones are estimated from the nearest
        but for a few: timing 15 more would take a second.
        """
        most = {M: b for b, M in self.recorded() if b != M}
        recorded = [(b, M, adapted) for b, M, adapted in self.keys if b in (M, most.get(M))]
        others = [t for t in self.totals if t > self.most_recorded and (t <= RECORDED or t % 1024 == 0)]
        riding = {self.totals[-1]: 0 if self.fixed else self.riding(self.most)}
        return recorded + [(riding.get(M, 0), M, adapted) for M, adapted in product(others, self.kinds)]

    @property
    def shows(self) -> bool:
        """Whether passes with pictures can be recorded: no kernel takes tokens that attend to the whole image."""
        return self.images is not None and not self.images.whole

    def pictured(self) -> Iterator[tuple[int, int, bool]]:
        """Yield (rows that step, all rows, whether with adapters) of every pass to record for sequences with images: steps, if
        these need separate rotary positions, and passes with prompts."""
        if self.images is not None and self.images.sections:
            yield from ((b, b, adapted) for b, adapted in product(self.steps, self.kinds))
        if self.shows:
            yield from ((b, M, adapted) for (b, M), adapted in product(self.recorded(), self.kinds) if b != M)
            alone = PICTURED if self.most_recorded == RECORDED and not self.fixed else ()
            yield from ((0, M, adapted) for M, adapted in product(alone, self.kinds) if self.largest >= M)


def buckets(most: int) -> list[int]:
    """Return the sizes of recorded steps, in rows, up to `most`."""
    sizes = [1, 2, 4, 8, *range(16, 33, 8), *range(48, 65, 16), *range(96, most + 32, 32)]
    return [s for s in sizes if s < most] + [most]
