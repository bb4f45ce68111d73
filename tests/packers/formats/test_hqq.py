"""HQQ: slabs by hand, the library's own numbers, qmodel.pt without running a pickle."""

import sys
from pathlib import Path

import pytest
import torch

from lowq_packers import formats
from lowq_packers.errors import UnsupportedError
from lowq_packers.formats import hqq
from lowq_packers.scheme import BITS

sys.path.insert(0, str(Path(__file__).parent))
from format_support import NAME, assert_same, random_q, read, written


def test_hqq_slabs_by_hand():
    rows = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]], dtype=torch.uint8)
    assert hqq.pack_slabs(rows, 4).tolist() == [[0x15, 0x26], [0x37, 0x48]]
    assert hqq.pack_slabs(torch.tensor([[1], [2], [3], [0]], dtype=torch.uint8), 2).tolist() == [[0x6C]]
    assert hqq.pack_slabs(torch.tensor([[1], [0], [1], [1], [0], [0], [1], [0]], dtype=torch.uint8), 1).tolist() == [[0xB2]]
    ten = torch.tensor([[0], [1], [2], [3], [4], [5], [6], [7], [0], [1]], dtype=torch.uint8)
    assert hqq.pack_slabs(ten, 3).tolist() == [[0x014E5DC1]]
    twelve = (torch.arange(12) % 8).to(torch.uint8).unsqueeze(1)
    assert hqq.pack_slabs(twelve, 3).flatten().tolist() == [0x02982000, 0x0BBCB000]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("view", [False, True])
def test_hqq_agrees_with_the_library(bits, axis, view):
    library = pytest.importorskip("hqq.core.quantize", reason="needs the package hqq")
    linear = torch.nn.Linear(128, 80, bias=False)
    config = library.BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis, view_as_float=view)
    layer = library.HQQLinear(linear, config, compute_dtype=torch.float16, device="cpu", del_orig=False)
    tensors = {f"{NAME}.{leaf}": t.detach() for leaf, t in layer.state_dict().items()}
    (result,) = read(tensors, {}).values()
    theirs = layer.dequantize().float()
    if axis == 1:
        words = layer.W_q.view(layer.meta["unpack_view_dtype"])
        codes = library.Quantizer.unpack[layer.meta["packing"]](words, dtype=torch.uint8)[: 80 * 2]
        assert torch.equal(result.W_q.reshape(-1, 64), codes)
        assert torch.equal(result.scales.flatten(), layer.meta["scale"].flatten())
        assert torch.equal(result.zeros.flatten(), layer.meta["zero"].flatten())
        result = result.dequantize()
    assert (result.float() - theirs).abs().max() <= 2e-3 * theirs.abs().max()  # theirs is computed in fp16


def test_hqqs_own_loader_reads_our_tensors():
    library = pytest.importorskip("hqq.core.quantize", reason="needs the package hqq")
    q = random_q(4, 64, "float", 48, 128)
    tensors, _ = written(formats.get("hqq"), q)
    layer = library.HQQLinear(None, None, compute_dtype=torch.float16, device="cpu")
    layer.load_state_dict({name.removeprefix(f"{NAME}."): t for name, t in tensors.items()})
    assert (layer.dequantize().float() - q.dequantize()).abs().max() < 1e-3


def test_hqq_qmodel(tmp_path):
    q = random_q(3, 32, "float", 50, 96)
    tensors, _ = written(formats.get("hqq"), q)
    raw = {
        "W_q": tensors[f"{NAME}.W_q"],
        "nbits": 3,
        "group_size": 32,
        "shape": torch.Size([50, 96]),
        "axis": 1,
        "packing": "3bit_32",
        "scale": q.scales.reshape(-1, 1),
        "zero": q.zeros.reshape(-1, 1),
        "view_as_float": False,
        "unpack_view_dtype": torch.int32,
        "quant_scale": False,
        "quant_zero": False,
        "compute_dtype": torch.float16,
    }
    torch.save({NAME: raw, "model.norm": {"weight": torch.ones(4)}}, tmp_path / "qmodel.pt")
    flat = hqq.flatten(torch.load(tmp_path / "qmodel.pt", weights_only=True))
    (back,) = read(flat, {}).values()
    assert_same(back, q)
    assert flat["model.norm.weight"].tolist() == [1, 1, 1, 1]


def test_hqq_text_is_compared_not_evaluated():
    tensors, config = written(formats.get("hqq"), random_q(4, 64, "float", 48, 128))
    tensors[f"{NAME}.packing"] = hqq.encode("__import__('os')")
    with pytest.raises(UnsupportedError, match="packing"):
        read(tensors, config)
