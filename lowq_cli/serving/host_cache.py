"""The blocks of a cache in host memory: their bytes, and the copies between host and device.

The memory is an anonymous file, which the server's process holds open, so that the next engine of the same model can use the
blocks that an engine leaves there.
"""

from collections.abc import Sequence
from itertools import groupby

import torch

from lowq_cli.engine.batch import KeyValues, States
from lowq_cli.engine.plan import Plan
from lowq_cli.engine.state import raw_tensors
from lowq_cli.serving.host_blocks import Swap
from lowq_packers.arch.parts import Pages

AT_ONCE = 64  # max. blocks gathered for one copy: 512 MB with an 8B


def places(room: int, blocks: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the places of each group in `room` bytes, in proportion to its blocks on the device; `sizes`: block bytes."""
    whole = sum(n * size for n, size in zip(blocks, sizes, strict=True))
    return [room * n // whole for n in blocks] if whole else [0] * len(blocks)


class HostCache:
    """Host memory for the blocks of an engine's cache.

    Args:
        path: the file. plan, state: those of the engine's passes. places: number of places per page group, then of snapshots.
        extra: further keys and values (a drafter's) in the blocks of the first group.
    """

    def __init__(
        self, path: str, plan: Plan, state: Sequence[KeyValues | States], places: Sequence[int], extra: Sequence[KeyValues] = ()
    ) -> None:
        self.device, self.places = plan.device, tuple(places)
        self.groups, ends = list[list[tuple[torch.Tensor, torch.Tensor]]](), 0
        windows = sorted({spec.window for spec in plan.states if isinstance(spec, Pages)})
        parts: list[list[torch.Tensor]] = [[] for _ in range(len(windows) + 1)]
        for spec, one in zip(plan.states, state, strict=True):
            parts[windows.index(spec.window) if isinstance(spec, Pages) else -1] += map(_bytes, raw_tensors(one))
        parts[0] += [t for one in extra for t in map(_bytes, raw_tensors(one))]
        size = sum(n * t[0].numel() for n, group in zip(places, parts, strict=True) for t in group)
        flat = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        for n, group in zip(places, parts, strict=True):
            self.groups.append([])
            for here in group:
                first, ends = ends, ends + n * here[0].numel()
                self.groups[-1].append((here, flat[first:ends].view(n, *here.shape[1:])))
        self.block_bytes = [sum(t[0].numel() for t, _ in group) for group in self.groups]

    def bytes(self, held: Sequence[int]) -> int:
        """Return the bytes of these numbers of places of each group."""
        return sum(n * size for n, size in zip(held, self.block_bytes, strict=True))

    def run(self, swaps: Sequence[Swap]) -> None:
        """Copy blocks, in order."""
        for (group, out), run in groupby(swaps, key=lambda s: (s.group, s.out)):
            several = list(run)
            for first in range(0, len(several), AT_ONCE):
                self._copy(group, out, several[first : first + AT_ONCE])

    def _copy(self, group: int, out: bool, swaps: Sequence[Swap]) -> None:
        blocks = torch.tensor([s.block for s in swaps], device=self.device)
        places = torch.tensor([s.place - 1 for s in swaps])
        for here, there in self.groups[group]:
            if out:
                there.index_copy_(0, places, here.index_select(0, blocks).cpu())
            else:
                here.index_copy_(0, blocks, there.index_select(0, places).to(self.device))


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as a view with the same first dimension."""
    return t.view(torch.uint8) if t.dim() > 1 else t.view(-1, 1).view(torch.uint8)
