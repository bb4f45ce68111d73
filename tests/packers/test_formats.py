"""Foreign formats: what is written reads back bit for bit; bytes worked out by hand from the specifications; every trap."""

import contextlib
import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowq_packers import bitstream, formats
from lowq_packers.errors import DamagedError, LowqError, SchemeError, UnsupportedError
from lowq_packers.formats import _common, compressed_tensors, fp8_block, gguf, gptq, hqq
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import BITS, Scheme

NAME = "model.layers.3.mlp.up_proj"
ST = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint32: "U32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
}
WRITERS = [f for f in formats.FORMATS.values() if f.write]


class Header:
    def __init__(self, t):
        self.shape, self.dtype = tuple(t.shape), ST[t.dtype]


def headers(tensors):
    return {name: Header(t) for name, t in tensors.items()}


def fetcher(tensors):
    """U32 tensors arrive as int32, as the file reader gives them."""
    return lambda name: tensors[name].view(torch.int32) if tensors[name].dtype == torch.uint32 else tensors[name]


def read(tensors, config):
    """The matrices of a checkpoint, decoded, by name."""
    fmt = formats.detect(config, headers(tensors))
    found = fmt.matrices(config, headers(tensors), fetcher(tensors))
    for m in found:
        q = m.read(fetcher(tensors))
        assert (q.scheme if isinstance(q, QuantizedTensor) else None) == m.scheme, "what was promised is what is read"
        assert tuple(q.shape) == m.shape
        assert set(m.parts) <= tensors.keys()
    return {m.name: m.read(fetcher(tensors)) for m in found}


