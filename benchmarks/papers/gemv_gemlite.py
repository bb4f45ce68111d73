"""triton/gemv, triton/gemv_revsplitk: GemLite's GEMVs of one step a program, by the kernel of triton/gemv_splitk.

Split   gemv           one step a program: K / BLOCK_K programs share a block of columns
        gemv_revsplitk one program takes SHARE = 2 steps in a row under one load of scales and zeros
Speed   behind gemv_splitk at M = 1 on an H100, but for gemv_revsplitk at N = K = 1024 (docs/splitk.md)
Source  GemLite's GEMV and GEMV_REVSPLITK (Badri 2024), with an ordered reduction
"""

import torch

from lowq_kernels.dispatch.registry import Config
from lowq_kernels.products.triton.gemv_splitk import FACTS, configs, launch
from lowq_packers.layouts import PackedWeight
from papers import paper

ONE_STEP = (
    (128, 64, 0, 4, 1), (256, 16, 0, 2, 1), (512, 16, 0, 4, 1), (256, 32, 0, 4, 1), (128, 16, 0, 2, 1), (256, 4, 0, 2, 1),
    (128, 8, 0, 2, 1), (512, 8, 0, 2, 1),
)  # fmt: skip


@paper("triton/gemv", configs=configs(*ONE_STEP), **FACTS)
@paper("triton/gemv_revsplitk", configs=configs(*ONE_STEP, share=2), **FACTS)
def gemv_gemlite(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) -> (M, N)."""
    return launch(x, p, bias, config)
