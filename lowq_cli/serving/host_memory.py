"""The host memory that a server lends its engines for blocks of their caches (`host_cache`), also while a model is unloaded.

Each model has a file without a name, in memory, which grows as blocks are copied to it up to a size that is counted from the
start: all files together never hold more than the server was given. A model that is loaded for the first time takes room, if
there is none left, from those that were unloaded, least recently first.
"""

import os
import threading
from dataclasses import dataclass

from lowq_packers.errors import UnsupportedError

SHARES = 4  # models among which the memory is divided at most, as all memory for models is


@dataclass(frozen=True)
class Kept:
    """What an engine has left in its file, for the next one that is the same.

    key: what must be the same. places: of each group. records: names and places of each group. bytes: that they hold.
    """

    key: bytes
    places: tuple[int, ...]
    records: tuple[list[tuple[bytes, int]], ...]
    bytes: int


@dataclass(frozen=True)
class Lent:
    """The file that an engine may use, what is in it, its `room` in bytes, and the key of the engine that uses it."""

    path: str
    kept: Kept | None
    room: int
    key: bytes = b""


@dataclass
class _Region:
    file: int
    bytes: int
    lent: Lent | None = None
    kept: Kept | None = None


class HostMemory:
    """`bytes_` of host memory for `models` models; from any thread.

    Raises UnsupportedError where the system has no such files.
    """

    def __init__(self, bytes_: int, models: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise UnsupportedError("--kv-host needs Linux, whose files in memory have no names; leave it out here")
        self.bytes, self._share = bytes_, bytes_ // min(max(models, 1), SHARES)
        self._regions: dict[str, _Region] = {}  # the least recently used first
        self._lock = threading.Lock()

    def lend(self, name: str) -> Lent | None:
        """The file of a model that is to be loaded; None where those of loaded ones leave no room."""
        with self._lock:
            region = self._regions.pop(name, None)
            if region is not None and region.lent is not None:  # its engine died
                os.close(region.file)
                region = None
            if region is None:
                region = self._new()
            if region is None:
                return None
            self._regions[name] = region
            region.lent = Lent(f"/proc/{os.getpid()}/fd/{region.file}", region.kept, region.bytes)
            return region.lent

    def take_back(self, name: str, lent: Lent, kept: Kept | None) -> None:
        """A model has been unloaded, and this is what its file holds; None: nothing that is of use."""
        with self._lock:
            region = self._regions.get(name)
            if region is None or region.lent is not lent:
                return
            region.lent, region.kept = None, kept
            if kept is None:
                os.close(self._regions.pop(name).file)

    def kept_bytes(self, name: str) -> int:
        """Bytes that wait for a model that is not loaded."""
        with self._lock:
            region = self._regions.get(name)
            return 0 if region is None or region.lent is not None or region.kept is None else region.kept.bytes

    def close(self) -> None:
        """Give all of it back."""
        with self._lock:
            while self._regions:
                os.close(self._regions.popitem()[1].file)

    def _new(self) -> _Region | None:
        """Room for one model more."""
        for name in [n for n, r in self._regions.items() if r.lent is None]:
            if self._left() >= self._share:
                break
            os.close(self._regions.pop(name).file)
        size = min(self._share, self._left())
        if size <= 0:
            return None
        file = os.memfd_create("lowq-kv-host", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        return _Region(file, size)

    def _left(self) -> int:
        return self.bytes - sum(r.bytes for r in self._regions.values())
