"""How the decode kernels are launched: with programmatic dependent launch where the GPU has it."""

from typing import Any

import torch

from lowq_kernels import gpu

enabled = True  # benchmarks switch it off to measure what it gains


def pdl(x: torch.Tensor) -> dict[str, Any]:
    """Launch options for a kernel on x's device."""
    if enabled and x.is_cuda and gpu.here(x.device.index).dependent_launch:
        return {"PDL": True, "TRIGGER": True, "launch_pdl": True}
    return {"PDL": False, "TRIGGER": False}
