"""The choice of a weight's layout: what a forced kernel reads, what measurements prefer, or what the rule ranks first.

It is made once per weight, for one row of x, by `rank` alone; `prefers` later chooses among the kernels of that layout.
"""

import torch

from lowq_kernels.dispatch import tuning
from lowq_kernels.dispatch.registry import Call, forced, kernels
from lowq_kernels.gpu import capability
from lowq_packers.errors import UnsupportedError
from lowq_packers.layouts import DISK, LAYOUTS
from lowq_packers.scheme import Scheme


def ranked(scheme: Scheme, N: int, K: int, dtype: torch.dtype, device: torch.device, M: int = 1) -> list[str]:
    """The layouts that can hold such a weight, by the rank of their best kernel for M rows; `DISK` first among equals."""
    candidates = []
    for name, layout in LAYOUTS.items():
        if layout.why_not(scheme, N, K) is None:
            call = Call(M, N, K, scheme, name, dtype, device.type, capability(device))
            ranks = [s.rank for s in kernels("product", device.type).values() if s.why_not(call) is None]
            candidates.append((min(ranks, default=1 << 30), name != DISK, name))
    return [name for _, _, name in sorted(candidates)]


def best_layout(
    scheme: Scheme, N: int, K: int, dtype: torch.dtype, device: torch.device, M: int = 1, kernel: str | None = None
) -> str:
    """The layout that a forced kernel reads (`kernel`, LOWQ_KERNEL), else the one that measurements prefer here, else the one
    whose best kernel the rule ranks first for M rows; DISK if only `reference` can take the call.

    A forced kernel of another device has no effect here: the weight may still move to that device.
    Raises UnsupportedError where no layout of the forced kernel holds such a weight.
    """
    if (spec := forced(kernel)) and device.type in spec.devices:
        refused = {name: LAYOUTS[name].why_not(scheme, N, K) for name in spec.layouts}
        fits = [name for name, why in refused.items() if why is None]
        if not fits:
            why = "; ".join(f"layout {name}: {why}" for name, why in refused.items())
            raise UnsupportedError(f"kernel {spec.name} was requested, but none of its layouts can hold this weight: {why}")
        return min(fits, key=lambda name: (name != DISK, name))
    if tuned := tuning.best_layout(tuning.Shape(N, K, scheme, dtype), device):
        return tuned
    return ranked(scheme, N, K, dtype, device, M)[0]
