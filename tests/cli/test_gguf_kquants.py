"""GGUF files of the K-quants and their kin, as sources: the gguf package's numbers, in Hugging Face's order of rows."""

import json

import pytest
import torch

from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.interop.foreign import open_decoded, open_foreign
from lowq_cli.interop.gguf_file import GgufTensor, f32, head, padded, text, u32
from lowq_cli.interop.inspection import inspect_model
from lowq_cli.run import pipeline
from lowq_packers.errors import DamagedError
from lowq_packers.formats import gguf

DECODED = [name for name in gguf.TYPES if name not in (*gguf.QUANTIZED, *gguf.PLAIN)]
H, INTER, V = 256, 512, 64
LINEARS = {"attn_q": (H, H), "attn_k": (H // 2, H), "attn_v": (H // 2, H), "attn_output": (H, H), "ffn_gate": (INTER, H),
           "ffn_up": (INTER, H), "ffn_down": (H, INTER)}  # fmt: skip


def blocks(kind, N, K, seed=0):
    """Random blocks with small scales: every byte is a legal code, but fp16 fields must be finite numbers."""
    b, g = gguf.TYPES[kind], torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (N * K // b.elements, b.nbytes), generator=g, dtype=torch.uint8)
    at = {"Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q5_1": [0, 2]}.get(kind, [0])
    for i in at:
        scale = torch.rand(len(raw), 1, generator=g).mul(0.01).to(torch.float16)
        raw[:, i : i + 2] = scale.view(torch.uint8)
    return raw.flatten()


def write_file(path, kind):
    """A one-layer Llama whose matrices are all of one type; the bytes of each tensor."""
    facts = {"context_length": 128, "embedding_length": H, "block_count": 1, "feed_forward_length": INTER}
    facts |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    metadata = [("general.architecture", text("llama")), *((f"llama.{k}", u32(v)) for k, v in facts.items())]
    metadata.append(("llama.attention.layer_norm_rms_epsilon", f32(1e-5)))
    rows = [GgufTensor("token_embd.weight", (V, H), kind), GgufTensor("output_norm.weight", (H,), "F32")]
    rows += [GgufTensor(f"blk.0.{n}.weight", (H,), "F32") for n in ("attn_norm", "ffn_norm")]
    rows += [GgufTensor(f"blk.0.{n}.weight", shape, kind) for n, shape in LINEARS.items()]
    raw = {
        r.name: torch.ones(H).view(torch.uint8) if r.kind == "F32" else blocks(kind, *r.shape, i) for i, r in enumerate(rows)
    }
    with open(path, "wb") as f:
        f.write(head(metadata, rows))
        for r in rows:
            f.write(raw[r.name].numpy().data)
            f.write(bytes(padded(r.nbytes) - r.nbytes))
    return raw


@pytest.mark.parametrize("kind", DECODED)
def test_sizes_and_numbers_are_those_of_the_gguf_package(kind):
    constants = pytest.importorskip("gguf.constants", reason="gguf is not installed (extra: interop)")
    number = constants.GGMLQuantizationType[kind]
    b = gguf.TYPES[kind]
    assert (b.number, constants.GGML_QUANT_SIZES[number]) == (int(number), (b.elements, b.nbytes))


@pytest.mark.parametrize("kind", DECODED)
def test_a_file_of_each_type_is_a_source(kind, tmp_path):
    quants = pytest.importorskip("gguf.quants", reason="gguf is not installed (extra: interop)")
    from gguf import GGMLQuantizationType

    raw = write_file(tmp_path / "m.gguf", kind)
    with open_decoded(str(tmp_path / "m.gguf")) as source:
        for theirs, ours, heads in (
            ("attn_v", "self_attn.v_proj", 0),
            ("ffn_down", "mlp.down_proj", 0),
            ("attn_q", "self_attn.q_proj", 4),
        ):
            N, K = LINEARS[theirs]
            expected = quants.dequantize(raw[f"blk.0.{theirs}.weight"].reshape(N, -1).numpy(), GGMLQuantizationType[kind])
            expected = torch.from_numpy(expected).to(torch.float16)
            assert expected.isfinite().all()
            assert expected.unique().numel() > 8
            expected = gguf.permute_heads(expected, heads, inverse=True) if heads else expected
            assert torch.equal(source.read(f"model.layers.0.{ours}.weight").reshape(N, K), expected)


def test_one_is_quantized_anew_and_inspected(tmp_path):
    write_file(tmp_path / "m.gguf", "Q4_K")
    report = inspect_model(str(tmp_path / "m.gguf"))
    assert report.format == "gguf"
    assert {r.scheme for r in report.rows if r.quantized} == {"Q4_K"}
    assert report.histogram[4] > 0
    assert 4.5 <= report.quantized_bpw < 4.51
    pipeline.quantize(tmp_path / "m.gguf", tmp_path / "out", bits=8, group=64, method="rtn", device="cpu")
    checkpoint = open_checkpoint(tmp_path / "out")
    t = next(t for t in checkpoint.tensors if t.name.endswith("down_proj"))
    with open_decoded(str(tmp_path / "m.gguf")) as source:
        W = source.read(f"{t.name}.weight").reshape(t.shape).float()
    error = (checkpoint.read_matrix(t).dequantize() - W).norm() / W.norm()
    assert error < 0.01
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_method"] == "lowq"


def test_a_scale_that_is_none_is_refused(tmp_path):
    write_file(tmp_path / "m.gguf", "Q6_K")
    with open_foreign(str(tmp_path / "m.gguf")) as source:
        at = source.headers["model.layers.0.mlp.down_proj.weight"].offset
    raw = bytearray((tmp_path / "m.gguf").read_bytes())
    raw[at + 208 : at + 210] = b"\x00\x7e"  # fp16 NaN
    (tmp_path / "m.gguf").write_bytes(raw)
    with open_decoded(str(tmp_path / "m.gguf")) as source, pytest.raises(DamagedError, match=r"down_proj holds NaN"):
        source.read("model.layers.0.mlp.down_proj.weight")
