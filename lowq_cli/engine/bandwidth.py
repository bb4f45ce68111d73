"""How fast this machine's memory can be read: measured once (under a second), then kept in the user's cache folder."""

import os
import platform

import torch

from lowq_cli.files import memo
from lowq_kernels.dispatch import timing

FILE = "bandwidth.json"


def measured(device: torch.device) -> float:
    """Bytes per second that a plain read of a large buffer reaches on `device`, from the cache folder if known there."""
    key, known = _name(device), memo.recall(FILE)
    if not (isinstance(known.get(key), int | float) and known[key] > 0):
        known[key] = timing.read_gbs(device) * 1e9
        memo.keep(FILE, known)
    return float(known[key])


def last_level_cache(device: torch.device) -> int | None:
    """Bytes of the last cache before memory; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    try:
        return next((n for level in ("3", "2") if (n := os.sysconf(f"SC_LEVEL{level}_CACHE_SIZE")) > 0), None)
    except (ValueError, OSError, AttributeError):  # a system without this name, or without os.sysconf
        return None


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.node()} cpu, {torch.get_num_threads()} threads, in pieces"
