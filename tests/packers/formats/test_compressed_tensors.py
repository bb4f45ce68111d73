"""compressed-tensors: dense and padded words of odd widths, int and float, what contradicts itself."""

import sys
from pathlib import Path

import pytest
import torch

from lowq_packers import bitstream
from lowq_packers.errors import DamagedError
from lowq_packers.formats import compressed_tensors

sys.path.insert(0, str(Path(__file__).parent))
from format_support import NAME, dense, read


def ct_config(bits=3, group=32, symmetric=True, kind="int", fmt="pack-quantized", **more):
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
        **more,
    }
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": fmt,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }
    }


def padded(codes, bits):
    """32 // bits codes to a word, the rest of it empty: the layout before mid-2026."""
    E = 32 // bits
    short = -codes.shape[1] % E
    wide = torch.nn.functional.pad(codes, (0, short)).long().reshape(codes.shape[0], -1, E)
    words = sum(wide[..., i] << (bits * i) for i in range(E))
    return words.to(torch.int32)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("K", [16, 32, 96, 320])
@pytest.mark.parametrize("layout", ["dense", "padded"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_ct_odd_widths_old_and_new(bits, K, layout, symmetric):
    """K = 16 fills as many words either way at some widths: only the bits behind a dense stream tell."""
    g = torch.Generator().manual_seed(bits + K)
    N, group = 40, 16
    codes = torch.randint(0, 1 << bits, (N, K), generator=g, dtype=torch.uint8)
    zeros = torch.randint(0, 1 << bits, (N, K // group), generator=g, dtype=torch.uint8)
    pack = padded if layout == "padded" else dense
    tensors = {
        f"{NAME}.weight_packed": pack(codes, bits),
        f"{NAME}.weight_scale": torch.rand(N, K // group, generator=g).to(torch.bfloat16),
        f"{NAME}.weight_shape": torch.tensor([N, K]),
    }
    if not symmetric:
        tensors[f"{NAME}.weight_zero_point"] = pack(zeros.t().contiguous(), bits).t().contiguous()
    (q,) = read(tensors, ct_config(bits, group, symmetric)).values()
    z = zeros.float().unsqueeze(-1) if not symmetric else float(1 << (bits - 1))
    w = (codes.float().reshape(N, -1, group) - z) * tensors[f"{NAME}.weight_scale"].float().unsqueeze(-1)
    assert torch.equal(q.dequantize(), w.reshape(N, K))
    assert torch.equal(q.W_q, codes)


def test_ct_zeros_are_laid_out_as_the_codes_they_belong_to():
    """8 rows of 6 bits fill two words either way, and zeros whose last ones are small leave no trace of which."""
    codes, zeros = torch.arange(8 * 16, dtype=torch.uint8).reshape(8, 16) % 64, torch.arange(8, dtype=torch.uint8)
    tensors = {
        f"{NAME}.weight_packed": padded(codes, 6),
        f"{NAME}.weight_scale": torch.ones(8, 1),
        f"{NAME}.weight_shape": torch.tensor([8, 16]),
        f"{NAME}.weight_zero_point": padded(zeros[None], 6).t().contiguous(),
    }
    (q,) = read(tensors, ct_config(6, 16, False)).values()
    assert torch.equal(q.zeros.flatten(), zeros.float())


def test_ct_three_bit_words_by_hand():
    """3 bits, codes 1 .. 7 then 0: dense puts code 10 across the first two words; padded starts the second word with it."""
    codes = (torch.arange(1, 33) % 8).to(torch.uint8).unsqueeze(0)
    new, old = bitstream.pack(codes, 3), padded(codes, 3)
    stream = sum(((k + 1) % 8) << (3 * k) for k in range(32))
    assert [w & 0xFFFFFFFF for w in new[0].tolist()] == [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(3)]
    assert old.shape == (1, 4)
    assert old[0, 1] & 7 == 11 % 8


def test_ct_one_bit_symmetric_is_minus_s_and_0():
    tensors = {
        f"{NAME}.weight_packed": torch.tensor([[0b0110]], dtype=torch.int32),
        f"{NAME}.weight_scale": torch.tensor([[0.5]]),
        f"{NAME}.weight_shape": torch.tensor([1, 32]),
    }
    (q,) = read(tensors, ct_config(1, 32)).values()
    assert q.dequantize()[0, :4].tolist() == [-0.5, 0, 0, -0.5]


def test_ct_int_quantized():
    W = torch.tensor([[-128, 127, 0, 5] * 8, [1, -1, 2, -2] * 8], dtype=torch.int8)
    tensors = {f"{NAME}.weight": W, f"{NAME}.weight_scale": torch.tensor([[0.5], [0.25]])}
    (q,) = read(tensors, ct_config(8, None, fmt="int-quantized")).values()
    assert (q.bits, q.zero, q.group_size) == (8, "none", 32)
    assert torch.equal(q.dequantize(), W.float() * torch.tensor([[0.5], [0.25]]))
    tensors[f"{NAME}.weight_zero_point"] = torch.tensor([[-3], [4]], dtype=torch.int8)
    (q,) = read(tensors, ct_config(8, None, False, fmt="int-quantized")).values()
    assert torch.equal(q.dequantize(), (W.float() - torch.tensor([[-3.0], [4.0]])) * torch.tensor([[0.5], [0.25]]))
    tensors = {f"{NAME}.weight": W, f"{NAME}.weight_scale": torch.tensor([0.5])}
    (q,) = read(tensors, ct_config(8, None, fmt="int-quantized")).values()
    assert torch.equal(q.dequantize(), W.float() * 0.5)


def test_ct_float_quantized():
    W = torch.linspace(-2, 2, 192 * 160).reshape(192, 160).to(torch.float8_e4m3fn)
    tensors = {f"{NAME}.weight": W, f"{NAME}.weight_scale": torch.rand(192, 1)}
    config = ct_config(8, None, kind="float", fmt="float-quantized")
    for output, dtype in ({}, "float32"), ({"dtype": "float32"}, "float32"), ({"torch_dtype": "bfloat16"}, "bfloat16"):
        (w,) = read(tensors, {**config, **output}).values()
        assert torch.equal(w, (W.float() * tensors[f"{NAME}.weight_scale"]).to(getattr(torch, dtype)))
        assert w.dtype == getattr(torch, dtype), "the model's dtype; the scales' where config.json names none"
    tensors[f"{NAME}.weight_scale"] = torch.rand(2, 2)
    block = {"strategy": "block", "block_structure": [128, 128]}
    (w,) = read(tensors, ct_config(8, None, kind="float", fmt="float-quantized", **block)).values()
    assert w[130, 129] == W[130, 129].float() * tensors[f"{NAME}.weight_scale"][1, 1]


@pytest.mark.parametrize(
    ("leaf", "tensor", "message"),
    [
        ("weight_scale", torch.ones(4, 1), "expected"),
        ("weight_shape", torch.tensor([4, 64]), "weight_shape says"),
        ("weight_shape", torch.tensor([1 << 60, 32]), "weight_shape says"),
        ("weight_packed", torch.zeros(2, 9, dtype=torch.int32), "9 words a row"),
    ],
)
def test_ct_tensors_that_contradict_each_other(leaf, tensor, message):
    tensors = {
        f"{NAME}.weight_packed": torch.zeros(2, 3, dtype=torch.int32),
        f"{NAME}.weight_scale": torch.ones(2, 1),
        f"{NAME}.weight_shape": torch.tensor([2, 32]),
    }
    with pytest.raises(DamagedError, match=message):
        read({**tensors, f"{NAME}.{leaf}": tensor}, ct_config(3, 32))


def test_ct_target_of_a_group():
    groups = {
        "a": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8}},
        "b": {"targets": ["Linear"], "weights": {"num_bits": 4}},
        "c": {"targets": [NAME], "weights": {"num_bits": 2}},
    }
    result = [
        compressed_tensors.Groups({"config_groups": groups}).weights(n, "pack-quantized", {})["num_bits"]
        for n in ("x.down_proj", "x.up_proj", NAME)
    ]
    assert result == [8, 4, 2]
