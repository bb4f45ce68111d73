"""The read bandwidth of this machine's memory: measured once (under a second), then kept in the user's cache folder."""

import os
import platform

import torch

from lowq_cli.files import memo
from lowq_kernels.dispatch import timing

FILE = "bandwidth.json"


def measured(device: torch.device) -> float:
    """Bytes per second of a plain read of a large buffer on `device`; read from the cache folder if it is there."""
    key, measurements = _name(device), memo.recall(FILE)
    if not (isinstance(measurements.get(key), int | float) and measurements[key] > 0):
        measurements[key] = timing.read_gbs(device) * 1e9
        memo.keep(FILE, measurements)
    return float(measurements[key])


def last_level_cache(device: torch.device) -> int | None:
    """Bytes of the last-level cache; None where the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    try:
        return next((n for level in ("3", "2") if (n := os.sysconf(f"SC_LEVEL{level}_CACHE_SIZE")) > 0), None)
    except (ValueError, OSError, AttributeError):  # the system lacks this name, or os.sysconf
        return None


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.node()} cpu, {torch.get_num_threads()} threads, in pieces"
