"""FP8 with block scales: partial blocks, exponents, shapes that do not fit."""

import sys
from pathlib import Path

import pytest
import torch

from lowq_packers import formats
from lowq_packers.errors import DamagedError

sys.path.insert(0, str(Path(__file__).parent))
from format_support import NAME, headers, read


@pytest.mark.parametrize("shape", [(128, 128), (192, 128), (576, 256), (130, 129), (64, 64)])
def test_fp8_blocks_keep_their_stride_when_the_last_is_partial(shape):
    N, K = shape
    g = torch.Generator().manual_seed(0)
    W = (torch.randn(N, K, generator=g) * 3).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-N // 128), -(-K // 128), generator=g) + 0.5
    tensors = {f"{NAME}.weight": W, f"{NAME}.weight_scale_inv": scale}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (w,) = read(tensors, config).values()
    for n, k in [(0, 0), (N - 1, K - 1), (N - 1, 0), (min(127, N - 1), K - 1)]:
        assert w[n, k] == (W[n, k].float() * scale[n // 128, k // 128]).to(torch.bfloat16)
    partial = formats.get("fp8").notes(config, headers(tensors))
    assert bool(partial) == bool(N % 128 or K % 128)


def test_fp8_scales_that_do_not_fit():
    tensors = {f"{NAME}.weight": torch.zeros(192, 128).to(torch.float8_e4m3fn), f"{NAME}.weight_scale_inv": torch.ones(1, 1)}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    with pytest.raises(DamagedError, match=r"asks for \(2, 1\)"):
        read(tensors, config)


def test_mxfp8_scales_are_powers_of_two():
    W = torch.ones(2, 64).to(torch.float8_e4m3fn)
    tensors = {f"{NAME}.weight": W, f"{NAME}.weight_scale": torch.tensor([[127, 128], [126, 130]], dtype=torch.uint8)}
    (w,) = read(tensors, {"quantization_config": {"quant_method": "mxfp8"}}).values()
    assert w[:, [0, 32]].tolist() == [[1, 2], [0.5, 8]]
