"""gpt-oss as published, as a source of `quantize`: experts stay in MXFP4, the rest gets 8 bits, or explicit settings."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

import lowq  # noqa: F401 (lets transformers read its folders)
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.interop.foreign import open_decoded
from lowq_cli.interop.inspection import inspect_model
from lowq_cli.plan.planner import make_plan
from lowq_cli.plan.recipe import as_published, make_recipe
from lowq_cli.run.pipeline import quantize

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
MORE = {"num_key_value_heads": 2, "vocab_size": 320, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A tiny gpt-oss without square matrices; every second expert has small codes, and scales unlike those of rounding."""
    out = tmp_path_factory.mktemp("gpt-oss")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(GptOssConfig(**SIZES, **MORE)).bfloat16().save_pretrained(out)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        E, K, N = tensors.pop(name).shape
        blocks = torch.randint(256, (E, N, K // 32, 16), dtype=torch.uint8)
        blocks[::2] &= 0xBB  # of 0, 0.5, 1, 1.5 and their negatives
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = torch.randint(115, 121, (E, N, K // 32), dtype=torch.uint8)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return out


def test_by_default_experts_stay_bit_for_bit_and_the_rest_gets_8_bits(published, tmp_path):
    quantize(published, tmp_path / "q", device="cpu")
    report = json.loads((tmp_path / "q" / "lowq_report.json").read_text())["tensors"]
    schemes = {t["name"]: t["scheme"] for t in report if "scheme" in t}
    experts = {n: s for n, s in schemes.items() if ".experts." in n}
    assert len(experts) == 2 * 4 * 3
    assert set(experts.values()) == {"4-bit g32 e2m1/e8m0"}
    rest = {n: s for n, s in schemes.items() if n not in experts}
    assert len(rest) == 2 * 4 + 1
    assert rest.pop("lm_head") == "8-bit g64 none zero"
    assert set(rest.values()) == {"8-bit g64"}
    assert all(t["rel_error"] == 0 for t in report if t["name"] in experts)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    assert decoder_of(model).name == "native"


@pytest.mark.parametrize(
    "asked", [{"bits": 3}, {"group": 32}, {"method": "rtn"}, {"format": "nvfp4"}, {"overrides": ["lm_head=4"]}]
)
def test_explicit_settings_override_the_published_format(published, asked):
    recipe = make_recipe(**asked)
    with open_decoded(published) as source:
        assert as_published(recipe, source.stored_as) == (recipe, [])
        experts = {i.scheme.bits for i in make_plan(source, recipe).items if i.kind == "expert" and i.scheme}
        assert experts == {recipe.bits}


def test_inspect_lists_experts_where_the_files_hold_them(published, tmp_path):
    """In a file for each layer. Their names are not those of the tensors that store them; they once came last of all."""
    tensors, of_file = load_file(published / "model.safetensors"), {}
    for name in tensors:
        of_file[name] = f"model-{1 + ('.layers.1.' in name)}.safetensors"
    for file in set(of_file.values()):
        save_file({n: t for n, t in tensors.items() if of_file[n] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of_file}))
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    rows = [row.name for row in inspect_model(str(tmp_path)).rows]
    layers = [name.split(".")[2] for name in rows if ".layers." in name]
    assert len([name for name in rows if name.endswith("_proj") and ".layers.0.mlp.experts." in name]) == 4 * 3
    assert layers == sorted(layers)


def test_a_plain_model_is_quantized_as_ever(published):
    assert as_published(make_recipe(), "") == (make_recipe(), [])
    assert as_published(make_recipe(), "awq") == (make_recipe(), [])
