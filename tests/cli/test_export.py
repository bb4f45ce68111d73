"""lowq export: what it writes reads back as the same weights, with our reader and with the real ones; or nothing is written."""

import json
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import lowq
from lowq_cli import main
from lowq_cli.files import shards
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.inspection import inspect_model
from lowq_cli.files.quant_config import compact
from lowq_cli.files.source import open_source
from lowq_cli.interop.exporter import export, read_matrix
from lowq_cli.interop.foreign import fetcher, foreign_matrices, open_decoded, open_foreign
from lowq_cli.interop.importer import runnable
from lowq_cli.interop.older_config import spelled_out
from lowq_cli.interop.sharding import fusion_problems, shard_problems
from lowq_packers import formats
from lowq_packers.errors import DamagedError, UnsupportedError, UsageError
from lowq_packers.scheme import Scheme

INT4 = {"attention": Scheme(4, 32, "int"), "mlp": Scheme(4, 32, "int"), "expert": Scheme(4, 16, "int")}
SYM = {"attention": Scheme(4, 32, "none"), "mlp": Scheme(8, 32, "none"), "expert": Scheme(4, 16, "none")}
FLOAT = {"attention": Scheme(4, 32, "float"), "mlp": Scheme(2, 32, "float")}
HEAD = {"head": Scheme(8, 64, "none")}
CASES = [
    ("gptq", SYM | HEAD),
    ("gptq", INT4),
    ("awq", INT4),
    ("compressed-tensors", SYM | HEAD),
    ("compressed-tensors", INT4),
    ("hqq", FLOAT),
    ("mlx", SYM),
]


@pytest.fixture(scope="module")
def checkpoints(family_checkpoints, tmp_path_factory):
    """`family_checkpoints` in bf16, with scales and zeros stored in bf16 too, as `lowq quantize` stores them."""
    made = {}

    def make(family="llama", schemes=SYM):
        key = (family, str(schemes))
        if key not in made:
            found = family_checkpoints(family, "bfloat16", schemes)
            packed = tmp_path_factory.mktemp(family) / "packed"
            shutil.copytree(found.packed, packed)
            tensors = load_file(packed / "model.safetensors")
            tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
            save_file(tensors, packed / "model.safetensors")
            made[key] = replace(found, packed=packed)
        return made[key]

    return make


def dense_tensors(source):
    return {n: source.read(n).reshape(h.shape) for n, h in source.headers.items()}


@pytest.mark.parametrize(("to", "schemes"), CASES, ids=lambda v: v if isinstance(v, str) else v["mlp"].zero)
def test_an_export_opens_as_the_weights_that_the_checkpoint_stands_for(checkpoints, tmp_path, to, schemes):
    made = checkpoints("llama", schemes)
    done = export(made.packed, to, tmp_path / "out")
    assert done.bytes == sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))
    with open_decoded(tmp_path / "out") as found, open_source(made.dequantized) as wanted:
        ours, theirs = dense_tensors(found), dense_tensors(wanted)
        assert "quantization_config" not in found.config
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name].to(theirs[name].dtype), theirs[name]), name
    shown = inspect_model(str(tmp_path / "out"))
    assert shown.format == to
    assert sum(r.params for r in shown.rows if r.quantized) == sum(
        r.params for r in inspect_model(str(made.packed)).rows if r.quantized
    )
    assert "lowq" in shown.engines


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("to", ["gptq", "compressed-tensors"])
def test_experts_are_exported_one_by_one(checkpoints, tmp_path, family, to):
    made = checkpoints(family, INT4)
    export(made.packed, to, tmp_path / "out")
    with open_decoded(tmp_path / "out") as found, open_source(made.packed) as packed:
        assert sum("expert" in n for n in found.headers) == sum("expert" in n and n.endswith(".weight") for n in packed.headers)


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
    found = open_checkpoint(packed)
    assert back.keys() == found.schemes.keys()
    for t in found.tensors:
        if t.scheme:
            assert torch.equal(back[t.name].dequantize(), read_matrix(found, t).dequantize()), t.name
    shown = inspect_model(str(tmp_path / "out"))
    assert sum(r.bytes for r in shown.rows) == sum(t.numel() * t.element_size() for t in written.values())
    assert done.matrices == len(back)
    imported = runnable(tmp_path / "out")
    assert open_checkpoint(imported).schemes.keys() == found.schemes.keys()


