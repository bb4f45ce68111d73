"""fp8-block checkpoints and activation modes: written, read by transformers' own reader, run, judged, quantized further."""

import itertools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lowq_cli.hf.activations import modes, set_activations
from lowq_cli.loading import load
from lowq_cli.main import app
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import pipeline
from lowq_cli.run.pipeline import quantize
from lowq_kernels.activations import rounded
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers import fp8
from lowq_packers.errors import DamagedError, UnsupportedError, UsageError

IDS = torch.arange(2, 34)[None]


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code or isinstance(result.exception, DamagedError | UsageError | UnsupportedError), result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return str(result.exception)
    return result.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The demo model in fp8 blocks of 128x128."""
    out = tmp_path_factory.mktemp("fp8") / "demo"
    output = json.loads(run("quantize", "demo", "--format", "fp8", "--out", out, "--device", "cpu", "--json"))
    assert output["out"] == str(out)
    assert output["bytes"] <= sum(p.stat().st_size for p in out.glob("*.safetensors")) <= output["bytes"] + 20000
    return out


def test_files(checkpoint):
    """The layout of DeepSeek's files: names, dtypes, and scales that multiply."""
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8"
    assert config["weight_block_size"] == [128, 128]
    assert config["activation_scheme"] == "dynamic"
    assert "lm_head" in config["modules_to_not_convert"]
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    q, scales = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]
    assert q.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float32
    assert scales.shape == (2, 6)
    original = load("demo", "cpu")[0].get_submodule(name).weight
    W = fp8.Fp8Matrix(q, scales, (128, 128)).dequantize()
    assert 0.01 < ((W - original.float()).norm() / original.float().norm()).item() < 0.03
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_transformers_reads_the_same_weights(checkpoint, monkeypatch):
    """transformers' own reader, which widens to bf16 on a CPU, and ours."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    ours = load(checkpoint, "cpu")[0]
    layer = ours.model.layers[3].mlp.gate_proj
    assert isinstance(layer, QuantLinear)
    assert torch.equal(layer.weight, theirs.model.layers[3].mlp.gate_proj.weight)
    set_activations(ours, "none")
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, theirs(IDS).logits)


def test_without_fp8_hardware_it_says_so(checkpoint, capfd):
    model, _ = load(checkpoint, "cpu")
    assert "cpu has no FP8: weights widened to" in capfd.readouterr().err
    assert modes(model) == ["none", "fp8"]
    layer, x = model.model.layers[0].self_attn.q_proj, torch.randn(3, 256, dtype=torch.bfloat16)
    assert torch.equal(layer(x), rounded(x, "fp8", 128) @ layer.weight.t())
    with pytest.raises(UnsupportedError, match="not in int8"):
        set_activations(model, "int8")


def test_act_none_is_recorded(tmp_path):
    run(
        "quantize", "demo", "--format", "fp8", "--block", "256x256", "--act", "none", "--out", tmp_path / "m", "--device", "cpu"
    )
    layer = load(tmp_path / "m", "cpu")[0].model.layers[0].mlp.up_proj
    assert (layer.act, layer.scheme.block) == ("none", (256, 256))
    assert layer.weight_scale.shape == (3, 1)


def test_a_plan_without_a_file(tmp_path):
    out = tmp_path / "m"
    output = json.loads(run("quantize", "demo", "--format", "fp8", "--lm-head", "fp8", "--dry-run", "--out", out, "--json"))
    assert output["recipe"] == {"format": "fp8", "block": "128x128", "act": "fp8", "lm_head": 8, "skip": []}
    assert {t["scheme"] for t in output["tensors"] if t["kind"] == "mlp"} == {"fp8 128x128"}
    assert not out.exists()


@pytest.mark.parametrize("done", [1, 3, 8])
def test_an_interrupted_run_continues_and_leaves_the_same_files(family_checkpoints, tmp_path, done):
    dense, recipe = family_checkpoints("llama").dense, make_recipe(format="fp8", skip=["layers.0.mlp"])
    list(pipeline.run(dense, recipe, tmp_path / "whole", shard_size=20_000))
    events = pipeline.run(dense, recipe, tmp_path / "out", shard_size=20_000)
    for _ in itertools.islice((e for e in events if isinstance(e, pipeline.TensorDone)), done):
        assert not (tmp_path / "out" / "config.json").exists()
    events.close()
    again = [e for e in pipeline.run(dense, recipe, tmp_path / "out", shard_size=20_000) if isinstance(e, pipeline.TensorDone)]
    assert sum(e.resumed for e in again) >= done
    left, whole = ({p.name: p.read_bytes() for p in (tmp_path / f).iterdir() if p.name != "lowq.log"} for f in ("out", "whole"))
    assert left == whole
    with pytest.raises(UsageError, match="another lowq run"):
        list(pipeline.run(dense, make_recipe(format="fp8", block="256x256"), tmp_path / "out"))


def test_partial_blocks(family_checkpoints, tmp_path):
    """Rows that no block divides: 64 x 64 and 96 x 64, each less than one block."""
    dense = family_checkpoints("llama").dense
    run("quantize", dense, "--format", "fp8", "--out", tmp_path / "m", "--device", "cpu")
    model, original = load_model(tmp_path / "m"), load_model(dense)
    for name in ("self_attn.k_proj", "mlp.gate_proj"):
        a, b = (m.model.layers[1].get_submodule(name).weight.float() for m in (model, original))
        assert ((a - b).norm() / b.norm()).item() < 0.03


def load_model(folder):
    from lowq_cli.files.source import open_source
    from lowq_cli.hf.load import load_model

    with open_source(str(folder)) as source:
        return load_model(source, "cpu")


def test_it_is_a_source_for_fewer_bits(checkpoint, tmp_path):
    """4 bits from fp8: the same as from the dense weights that the blocks stand for."""
    quantize(str(checkpoint), tmp_path / "four", method="rtn", device="cpu")
    tensors = load_file(checkpoint / "model.safetensors")
    dense = {}
    for name, t in tensors.items():
        if t.dtype == torch.float8_e4m3fn:
            scales = tensors[name.removesuffix(".weight") + ".weight_scale_inv"]
            dense[name] = fp8.Fp8Matrix(t, scales, (128, 128)).dequantize(torch.bfloat16)
        elif not name.endswith("_inv"):
            dense[name] = t
    plain = shutil.copytree(checkpoint, tmp_path / "plain")
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    quantize(str(plain), tmp_path / "same", method="rtn", device="cpu")
    four, same = (load_file(tmp_path / f / "model.safetensors") for f in ("four", "same"))
    assert four.keys() == same.keys()
    assert all(torch.equal(four[n], same[n]) for n in four)


def test_damage_is_one_line(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedError, match=r"up_proj\.weight_scale_inv holds scales that are not finite"):
        load(folder, "cpu")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--format", "fp8", "--bits", "4"), "--bits is for --format lowq"),
        (("--format", "fp8", "--for", "mlx"), "mlx reads mlx; leave one out"),
        (("--format", "fp8", "--for", "vllm"), "leave --for and --export out"),
        (("--format", "fp8", "--lm-head", "4"), "write --lm-head fp8, or keep"),
        (("--format", "fp8", "--act", "int8"), "--act int8 needs --format lowq"),
        (("--format", "fp8", "--block", "64x64"), "use one of 128x128, 256x256"),
        (("--format", "fp9"), "use one of lowq, fp8"),
        (("--block", "128x128"), "--block needs --format fp8"),
        (("--act", "int4"), "use one of none, int8, fp8"),
        (("--format", "fp8", "--skip", "nothing"), "matches no weight"),
    ],
)
def test_flags_that_contradict(flags, says, tmp_path):
    assert says in run("quantize", "demo", *flags, "--out", tmp_path / "m", "--device", "cpu", code=2)
    assert not (tmp_path / "m").exists()


def test_activations_of_packed_weights(tmp_path):
    """--act is in the config, set on load, part of the run's name, and eval compares all modes."""
    quantize("demo", tmp_path / "m", bits=8, method="rtn", act="int8", device="cpu")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]["activations"] == "int8"
    model, _ = load(tmp_path / "m", "cpu")
    layers = [m for m in model.modules() if isinstance(m, QuantLinear)]
    assert {m.act for m in layers} == {"int8"}
    with pytest.raises(UsageError, match="another lowq run"):
        quantize("demo", tmp_path / "m", bits=8, method="rtn", act="none", device="cpu")
    output = json.loads(run("eval", tmp_path / "m", "--act", "all", "--max-tokens", "600", "--device", "cpu", "--json"))[
        "modes"
    ]
    assert list(output) == ["none", "int8", "fp8"]
    assert len({output[m]["ppl"] for m in output}) == 3
    alone = json.loads(run("eval", tmp_path / "m", "--max-tokens", "600", "--device", "cpu", "--json"))
    assert alone["ppl"] == output["int8"]["ppl"]
    assert "no quantized linear layers" in run(
        "eval", "demo", "--act", "int8", "--max-tokens", "600", "--device", "cpu", code=2
    )


def test_decoding_joins_layers_and_says_which_kernel(checkpoint):
    """q, k, v become one product; the tokens are those of the separate layers."""
    output = json.loads(
        run(
            "generate",
            checkpoint,
            "--prompt",
            "Once upon a time",
            "--max-new-tokens",
            "6",
            "--device",
            "cpu",
            "--json",
            "--explain",
        )
    )
    model, tokenizer = load(checkpoint, "cpu")
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert output["text"] == tokenizer.decode(expected)
    rows = {r["layers"]: r["kernel"] for r in output["kernels"]}
    assert rows["layers.*.qkv"] == "torch (widened)", rows
