"""A run writes the bytes of the quantizer and the layout for every family, the same on every run."""

import json
import shutil
import zlib

import pytest
import torch
from folders import files
from safetensors.torch import load_file, save_file

from lowq_cli import quantizers
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.source import DEMO, open_source
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import budget, pipeline
from lowq_cli.run.pipeline import Finished, ShardDone, TensorDone, execute, prepare, run
from lowq_packers.errors import DamagedError
from lowq_packers.layouts import pack
from lowq_packers.scheme import Scheme

FAMILY_NAMES = ["llama", "llama-tied", "qwen2", "gemma3", "phi3", "gpt2", "mixtral", "qwen3-moe"]


def all_tensors(folder):
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def same(a, b):
    assert a.keys() == b.keys()
    assert [n for n in a if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])] == []


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_tensor_is_that_of_quantizer_and_layout(family, family_checkpoints, pack_checkpoint, tmp_path):
    schemes = dict.fromkeys(("attention", "mlp", "expert"), Scheme(3, 16, "int"))
    dense = family_checkpoints(family).dense
    schemes["head" if "lm_head.weight" in all_tensors(dense) else "embedding"] = Scheme(8, 16, "none")
    expected = pack_checkpoint(dense, tmp_path / "expected", schemes).packed
    *_, finished = run(dense, make_recipe(bits=3, group=16, zero="int", method="rtn"), tmp_path / "out", shard_size=50_000)
    assert isinstance(finished, Finished)
    same(all_tensors(tmp_path / "out"), all_tensors(expected))
    read = json.loads((tmp_path / "out" / "config.json").read_text())
    assert read == json.loads((expected / "config.json").read_text())
    assert open_checkpoint(tmp_path / "out").check_values() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scales_have_the_dtype_of_the_model(dtype, family_checkpoints, pack_checkpoint, tmp_path):
    dense, stored = tmp_path / "dense", torch.float32 if dtype == torch.float64 else dtype
    shutil.copytree(family_checkpoints("llama").dense, dense)
    (path,) = dense.glob("*.safetensors")
    save_file({n: t.to(dtype) for n, t in load_file(path).items()}, path)
    schemes = dict.fromkeys(("attention", "mlp"), Scheme(4, 16, "float")) | {"head": Scheme(8, 16, "none")}
    expected = pack_checkpoint(dense, tmp_path / "expected", schemes, str(stored).removeprefix("torch.")).packed
    list(run(dense, make_recipe(bits=4, group=16, method="rtn"), tmp_path / "out"))
    scales = {n: t for n, t in all_tensors(tmp_path / "out").items() if n.endswith(("_scale", "_zero"))}
    assert {t.dtype for t in scales.values()} == {stored}
    same({n: t.to(stored) for n, t in all_tensors(expected).items() if n in scales}, scales)


def test_events_tell_the_whole_run(tmp_path):
    with prepare("demo", make_recipe(method="rtn"), tmp_path / "out", shard_size=3_000_000) as prepared:
        *middle, finished = execute(prepared)
    plan = prepared.plan
    assert isinstance(finished, Finished)
    tensors = [e for e in middle if isinstance(e, TensorDone)]
    assert [e.index for e in tensors] == list(range(1, len(plan.items) + 1))
    assert tensors[-1].params_done == tensors[-1].params_total == plan.params
    assert [e.name for e in middle if isinstance(e, ShardDone)] == [s.name for s in plan.shards]
    result = finished.result.to_json()
    expected = ["out", "bpw", "bytes", "source_bytes", "quantized_fraction", "seconds", "peak_rss_bytes"]
    assert list(result)[:7] == expected
    sizes = sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))
    assert result["bytes"] == plan.nbytes == sizes
    assert [e for _, _, e in result["worst"]] == sorted((e.rel_error for e in tensors if e.scheme), reverse=True)[:5]


def test_the_error_on_record_is_that_of_the_bytes_written(tmp_path):
    events = list(run("demo", make_recipe(bits=2, skip=["layers.[1-5]"]), tmp_path / "out"))
    source = load_file(open_source("demo").folder / "model.safetensors")
    done = next(e for e in events if isinstance(e, TensorDone) and (e.scheme or "").startswith("2-bit"))
    W = source[f"{done.name}.weight"]
    q = quantizers.get(quantizers.default_method(2))(W, Scheme(2, 64), torch.bfloat16)
    relative = ((W.double() - q.dequantize().double()).norm() / W.double().norm()).item()
    assert done.rel_error == pytest.approx(relative, rel=1e-5)
    words = load_file(tmp_path / "out" / "model.safetensors")[f"{done.name}.weight"]
    assert torch.equal(words, pack(q).words)
    report = json.loads((tmp_path / "out" / "lowq_report.json").read_text())
    entry = next(t for t in report["tensors"] if t["name"] == done.name)
    assert entry["rel_error"] == done.rel_error
    assert entry["crc32"][0] == zlib.crc32(words.numpy().tobytes())
    assert not {"time", "seconds", "date"} & report.keys()