def test_mlx_is_told_what_transformers_5_nests(mixture, tmp_path):
    folder = mixture("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32, "rope_parameters": {"rope_theta": 5e5}})
    saved = json.loads((folder / "config.json").read_text())
    assert "rope_theta" not in saved, "else this tests nothing"
    export(folder, "mlx", tmp_path / "out")
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (told["rope_theta"], told["num_experts"], told["tie_word_embeddings"]) == (5e5, 4, False)
    assert "rope_scaling" not in told


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
    found = open_checkpoint(folder)
    found.source.close()
    (folder / "lowq_report.json").unlink()  # lowq quantize makes them agree: this folder is another's work
    kept = [t.name.removesuffix(".weight") for t in found.tensors if not t.scheme]
    section = compact(found.schemes | {name: Scheme(8, 32, "none")}, kept)
    (folder / "config.json").write_text(json.dumps(found.config | {"quantization_config": section}))
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


def test_several_files_and_an_index(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD", 20_000)
    made = checkpoints("llama", SYM)
    export(made.packed, "compressed-tensors", tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    with open_decoded(tmp_path / "out") as found, open_source(made.dequantized) as wanted:
        assert found.headers.keys() == wanted.headers.keys()  # open_source checks the index


def test_the_same_bytes_twice(checkpoints, tmp_path):
    made = checkpoints("llama", INT4)
    for out in ("a", "b"):
        export(made.packed, "awq", tmp_path / out)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


REFUSED = [
    ("gptq", FLOAT, "nearest: quantize with --zero int"),
    ("awq", SYM, "nearest"),
    ("compressed-tensors", FLOAT, "--to humming"),
    ("mlx", INT4 | {"mlp": Scheme(1, 32, "int")}, "nearest: --bits 2"),
    ("gguf", FLOAT, "nearest: --bits 4 --group 32"),
    ("mlx", FLOAT, "--round"),
    ("humming", FLOAT, "multiple of 64"),
]


@pytest.mark.parametrize(("to", "schemes", "message"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_a_format_cannot_hold_is_refused_and_nothing_is_left(checkpoints, tmp_path, to, schemes, message):
    made = checkpoints("llama", schemes)
    with pytest.raises(UnsupportedError, match=message):
        export(made.packed, to, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_full_folder_an_unknown_format_and_a_model_that_is_not_ours(checkpoints, tmp_path):
    made = checkpoints("llama", SYM)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("data")
    with pytest.raises(UsageError, match="is there already"):
        export(made.packed, "gptq", tmp_path / "out")
    with pytest.raises(UsageError, match="does not exist; use one of"):
        export(made.packed, "exl2", tmp_path / "new")
    with pytest.raises(UsageError, match="not quantized"):
        export(made.dense, "gptq", tmp_path / "new")
    assert (tmp_path / "out" / "precious").read_text() == "data"


def test_the_command(checkpoints, tmp_path, monkeypatch, capsys):
    made = checkpoints("llama", SYM)
    args = ["lowq", "export", str(made.packed), "--to", "gptq", "--out", str(tmp_path / "out"), "--json"]
    monkeypatch.setattr(sys, "argv", args)
    assert main._run() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "gptq"
    assert (tmp_path / "out" / "quantize_config.json").is_file()
    monkeypatch.setattr(sys, "argv", [*args[:4], "awq", *args[5:-1]])
    assert main._run() == 5
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("to", ["mlx", "gptq", "hqq"])
def test_groups_of_scale_zero(checkpoints, tmp_path, to):
    """All weights of such a group are 0, whatever their codes; formats with offsets keep other codes for it."""
    made = checkpoints("llama", SYM)
    folder = tmp_path / "m"
    shutil.copytree(made.packed, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.weight_scale"][3] = 0
    save_file(tensors, folder / "model.safetensors")
    export(folder, to, tmp_path / "out")
    with open_decoded(tmp_path / "out") as source:
        assert not source.read(f"{name}.weight").reshape(96, 64)[3].any()


def test_a_format_that_lies_is_caught(checkpoints, tmp_path, monkeypatch):
    fmt = formats.get("awq")

    def write(name, q, config):
        tensors = fmt.write(name, q, config)
        tensors[f"{name}.qweight"][0, 0] ^= 1
        return tensors

    monkeypatch.setitem(formats.FORMATS, "awq", replace(fmt, write=write))
    with pytest.raises(AssertionError, match="does not read back"):
        export(checkpoints("llama", INT4).packed, "awq", tmp_path / "out")
    assert not list(tmp_path.iterdir())


# --- tensor parallelism -----------------------------------------------------------------------------------------------

QWEN = {"hidden_size": 3584, "num_key_value_heads": 4, "num_attention_heads": 28}
QWEN_SHAPES = {
    "q_proj": (3584, 3584),
    "k_proj": (512, 3584),
    "v_proj": (512, 3584),
    "o_proj": (3584, 3584),
    "gate_proj": (18944, 3584),
    "up_proj": (18944, 3584),
    "down_proj": (3584, 18944),
}


@pytest.mark.parametrize(
    ("group", "ranks", "bad"), [(128, 1, 0), (128, 2, 0), (128, 4, 1), (64, 4, 0), (64, 8, 1), (32, 8, 0), (128, 8, 2)]
)
def test_qwen_7b_over_ranks(group, ranks, bad):
    """down_proj: 18944 / 4 = 37 * 128, / 8 = 2368 = 37 * 64; o_proj: 3584 / 4 = 7 * 128, / 8 = 448 = 3.5 * 128."""
    schemes = {n: Scheme(4, group, "none") for n in QWEN_SHAPES}
    problems = shard_problems(QWEN, schemes, QWEN_SHAPES, ranks)
    bad_rows = {(128, 4): 0, (64, 8): 0}.get((group, ranks), bad)
    assert len(problems) == bad_rows, problems
    if group == 128 and ranks == 8:
        assert any("down_proj" in p and "2368" in p and "down_proj=4:64" in p for p in problems)


def test_fused_weights_must_agree():
    schemes = {"a.q_proj": Scheme(4, 64), "a.k_proj": Scheme(8, 64), "a.v_proj": Scheme(4, 64), "m.gate_proj": Scheme(4, 64)}
    (line,) = fusion_problems(schemes)
    assert "a.qkv_proj" in line


def test_a_checkpoint_that_vllm_would_refuse_is_exported_with_a_note(checkpoints, tmp_path):
    made = checkpoints("llama", SYM)
    assert "vLLM" in export(made.packed, "gptq", tmp_path / "good").engines
    folder = tmp_path / "mixed"
    lowq.quantize(made.dense, out=folder, bits=4, group=32, zero="none", overrides=["q_proj=8"])
    done = export(folder, "gptq", tmp_path / "out")
    assert "vLLM" not in done.engines
    assert any("qkv_proj is made of" in note for note in done.notes)
    rules = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["dynamic"]
    assert any(re.match(rule.removeprefix("+:"), "model.layers.0.self_attn.qkv_proj") for rule in rules)


def test_check_tp_refuses_before_writing(checkpoints, tmp_path):
    made = checkpoints("llama", SYM)
    with pytest.raises(UnsupportedError, match="8 tensor-parallel ranks"):
        export(made.packed, "gptq", tmp_path / "out", check_tp=8)
    assert not list(tmp_path.iterdir())
    made = checkpoints("llama", {"attention": Scheme(4, 16, "none"), "mlp": Scheme(4, 16, "none")})
    export(made.packed, "gptq", tmp_path / "out", check_tp=2)


# --- foreign checkpoints as a source ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gptq_folder(checkpoints, tmp_path_factory):
    out = tmp_path_factory.mktemp("gptq") / "out"
    export(checkpoints("llama", SYM | HEAD).packed, "gptq", out)
    return out


def test_quantize_takes_a_foreign_checkpoint(gptq_folder, checkpoints, tmp_path):
    """The same recipe on the foreign checkpoint and on the dense weights it stands for gives the same bytes."""
    made = checkpoints("llama", SYM | HEAD)
    for name, model in (("foreign", gptq_folder), ("dense", made.dequantized)):
        lowq.quantize(model, out=tmp_path / name, bits=3, group=32, skip=["layers.1.mlp.up_proj"])
    weights = [open_source(tmp_path / name) for name in ("foreign", "dense")]
    for name in weights[1].headers:
        a, b = (bytes(w.read_raw(name, 0, w.headers[name].nbytes)) for w in weights)
        assert a == b, name
    for w in weights:
        w.close()


def test_a_dry_run_reads_no_weights(gptq_folder, monkeypatch):
    from lowq_cli.interop import foreign
    from lowq_cli.run import pipeline
    from lowq_cli.run.recipe import Recipe

    monkeypatch.setattr(foreign, "dense", lambda *_: pytest.fail("weights were read"))
    planned = next(pipeline.run(gptq_folder, Recipe(bits=4, group=32), dry_run=True))
    assert planned.plan.coverage > 0.5


def test_rows_of_a_decoded_matrix(gptq_folder):
    name = "model.layers.0.mlp.up_proj.weight"
    with open_decoded(gptq_folder) as source:
        whole = source.read(name)
        N, K = source.headers[name].shape
        assert torch.equal(source.read(name, 3 * K, 2 * K), whole[3 * K : 5 * K])
        raw = source.read_raw(name, 2 * K, 40)
        assert bytes(raw) == bytes(whole.view(torch.uint8)[2 * K : 2 * K + 40].numpy())
        assert whole.numel() == N * K


def test_hqq_qmodel_is_a_source_and_a_pickle_of_code_is_not(checkpoints, tmp_path):
    made = checkpoints("llama", FLOAT)
    export(made.packed, "hqq", tmp_path / "st")
    qmodel = {}
    with open_foreign(tmp_path / "st") as source:
        fetch = fetcher(source)
        for name in source.headers:
            module, _, leaf = name.rpartition(".")
            value = fetch(name)
            if leaf in ("nbits", "group_size", "axis"):
                value = int(value)
            elif leaf in ("packing",):
                value = bytes(value.tolist()).decode()
            elif leaf in ("unpack_view_dtype", "compute_dtype"):
                value = getattr(torch, bytes(value.tolist()).decode().removeprefix("torch."))
            elif leaf == "shape":
                value = torch.Size(value.tolist())
            qmodel.setdefault(module, {})[leaf] = value
    folder = tmp_path / "hqq"
    folder.mkdir()
    config = json.loads((tmp_path / "st" / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(qmodel, folder / "qmodel.pt")
    with open_decoded(folder) as found, open_source(made.dequantized) as wanted:
        ours, theirs = dense_tensors(found), dense_tensors(wanted)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n].to(theirs[n].dtype), theirs[n]) for n in ours)
    assert inspect_model(str(folder)).format == "hqq"

    marker = tmp_path / "executed"

    class Hostile:
        def __reduce__(self):
            return (marker.write_text, ("x",))

    torch.save({"model": Hostile()}, folder / "qmodel.pt")
    with pytest.raises(UnsupportedError, match="runs no pickled code"):
        open_decoded(folder)
    assert not marker.exists()
    (folder / "qmodel.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(UnsupportedError, match="no plain HQQ checkpoint"):
        open_decoded(folder)


def test_formats_that_nobody_reads_and_configs_that_lie(gptq_folder, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(gptq_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    for q, error, message in [
        ({"quant_method": "exl3"}, UnsupportedError, "quantized as 'exl3'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, DamagedError, "lm_head"),
        ({"quant_method": "compressed-tensors"}, DamagedError, "no weight is packed so"),
        ({**config["quantization_config"], "bits": 2}, DamagedError, "qzeros"),
        ({**config["quantization_config"], "checkpoint_format": "marlin"}, UnsupportedError, "one kernel"),
    ]:
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": q}))
        with pytest.raises(error, match=message):
            open_decoded(folder)


def test_traps_are_shown(gptq_folder):
    found = inspect_model(str(gptq_folder))
    assert any("version 1" in note for note in found.notes)
    assert "vLLM" in found.engines
    with open_source(gptq_folder) as source:
        fmt, matrices = foreign_matrices(source)
    assert fmt.name == "gptq"
    assert {m.bits for m in matrices} == {4, 8}


# --- real readers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schemes", [SYM, {"attention": Scheme(2, 32, "none"), "mlp": Scheme(3, 16, "none")}], ids=["4+8", "2+3"]
)
def test_transformers_loads_a_compressed_tensors_export_with_our_logits(family_checkpoints, tmp_path, schemes):
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (extra interop)")
    from transformers import AutoModelForCausalLM

    made = family_checkpoints("llama", "float32", schemes)
    export(made.packed, "compressed-tensors", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = AutoModelForCausalLM.from_pretrained(made.dequantized).eval()
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(theirs(ids).logits, ours(ids).logits)