def random_q(bits, group, zero, N, K, seed=0, dtype=torch.float16):
    """Random codes, all of them drawn; scales of three digits and zeros of five, products exact in bf16 too."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (N, K), generator=g, dtype=torch.uint8)
    scales = (torch.randint(1, 8, (N, K // group), generator=g) / 1024).to(dtype)
    zeros = None
    if zero != "none":
        levels = torch.randint(0, min(1 << bits, 15), (N, K // group), generator=g)
        zeros = (levels + (0.5 if zero == "float" else 0)).to(dtype)
    return QuantizedTensor(codes, scales, zeros, bits, group, zero)


def assert_same(a, b, kinds=True):
    assert torch.equal(a.W_q, b.W_q)
    assert torch.equal(a.scales, b.scales)
    assert a.scales.dtype == b.scales.dtype
    assert (a.bits, a.group_size) == (b.bits, b.group_size)
    if kinds:
        assert a.zero == b.zero
        assert (a.zeros is None) == (b.zeros is None)
    if a.zeros is not None or b.zeros is not None:
        zeros = [torch.full_like(x.scales, x.scheme.mid) if x.zeros is None else x.zeros for x in (a, b)]
        assert torch.equal(zeros[0].float(), zeros[1].float())


def written(fmt, q, **more):
    config = {**fmt.config({NAME: q.scheme}, {NAME: q.shape}, ["lm_head"]), **more}
    return fmt.write(NAME, q, config), config


HOLDS_KINDS = ("gptq", "awq", "compressed-tensors", "humming")  # the others have one kind of zero


@settings(max_examples=300, deadline=None)
@given(
    fmt=st.sampled_from(WRITERS),
    bits=st.sampled_from(BITS),
    zero=st.sampled_from(["float", "int", "none"]),
    N=st.integers(1, 9).map(lambda n: 8 * n) | st.integers(1, 70),
    group=st.sampled_from([16, 32, 48, 64, 128]),
    groups=st.integers(1, 3),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_what_is_written_reads_back_bit_for_bit_or_is_refused(fmt, bits, zero, N, group, groups, dtype, seed):
    q = random_q(bits, group, zero, N, group * groups, seed, dtype)
    if reason := fmt.why_not(q.scheme, *q.shape):
        assert "nearest" in reason or "K that is a multiple" in reason
        return
    tensors, config = written(fmt, q)
    (back,) = read(tensors, config).values()
    if isinstance(back, torch.Tensor):
        pytest.fail("a scheme of ours came back dense")
    assert_same(back, q, kinds=fmt.name in HOLDS_KINDS and not (bits == 1 and zero == "none"))
    assert torch.equal(back.dequantize(), q.dequantize())


HELD = {
    "gptq": [(b, z) for b in (8, 4, 3, 2) for z in ("int", "none")],
    "awq": [(4, "int")],
    "compressed-tensors": [(b, "int") for b in BITS] + [(b, "none") for b in (8, 4, 3, 2)],
    "humming": [(b, z) for b in BITS for z in ("float", "int", "none")],
    "mlx": [(b, z) for b in (8, 4, 3, 2) for z in ("float", "int", "none")],
    "hqq": [(b, z) for b in BITS for z in ("float", "int", "none")],
    "gemlite": [(b, z) for b in (8, 4, 2, 1) for z in ("float", "int", "none")],
}


@pytest.mark.parametrize("name", HELD)
def test_each_format_holds_what_its_specification_says_and_refuses_the_rest(name):
    fmt = formats.get(name)
    for bits in BITS:
        for zero in ("float", "int", "none"):
            reason = fmt.why_not(Scheme(bits, 64, zero), 64, 128)
            assert (reason is None) == ((bits, zero) in HELD[name]), (bits, zero, reason)


@pytest.mark.parametrize("fmt", WRITERS, ids=lambda f: f.name)
def test_a_flipped_code_is_seen(fmt):
    bits, zero = HELD[fmt.name][0]
    q = random_q(bits, 64, zero, 64, 128)
    tensors, config = written(fmt, q)
    W_q = q.W_q.clone()
    W_q[5, 77] ^= 1
    other, _ = written(fmt, QuantizedTensor(W_q, q.scales, q.zeros, bits, 64, zero))
    changed = [
        n for n in tensors if not torch.equal(tensors[n].flatten().view(torch.uint8), other[n].flatten().view(torch.uint8))
    ]
    assert len(changed) == 1
    (back,) = read(other, config).values()
    assert torch.equal(back.W_q, W_q)


@pytest.mark.parametrize("fmt", WRITERS, ids=lambda f: f.name)
def test_per_channel(fmt):
    bits, zero = HELD[fmt.name][-1]
    if fmt.why_not(Scheme(bits, 128, zero), 64, 128):
        pytest.skip(f"{fmt.name} has no such group")
    q = random_q(bits, 128, zero, 64, 128)
    tensors, config = written(fmt, q)
    (back,) = read(tensors, config).values()
    assert torch.equal(back.dequantize(), q.dequantize())


@pytest.mark.parametrize(
    "fmt", [formats.get(n) for n in ("gptq", "compressed-tensors", "humming", "mlx")], ids=lambda f: f.name
)
def test_several_schemes_in_one_checkpoint(fmt):
    """The config must say which matrix has which, whatever it takes as the default."""
    tensors, schemes, shapes, qs = {}, {}, {}, {}
    for i, (bits, group) in enumerate([(4, 64), (4, 64), (8, 32), (2, 64), (4, 128)]):
        name = f"model.layers.{i}.mlp.up_proj"
        qs[name] = random_q(bits, group, "none", 64, 128, seed=i)
        schemes[name], shapes[name] = qs[name].scheme, (64, 128)
    config = fmt.config(schemes, shapes, ["lm_head"])
    for name, q in qs.items():
        tensors |= fmt.write(name, q, config)
    for name, back in read(tensors, config).items():
        assert_same(back, qs[name], kinds=fmt.name in HOLDS_KINDS)
        assert torch.equal(back.dequantize(), qs[name].dequantize())


# --- GPTQ -------------------------------------------------------------------------------------------------------------


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


# --- AWQ --------------------------------------------------------------------------------------------------------------


def test_awq_bytes():
    """Columns 0 .. 7 with the codes 0 .. 7: nibbles hold columns 0, 2, 4, 6, 1, 3, 5, 7, so the word is 0x75316420."""
    codes = torch.arange(8, dtype=torch.uint8).unsqueeze(1).repeat(1, 16)
    q = QuantizedTensor(codes, torch.ones(8, 1), torch.arange(8.0).unsqueeze(1), 4, 16, "int")
    tensors, _ = written(formats.get("awq"), q)
    assert tensors[f"{NAME}.qweight"].tolist() == [[0x75316420]] * 16
    assert tensors[f"{NAME}.qzeros"].tolist() == [[0x75316420]]


def test_awq_of_another_kernel_is_refused():
    with pytest.raises(UnsupportedError, match="gemv"):
        read(
            {f"{NAME}.qweight": torch.zeros(32, 1, dtype=torch.int32)},
            {"quantization_config": {"quant_method": "awq", "version": "gemv"}},
        )


# --- compressed-tensors -----------------------------------------------------------------------------------------------


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


def dense(codes, bits):
    """A little-endian stream of codes, by whole numbers of any size: slow, and nothing shared with bitstream."""
    rows = []
    for row in codes.tolist():
        stream = sum(q << (bits * k) for k, q in enumerate(row))
        rows.append([(stream >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(row) * bits // 32))])
    return torch.tensor(rows).to(torch.int32)


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
    (w,) = read(tensors, ct_config(8, None, kind="float", fmt="float-quantized")).values()
    assert torch.equal(w, (W.float() * tensors[f"{NAME}.weight_scale"]).to(torch.bfloat16))
    tensors[f"{NAME}.weight_scale"] = torch.rand(2, 2)
    block = {"strategy": "block", "block_structure": [128, 128]}
    (w,) = read(tensors, ct_config(8, None, kind="float", fmt="float-quantized", **block)).values()
    assert w[130, 129] == (W[130, 129].float() * tensors[f"{NAME}.weight_scale"][1, 1]).to(torch.bfloat16)


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
    found = [
        compressed_tensors._group_of({"config_groups": groups}, n)["weights"]["num_bits"]
        for n in ("x.down_proj", "x.up_proj", NAME)
    ]
    assert found == [8, 4, 2]


# --- FP8 --------------------------------------------------------------------------------------------------------------


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
    partial = fp8_block._notes(config, headers(tensors))
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


# --- HQQ --------------------------------------------------------------------------------------------------------------


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
    (found,) = read(tensors, {}).values()
    theirs = layer.dequantize().float()
    if axis == 1:
        words = layer.W_q.view(layer.meta["unpack_view_dtype"])
        codes = library.Quantizer.unpack[layer.meta["packing"]](words, dtype=torch.uint8)[: 80 * 2]
        assert torch.equal(found.W_q.reshape(-1, 64), codes)
        assert torch.equal(found.scales.flatten(), layer.meta["scale"].flatten())
        assert torch.equal(found.zeros.flatten(), layer.meta["zero"].flatten())
        found = found.dequantize()
    assert (found.float() - theirs).abs().max() <= 2e-3 * theirs.abs().max()  # theirs is computed in fp16


def test_hqq_loads_what_we_write_with_its_own_loader():
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


# --- GemLite ----------------------------------------------------------------------------------------------------------


def test_gemlite_words_and_metadata():
    codes = (torch.arange(64) % 16).to(torch.uint8).repeat(32, 1)
    q = QuantizedTensor(codes, torch.ones(32, 1).half(), torch.full((32, 1), 7.0).half(), 4, 64)
    tensors, _ = written(formats.get("gemlite"), q)
    assert tensors[f"{NAME}.W_q"].shape == (8, 32)
    assert tensors[f"{NAME}.W_q"][0].unique().tolist() == [0x76543210]
    assert tensors[f"{NAME}.metadata"].tolist()[:5] == [0, 4, 64, 15, 8]
    assert "nearest" in formats.get("gemlite").why_not(Scheme(3, 64), 32, 64)


@pytest.mark.parametrize("container", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_gemlite_fused_zeros_in_every_container(container):
    q = random_q(4, 32, "int", 64, 128)
    tensors, _ = written(formats.get("gemlite"), q)
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


# --- MLX and GGUF -----------------------------------------------------------------------------------------------------


def test_mlx_offsets_that_do_not_fit_are_refused_with_the_size_of_the_error():
    q = random_q(4, 64, "float", 8, 64)
    q = QuantizedTensor(q.W_q, torch.full_like(q.scales, 1 / 3), torch.full_like(q.zeros, 7.3), 4, 64)
    with pytest.raises(SchemeError, match=r"--round, or quantize with --zero none"):
        written(formats.get("mlx"), q)
    tensors, config = written(formats.get("mlx"), q, round=True)
    (back,) = read(tensors, config).values()
    assert (back.dequantize() - q.dequantize()).abs().max() < 4e-3 * (1 / 3)


@pytest.mark.parametrize("bits", [5, 6])
def test_mlx_widths_that_lowq_lacks_are_widened(bits):
    codes = torch.randint(0, 1 << bits, (8, 64), dtype=torch.uint8)
    tensors = {
        f"{NAME}.weight": dense(codes, bits).view(torch.uint32),
        f"{NAME}.scales": torch.full((8, 1), 0.25).half(),
        f"{NAME}.biases": torch.full((8, 1), -2.0).half(),
    }
    (q,) = read(tensors, {"quantization": {"bits": bits, "group_size": 64}}).values()
    assert torch.equal(q.dequantize(), codes.float() * 0.25 - 2)
    assert q.bits == 8


def test_constant_groups_of_offset_formats():
    """scale 0: every weight of the group is the offset."""
    codes, scales, zeros = _common.offset_to_zeros(
        torch.full((1, 32), 9, dtype=torch.uint8), torch.zeros(1, 2), torch.tensor([[0.75, 0.0]]), 16
    )
    q = QuantizedTensor(codes, scales, zeros, 4, 16)
    assert q.dequantize().unique().tolist() == [0, 0.75]


@pytest.mark.parametrize(
    ("bits", "zero", "kind"), [(4, "none", "Q4_0"), (4, "float", "Q4_1"), (4, "int", "Q4_1"), (8, "none", "Q8_0")]
)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_gguf_blocks(bits, zero, kind, group):
    q = random_q(bits, group, zero, 24, 256)
    assert gguf.type_for(q.scheme) == kind
    raw = gguf.encode(q, NAME)
    assert raw.shape == (24, 256 // 32 * gguf.TYPES[kind].nbytes)
    back = gguf.decode(raw, kind, 24, 256)
    assert torch.equal(back.W_q, q.W_q)
    assert torch.equal(back.dequantize(), q.dequantize())
    package = pytest.importorskip("gguf", reason="needs the package gguf (extra interop)")
    theirs = package.quants.dequantize(raw.numpy(), getattr(package.GGMLQuantizationType, kind))
    assert torch.equal(torch.from_numpy(theirs), q.dequantize())


def test_gguf_block_by_hand():
    """d = 0.5 is 0x3800; byte j = code j | code (j + 16) << 4."""
    codes = torch.cat([torch.arange(16), torch.arange(15, -1, -1)]).to(torch.uint8).unsqueeze(0)
    raw = gguf.encode(QuantizedTensor(codes, torch.tensor([[0.5]]).half(), None, 4, 32), NAME)
    assert raw[0].tolist() == [0x00, 0x38] + [j | (15 - j) << 4 for j in range(16)]


def test_gguf_scales_that_fp16_does_not_hold():
    q = QuantizedTensor(torch.zeros(1, 32, dtype=torch.uint8), torch.tensor([[1e-9]]).bfloat16(), None, 4, 32)
    with pytest.raises(SchemeError, match="does not fit GGUF's fp16"):
        gguf.encode(q, NAME)


def test_heads_permute_there_and_back():
    rows = torch.arange(2 * 8).unsqueeze(1)
    there = gguf.permute_heads(rows, 2)
    assert there.flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert torch.equal(gguf.permute_heads(there, 2, inverse=True), rows)


# --- real readers, where installed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("zero", ["none", "int"])
def test_compressed_tensors_unpacks_what_we_write(bits, zero):
    helpers = pytest.importorskip(
        "compressed_tensors.compressors.pack_quantized.helpers", reason="needs compressed-tensors (extra interop)"
    )
    q = random_q(bits, 32, zero, 40, 96)
    tensors, _ = written(formats.get("compressed-tensors"), q)
    half = 1 << (bits - 1)
    codes = helpers.unpack_from_int32(tensors[f"{NAME}.weight_packed"], bits, torch.Size([40, 96]))
    assert torch.equal(codes.int() + half, q.W_q.int())
    if zero == "int":
        z = helpers.unpack_from_int32(tensors[f"{NAME}.weight_zero_point"], bits, torch.Size([40, 3]), packed_dim=0)
        assert torch.equal((z.int() + half).float(), q.zeros.float())


@pytest.mark.parametrize("zero", ["float", "int", "none"])
@pytest.mark.parametrize("group", [32, 128])
def test_humming_takes_our_config_and_expects_our_tensors(zero, group):
    schema = pytest.importorskip("humming.schema", reason="needs humming-kernels and cuda-bindings", exc_type=ImportError)
    for bits in BITS:
        q = random_q(bits, group, zero, 64, 128)
        tensors, config = written(formats.get("humming"), q)
        expected = schema.BaseWeightSchema.from_config(config["quantization_config"]).get_tensors_attrs(64, 128, torch.float16)
        assert {f"{NAME}.{leaf}": (tuple(e["shape"]), e["dtype"]) for leaf, e in expected.items()} == {
            n: (tuple(t.shape), t.dtype) for n, t in tensors.items()
        }


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("zero", ["int", "none"])
def test_gptqmodel_dequantizes_what_we_write(bits, zero):
    """Version 2 with whole-number zeros, version 1 (which it converts first) without."""
    pytest.importorskip("gptqmodel", reason="needs the package gptqmodel", exc_type=ImportError)
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    q = random_q(bits, 32, zero, 64, 128)
    tensors, config = written(formats.get("gptq"), q)
    layer = TorchLinear(bits, 32, zero == "none", False, 128, 64, format=FORMAT.GPTQ_V2)
    for name, t in tensors.items():
        getattr(layer, name.rpartition(".")[2]).copy_(t)
    if config["quantization_config"]["checkpoint_format"] == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, bits=bits, pack_dtype=torch.int32)
    layer.post_init()
    assert torch.equal(layer.dequantize_weight().t().float(), q.dequantize())


def test_autoawq_unpacks_what_we_write():
    package = importlib.util.find_spec("awq")  # not imported: it wants data sets and models
    if package is None:
        pytest.skip("needs the package autoawq")
    path = Path(package.submodule_search_locations[0]) / "utils" / "packing_utils.py"
    spec = importlib.util.spec_from_file_location("packing_utils", path)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    q = random_q(4, 32, "int", 40, 96)
    t, _ = written(formats.get("awq"), q)
    codes, zeros = theirs.unpack_awq(t[f"{NAME}.qweight"], t[f"{NAME}.qzeros"], 4)
    codes, zeros = theirs.reverse_awq_order(codes, zeros, 4)
    assert torch.equal((codes & 15).t().to(torch.uint8), q.W_q)
    assert torch.equal((zeros & 15).t().float(), q.zeros.float())


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_mlx_dequantizes_what_we_write_and_we_read_what_it_quantizes(bits):
    mx = pytest.importorskip("mlx.core", reason="needs mlx (extra interop)")
    q = random_q(bits, 32, "none", 40, 96)
    tensors, _ = written(formats.get("mlx"), q)
    w, s, b = (mx.array(t.view(torch.uint32).numpy() if t.dtype == torch.uint32 else t.numpy()) for t in tensors.values())
    theirs = mx.dequantize(w, s.astype(mx.float32), b.astype(mx.float32), group_size=32, bits=bits)
    assert theirs.tolist() == q.dequantize().tolist()
    w, s, b = mx.quantize(mx.random.normal((40, 96)).astype(mx.float32), group_size=32, bits=bits)
    tensors = dict(
        zip(
            tensors,
            (torch.tensor(w.tolist(), dtype=torch.int64).to(torch.uint32), torch.tensor(s.tolist()), torch.tensor(b.tolist())),
            strict=True,
        )
    )
    (back,) = read(tensors, {"quantization": {"bits": bits, "group_size": 32}}).values()
    expected = torch.tensor(mx.dequantize(w, s, b, group_size=32, bits=bits).tolist())
    assert (back.dequantize() - expected).abs().max() < 1e-6


# --- hostile files ----------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    fmt=st.sampled_from(WRITERS),
    victim=st.integers(0, 30),
    how=st.sampled_from(["drop", "row", "column", "dtype", "flat", "empty"]),
)
def test_a_spoilt_tensor_is_refused_or_read_but_never_a_crash(fmt, victim, how):
    bits, zero = HELD[fmt.name][0]
    tensors, config = written(fmt, random_q(bits, 64, zero, 64, 128))
    name = sorted(tensors)[victim % len(tensors)]
    t = tensors.pop(name)
    if how == "row" and t.dim():
        t = t[:-1]
    elif how == "column":
        t = t[..., :-1] if t.dim() else t
    elif how == "dtype":
        t = t.to(torch.float32 if not t.is_floating_point() else torch.int32)
    elif how == "flat":
        t = t.flatten()
    elif how == "empty":
        t = t.flatten()[:0]
    if how != "drop":
        tensors[name] = t.contiguous()
    try:
        found = formats.detect(config, headers(tensors))
        for m in found.matrices(config, headers(tensors), fetcher(tensors)) if found else ():
            m.read(fetcher(tensors))
    except LowqError:
        pass


@pytest.mark.parametrize("fmt", [f.name for f in WRITERS if f.name != "gemlite"])
@pytest.mark.parametrize("value", [None, "4", -1, 3.5, [], 10**9, True])
def test_a_spoilt_config_is_refused_or_read_but_never_a_crash(fmt, value):
    bits, zero = HELD[fmt][0]
    tensors, config = written(formats.get(fmt), random_q(bits, 64, zero, 64, 128))
    section = "quantization" if fmt == "mlx" else "quantization_config"
    for key in config[section]:
        if key == "quant_method":
            continue
        spoilt = {**config, section: {**config[section], key: value}}
        with contextlib.suppress(LowqError):
            read(tensors, spoilt)
