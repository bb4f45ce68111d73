"""The host memory that a server lends its engines for cache blocks (`host_cache`); it is kept while a model is unloaded.

Each model has an anonymous file in memory, which grows as blocks are copied to it up to a size that is reserved from the start:
all files together never hold more than the server's limit. A model that is loaded for the first time takes room, if none is
left, from unloaded models, least recently used first.
"""

import os
import threading
from dataclasses import dataclass

from lowq_packers.errors import UnsupportedError

SHARES = 4  # max. models among which the memory is divided; the memory for loaded models is divided in the same way


@dataclass(frozen=True)
class Kept:
    """The contents of an engine's file, for the next engine with the same settings.

    key: identifies these settings. places: number of places of each group. records: names and places of each group. bytes:
    total bytes of the records.
    """

    key: bytes
    places: tuple[int, ...]
    records: tuple[list[tuple[bytes, int]], ...]
    bytes: int


@dataclass(frozen=True)
class Lent:
    """The file that an engine may use, its contents, its `room` in bytes, and the key of the engine that uses it."""

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
    """Lends `bytes_` of host memory to `models` models; methods can be called from any thread.

    Raises UnsupportedError where the system has no such files.
    """

    def __init__(self, bytes_: int, models: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise UnsupportedError("--kv-host needs Linux, whose files in memory have no names; leave it out here")
        self.bytes, self._share = bytes_, bytes_ // min(max(models, 1), SHARES)
        self._regions: dict[str, _Region] = {}  # the least recently used first
        self._lock = threading.Lock()

    def lend(self, name: str) -> Lent | None:
        """Return the file for a model about to be loaded; None where the files of loaded models leave no room."""
        with self._lock:
            region = self._regions.pop(name, None)
            if region is not None and region.lent is not None:  # its engine died without returning it
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
        """Record the contents of the file of a model that has been unloaded; None: nothing of use."""
        with self._lock:
            region = self._regions.get(name)
            if region is None or region.lent is not lent:
                return
            region.lent, region.kept = None, kept
            if kept is None:
                os.close(self._regions.pop(name).file)

    def kept_bytes(self, name: str) -> int:
        """Bytes held for models that are not loaded."""
        with self._lock:
            region = self._regions.get(name)
            return 0 if region is None or region.lent is not None or region.kept is None else region.kept.bytes

    def close(self) -> None:
        """Release all memory."""
        with self._lock:
            while self._regions:
                os.close(self._regions.popitem()[1].file)

    def _new(self) -> _Region | None:
        """Return the room for one more model."""
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
