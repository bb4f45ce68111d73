"""Every kind of matrix that mlx quantizes, as mlx-lm files it: decoded as mlx decodes it, or refused by its mode."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from library_files import decoded, leaves, refused, there_and_back, write

mx = pytest.importorskip("mlx.core", reason="needs the package mlx (extra interop)")

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


def to_torch(a) -> torch.Tensor:
    if a.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(a.astype(mx.float32))).bfloat16()
    result = np.array(a)
    return torch.from_numpy(result.view(np.int32)).view(torch.uint32) if result.dtype == np.uint32 else torch.from_numpy(result)


def by_library(folder: Path) -> torch.Tensor:
    """The matrix of a folder as the library decodes it, in fp32."""
    q, t = json.loads((folder / "config.json").read_text())["quantization"], leaves(folder)
    words = mx.array(t["weight"].view(torch.int32).numpy().view(np.uint32))
    scales, biases = (mx.array(t[n].float().numpy()) for n in ("scales", "biases"))
    return torch.from_numpy(np.array(mx.dequantize(words, scales, biases, group_size=q["group_size"], bits=q["bits"])))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), [(40, 128), (7, 384)])
def test_every_variant(bits, group, dtype, N, K, tmp_path):
    mx.random.seed(bits)
    W = mx.random.normal((N, K)).astype(DTYPES[dtype])
    W[0, :group] = 0.5  # a group of one value
    W[1, :group] = 0.0
    parts = dict(zip(("weight", "scales", "biases"), mx.quantize(W, group_size=group, bits=bits), strict=True))
    q = {"group_size": group, "bits": bits, "mode": "affine"}
    tensors = {n: to_torch(t) for n, t in parts.items()}
    folder = write(tmp_path / "m", tensors, {"dtype": dtype, "quantization": q, "quantization_config": q})
    expected, result = by_library(folder), decoded(folder)
    rounding = torch.finfo(result.dtype).eps * expected.abs() + 1e-6 * expected.abs().max()
    assert ((result.float() - expected).abs() <= rounding).all()
    there_and_back(folder, "mlx", by_library, 1e-5)


@pytest.mark.parametrize(("mode", "group", "bits"), [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)])
def test_other_modes_are_refused_by_name(mode, group, bits, tmp_path):
    parts = mx.quantize(mx.random.normal((40, 128)), group_size=group, bits=bits, mode=mode)
    tensors = {n: to_torch(t) for n, t in zip(("weight", "scales"), parts[:2], strict=True)}
    q = {"group_size": group, "bits": bits, "mode": mode}
    refused(
        write(tmp_path / "m", tensors, {"quantization": q, "quantization_config": q}), f"mode='{mode}' for .* is not supported"
    )
