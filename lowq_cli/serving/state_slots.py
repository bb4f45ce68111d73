"""Slots of the recurrent layers' state: which belong to which sequences, and which hold snapshots for later sequences.

All recurrent layers have the same slots: 0 is the null slot, which no sequence has; then come those of sequences, one each;
then those of snapshots. A snapshot has the name of the last block of tokens before it, like blocks of pages, and is kept until
its slot is needed, least recently used first.
"""

from collections import OrderedDict, deque
from collections.abc import Callable

from lowq_cli.serving.block_pool import Name


class StateSlots:
    """The host's bookkeeping of slots 1 .. `texts` for sequences, of `snapshots` more slots for snapshots, and of `copies` more
    for states after rows of drafts, so that these evict no snapshot.

    Attributes:
        blank: slots for snapshots that are neither reserved nor named. named: the slots of named snapshots.
        evicted: called with the name and the slot of a snapshot that is evicted, before anything is written to its slot; not
            called for a retired snapshot.
    """

    def __init__(self, texts: int, snapshots: int, copies: int = 0) -> None:
        self.texts, self.snapshots, self.copies = texts, snapshots, copies
        self._spare = deque(range(texts + snapshots + 1, texts + snapshots + copies + 1))
        self._free = deque(range(1, texts + 1))
        self.blank = deque(range(texts + 1, texts + snapshots + 1))
        self.named: OrderedDict[Name, int] = OrderedDict()  # the least recently used first
        self._retired: set[Name] = set()
        self.evicted: Callable[[Name, int], None] = lambda name, slot: None

    @property
    def free(self) -> int:
        """Number of slots that `take` could return."""
        return len(self._free)

    def take(self) -> int:
        """Return a slot for a sequence; its contents are undefined."""
        return self._free.popleft()

    def give_back(self, slot: int) -> None:
        """Free a sequence's slot."""
        self._free.append(slot)

    def find(self, name: Name) -> int:
        """Return the slot of the snapshot of this name, or 0."""
        return self.named.get(name, 0)

    def use(self, name: Name) -> None:
        """Make a snapshot the most recently used one."""
        self.named.move_to_end(name)
        self._retired.discard(name)

    def retire(self, name: Name) -> None:
        """Make a snapshot, if it is still there, the next to be replaced."""
        if name in self.named:
            self.named.move_to_end(name, last=False)
            self._retired.add(name)

    def reserve(self) -> int:
        """Return a slot to write a snapshot to, without a name yet; 0 where all are reserved."""
        if self.blank:
            return self.blank.popleft()
        if not self.named:
            return 0
        name, slot = self.named.popitem(last=False)
        if name not in self._retired:
            self.evicted(name, slot)
        self._retired.discard(name)
        return slot

    def unretired(self) -> list[tuple[Name, int]]:
        """Return names and slots of snapshots that were not retired, the least recently used first."""
        return [(name, slot) for name, slot in self.named.items() if name not in self._retired]

    @property
    def free_copies(self) -> int:
        """Number of slots that `copy` could return without evicting a snapshot."""
        return len(self._spare)

    def copy(self) -> int:
        """Return a slot for the state after a row of a draft: a spare one, else one for snapshots; 0 where there is none."""
        return self._spare.popleft() if self._spare else self.reserve()

    def drop_copy(self, slot: int) -> None:
        """Free the slot of a state after a row of a draft."""
        (self._spare if len(self._spare) < self.copies else self.blank).append(slot)

    def keep_copy(self, slot: int) -> bool:
        """Turn the slot of a draft's row into a reserved snapshot, and another slot into a spare; False if there is none."""
        if len(self._spare) < self.copies:
            other = self.reserve()
            if not other:
                return False
            self._spare.append(other)
        return True

    def name(self, snapshot: int, name: Name) -> None:
        """Name a reserved snapshot. If another one has this name already, that one keeps it and this one is freed."""
        if name in self.named:
            self.drop(snapshot)
            self.use(name)
        else:
            self.named[name] = snapshot

    def drop(self, snapshot: int) -> None:
        """Free a reserved snapshot that will get no name."""
        self.blank.append(snapshot)
