"""A checkpoint ready to decode: its tuning table in force, its model loaded, threads set."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def ready(folder: str, device: str, notice: Callable[[str], None]) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder, hub id or "demo". Raises what `lowq_cli.loading.load` raises."""
    from lowq_cli.devices import pick_device
    from lowq_cli.loading import load
    from lowq_kernels.dispatch import tuning

    chosen = pick_device(device)
    if chosen.type == "cpu":
        torch.set_num_threads(threads())
    if Path(folder).is_dir():
        tuning.use(folder, chosen, notice)  # before loading: it also says which layout each shape is best held in
    return load(folder, device=chosen)


def threads() -> int:
    """Threads to compute with: torch's own number, but not more than this process may use at once.

    In a container the processors one sees are often more than the share one has; threads beyond it only wait for each other.
    """
    allowed = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return allowed
    if hasattr(os, "sched_getaffinity"):
        allowed = min(allowed, len(os.sched_getaffinity(0)))
    try:
        quota, period = CGROUP_QUOTA.read_text().split()
        return max(1, min(allowed, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no limit
        return max(1, allowed)
