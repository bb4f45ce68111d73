"""What the launchers of the tile kernels share: operands as the device code wants them, and facts about the GPU."""

from functools import cache

import torch

from lowq_packers.layouts import PackedWeight

TYPES = {torch.float16: 0, torch.bfloat16: 1}  # the device code's template argument T


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x at a 16-byte aligned address; x itself where it is so already."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def rows_of_x(x: torch.Tensor, step: int) -> torch.Tensor:
    """`aligned` x with K a multiple of `step` (padded with zeros)."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % step)) if x.shape[1] % step else aligned(x)


def companions(
    p: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """scales, zeros and bias in x's dtype; no copy where they are already."""

    def cast(t: torch.Tensor | None) -> torch.Tensor | None:
        return t if t is None or t.dtype == dtype else t.to(dtype)  # even a `to` that does nothing costs 3 us

    scales = cast(p.scales)
    assert scales is not None
    return scales, cast(p.zeros), cast(bias)


def group_argument(p: PackedWeight) -> int:
    """The device code's template argument GROUP: 0 where a row is one group."""
    return 0 if p.scales.shape[1] == 1 else p.scheme.group_size


@cache
def multiprocessors(device: int | None = None) -> int:
    """SMs of a GPU; of an H100 where there is none, so that rules can be asked ahead of time."""
    return torch.cuda.get_device_properties(device or 0).multi_processor_count if torch.cuda.is_available() else 132


def shared_memory_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory a block may ask for."""
    limits = {(8, 0): 163, (8, 7): 163, (8, 6): 99, (8, 9): 99, (12, 0): 99, (12, 1): 99}
    return limits.get(capability, 227 if capability >= (9, 0) else 99) << 10
