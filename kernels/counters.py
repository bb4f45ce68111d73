"""Counters for kernels whose programs meet: int32 zeros that no concurrent launch uses and that the kernel leaves at zero.

A zero-filled tensor a call would cost a launch; one shared by all calls would be wrong when two run at once. So: launches
on one stream share, for they run one after another; a launch being captured gets counters of its own, for its graph may be
replayed beside anything. When the arena for those is spent, a captured memset serves: right, and about a microsecond slower.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ARENA = 1 << 20  # counters (4 MiB) zeroed at once per device: some twenty captured 8B models
SHARED = 1 << 14  # counters that the launches of one stream share to begin with

_arenas: dict[torch.device, tuple[torch.Tensor, list[int]]] = {}  # counters, [how many are given away]
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
    held = _shared.get(key)
    if held is None or held.numel() < n:
        if capturing:
            return _slice(n, device)
        if device not in _arenas:
            _arenas[device] = torch.zeros(ARENA, dtype=torch.int32, device=device), [0]
            torch.cuda.synchronize(device)  # once: other streams may use the arena from now on
        _shared[key] = held = _slice(max(n, SHARED), device)
    return held


def reserve(n: int, device: torch.device) -> None:
    """An arena of at least n counters, for who will capture many graphs. What was given away stays as it is."""
    if device.type == "cuda" and (device not in _arenas or _arenas[device][0].numel() - _arenas[device][1][0] < n):
        _arenas[device] = torch.zeros(n, dtype=torch.int32, device=device), [0]
        torch.cuda.synchronize(device)


def _slice(n: int, device: torch.device) -> torch.Tensor:
    arena, given = _arenas.get(device, (None, [ARENA]))
    if arena is None or given[0] + n > arena.numel():
        return torch.zeros(n, dtype=torch.int32, device=device)
    given[0] += n
    return arena[given[0] - n : given[0]]
