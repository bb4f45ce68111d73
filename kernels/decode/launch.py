"""How the decode kernels are launched: with programmatic dependent launch where the GPU has it (capability 9.0)."""

from typing import Any

import torch

from lowq_kernels.dispatch.registry import capability

enabled = True  # benchmarks switch it off to see what it brings
trigger = True  # whether the next kernel may start before this one ends, too


def pdl(x: torch.Tensor) -> dict[str, Any]:
    """Launch options for a kernel on x's device."""
    if enabled and x.is_cuda and capability(x.device) >= (9, 0):
        return {"PDL": True, "TRIGGER": trigger, "launch_pdl": True}
    return {"PDL": False, "TRIGGER": False}
