"""A file of every type that the gguf package knows, by its own writer: decoded as it decodes it, or refused by its type."""

import numpy as np
import pytest
import torch

from lowq_cli.interop.foreign import open_decoded
from lowq_packers.errors import UnsupportedError
from lowq_packers.formats import gguf as ours

gguf = pytest.importorskip("gguf", reason="needs the package gguf (extra test)")
quants = pytest.importorskip("gguf.quants")

H, INTER, V = 256, 512, 64
SHAPES = {
    "token_embd": (V, H), "blk.0.attn_q": (H, H), "blk.0.attn_k": (H // 2, H), "blk.0.attn_v": (H // 2, H),
    "blk.0.attn_output": (H, H), "blk.0.ffn_gate": (INTER, H), "blk.0.ffn_up": (INTER, H), "blk.0.ffn_down": (H, INTER),
}  # fmt: skip
FIRST = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64}  # where a block keeps its first fp16 scale


def raw(kind, N, K):
    """Rows of a type: by the package's quantizer, and where it has none, random blocks of small scales."""
    W = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    try:
        return quants.quantize(W, kind)
    except (NotImplementedError, ValueError, KeyError):
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (N * K // elements, nbytes), dtype=np.uint8)
    at = FIRST.get(kind.name, 0)
    if elements == 1:
        return blocks.reshape(N, -1)
    for i in (at, at + 2) if kind.name in ("Q2_K", "Q4_K", "Q5_K", "Q5_1", "Q4_1") else (at,):
        blocks[:, i : i + 2] = np.full((len(blocks), 1), 0.01, np.float16).view(np.uint8)
    return blocks.reshape(N, -1)


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType, ids=lambda k: k.name)
def test_every_type(kind, tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (("context_length", 128), ("embedding_length", H), ("block_count", 1), ("feed_forward_length", INTER),
                       ("head_count", 4), ("head_count_kv", 2)):  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    stored = {name: raw(kind, *shape) for name, shape in SHAPES.items()}
    for name, rows in stored.items():
        data = rows.view(np.uint8) if rows.dtype != np.uint8 else rows
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(H, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if kind.name not in ours.TYPES:
        with pytest.raises(UnsupportedError, match=kind.name):
            open_decoded(path)
        return
    with open_decoded(path) as source:
        for theirs, name in (("attn_v", "self_attn.v_proj"), ("ffn_down", "mlp.down_proj"), ("ffn_up", "mlp.up_proj")):
            shape = SHAPES[f"blk.0.{theirs}"]
            result = source.read(f"model.layers.0.{name}.weight").reshape(shape)
            if kind.name == "Q1_0":  # which the package cannot decode
                assert result.unique().numel() > 1
                continue
            expected = torch.from_numpy(quants.dequantize(stored[f"blk.0.{theirs}"], kind)).reshape(shape)
            off = (result.float() - expected.to(result.dtype).float()).abs().max()
            exact = kind.name != "Q4_1"  # whose offsets become zeros, which rounds once more
            assert off <= (0 if exact else 1e-3) * expected.abs().max()
