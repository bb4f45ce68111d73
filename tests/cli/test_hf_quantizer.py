"""The quantizer inside transformers: registered lazily, loud without lowq; checkpoints checked; modules move, compile."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, write_dense, write_packed
from safetensors.torch import load_file, save_file

from lowq_cli.files.quant_config import compact, expand
from lowq_cli.files.source import open_source
from lowq_cli.hf import register
from lowq_cli.hf.embedding import QuantEmbedding, TiedHead
from lowq_cli.hf.experts import QuantExperts, row_by_row, rows_by_expert
from lowq_cli.hf.load import load_model
from lowq_kernels.dispatch.layouts import best_layout
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.errors import DamagedError, LowqError, UnsupportedError
from lowq_packers.scheme import Scheme

IDS = torch.tensor([[1, 17, 42, 99, 7, 3, 150, 23, 64, 5]])
Q = "model.layers.0.self_attn.q_proj"
GATE = "model.layers.0.mlp.gate_proj"


def open_model(folder: Path, dtype: torch.dtype | None = torch.float32):
    with open_source(folder) as source:
        return load_model(source, "cpu", dtype)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


def distance(y: torch.Tensor, ref: torch.Tensor) -> float:
    return float((y - ref).norm() / ref.norm())


def python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    lean = "import sys; sys.modules.update(hqq=None, sklearn=None)\n"  # transformers would import them, which takes 3 s
    line = [sys.executable, "-P", "-c", lean + code, *map(str, args)]
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # an installed lowq would register itself
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=env, check=False)


# --- registration ----------------------------------------------------------------------------------------------------


def test_import_lowq_is_light_and_makes_from_pretrained_work(family_checkpoints):
    code = """
import sys, lowq
assert not {"torch", "transformers"} & sys.modules.keys(), "import lowq pulled in a heavy library"
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model.model.layers[0].self_attn.q_proj).__name__, model.dtype)
"""
    done = python(code, family_checkpoints("llama", "bfloat16").packed)
    assert (done.returncode, done.stdout.split()) == (0, ["QuantLinear", "torch.bfloat16"]), done.stderr[-2000:]


def test_without_lowq_a_checkpoint_fails_loudly(family_checkpoints):
    code = """
