"""What tests of the searches of scales share: groups of weights, and launches whose outputs hold NaN before."""

from collections.abc import Callable
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (None, torch.float16, torch.bfloat16, torch.float32)


def case(R: int, G: int, size: int, seed: int = 0, side: float = 0.01) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups (R, G, size) that lie in wider rows, and weights (G, size). side: the spread of the rows' means."""
    g = torch.Generator().manual_seed(seed)
    whole = torch.randn(R, G * size + 7, generator=g) * 0.02 + side * torch.randn(R, 1, generator=g)
    groups = whole.to(DEVICE)[:, 3 : 3 + G * size].unflatten(1, (G, size))
    return groups, (torch.rand(G, size, generator=g) + 0.1).to(DEVICE)


class Poisoned:
    """A Triton kernel before whose launches its arguments of the slice `outputs` are filled with NaN, bytes with 255."""

    def __init__(self, kernel: Any, outputs: slice) -> None:
        self.kernel, self.outputs = kernel, outputs

    def __getitem__(self, blocks: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **constants: Any) -> None:
            for t in args[self.outputs]:
                t.fill_(torch.nan if t.dtype == torch.float32 else 0xFF)
            self.kernel[blocks](*args, **constants)

        return run