def test_two_runs_write_the_same_bytes(tmp_path):
    for folder in ("one", "two"):
        list(run("demo", make_recipe(skip=["layers.[1-5]"]), tmp_path / folder))
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_a_matrix_of_several_slabs_has_the_bytes_of_one(tmp_path):
    folder, rows = shutil.copytree(DEMO, tmp_path / "wide"), budget.slab_rows(256) + 100
    W = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save_file(load_file(folder / "model.safetensors") | {"model.embed_tokens.weight": W}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    list(run(folder, make_recipe(method="rtn", embedding=8, skip=["layers"]), tmp_path / "out"))
    whole = pack(quantizers.get("rtn")(W, Scheme(8, 64), torch.bfloat16))
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"], whole.words)


def test_the_number_of_threads_changes_no_byte(tmp_path):
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            list(run("demo", make_recipe(skip=["layers.[1-5]"]), tmp_path / str(threads)))
    finally:
        torch.set_num_threads(before)
    assert files(tmp_path / "1") == files(tmp_path / "3")


def test_small_and_large_files_hold_the_same_tensors(tmp_path):
    list(run("demo", make_recipe(method="rtn"), tmp_path / "one"))
    list(run("demo", make_recipe(method="rtn"), tmp_path / "many", shard_size=1_000_000))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    same(all_tensors(tmp_path / "one"), all_tensors(tmp_path / "many"))
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in all_tensors(tmp_path / "one").values())
    assert index["weight_map"].keys() == all_tensors(tmp_path / "one").keys()


def test_stacked_experts_give_the_files_of_separate_ones(family_checkpoints, tmp_path):
    from transformers import AutoModelForCausalLM

    dense = family_checkpoints("mixtral").dense
    model = AutoModelForCausalLM.from_pretrained(dense)
    stacked = tmp_path / "stacked"
    stacked.mkdir()
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, stacked / "model.safetensors")
    (stacked / "config.json").write_bytes((dense / "config.json").read_bytes())
    assert any(t.dim() == 3 for t in all_tensors(stacked).values())
    list(run(dense, make_recipe(group=16), tmp_path / "a"))
    list(run(stacked, make_recipe(group=16), tmp_path / "b"))
    a, b = all_tensors(tmp_path / "a"), all_tensors(tmp_path / "b")
    packed = [n for n in a if ".experts." in n]
    assert len(packed) == 2 * 4 * 3 * 3
    same({n: a[n] for n in packed}, {n: b[n] for n in packed})


def test_a_cast_reaches_kept_tensors_and_the_config(tmp_path):
    list(run("demo", make_recipe(method="rtn", dtype="float16"), tmp_path / "out"))
    assert {t.dtype for t in all_tensors(tmp_path / "out").values()} == {torch.float16, torch.int32}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float16"
    assert "torch_dtype" not in config


def test_the_python_function_returns_the_documented_keys(tmp_path):
    result = pipeline.quantize("demo", tmp_path / "out", bits=8, group=128, method="rtn", device="cpu")
    assert {"out", "bpw", "bytes", "source_bytes", "quantized_fraction", "seconds", "peak_rss_bytes"} <= result.keys()
    assert result["quantized_bpw"] == pytest.approx(8.25)
    assert pipeline.quantize("demo", tmp_path / "out", bits=8, group=128, method="rtn", device="cpu")["already_done"]


def test_companions_come_along(tmp_path):
    list(run("demo", make_recipe(method="rtn"), tmp_path / "out"))
    demo = open_source("demo").folder
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (demo / name).read_bytes()
    assert "finished" in (tmp_path / "out" / "lowq.log").read_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_too_large_for_their_squares_are_refused_for_that(dtype, family_checkpoints, tmp_path):
    shutil.copytree(family_checkpoints("llama", "bfloat16").dense, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name] * 1e30}, path, metadata={"format": "pt"})
    with pytest.raises(DamagedError, match=rf"{name} holds weights of \S+e\+29, whose squares float32 cannot sum"):
        pipeline.quantize(tmp_path / "m", tmp_path / "q", bits=4, group="32", method="rtn", dtype=dtype)
