"""lowq export of mixtures: experts one by one where a format has them so, stacked for MLX, and its config spelled out."""

import json

import pytest
import torch
from exported import INT4
from safetensors.torch import load_file, save_file

import lowq
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.quant_config import compact
from lowq_cli.files.source import open_source
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import fetcher, foreign_matrices, open_decoded, open_foreign
from lowq_cli.interop.importer import runnable
from lowq_cli.interop.inspection import inspect_model
from lowq_packers.errors import UnsupportedError
from lowq_packers.formats._older_config import spelled_out
from lowq_packers.scheme import Scheme


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("to", ["gptq", "compressed-tensors"])
def test_experts_are_exported_one_by_one(bf16_checkpoints, tmp_path, family, to):
    folders = bf16_checkpoints(family, INT4)
    export(folders.packed, to, tmp_path / "out")
    with open_decoded(tmp_path / "out") as source, open_source(folders.packed) as packed:
        assert sum("expert" in n for n in source.headers) == sum(
            "expert" in n and n.endswith(".weight") for n in packed.headers
        )


@pytest.fixture
def mixture(tmp_path):
    """A function: a tiny mixture model of a family, quantized symmetrically at 4 bits in groups of 32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(family, more, **recipe):
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "num_experts_per_tok": 2, "dtype": "bfloat16"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **more)).bfloat16()
        model.save_pretrained(tmp_path / "dense")
        lowq.quantize(
            tmp_path / "dense", tmp_path / "packed", bits=4, group=32, zero="none", method="rtn", lm_head="keep", **recipe
        )
        return tmp_path / "packed"

    return make


STACKED = {
    "mixtral": ({"num_local_experts": 4}, "block_sparse_moe", {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}),
    "qwen3_moe": ({"num_experts": 4, "moe_intermediate_size": 32}, "mlp", {}),
}


@pytest.mark.parametrize("family", STACKED)
def test_mlx_gets_experts_stacked_and_they_come_back_one_by_one(mixture, tmp_path, family):
    more, block, leaves = STACKED[family]
    packed = mixture(family, more)
    done = export(packed, "mlx", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert not any(".experts." in n for n in written)
    with open_source(packed) as ours:
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            stack = written[f"model.layers.1.{block}.switch_mlp.{leaf}.weight"]
            for e in range(4):
                one = ours.read(f"model.layers.1.{block}.experts.{e}.{leaves.get(leaf, leaf)}.weight")
                assert torch.equal(stack[e].view(torch.int32).flatten(), one), "the words are lowq's"
            assert stack.shape[0] == 4
    with open_foreign(tmp_path / "out") as source:
        _, matrices = foreign_matrices(source)
        back = {m.name: m.read(fetcher(source)) for m in matrices}
    checkpoint = open_checkpoint(packed)
    assert back.keys() == checkpoint.schemes.keys()
    for t in checkpoint.tensors:
        if t.scheme:
            assert torch.equal(back[t.name].dequantize(), checkpoint.read_matrix(t).dequantize()), t.name
    shown = inspect_model(str(tmp_path / "out"))
    assert sum(r.bytes for r in shown.rows) == sum(t.numel() * t.element_size() for t in written.values())
    assert done.matrices == len(back)
    imported = runnable(tmp_path / "out")
    assert open_checkpoint(imported).schemes.keys() == checkpoint.schemes.keys()


def test_mlx_exports_have_rope_fields_at_the_top_level(mixture, tmp_path):
    folder = mixture("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32, "rope_parameters": {"rope_theta": 5e5}})
    saved = json.loads((folder / "config.json").read_text())
    assert "rope_theta" not in saved, "else this tests nothing"
    export(folder, "mlx", tmp_path / "out")
    output = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (output["rope_theta"], output["num_experts"], output["tie_word_embeddings"]) == (5e5, 4, False)
    assert "rope_scaling" not in output


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
BOTH = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}, "sliding_attention": {"rope_theta": 1e4}}
NESTED = [
    ({"rope_parameters": SCALED | {"rope_theta": 5e5}}, {"rope_theta": 5e5, "rope_scaling": SCALED}),
    ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, {"rope_theta": 1e4}),
    ({"rope_parameters": BOTH}, {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
    ({"model_type": "mixtral", "num_local_experts": 8}, {}),
    ({"tie_word_embeddings": False}, {}),
]


@pytest.mark.parametrize(("config", "added"), NESTED)
def test_fields_are_spelled_out_and_none_is_changed(config, added):
    assert spelled_out(config, tied=True) == {"tie_word_embeddings": True} | config | added


def test_experts_that_do_not_agree_cannot_be_stacked(mixture, tmp_path):
    folder, name = mixture("mixtral", {"num_local_experts": 4}), "model.layers.0.block_sparse_moe.experts.1.w1"
    checkpoint = open_checkpoint(folder)
    checkpoint.source.close()
    (folder / "lowq_report.json").unlink()  # lowq quantize makes them agree: this folder is another's work
    kept = [t.name.removesuffix(".weight") for t in checkpoint.tensors if not t.scheme]
    section = compact(checkpoint.schemes | {name: Scheme(8, 32, "none")}, kept)
    (folder / "config.json").write_text(json.dumps(checkpoint.config | {"quantization_config": section}))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].repeat(1, 2)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"stacks 4 experts, here of 4-bit g32 .*give all one scheme"):
        export(folder, "mlx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_packed_and_dense_experts_cannot_be_stacked(mixture, tmp_path):
    folder = mixture("mixtral", {"num_local_experts": 4}, skip=[r"layers\.1\..*experts"])
    with pytest.raises(UnsupportedError, match="all experts packed or none"):
        export(folder, "mlx", tmp_path / "out")
    assert not (tmp_path / "out").exists()
