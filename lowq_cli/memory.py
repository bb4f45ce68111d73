"""Memory of this process (current, peak, available), and the load that other processes put on the processors."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BUSY = 1.2  # load per processor from which processes wait for each other


def available_memory() -> int | None:
    """Bytes of memory that a process can still allocate: the kernel's value, or the container's limit if that is lower."""
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
        cache = int(stat["inactive_file"]) + int(stat["active_file"])  # freed on demand
        return min(free, max(0, limit - used + cache))
    except (OSError, ValueError, KeyError):  # no limit ("max" is not a number)
        return free


def others_at_work() -> str:
    """A note if other processes keep the processors busy, so that measured times are unreliable; else ""."""
    try:
        load, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    except (OSError, AttributeError):  # a system without these functions
        return ""
    return f"load {load:.1f} on {processors} processors" if load > BUSY * processors else ""


def current_rss() -> int:
    """Current resident bytes of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return peak_rss()


def peak_rss() -> int:
    """Peak resident bytes of this process; 0 on Windows, which does not report it."""
    try:
        import resource
    except ModuleNotFoundError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_bytes(device: "torch.device") -> int:
    """Peak memory of this process in bytes: torch's GPU allocations, or on the CPU the resident size."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_rss()
