"""How the decode kernels are launched: with programmatic dependent launch where the GPU has it.

Such a kernel may start while several earlier ones still run, and has to wait for them (gdc_wait, griddepcontrol.wait).

Before    the wait it may read weights, and what was written before the step began: positions, block tables, numbers of
          adapters, caches and states. Every step, and every pass of a draft head or model, begins with launches of torch (the
          embedding look-up, sums of positions), which are not dependent: they start when all before them has ended.
After     the wait it reads what kernels of the same step write, and it writes. Only a kernel whose predecessor waits before it
          lets the next one start may read earlier what came before that predecessor (ids in experts.cu, x in the shrink of a
          product's adapters): the kernels that multiply do, those that only prepare x for one do not.
Programs  One at least of each kernel waits, else the next kernel would not wait for those before it; the others may end early.
Loops     hold no wait: Triton moves loads of a loop's products before the loop, and so before the wait.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowq_kernels import gpu

enabled = True  # benchmarks switch it off to measure what it gains


def pdl(x: torch.Tensor) -> dict[str, Any]:
    """Launch options for a kernel on x's device."""
    if enabled and x.is_cuda and gpu.here(x.device.index).dependent_launch:
        return {"PDL": True, "TRIGGER": True, "launch_pdl": True}
    return {"PDL": False, "TRIGGER": False}


@triton.jit
def launch_next(TRIGGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start while this one runs."""
    if TRIGGER:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the kernels before this one have ended."""
    if PDL:
        gdc_wait()


@triton.jit
def overlap(PDL: tl.constexpr, TRIGGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """`launch_next`, then `wait`."""
    launch_next(TRIGGER)
    wait(PDL)
