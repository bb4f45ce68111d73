"""Memory: what this process holds, has held at most, and may still take; and whether others keep the processors busy."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BUSY = 1.2  # processes that want to run, for each processor: from here on some wait


def available_memory() -> int | None:
    """Bytes of memory a process may still take: what the kernel says, or the container's limit if that is lower."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cache = int(stat["inactive_file"]) + int(stat["active_file"])  # given back when asked for
        return min(free, max(0, limit - used + cache))
    except (OSError, ValueError, KeyError):  # no such limit ("max" is no number)
        return free


def others_at_work() -> str:
    """Where other work keeps the processors busy, so that times mean little: what to say of it; "" where it does not."""
    try:
        load, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    except (OSError, AttributeError):  # a system that does not tell
        return ""
    return f"load {load:.1f} on {processors} processors" if load > BUSY * processors else ""


def current_rss() -> int:
    """Resident bytes of this process now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return peak_rss()


def peak_rss() -> int:
    """Largest number of resident bytes of this process so far; 0 on Windows, which does not say."""
    try:
        import resource
    except ModuleNotFoundError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_bytes(device: "torch.device") -> int:
    """The most this process held: GPU memory that torch allocated, or on the CPU its resident size."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_rss()
