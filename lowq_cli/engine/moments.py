"""Moments of a device: on a GPU a moment is an event, which its queue reaches when the work before it is done."""

import time
from typing import Any

from lowq_packers.lazy import torch


def moment(device: Any) -> Any:
    """The present time of a device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, second: Any) -> float:
    """Seconds between two moments, after the device has reached both."""
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3
