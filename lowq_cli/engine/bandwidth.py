"""How fast this machine's memory can be read: measured once (under a second), then kept in the user's cache folder."""

import json
import os
import platform
from typing import Any

import torch

from lowq_kernels.dispatch import timing
from lowq_packers.atomic import write_whole
from lowq_packers.errors import LowqError, NotFoundError
from lowq_packers.home import cache_dir
from lowq_packers.regular import MAX_CONFIG, read_text

FILE = "bandwidth.json"


def measured(device: torch.device) -> float:
    """Bytes per second that a plain read of a large buffer reaches on `device`, from the cache folder if known there."""
    key, known = _name(device), _read()
    if not (isinstance(known.get(key), int | float) and known[key] > 0):
        known[key] = timing.read_gbs(device) * 1e9
        _write(known)
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


def _read() -> dict[str, Any]:
    try:
        found = json.loads(read_text(cache_dir() / FILE, MAX_CONFIG))
    except (LowqError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(known: dict[str, Any]) -> None:
    """Keep `known`; a home that is read-only or not there only means measuring again."""
    try:
        write_whole(cache_dir() / FILE, json.dumps(known).encode())
    except (OSError, NotFoundError):
        return
