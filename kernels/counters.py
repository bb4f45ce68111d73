"""Counters for kernels whose programs synchronise: int32 zeros that no concurrent launch uses; a kernel resets them to zero.

A zero-filled tensor per call would cost a launch, and one shared by all calls would be wrong when two run at once. So launches
on one stream share counters, since they run one after another. A captured launch gets its own, since its graph may be
replayed at any time. When the arena of those is used up, a captured memset is used, which takes about 1 us more.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ARENA = 1 << 20  # counters (4 MiB) allocated and zeroed at once per device: enough for about twenty captured 8B models
SHARED = 1 << 14  # initial number of counters that the launches of one stream share

_arenas: dict[torch.device, tuple[torch.Tensor, list[int]]] = {}  # counters, [how many are allocated]
_shared: dict[tuple[torch.device, int], torch.Tensor] = {}  # (device, stream) -> its counters
_serial = False


@contextmanager
def serial() -> Iterator[None]:
    """Promise that the graphs captured inside run one at a time: their launches then share counters (timing loops)."""
    global _serial
    before, _serial = _serial, True
    try:
        yield
    finally:
        _serial = before


def counters(n: int, device: torch.device) -> torch.Tensor:
    """At least n int32 zeros for one launch on the current stream."""
    if device.type != "cuda":
        return torch.zeros(n, dtype=torch.int32, device=device)
    capturing = torch.cuda.is_current_stream_capturing()
    if capturing and not _serial:
        return _slice(n, device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    shared = _shared.get(key)
    if shared is None or shared.numel() < n:
        if capturing:
            return _slice(n, device)
        if device not in _arenas:
            _arenas[device] = torch.zeros(ARENA, dtype=torch.int32, device=device), [0]
            torch.cuda.current_stream(device).synchronize()  # once: from now on other streams may use the arena
        _shared[key] = shared = _slice(max(n, SHARED), device)
    return shared


def arenas() -> list[torch.Tensor]:
    """What captured launches take counters from now: a graph must hold it, as `reserve` replaces it."""
    return [arena for arena, _ in _arenas.values()]


def reserve(n: int, device: torch.device) -> None:
    """An arena of at least n counters, for callers that will capture many graphs. Graphs hold the one that they took from."""
    if device.type == "cuda" and (device not in _arenas or _arenas[device][0].numel() - _arenas[device][1][0] < n):
        _arenas[device] = torch.zeros(n, dtype=torch.int32, device=device), [0]
        torch.cuda.current_stream(device).synchronize()


def _slice(n: int, device: torch.device) -> torch.Tensor:
    arena, used = _arenas.get(device, (None, [ARENA]))
    if arena is None or used[0] + n > arena.numel():
        return torch.zeros(n, dtype=torch.int32, device=device)
    used[0] += n
    return arena[used[0] - n : used[0]]
