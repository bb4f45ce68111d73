"""GPTQ: bytes worked out by hand, both versions of zeros, g_idx, rules per module."""

import sys
from pathlib import Path

import pytest
import torch

from lowq_packers import bitstream, formats
from lowq_packers.errors import DamagedError
from lowq_packers.formats import gptq
from lowq_packers.qtensor import QuantizedTensor

sys.path.insert(0, str(Path(__file__).parent))
from format_support import NAME, fetcher, headers, read, written


def gptq_tensors(zeros_word, bits=4, K=32, N=8, groups=1):
    """Code of (n, k) is k % 2**bits; qweight row r holds k = 8r .. 8r+7, least significant first: 0x76543210, 0xFEDCBA98."""
    q = (torch.arange(K) % (1 << bits)).to(torch.uint8).repeat(N, 1)
    return {
        f"{NAME}.qweight": bitstream.pack(q, bits).t().contiguous(),
        f"{NAME}.qzeros": torch.tensor([[zeros_word]] * groups, dtype=torch.int64)
        .to(torch.int32)
        .expand(groups, N * bits // 32)
        .contiguous(),
        f"{NAME}.scales": torch.full((groups, N), 0.5, dtype=torch.float16),
    }


def gptq_config(bits=4, group=32, **more):
    return {"quantization_config": {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, **more}}


def test_gptq_bytes():
    tensors = gptq_tensors(0x77777777)
    words = [w & 0xFFFFFFFF for w in tensors[f"{NAME}.qweight"][:, 0].tolist()]
    assert words == [0x76543210, 0xFEDCBA98, 0x76543210, 0xFEDCBA98]
    tensors, _ = written(
        formats.get("gptq"), QuantizedTensor(torch.zeros(8, 32, dtype=torch.uint8), torch.ones(8, 1), None, 4, 32)
    )
    assert tensors[f"{NAME}.qzeros"].tolist() == [[0x77777777]], "symmetric: version 1, z - 1 = 7"


@pytest.mark.parametrize(
    ("version", "bits", "word", "z"),
    [
        ("gptq", 4, 0x77777777, 8),
        ("gptq_v2", 4, 0x88888888, 8),
        (None, 4, 0x77777777, 8),
        ("gptq", 4, 0x00000000, 1),
        ("gptq", 8, 0x7F7F7F7F, 128),
        ("gptq_v2", 8, 0x80808080, 128),
        ("gptq", 2, 0x55555555, 2),
        ("gptq_v2", 2, 0xAAAAAAAA, 2),
    ],
)
def test_gptq_zeros_of_both_versions(version, bits, word, z):
    config = gptq_config(bits, **({} if version is None else {"checkpoint_format": version}))
    (q,) = read(gptq_tensors(word, bits, N=16), config).values()
    assert q.zeros.unique().tolist() == [z]
    assert q.dequantize()[0, :4].tolist() == [(k % (1 << bits) - z) / 2 for k in range(4)]


def test_gptq_version_1_zeros_that_wrapped_are_masked_and_noted():
    tensors = gptq_tensors(0x7777777F)  # column 0: 15 + 1 wraps to 0; a carry into column 1 would make 9
    config = gptq_config()
    (q,) = read(tensors, config).values()
    assert q.zeros[:, 0].tolist() == [0] + [8] * 7
    (m,) = gptq._matrices(config, headers(tensors), fetcher(tensors))
    assert "wrapped" in m.check(fetcher(tensors))[0]
    assert not m.check(fetcher(gptq_tensors(0x77777777)))


def test_gptq_g_idx_that_says_nothing_new_stays_quantized_and_another_is_read_dense():
    tensors = gptq_tensors(0x77777777, K=64, groups=2)
    tensors[f"{NAME}.scales"][1] = 0.25
    config = gptq_config(desc_act=True)
    tensors[f"{NAME}.g_idx"] = (torch.arange(64) // 32).to(torch.int32)
    (q,) = read(tensors, config).values()
    assert isinstance(q, QuantizedTensor)
    tensors[f"{NAME}.g_idx"] = (torch.arange(64) % 2).to(torch.int32)  # k even: group 0, odd: group 1
    (w,) = read(tensors, config).values()
    assert w[0, :4].tolist() == [-8 * 0.5, -7 * 0.25, -6 * 0.5, -5 * 0.25]
    tensors[f"{NAME}.g_idx"][3] = 2
    with pytest.raises(DamagedError, match="names group 2"):
        read(tensors, config)


def test_gptq_sym_that_is_not_is_refused():
    with pytest.raises(DamagedError, match="set sym to false"):
        read(gptq_tensors(0x66666666), gptq_config(sym=True))


def test_gptq_dynamic_rules():
    tensors = gptq_tensors(0x7F7F7F7F, bits=8, N=16)
    rules = {r"-:.*lm_head": {}, r"+:.*\.3\.mlp": {"bits": 8}}
    (q,) = read(tensors, gptq_config(4, dynamic=rules)).values()
    assert q.bits == 8


def test_gptq_three_bits_straddle_words():
    codes = torch.tensor([7, 0, 5, 2, 6, 1, 3, 4] * 4, dtype=torch.uint8).repeat(32, 1)
    q = QuantizedTensor(codes, torch.ones(32, 1), torch.full((32, 1), 3.0), 3, 32, "int")
    tensors, _ = written(formats.get("gptq"), q)
    stream = sum(int(v) << (3 * k) for k, v in enumerate(codes[0]))
    assert [w & 0xFFFFFFFF for w in tensors[f"{NAME}.qweight"][:, 0].tolist()] == [
        (stream >> (32 * i)) & 0xFFFFFFFF for i in range(3)
    ]
