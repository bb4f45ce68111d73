"""Every kind of 4-bit matrix that bitsandbytes writes, decoded as its own definition in torch decodes it."""

import json
from pathlib import Path

import pytest
import torch
from library_files import decoded, leaves, refused, there_and_back, write

functional = pytest.importorskip("bitsandbytes.functional", reason="needs the package bitsandbytes")

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
STORAGE = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHAPES = [(64, 128), (24, 96), (5, 512)]  # (N, K)


def saved(folder: Path, kind: str, block: int, nested: bool, storage: torch.dtype, dtype: torch.dtype, N: int, K: int) -> None:
    W = torch.randn(N, K, dtype=dtype)
    codes, state = functional.quantize_4bit(W, None, None, block, nested, kind, storage)
    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": str(storage).removeprefix("torch."),
        "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None,
    }  # fmt: skip
    tensors = {"weight": codes} | {f"weight.{leaf}": t for leaf, t in state.as_dict(packed=True).items()}
    write(folder, tensors, {"dtype": str(dtype).removeprefix("torch."), "quantization_config": config})


def by_library(folder: Path) -> torch.Tensor:
    """The matrix of a folder by the library's state and tables, blocks running over the ends of rows, in fp32.

    Not by its CPU kernel, which begins a block with every row.
    """
    t = leaves(folder)
    state = functional.QuantState.from_dict({n: x for n, x in t.items() if n != "weight"}, torch.device("cpu"))
    scales = state.absmax
    if state.nested:
        scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    stored = t["weight"].view(torch.uint8).flatten()
    codes = torch.stack((stored >> 4, stored & 15), -1).flatten()
    values = state.code[codes.long()] * scales.repeat_interleave(state.blocksize)[: codes.numel()]
    return values.reshape(state.shape)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("storage", STORAGE, ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_every_variant(kind, storage, nested, tmp_path):
    torch.manual_seed(0)
    for block in BLOCKS:
        for dtype in DTYPES:
            for N, K in SHAPES:
                folder = tmp_path / f"{block}-{dtype}-{N}-{K}"
                saved(folder, kind, block, nested, storage, dtype, N, K)
                expected = by_library(folder)
                assert (decoded(folder).float() - expected.to(dtype).float()).abs().max() <= 1e-6 * expected.abs().max()
                held = there_and_back(folder, "bitsandbytes", by_library, 1e-6)
                assert held == (kind == "nf4" and K % block == 0), (block, dtype, N, K)


def test_by_its_own_kernel_where_blocks_end_with_rows(tmp_path):
    """The definition above is the library's: its dequantize_4bit gives the same."""
    for kind in ("nf4", "fp4"):
        for storage in STORAGE:
            saved(tmp_path / f"{kind}{storage}", kind, 64, True, storage, torch.float32, 64, 128)
            t = leaves(tmp_path / f"{kind}{storage}")
            state = functional.QuantState.from_dict({n: x for n, x in t.items() if n != "weight"}, torch.device("cpu"))
            theirs = functional.dequantize_4bit(t["weight"], state)
            assert (decoded(tmp_path / f"{kind}{storage}") - theirs).abs().max() < 1e-6


def test_eight_bits_are_refused_by_name(tmp_path):
    codes, stats, _ = functional.int8_vectorwise_quant(torch.randn(64, 128).half())
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    folder = write(tmp_path / "m", {"weight": codes, "SCB": stats}, {"quantization_config": config})
    refused(folder, "load_in_8bit=True is not supported")
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["load_in_8bit"]
