"""GemLite state dicts: words, fused zeros in every container, int8."""

import sys
from pathlib import Path

import pytest
import torch

from lowq_packers import bitstream, formats
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

sys.path.insert(0, str(Path(__file__).parent))
from format_support import GEMLITE, NAME, random_q, read, written


def test_gemlite_words_and_metadata():
    codes = (torch.arange(64) % 16).to(torch.uint8).repeat(32, 1)
    q = QuantizedTensor(codes, torch.ones(32, 1).half(), torch.full((32, 1), 7.0).half(), 4, 64)
    tensors, _ = written(GEMLITE, q)
    assert tensors[f"{NAME}.W_q"].shape == (8, 32)
    assert tensors[f"{NAME}.W_q"][0].unique().tolist() == [0x76543210]
    assert tensors[f"{NAME}.metadata"].tolist()[:5] == [0, 4, 64, 15, 8]
    assert "nearest" in formats.get("gemlite").why_not(Scheme(3, 64), 32, 64)


@pytest.mark.parametrize("container", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_gemlite_fused_zeros_in_every_container(container):
    q = random_q(4, 32, "int", 64, 128)
    tensors, _ = written(GEMLITE, q)
    words = bitstream.pack(q.W_q, 4, container)
    tensors[f"{NAME}.W_q"] = words.t().contiguous()
    tensors[f"{NAME}.zeros"] = -(q.zeros * q.scales).t().contiguous()
    tensors[f"{NAME}.metadata"][4], tensors[f"{NAME}.metadata"][10] = container.itemsize * 2, 4
    (back,) = read(tensors, {}).values()
    assert torch.equal(back.dequantize(), q.dequantize())


def test_gemlite_int8_channelwise():
    W = torch.randint(-128, 128, (32, 64), dtype=torch.int8)
    scales = torch.rand(1, 32).half()
    meta = torch.tensor([0, 8, 64, 255, 1, 1, 1, 0, 1, 1, 0, 1], dtype=torch.int32)
    tensors = {
        f"{NAME}.W_q": W.t().contiguous(),
        f"{NAME}.scales": scales,
        f"{NAME}.zeros": torch.zeros(1, 0, dtype=torch.int32),
        f"{NAME}.metadata": meta,
        f"{NAME}.orig_shape": torch.tensor([32, 64], dtype=torch.int32),
    }
    (back,) = read(tensors, {}).values()
    assert torch.equal(back.dequantize(), W.float() * scales.t().float())
