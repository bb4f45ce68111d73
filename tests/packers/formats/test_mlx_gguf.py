"""MLX and GGUF: offsets instead of zeros, blocks by hand, order of rows."""

import sys
from pathlib import Path

import pytest
import torch

from lowq_packers import formats
from lowq_packers.errors import DamagedError, SchemeError
from lowq_packers.formats import _common, gguf
from lowq_packers.formats._gguf_blocks import BLOCK_KINDS, read_blocks, write_blocks
from lowq_packers.qtensor import QuantizedTensor

sys.path.insert(0, str(Path(__file__).parent))
from format_support import NAME, dense, random_q, read, written


def test_mlx_offsets_that_do_not_fit_are_refused_with_the_size_of_the_error():
    q = random_q(4, 64, "float", 8, 64)
    q = QuantizedTensor(q.W_q, torch.full_like(q.scales, 1 / 3), torch.full_like(q.zeros, 7.3), 4, 64)
    with pytest.raises(SchemeError, match=r"--round, or quantize with --zero none"):
        written(formats.get("mlx"), q)
    tensors, config = written(formats.get("mlx"), q, round=True)
    (back,) = read(tensors, config).values()
    assert (back.dequantize() - q.dequantize()).abs().max() < 4e-3 * (1 / 3)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mistral"}, ["without its sliding window: other numbers from token 4096 on"]),  # transformers' own
        ({"model_type": "mistral", "sliding_window": None}, []),
        ({"model_type": "qwen3", "sliding_window": 1024}, []),
        (
            {"model_type": "qwen3", "sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 1},
            ["from token 1024 on"],
        ),
        ({"model_type": "llama", "hidden_act": "gelu"}, ["with silu, not with this model's gelu"]),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}, []),
        (
            {"model_type": "mixtral", "rope_scaling": {"type": "linear", "factor": 2.0}},
            ["mixtral without its linear rotary scaling"],
        ),
        ({"model_type": "qwen2", "head_dim": 32}, ["qwen2 with heads of 16, this model's have 32"]),
        ({"model_type": "qwen3", "head_dim": 32}, []),
        ({"model_type": "qwen3", "attention_bias": True}, ["qwen3 has no place for the bias of layers.0.self_attn.q_proj"]),
        ({"model_type": "llama", "attention_bias": True, "mlp_bias": True}, []),
        ({"model_type": "gemma3_text", "sliding_window": 512, "hidden_act": "gelu"}, []),  # mlx-lm has both
    ],
)
def test_differences_from_mlx_lm_are_noted(config, said):
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), 64)
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_window_layers": 0}
    mlx = formats.get("mlx")
    notes = mlx.notes({"rms_norm_eps": 1e-6} | sizes | config, {})
    assert mlx.export.otherwise({"rms_norm_eps": 1e-6} | sizes | config) in (*notes, None)
    assert len(notes) == len(said)
    assert all(text in note for text, note in zip(said, notes, strict=True))


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


@pytest.mark.parametrize("kind", [k for k in gguf.SCHEMES if k not in ("Q1_0", "Q4_1")])
def test_any_bytes_of_a_block_decode_as_in_the_gguf_package(kind):
    package = pytest.importorskip("gguf", reason="needs the package gguf (extra interop)")
    t, g = gguf.TYPES[kind], torch.Generator().manual_seed(0)
    number = package.GGMLQuantizationType(t.number)
    assert package.GGML_QUANT_SIZES[number] == (t.elements, t.nbytes)
    raw = torch.randint(0, 256, (6, 512 // t.elements, t.nbytes), generator=g, dtype=torch.uint8)
    d = (torch.rand(6, 512 // t.elements, 1, generator=g) / 16).half().view(torch.uint8)
    if kind == "MXFP4":
        raw[..., 0] = raw[..., 0] % 250  # beyond are infinite weights
    elif kind.startswith("TQ"):
        raw[..., -2:] = d
    else:
        raw[..., :2] = d
    if kind == "TQ2_0":
        raw[..., :-2] &= 0xAA  # codes 0 and 2
    raw = raw.reshape(6, -1)
    q = gguf.decode(raw, kind, 6, 512)
    assert q.scheme == gguf.SCHEMES[kind]
    assert torch.equal(q.dequantize(), torch.from_numpy(package.quants.dequantize(raw.numpy(), number)))
    if gguf.type_for(q.scheme) == kind:
        assert torch.equal(gguf.encode(q, NAME), raw)


def test_gguf_one_bit_by_hand():
    """Bit j of byte i is weight 8 i + j: d where it is set, -d where not. PrismML's Bonsai; llama.cpp's type 41."""
    raw = torch.zeros(1, 18, dtype=torch.uint8)
    raw[0, 1], raw[0, 2], raw[0, 3] = 0x38, 0b101, 0x80  # 0.5
    q = gguf.decode(raw, "Q1_0", 1, 128)
    assert q.dequantize()[0, :3].tolist() == [0.5, -0.5, 0.5]
    assert (q.dequantize() > 0).nonzero()[:, 1].tolist() == [0, 2, 15]
    assert torch.equal(gguf.encode(q, NAME), raw)
    largest = raw.clone()
    largest[0, 0], largest[0, 1] = 0xFF, 0x7B  # 65504, twice which fp16 does not hold
    assert gguf.decode(largest, "Q1_0", 1, 128).dequantize().abs().max() == 65504
    assert torch.equal(gguf.encode(gguf.decode(largest, "Q1_0", 1, 128), NAME), largest)


@pytest.mark.parametrize(("kind", "said"), [("TQ2_0", "beyond -1, 0 and 1"), ("MXFP4", "exponents that are NaN")])
def test_gguf_codes_that_no_writer_produces_are_refused(kind, said):
    raw = torch.full((1, gguf.TYPES[kind].nbytes), 255, dtype=torch.uint8)
    with pytest.raises(DamagedError, match=said):
        gguf.decode(raw, kind, 1, gguf.TYPES[kind].elements)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_any_bytes_of_blocks_of_two_levels_decode_as_in_the_gguf_package(kind):
    package = pytest.importorskip("gguf", reason="needs the package gguf (extra interop)")
    t, g = gguf.TYPES[kind], torch.Generator().manual_seed(0)
    raw, at = torch.randint(0, 256, (6 * 512 // t.elements, t.nbytes), generator=g, dtype=torch.uint8), {}
    for field, size in BLOCK_KINDS[kind].fields:
        at[field] = sum(n for f, n in BLOCK_KINDS[kind].fields[: len(at)])
        if field in ("d", "dmin"):
            raw[:, at[field] : at[field] + size] = (torch.randn(len(raw), 1, generator=g) / 16).half().view(torch.uint8)
    q = read_blocks(raw, kind, 6, 512)
    theirs = package.quants.dequantize(raw.reshape(6, -1).numpy(), package.GGMLQuantizationType[kind])
    assert torch.equal(q.dequantize(), torch.from_numpy(theirs))
    assert torch.equal(write_blocks(q), raw.reshape(6, -1))
    raw[3, at["d"] : at["d"] + 2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    with pytest.raises(DamagedError, match="x holds NaN or infinite scales"):
        read_blocks(raw, kind, 6, 512, "x")
