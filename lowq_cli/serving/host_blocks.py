"""Which places of host memory hold which blocks that a cache had no room for: the host's record, without a tensor in it.

A block, or a snapshot of a recurrent state, whose place on the device is taken by another moves to host memory under its name,
if there is room or something was used less recently. A text that begins like it has it copied back.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from lowq_cli.serving.block_pool import Name


@dataclass(frozen=True)
class Swap:
    """A copy of one block between the device and host memory.

    group: of pages, in order; that of recurrent states comes last. out: to host memory. block: on the device. place: there.
    """

    group: int
    out: bool
    block: int
    place: int


class HostBlocks:
    """The record of places 1 .. `places` for blocks of one group."""

    def __init__(self, places: int = 0) -> None:
        self.places = places
        self._free = deque(range(1, places + 1))
        self._named: OrderedDict[Name, int] = OrderedDict()  # the least recently used first

    @property
    def used(self) -> int:
        """Places that hold something."""
        return len(self._named)

    def find(self, name: Name) -> int:
        """The place of this name, or 0."""
        return self._named.get(name, 0)

    def take(self, name: Name) -> int:
        """The place of a name that is there: nothing else goes there until `give_back` or `keep`."""
        return self._named.pop(name)

    def give_back(self, place: int) -> None:
        """What `take` gave is of no use any more."""
        self._free.append(place)

    def keep(self, name: Name, place: int) -> None:
        """What `take` gave has its name again, as the most recently used one."""
        self._named[name] = place

    def put(self, name: Name) -> int:
        """A place to copy the block of this name to; 0 where it need not be, as it is there, or cannot be."""
        if name in self._named:
            self._named.move_to_end(name)
            return 0
        if not (self._free or self._named):
            return 0
        place = self._free.popleft() if self._free else self._named.popitem(last=False)[1]
        self._named[name] = place
        return place

    def record(self) -> list[tuple[Name, int]]:
        """All names and places, the least recently used first."""
        return list(self._named.items())

    def restore(self, record: list[tuple[Name, int]]) -> None:
        """As it was when `record` was asked for."""
        self._named = OrderedDict(record)
        taken = set(self._named.values())
        self._free = deque(p for p in range(1, self.places + 1) if p not in taken)
