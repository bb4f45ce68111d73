"""The role of each source tensor: names with and without prefix, per-expert and stacked experts, tied heads, bad configs."""

import pytest
import torch
from safetensors.torch import load_file

from lowq_cli.files.roles import Part
from lowq_cli.files.safetensors_io import TensorHeader, read_json
from lowq_cli.files.source import Cut, open_source
from lowq_cli.hf.load import load_model
from lowq_cli.hf.structure import roles
from lowq_packers.errors import DamagedError, UnsupportedError


@pytest.fixture
def headers(family_checkpoints):
    """family -> its config and headers, to be changed freely."""

    def of(family):
        with open_source(family_checkpoints(family).dense) as source:
            return dict(source.config), dict(source.headers)

    return of


def test_every_tensor_of_a_llama_has_the_role_of_its_module(headers):
    role_of = roles(*headers("llama"))
    layer = "model.layers.1."
    assert {n.removeprefix(layer): r.kind for n, r in role_of.items() if n.startswith(layer) and r.parts} == {
        f"{m}.weight": kind
        for kind, ms in {
            "attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
            "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        }.items()
        for m in ms
    }
    assert (role_of["model.norm.weight"].kind, role_of["model.norm.weight"].reason) == ("norm", "norm")
    assert role_of["lm_head.weight"].kind == "head"
    assert role_of["lm_head.weight"].parts == (Part("lm_head", target="lm_head.weight"),)
    assert role_of["model.embed_tokens.weight"].kind == "embedding"
    assert role_of["model.embed_tokens.weight"].parts


def test_biases_and_fused_and_transposed_weights(headers):
    assert roles(*headers("qwen2"))["model.layers.0.self_attn.q_proj.bias"].reason == "bias"
    assert roles(*headers("phi3"))["model.layers.0.self_attn.qkv_proj.weight"].kind == "attention"
    gpt2 = roles(*headers("gpt2"))
    part = gpt2["transformer.h.0.mlp.c_fc.weight"].parts[0]
    assert part == Part("transformer.h.0.mlp.c_fc", Cut(transposed=True), target="transformer.h.0.mlp.c_fc.weight")
    assert gpt2["transformer.wpe.weight"].reason == "not the token embedding"


@pytest.mark.parametrize(
    ("family", "router", "expert", "target"),
    [
        ("mixtral", "block_sparse_moe.gate", "block_sparse_moe.experts.3.w1", "mlp.experts.gate_up_proj"),
        ("qwen3-moe", "mlp.gate", "mlp.experts.3.down_proj", "mlp.experts.down_proj"),
    ],
)
def test_experts_are_quantized_and_the_router_is_not(headers, family, router, expert, target):
    role_of = roles(*headers(family))
    layer = "model.layers.1."
    assert role_of[f"{layer}{router}.weight"].kind == "router"
    assert not role_of[f"{layer}{router}.weight"].parts
    role = role_of[f"{layer}{expert}.weight"]
    assert (role.kind, role.parts) == ("expert", (Part(layer + expert, target=layer + target),))


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_stacked_experts_are_cut_into_the_names_of_per_expert_files(family, family_checkpoints, tmp_path):
    """save_original_format=False writes stacks; each slice must carry the name under which its values are saved per expert."""
    dense = family_checkpoints(family).dense
    with open_source(dense) as source:
        load_model(source, "cpu").save_pretrained(tmp_path, save_original_format=False)
    per_expert = load_file(dense / "model.safetensors")
    seen = set()
    with open_source(tmp_path) as source:
        for name, role in roles(source.config, source.headers).items():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                continue
            W = source.read(name).reshape(source.headers[name].shape)
            for part in role.parts:
                piece = part.cut.of(W)
                assert torch.equal(piece, per_expert[f"{part.name}.weight"])
                seen.add(f"{part.name}.weight")
    assert seen == {n for n in per_expert if ".experts." in n}


def test_names_without_the_base_model_prefix_stay_without(headers):
    config, result = headers("gpt2")
    bare = {n.removeprefix("transformer."): h for n, h in result.items()}
    assert roles(config, bare)["h.1.attn.c_attn.weight"].parts[0].name == "h.1.attn.c_attn"


def test_a_tied_head_that_is_in_the_file_is_kept(headers):
    config, result = headers("llama-tied")
    assert "lm_head.weight" not in result
    result["lm_head.weight"] = result["model.embed_tokens.weight"]
    role = roles(config, result)["lm_head.weight"]
    assert (role.kind, role.parts, role.reason) == ("head", (), "tied to the embedding")


def test_unknown_tensors_are_kept_and_integers_are_not_quantized(headers):
    config, actual = headers("llama")
    actual["mtp.fc.weight"] = TensorHeader((64, 64), "F32")
    actual["lm_head.weight"] = TensorHeader(actual["lm_head.weight"].shape, "I8")
    result = roles(config, actual)
    assert result["mtp.fc.weight"].reason == "the model does not know it"
    assert (result["lm_head.weight"].parts, result["lm_head.weight"].reason) == ((), "stored as I8")


@pytest.mark.parametrize(
    ("family", "change", "error", "match"),
    [
        ("llama", {"model_type": "nonsense"}, UnsupportedError, "'nonsense' is not one that transformers"),
        ("llama", {"model_type": None}, DamagedError, "no model_type"),
        ("llama", {"model_type": "vit", "architectures": None}, UnsupportedError, "no language model"),
        ("llama", {"hidden_size": 128}, DamagedError, "has the shape .* asks for"),
        ("llama", {"hidden_size": "wide"}, DamagedError, "does not describe a llama model"),
        ("llama", {"num_hidden_layers": 3}, DamagedError, "lacks model.layers.2"),
        ("gpt2", {"n_head": -1}, DamagedError, "n_head = -1; it cannot be negative"),
        ("llama", {"architectures": 2, "model_type": "vit"}, UnsupportedError, "no language model"),
        ("llama", {"num_hidden_layers": 10**9}, DamagedError, "num_hidden_layers = 1000000000"),
        ("qwen3-moe", {"num_experts": 5, "num_local_experts": 5}, DamagedError, "rows; config.json asks for|has the shape"),
        ("mixtral", {"intermediate_size": 112}, DamagedError, "have 384 rows|rows; config.json asks for"),
    ],
)
def test_configs_that_do_not_fit(headers, family, change, error, match):
    config, result = headers(family)
    with pytest.raises(error, match=match):
        roles(config | change, result)


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.layers.1.mlp.experts.2.up_proj.weight"])
def test_a_missing_tensor_is_noticed(headers, lost):
    config, result = headers("qwen3-moe")
    del result[lost]
    with pytest.raises(DamagedError, match=r"lacks model\.norm\.weight|have 336 rows"):
        roles(config, result)


def test_stacked_experts_pack_and_load(family_checkpoints, pack_checkpoint, tmp_path):
    """The whole way from stacks: same packed tensors as from the per-expert file."""
    c = family_checkpoints("qwen3-moe")
    with open_source(c.dense) as source:
        load_model(source, "cpu").save_pretrained(tmp_path / "stacked", save_original_format=False)
    again = pack_checkpoint(tmp_path / "stacked", tmp_path)
    before, after = load_file(c.packed / "model.safetensors"), load_file(again.packed / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    configs = [read_json(folder.packed / "config.json")["quantization_config"] for folder in (c, again)]
    assert configs[0] == configs[1]
