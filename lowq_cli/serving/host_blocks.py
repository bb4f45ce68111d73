"""Bookkeeping, without tensors, of the places in host memory that hold blocks evicted from the device.

An evicted block, or snapshot of a recurrent state, moves to host memory under its name if a place is free or another one was
used less recently. For a sequence with the same prefix it is copied back.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from lowq_cli.serving.block_pool import Name


@dataclass(frozen=True)
class Swap:
    """A copy of one block between the device and host memory.

    group: index of the page group; recurrent states come last. out: whether it is copied to host memory. block: its number on
    the device. place: its place in host memory.
    """

    group: int
    out: bool
    block: int
    place: int


class HostBlocks:
    """Bookkeeping of places 1 .. `places` for blocks of one group; those in `free` have no block, those in `named` have one."""

    def __init__(self, places: int = 0) -> None:
        self.places = places
        self.free = deque(range(1, places + 1))
        self.named: OrderedDict[Name, int] = OrderedDict()  # the least recently used first

    @property
    def used(self) -> int:
        """Number of used places."""
        return len(self.named)

    def find(self, name: Name) -> int:
        """Return the place of this name, or 0."""
        return self.named.get(name, 0)

    def take(self, name: Name) -> int:
        """Return the place of a name that is there; the place is reserved until `give_back` or `keep`."""
        return self.named.pop(name)

    def give_back(self, place: int) -> None:
        """Free a place from `take`."""
        self.free.append(place)

    def keep(self, name: Name, place: int) -> None:
        """Give a place from `take` its name again, as the most recently used one."""
        self.named[name] = place

    def put(self, name: Name) -> int:
        """Return a place to copy the block of this name to; 0 where it is there already or no place is available."""
        if name in self.named:
            self.named.move_to_end(name)
            return 0
        if not (self.free or self.named):
            return 0
        place = self.free.popleft() if self.free else self.named.popitem(last=False)[1]
        self.named[name] = place
        return place

    def record(self) -> list[tuple[Name, int]]:
        """Return all names and places, the least recently used first."""
        return list(self.named.items())

    def restore(self, record: list[tuple[Name, int]]) -> None:
        """Restore the state of an earlier `record`."""
        self.named = OrderedDict(record)
        used = set(self.named.values())
        self.free = deque(p for p in range(1, self.places + 1) if p not in used)
