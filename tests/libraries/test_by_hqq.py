"""Every kind of layer that the hqq library saves, as tensors and as qmodel.pt, decoded as it decodes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from library_files import NAME, decoded, leaves, refused, there_and_back, write

library = pytest.importorskip("hqq.core.quantize", reason="needs the package hqq (extra test)")

BITS = (8, 6, 5, 4, 3, 2, 1, 1.58)
GROUPS = (8, 16, 64, 128, None)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHAPES = [(80, 128), (64, 192), (24, 64)]  # (N, K)


def layer(nbits: float, group: int | None, axis: int, view: bool, N: int, K: int, dtype: torch.dtype, **more: Any) -> Any:
    """A quantized layer; None where the library does not make one."""
    config = library.BaseQuantizeConfig(nbits=nbits, group_size=group, axis=axis, view_as_float=view)
    config["weight_quant_params"].update(more)
    dense = torch.nn.Linear(K, N, bias=False)
    try:
        made = library.HQQLinear(dense, config, compute_dtype=dtype, device="cpu", del_orig=False)
        made.dequantize()
        return made
    except (AssertionError, RuntimeError, ValueError):  # groups that do not divide the weights, slabs that do not fit
        return None


def by_library(folder: Path) -> torch.Tensor:
    """The matrix of a folder by the library's own loader, codes, scales and zeros multiplied in fp32."""
    tensors = leaves(folder)
    made = library.HQQLinear(None, None, compute_dtype=tensors["scale"].dtype, device="cpu")
    made.load_state_dict(tensors)
    return in_fp32(made)


def in_fp32(made: Any) -> torch.Tensor:
    meta = {**made.meta, "scale": made.meta["scale"].float(), "zero": made.meta["zero"].float(), "compute_dtype": torch.float32}
    words = made.W_q.data
    if meta["view_as_float"]:
        words, meta["view_as_float"] = words.view(meta["unpack_view_dtype"]), False
    return library.Quantizer.dequantize(words, meta).float()


@pytest.mark.half_of("nbits", "axis", "view")
@pytest.mark.parametrize("nbits", BITS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("view", [False, True])
def test_every_variant(nbits, axis, view, tmp_path):
    torch.manual_seed(0)
    walked = 0
    for g, group in enumerate(GROUPS):
        for s, (N, K) in enumerate(SHAPES):
            dtype = DTYPES[(g + s) % len(DTYPES)]  # each pair of a dtype and a shape meets a group
            module = layer(nbits, group, axis, view, N, K, dtype)
            if module is None:
                continue
            folder = write(tmp_path / f"{group}-{dtype}-{N}-{K}", module.state_dict(), {"quantization_config": SAID})
            expected, result = in_fp32(module), decoded(folder)
            off = (result.float() - expected.to(result.dtype).float()).abs().max()
            assert off <= 1e-6 * expected.abs().max(), (group, dtype, N, K)
            there_and_back(folder, "hqq", by_library, 1e-6)
            of_pickle(tmp_path / f"pt-{group}-{dtype}-{N}-{K}", module, result)
            walked += 1
    assert walked


SAID = {"quant_method": "hqq"}


def of_pickle(folder: Path, made: Any, found: torch.Tensor) -> None:
    """That qmodel.pt, which the library's own save_quantized writes, holds the same."""
    folder.mkdir()
    made.encoded_state_dict = False
    torch.save({NAME: {n: t for n, t in made.state_dict().items() if n != "encoded_state_dict"},
                "model.norm": {"weight": torch.ones(8)}}, folder / "qmodel.pt")  # fmt: skip
    (folder / "config.json").write_text(json.dumps({}))
    assert torch.equal(decoded(folder), found)


@pytest.mark.parametrize("nbits", [8, 4, 2])
def test_one_scale_for_all_weights(nbits, tmp_path):
    module = layer(nbits, None, 1, False, 64, 128, torch.float32, channel_wise=False)
    folder = write(tmp_path / "m", module.state_dict(), {"quantization_config": SAID})
    refused(folder, "one scale for all weights is not supported")
