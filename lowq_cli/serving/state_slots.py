"""Which slots of the recurrent layers' state belong to which texts, and which hold snapshots of a state for later texts.

All recurrent layers have the same slots: 0 is the null slot, which no text has; then come those of texts, one each; then
those of snapshots. A snapshot has the name of the last block of tokens before it, as blocks of pages have, and is kept until
its place is needed, least recently used first.
"""

from collections import OrderedDict, deque
from collections.abc import Callable

from lowq_cli.serving.block_pool import Name


class StateSlots:
    """The host's record of slots 1 .. `texts` for texts, `snapshots` slots more for snapshots, and `copies` more for states
    after rows of drafts, so that these take no snapshot's place.

    Attributes:
        evicted: told the name and the slot of a snapshot that gives up its place, before anything is written there; not of one
            that was retired.
    """

    def __init__(self, texts: int, snapshots: int, copies: int = 0) -> None:
        self.texts, self.snapshots, self.copies = texts, snapshots, copies
        self._spare = deque(range(texts + snapshots + 1, texts + snapshots + copies + 1))
        self._free = deque(range(1, texts + 1))
        self._blank = deque(range(texts + 1, texts + snapshots + 1))
        self._named: OrderedDict[Name, int] = OrderedDict()  # the least recently used first
        self._retired: set[Name] = set()
        self.evicted: Callable[[Name, int], None] = lambda name, slot: None

    @property
    def free(self) -> int:
        """Slots that `take` could give."""
        return len(self._free)

    def take(self) -> int:
        """A slot for a text; what it holds is of no use."""
        return self._free.popleft()

    def give_back(self, slot: int) -> None:
        """A text has no use for its slot any more."""
        self._free.append(slot)

    def find(self, name: Name) -> int:
        """The snapshot of this name, or 0."""
        return self._named.get(name, 0)

    def use(self, name: Name) -> None:
        """A snapshot becomes the most recently used one."""
        self._named.move_to_end(name)
        self._retired.discard(name)

    def retire(self, name: Name) -> None:
        """A snapshot, if it is still there, becomes the next to be replaced."""
        if name in self._named:
            self._named.move_to_end(name, last=False)
            self._retired.add(name)

    def reserve(self) -> int:
        """A slot to write a snapshot to, without a name yet; 0 where all are reserved."""
        if self._blank:
            return self._blank.popleft()
        if not self._named:
            return 0
        name, slot = self._named.popitem(last=False)
        if name not in self._retired:
            self.evicted(name, slot)
        self._retired.discard(name)
        return slot

    def unretired(self) -> list[tuple[Name, int]]:
        """Names and slots of snapshots that were not retired, the least recently used first."""
        return [(name, slot) for name, slot in self._named.items() if name not in self._retired]

    @property
    def free_copies(self) -> int:
        """Slots that `copy` could give without taking a snapshot's place."""
        return len(self._spare)

    def copy(self) -> int:
        """A slot for the state after a row of a draft: a spare one, else one for snapshots; 0 where there is none."""
        return self._spare.popleft() if self._spare else self.reserve()

    def drop_copy(self, slot: int) -> None:
        """A state after a row of a draft is of no use any more."""
        (self._spare if len(self._spare) < self.copies else self._blank).append(slot)

    def keep_copy(self, slot: int) -> bool:
        """Whether a slot of a draft's row can stay, as a reserved snapshot: another one takes its place among the spare."""
        if len(self._spare) < self.copies:
            other = self.reserve()
            if not other:
                return False
            self._spare.append(other)
        return True

    def name(self, snapshot: int, name: Name) -> None:
        """Name a reserved snapshot. Where another one has this state already, that one keeps the name."""
        if name in self._named:
            self.drop(snapshot)
            self.use(name)
        else:
            self._named[name] = snapshot

    def drop(self, snapshot: int) -> None:
        """A reserved snapshot that will have no name is free."""
        self._blank.append(snapshot)
