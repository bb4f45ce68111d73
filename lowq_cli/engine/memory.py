"""Peak memory of this process on a device."""

import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """The most this process held: GPU memory torch allocated, or on the CPU its resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
