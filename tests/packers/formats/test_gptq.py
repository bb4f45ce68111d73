"""GPTQ: bytes worked out by hand, both versions of zeros, g_idx, rules per module."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowq_packers import bitstream, formats
from lowq_packers.errors import DamagedError, UnsupportedError
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


def test_what_auto_round_writes_beside_the_grid_changes_nothing_and_other_kinds_of_data_are_refused():
    written_by = {"amp": False, "autoround_version": "0.16.1", "damp_percent": 0.01, "iters": 200, "provider": "auto-round"}
    tensors = gptq_tensors(0x77777777)
    (q,) = read(tensors, gptq_config(data_type="int", **written_by)).values()
    assert q.zeros.unique().tolist() == [8]
    with pytest.raises(UnsupportedError, match="data_type='mx_fp'"):
        read(tensors, gptq_config(data_type="mx_fp", **written_by))


def test_gptq_version_1_zeros_of_0_have_borrowed_from_the_next_and_are_noted():
    tensors = gptq_tensors(0x88888880 - 0x11111111)  # zeros 0, 8, 8, ...: 0x7777776F
    config = gptq_config()
    (q,) = read(tensors, config).values()
    assert q.zeros[:, 0].tolist() == [0] + [8] * 7
    (m,) = formats.get("gptq").matrices(config, headers(tensors), fetcher(tensors))
    assert "zeros of 0" in m.check(fetcher(tensors))[0]
    assert not m.check(fetcher(gptq_tensors(0x77777777)))


@settings(max_examples=200, deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), zeros=st.lists(st.integers(0, 255), min_size=32, max_size=32))
def test_gptq_version_1_zeros_of_any_kind_arrive_as_they_were(bits, zeros):
    """The writer is GPTQModel's convert_gptq_v2_to_v1_format_module: of 2, 4 and 8 bits it subtracts from whole words."""
    levels = [z % (1 << bits) for z in zeros]
    stream = sum(z << (bits * n) for n, z in enumerate(levels))
    words = [stream >> (32 * i) & 0xFFFFFFFF for i in range(bits)]
    if bits == 3:
        stream = sum((z - 1) % 8 << (3 * n) for n, z in enumerate(levels))
        words = [stream >> (32 * i) & 0xFFFFFFFF for i in range(3)]
    else:
        words = [(w - sum(1 << at for at in range(0, 32, bits))) % (1 << 32) for w in words]
    tensors = gptq_tensors(0, bits, N=32)
    tensors[f"{NAME}.qzeros"] = torch.tensor([words], dtype=torch.int64).to(torch.int32)
    if len(set(levels)) == 1 and levels[0] in ((1 << (bits - 1)) + 1, (1 << (bits - 1)) - 1):
        return  # all as the other version stores symmetric ones: refused, see below
    (q,) = read(tensors, gptq_config(bits)).values()
    assert q.zeros[:, 0].tolist() == levels


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_symmetric_zeros_are_found_in_both_versions_and_never_off_by_one(bits, version):
    """Of all zeros that a matrix may store: the two that mean 2**(bits-1) are read so, with or without a word of `sym`."""
    named, other = ("gptq", "gptq_v2") if version == 1 else ("gptq_v2", "gptq")
    mid = 1 << (bits - 1)
    for stored in range(1 << bits):
        tensors = gptq_tensors(0, bits, N=32)
        tensors[f"{NAME}.qzeros"] = bitstream.pack(torch.full((1, 32), stored, dtype=torch.uint8), bits)
        meant = (stored + (version == 1)) % (1 << bits)
        sym, asym = (gptq_config(bits, sym=sym, checkpoint_format=named) for sym in (True, False))
        if stored in (mid, mid - 1):
            (q,) = read(tensors, sym).values()
            assert q.zeros is None
            assert q.scheme.mid == mid
        else:
            with pytest.raises(DamagedError, match="asymmetric, set sym to false"):
                read(tensors, sym)
        if stored in (mid, mid - 1) and meant != mid:
            (m,) = formats.get("gptq").matrices(sym, headers(tensors), fetcher(tensors))
            assert f"read as {mid}, since the config says sym" in m.check(fetcher(tensors))[0]
            with pytest.raises(DamagedError, match=f"set checkpoint_format to {other} there"):
                read(tensors, asym)
            (q,) = read(tensors, gptq_config(bits, checkpoint_format=other)).values()  # the advice, followed
            assert q.zeros.unique().tolist() == [mid]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("K", "group"), [(160, 64), (192, 128), (96, 64), (64, 128), (32, 64)])
@pytest.mark.parametrize("sym", [True, False])
def test_gptq_groups_that_do_not_divide_k(bits, K, group, sym):
    """g_idx is k // group, as GPTQModel writes it: the last group is shorter, and one beyond K is the whole row."""
    g, N = torch.Generator().manual_seed(K), 32
    G, mid = -(-K // group), 1 << (bits - 1)
    codes = torch.randint(0, 1 << bits, (N, K), generator=g, dtype=torch.uint8)
    zeros = torch.full((G, N), mid) if sym else torch.randint(0, 1 << bits, (G, N), generator=g)
    scales = torch.rand(G, N, generator=g).half()
    index = torch.arange(K) // group
    tensors = {
        f"{NAME}.qweight": bitstream.pack(codes, bits).t().contiguous(),
        f"{NAME}.qzeros": bitstream.pack(zeros.to(torch.uint8), bits),
        f"{NAME}.scales": scales,
        f"{NAME}.g_idx": index.int(),
    }
    (w,) = read(tensors, gptq_config(bits, group, sym=sym, checkpoint_format="gptq_v2")).values()
    expected = (codes.float() - zeros.t()[:, index].float()) * scales.t()[:, index].float()
    if group > K:
        assert torch.equal(w.dequantize(), expected)
    else:
        assert torch.equal(w, expected.half())


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