import sys
from transformers import AutoModelForCausalLM
assert "lowq_cli.hf.quantizer" not in sys.modules
AutoModelForCausalLM.from_pretrained(sys.argv[1])
"""
    done = python(code, family_checkpoints("llama", "bfloat16").packed)
    assert done.returncode == 1
    assert "RuntimeError" in done.stderr
    assert "ignore_mismatched_sizes" in done.stderr  # transformers' own words for "the shapes are not the model's"


def test_registering_twice_is_harmless():
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    register()
    register()
    assert AUTO_QUANTIZER_MAPPING["lowq"].__name__ == "LowqQuantizer"


def test_quantizing_on_the_fly_is_refused(family_checkpoints):
    from transformers import AutoModelForCausalLM

    register()
    from lowq_cli.hf.quantizer import LowqConfig

    with pytest.raises(UnsupportedError, match="run `lowq quantize MODEL`"):
        AutoModelForCausalLM.from_pretrained(family_checkpoints("llama").dense, quantization_config=LowqConfig())


def test_a_transformers_that_hands_over_no_model_for_its_rules(monkeypatch, family_checkpoints):
    """5.17 to 5.20, which pyproject.toml allows."""
    register()
    from lowq_cli.hf.quantizer import LowqQuantizer

    ours = LowqQuantizer.update_weight_conversions
    monkeypatch.setattr(LowqQuantizer, "update_weight_conversions", lambda self, rules, model=None: ours(self, rules))
    for family in ("gpt2", "mixtral"):
        c = family_checkpoints(family)
        assert distance(logits(open_model(c.packed)), logits(open_model(c.dequantized))) < 1e-5


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt2"])
def test_every_tensor_has_the_dtype_that_was_asked_for(family, family_checkpoints):
    """Also those that transformers renames or merges: its versions before 5.21 leave them as the files have them."""
    from transformers import AutoModelForCausalLM

    register()
    model = AutoModelForCausalLM.from_pretrained(family_checkpoints(family, "float16").packed, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_with_one_scale_a_row_are_saved_as_they_were_read(family, tmp_path):
    """A dimension of size 1, which transformers before 5.23 drops when it cuts a stack."""
    model_type, fields = FAMILIES[family]
    square = {"intermediate_size": 64, "moe_intermediate_size": 64}
    family = model_type, {k: square.get(k, v) for k, v in fields.items()}
    c = write_packed(write_dense(tmp_path / "dense", family), tmp_path, {"expert": Scheme(4, 64, "int")})
    open_model(c.packed).save_pretrained(tmp_path / "saved")
    before, after = (load_file(folder / "model.safetensors") for folder in (c.packed, tmp_path / "saved"))
    assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}
    assert all(torch.equal(t, after[name]) for name, t in before.items())


# --- checks before any kernel ----------------------------------------------------------------------------------------


def _poison(name, value):
    def change(tensors, quant):
        tensors[name][0, 0] = value

    return change


def _drop(name):
    def change(tensors, quant):
        del tensors[name]

    return change


def _replace(name, make):
    def change(tensors, quant):
        tensors[name] = make(tensors[name])

    return change


def _config(edit):
    def change(tensors, quant):
        edit(quant)

    return change


BAD = {
    "NaN scale": (_poison(f"{Q}.weight_scale", float("nan")), "q_proj.weight_scale holds scales that are not finite"),
    "Inf zero": (_poison(f"{Q}.weight_zero", float("inf")), "q_proj.weight_zero holds zeros that are not finite"),
    "no weight": (_drop(f"{Q}.weight"), "does not say how it is packed|lacks"),
    "no scale": (_drop(f"{Q}.weight_scale"), "q_proj.weight_scale is missing"),
    "no zero": (_drop(f"{Q}.weight_zero"), "q_proj.weight_zero is missing"),
    "no norm": (_drop("model.norm.weight"), "lacks model.norm.weight"),
    "zero that the scheme lacks": (
        lambda t, q: t.update({f"{GATE}.weight_zero": t[f"{GATE}.weight_scale"].clone()}),
        "gate_proj.weight_zero is in the files, but",
    ),
    "words too short": (_replace(f"{Q}.weight", lambda t: t[:, :-1]), r"q_proj.weight is I32 \(64, 7\)"),
    "rows too few": (_replace(f"{Q}.weight", lambda t: t[:-1]), r"q_proj.weight is I32 \(63, 8\)|64 rows"),
    "words as floats": (_replace(f"{Q}.weight", lambda t: t.float()), "needs I32"),
    "scales as doubles": (_replace(f"{Q}.weight_scale", lambda t: t.double()), "needs F16/BF16/F32"),
    "groups too few": (_replace(f"{Q}.weight_scale", lambda t: t[:, :1]), r"weight_scale is F32 \(64, 1\)"),
    "norm of another size": (_replace("model.norm.weight", lambda t: t[:-1]), r"model.norm.weight has the shape \(63,\)"),
    "scheme of other bits": (_config(lambda q: q["schemes"]["w4g32"].update(bits=8)), "8-bit g32 of a row of 64 needs"),
    "group that K lacks": (_config(lambda q: q["schemes"]["w4g32"].update(group_size=48)), "K=64 is not a multiple"),
    "bits that do not exist": (_config(lambda q: q["schemes"]["w4g32"].update(bits=5)), "bits=5 is not a width"),
    "bits as text": (_config(lambda q: q["schemes"]["w4g32"].update(bits="4")), "bits, group_size, zero ="),
    "undefined scheme": (_config(lambda q: q["schemes"].pop("w4g32")), "which quantization_config does not define"),
    "listed but absent": (_config(lambda q: q["tensors"].update({"model.layers.9.x": "w4g32"})), "names model.layers.9.x"),
    "packed but not listed": (_config(lambda q: q["tensors"].pop("model.layers.*.self_attn.q_proj")), "does not say how"),
    "a dense tensor listed": (_config(lambda q: q["tensors"].update({"model.embed_tokens": "w4g32"})), "embed_tokens.weight"),
    "no tables": (_config(lambda q: q.update(schemes=[])), "needs `schemes` and `tensors`"),
    "newer version": (_config(lambda q: q.update(version=3)), "upgrade lowq"),
    "unknown field": (_config(lambda q: q.update(rotated=True)), "'rotated', which this lowq does not know"),
    "unknown field of a scheme": (
        _config(lambda q: [s.update(signs=1) for s in q["schemes"].values()]),
        "'signs', unknown to this lowq",
    ),
    "other layout": (_config(lambda q: q["schemes"]["w4g32"].update(layout="spiral")), "layout spiral|layout 'spiral'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_damaged_checkpoint_is_refused_in_one_line(case, family_checkpoints, tmp_path):
    change, match = BAD[case]
    c = family_checkpoints("llama")
    shutil.copytree(c.packed, tmp_path / "bad")
    tensors = load_file(c.packed / "model.safetensors")
    config = json.loads((c.packed / "config.json").read_text())
    change(tensors, config["quantization_config"])
    tensors = {k: v.contiguous() for k, v in tensors.items()}
    save_file(tensors, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "bad" / "config.json").write_text(json.dumps(config))
    with pytest.raises(LowqError, match=match) as e:
        open_model(tmp_path / "bad")
    assert "\n" not in str(e.value)


def test_zeros_of_the_int_kind_must_be_codes(family_checkpoints, tmp_path):
    c = family_checkpoints("mixtral")
    shutil.copytree(c.packed, tmp_path / "bad")
    tensors = load_file(c.packed / "model.safetensors")
    tensors["model.layers.1.block_sparse_moe.experts.2.w2.weight_zero"][0, 0] = 0.5
    save_file(tensors, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedError, match=r"layers.1.mlp.experts.down_proj_zero holds zeros"):
        open_model(tmp_path / "bad")


@pytest.mark.parametrize("lost", ["weight", "weight_scale", "weight_zero"])
def test_a_missing_expert_is_noticed(lost, family_checkpoints, tmp_path):
    c = family_checkpoints("qwen3-moe")
    shutil.copytree(c.packed, tmp_path / "bad")
    tensors = load_file(c.packed / "model.safetensors")
    del tensors[f"model.layers.1.mlp.experts.2.up_proj.{lost}"]
    save_file(tensors, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedError, match=r"experts.2.up_proj|has 384 rows; the checkpoint packs 336"):
        open_model(tmp_path / "bad")


def test_experts_of_one_layer_must_agree(family_checkpoints, tmp_path):
    c = family_checkpoints("qwen3-moe")
    shutil.copytree(c.packed, tmp_path / "bad")
    config = json.loads((c.packed / "config.json").read_text())
    expert = "model.layers.0.mlp.experts.1.gate_proj"
    tensors = load_file(c.packed / "model.safetensors")
    tensors[f"{expert}.weight"] = torch.zeros(48, 8, dtype=torch.int32)
    save_file(tensors, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = compact(c.schemes | {expert: Scheme(4, 16, "int")})
    (tmp_path / "bad" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="2-bit g16 int zero and 4-bit g16 int zero\\); they must agree"):
        open_model(tmp_path / "bad")


# --- modules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma3", "gpt2"])
def test_a_packed_embedding_looks_up_dequantized_rows(family, family_checkpoints, tmp_path):
    schemes = {"embedding": Scheme(8, 32, "float"), "attention": Scheme(4, 32, "float")}
    c = family_checkpoints(family, "float32", schemes)
    model, reference = open_model(c.packed), open_model(c.dequantized)
    assert isinstance(model.get_input_embeddings(), QuantEmbedding)
    assert isinstance(model.get_output_embeddings(), TiedHead) == (family != "llama")
    assert distance(logits(model), logits(reference)) < 1e-5
    model.save_pretrained(tmp_path)
    before, after = load_file(c.packed / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert torch.equal(logits(open_model(tmp_path)), logits(model))


def test_a_bare_gpt2_saves_under_the_names_its_config_lists(family_checkpoints, pack_checkpoint, tmp_path):
    """The published GPT-2 has no "transformer." in its names; transformers adds it on saving."""
    shutil.copytree(family_checkpoints("gpt2").dense, tmp_path / "bare")
    tensors = load_file(tmp_path / "bare" / "model.safetensors")
    bare = {k.removeprefix("transformer."): v for k, v in tensors.items()}
    save_file(bare, tmp_path / "bare" / "model.safetensors", metadata={"format": "pt"})
    c = pack_checkpoint(tmp_path / "bare", tmp_path)
    assert "h.0.attn.c_attn" in c.schemes
    model = open_model(c.packed)
    assert distance(logits(model), logits(open_model(c.dequantized))) < 1e-5
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(open_model(tmp_path / "saved")), logits(model))


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_compiles_into_one_graph(family, family_checkpoints):
    model = open_model(family_checkpoints(family, "bfloat16").packed, torch.bfloat16)
    expected = logits(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(IDS).logits.float(), expected)


def test_a_model_that_was_cast_still_saves_itself(family_checkpoints, tmp_path):
    c = family_checkpoints("llama")
    model = open_model(c.packed).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    before, after = load_file(c.packed / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(before[k], after[k]) for k in before if before[k].dtype == torch.int32)
    assert distance(logits(open_model(tmp_path)), logits(open_model(c.dequantized))) < 2e-2


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_maps(device_map, family_checkpoints):
    pytest.importorskip("accelerate", reason="transformers needs it for device_map")
    from transformers import AutoModelForCausalLM

    register()
    c = family_checkpoints("llama")
    model = AutoModelForCausalLM.from_pretrained(c.packed, device_map=device_map, dtype=torch.float32)
    assert distance(logits(model.to("cpu")), logits(open_model(c.dequantized))) < 1e-5


def test_disk_offload_is_refused(family_checkpoints, tmp_path):
    pytest.importorskip("accelerate", reason="transformers needs it for device_map")
    from transformers import AutoModelForCausalLM

    register()
    c = family_checkpoints("llama")
    places = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu") | {
        "model.layers": "disk"
    }
    with pytest.raises(UnsupportedError, match="does not offload"):
        AutoModelForCausalLM.from_pretrained(c.packed, device_map=places, offload_folder=str(tmp_path))


@pytest.mark.parametrize("stack", ["gate_up_proj", "down_proj"])
def test_experts_packed_in_one_stack_only(stack, family_checkpoints):
    """QuantExperts keeps unpacked experts dense."""
    c = family_checkpoints("qwen3-moe")
    dense = open_model(c.dequantized)
    module = dense.model.layers[0].mlp.experts
    torch.manual_seed(1)
    x = torch.randn(6, 64)
    index = torch.tensor([[0, 1], [3, 1], [2, 0], [1, 3], [3, 3], [0, 2]])
    weights = torch.rand(6, 2)
    with torch.no_grad():
        expected = module(x, index, weights)
    packed = open_model(c.packed).model.layers[0].mlp.experts
    half = QuantExperts(module, {stack: packed.schemes[stack]}, torch.float32)
    half.set_stack(stack, packed.stack(stack))
    assert distance(half(x, index, weights), expected) < 1e-5
    spoilt = half.get_parameter(stack)
    spoilt.data = spoilt.data.flip(0).contiguous()
    assert distance(half(x, index, weights), expected) > 1e-2  # the test can fail


def test_packed_experts_outlive_a_dtype_change(family_checkpoints):
    """On a CPU they are multiplied from a copy of the scales that must stay bf16."""
    experts = open_model(family_checkpoints("mixtral", "float32", {"expert": Scheme(4, 32)}).packed, torch.bfloat16)
    experts = experts.model.layers[0].mlp.experts
    x, index = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 1], [3, 2]])
    before = experts(x, index, torch.full((2, 2), 0.5))
    assert torch.equal(experts.half()(x, index, torch.full((2, 2), 0.5)), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_orders_of_expert_products_agree(dtype, family_checkpoints):
    """row_by_row is the path of a GPU while decoding; its result can be checked without a GPU."""
    model = open_model(family_checkpoints("mixtral", "float32", {"expert": Scheme(4, 32)}).packed, dtype)
    stack = model.model.layers[1].mlp.experts.stack("gate_up_proj")
    truth = best_layout(Scheme(4, 32), 128, 64, dtype, torch.device("cpu"))  # own CPU kernels' where they can be built
    assert stack.layout == truth
    assert (truth == "rowstream") == (dtype == torch.float32)
    torch.manual_seed(2)
    x, experts = torch.randn(7, 64).to(dtype), torch.tensor([3, 0, 0, 2, 3, 1, 0])
    expected = torch.stack([stack.product(x[s : s + 1], int(e))[0] for s, e in enumerate(experts)])
    assert distance(row_by_row(x, experts, stack).float(), expected.float()) < 1e-6
    assert distance(rows_by_expert(x, experts, stack).float(), expected.float()) < (1e-5 if dtype == torch.float32 else 1e-2)
    assert distance(row_by_row(x, experts.flip(0), stack).float(), expected.float()) > 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral", "qwen3-moe"])
def test_on_a_gpu(family, family_checkpoints, tmp_path):
    c = family_checkpoints(family, "bfloat16")
    reference = logits(open_model(c.dequantized))
    with open_source(c.packed) as source:
        model = load_model(source, "cuda")
    packed = [m for m in model.modules() if isinstance(m, QuantLinear | QuantExperts)]
    assert all(p.device.type == "cuda" for m in packed for p in m.parameters())
    with torch.no_grad():
        assert distance(model(IDS.cuda()).logits.float().cpu(), reference) < 2e-2
    model.generate(IDS.cuda(), max_new_tokens=4, do_sample=False)
    model.save_pretrained(tmp_path)
    before, after = load_file(c.packed / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert distance(logits(model.cpu()), reference) < 2e-2


# --- the config ------------------------------------------------------------------------------------------------------


def test_config_is_compact_and_exact():
    names = [f"m.{layer}.e.{e}.{p}" for layer in range(3) for e in range(4) for p in ("up", "down")]
    schemes = {n: Scheme(4, 64) for n in names}
    assert compact(schemes)["tensors"] == {"m.*.e.*.up": "w4g64", "m.*.e.*.down": "w4g64"}
    schemes["m.1.e.2.up"] = Scheme(8, 32, "none")
    del schemes["m.2.e.0.down"]
    config = compact(schemes, ["m.2.e.0.down", "embed"])
    assert expand(json.loads(json.dumps(config)), [*names, "embed"]) == schemes
    assert config["tensors"]["m.0.e.*.up"] == "w4g64"
    assert config["tensors"]["m.1.e.2.up"] == "w8g32_sym"


def test_an_exact_name_wins_and_contradictions_are_refused():
    config = compact({"a.0.x": Scheme(4, 64), "a.1.x": Scheme(8, 64)})
    config["tensors"] = {"a.*.x": "w4g64", "a.1.x": "w8g64"}
    assert expand(config, ["a.0.x", "a.1.x"]) == {"a.0.x": Scheme(4, 64), "a.1.x": Scheme(8, 64)}
    config["tensors"] = {"a.*.x": "w4g64", "*.0.x": "w8g64"}
    with pytest.raises(DamagedError, match="two schemes"):
        expand(config, ["a.0.x"])
