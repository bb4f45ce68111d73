"""Facts of GPUs: one checked row per architecture, and the sizes of the installed device.

To support a new architecture, add a row to `ROWS` and a file to tuned/: every kernel that the row's facts allow then runs. An
instruction of one architecture only, like wgmma, needs another fact, an `arch`, and kernels that use it. Rules ask
`of(capability)`, which needs no GPU; launchers ask `here(index)`, with sizes from the driver. `capability` alone identifies a
device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

Capability = tuple[int, int]


@dataclass(frozen=True)
class Gpu:
    """Facts of one GPU. Each row of `ROWS` names the GPU that its sizes come from."""

    name: str
    capability: Capability
    sms: int
    smem_block: int  # max. bytes of shared memory per block
    smem_sm: int  # bytes of shared memory per SM
    l2: int  # bytes of second-level cache
    split: int = 0  # bytes of an SM's L1 that stay shared memory throughout a step; 0: each launch chooses
    fp8: bool = False  # tensor cores multiply e4m3
    dependent_launch: bool = False  # programmatic dependent launch
    max_cluster: int = 1  # max. blocks per cluster; 1: no clusters
    clusters: tuple[int, ...] = ()  # measured: how many clusters of 1, 2, ... blocks run at once, one block per SM
    tma: bool = False
    wgmma: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError where facts contradict each other."""
        sizes = 0 < self.smem_block <= self.smem_sm <= self.l2 and self.sms > 0 <= self.split <= self.smem_sm
        clusters = all(n * size <= self.sms for size, n in enumerate(self.clusters, 1))
        clusters = clusters and len(self.clusters) <= self.max_cluster and self.clusters[:1] in ((), (self.sms,))
        newer = (not self.wgmma or self.tma) and (not self.tma or (self.max_cluster > 1 and self.dependent_launch and self.fp8))
        if not (sizes and clusters and newer):
            raise ValueError(f"the facts of {self} contradict each other")

    @property
    def arch(self) -> str:
        """NVRTC's target: with the suffix for instructions that only this architecture has."""
        return f"sm_{self.capability[0]}{self.capability[1]}" + ("a" if self.wgmma else "")


KB, MB = 1 << 10, 1 << 20
REGISTERS = 1 << 16  # per SM, since compute capability 5.0
_HOPPER_ON: dict[str, Any] = {"fp8": True, "dependent_launch": True, "max_cluster": 8, "tma": True}
# Sizes: CUDA C++ programming guide, table of technical specifications by compute capability
ROWS: dict[Capability, Gpu] = {
    g.capability: g
    for g in (
        Gpu("AMD, or older than is supported", (0, 0), 108, 64 * KB, 64 * KB, 4 * MB),
        Gpu("A100", (8, 0), 108, 163 * KB, 164 * KB, 40 * MB),
        Gpu("RTX 3090", (8, 6), 82, 99 * KB, 100 * KB, 6 * MB),
        Gpu("Jetson AGX Orin", (8, 7), 16, 163 * KB, 164 * KB, 4 * MB),
        Gpu("RTX 4090", (8, 9), 128, 99 * KB, 100 * KB, 72 * MB, fp8=True),
        # clusters: SMs lie in groups of unequal size
        Gpu("H100", (9, 0), 132, 227 * KB, 228 * KB, 50 * MB, 164 * KB, clusters=(132, 66, 39, 30), wgmma=True, **_HOPPER_ON),
        Gpu("B200", (10, 0), 148, 227 * KB, 228 * KB, 126 * MB, **_HOPPER_ON),
        Gpu("RTX 5090", (12, 0), 170, 99 * KB, 100 * KB, 96 * MB, **_HOPPER_ON),
        Gpu("GB10", (12, 1), 48, 99 * KB, 100 * KB, 24 * MB, **_HOPPER_ON),
    )
}
OTHER, LEAST, HOPPER = ROWS[0, 0], ROWS[8, 0].capability, ROWS[9, 0]  # LEAST: the CUDA kernels' lowest capability


def since(has: Callable[[Gpu], object]) -> Capability:
    """The least capability whose row has a fact, e.g. `since(lambda g: g.fp8)`."""
    return min(c for c, g in ROWS.items() if has(g))


@cache
def capability(device: torch.device) -> Capability:
    """Compute capability of an NVIDIA GPU; (0, 0) of every other device (AMD's gfx9 would say 9, which is not Hopper)."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if nvidia else OTHER.capability


@cache
def row(capability: Capability) -> Gpu:
    """The row of a capability, or of the newest one before it: a GPU that is newer than this file still runs."""
    nearest = ROWS[max((c for c in ROWS if LEAST <= c <= capability), default=OTHER.capability)]
    return nearest if nearest is OTHER else replace(nearest, capability=capability)


@cache
def here(index: int | None = None) -> Gpu:
    """The GPU of this index with the driver's sizes; an H100 if there is none, so that rules still work."""
    if not torch.cuda.is_available():
        return HOPPER
    return with_sizes(row(capability(torch.device("cuda", index or 0))), torch.cuda.get_device_properties(index or 0))


def with_sizes(known: Gpu, p: Any) -> Gpu:
    """A row with the name and sizes that torch reports of a device: its `torch.cuda.get_device_properties`."""
    sizes: dict[str, Any] = {
        "smem_block": getattr(p, "shared_memory_per_block_optin", 0) or known.smem_block,
        "smem_sm": getattr(p, "shared_memory_per_multiprocessor", 0) or known.smem_sm,
        "l2": getattr(p, "L2_cache_size", 0) or known.l2,
    }
    clusters = tuple(n * p.multi_processor_count // known.sms for n in known.clusters)
    return replace(known, name=p.name, sms=p.multi_processor_count, clusters=clusters, **sizes)


def of(capability: Capability) -> Gpu:
    """The GPU of a call of this capability: the installed one if it matches, else its row."""
    first = here()
    return first if first.capability == capability else row(capability)


def no_wgmma(capability: Capability) -> str | None:
    """Why a wgmma kernel cannot run there, or None. Later architectures have other instructions."""
    return None if of(capability).wgmma else f"needs wgmma (Hopper), this GPU has compute capability {capability}"
