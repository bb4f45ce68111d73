"""Invalid input of every kind: one line with the fault and the way out, its exit code, and no output that looks complete."""

import json
import os
import shutil
import struct
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowq_cli.calibrate import texts
from lowq_cli.run.pipeline import quantize
from lowq_packers.errors import LowqError

Q, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
WEIGHTS = "model.safetensors"


def config(m, **changes):
    old = json.loads((m / "config.json").read_text())
    (m / "config.json").write_text(json.dumps({k: v for k, v in (old | changes).items() if v is not ...}))


def tensors(m, change):
    tensors = load_file(m / WEIGHTS)
    change(tensors)
    save_file(tensors, m / WEIGHTS)


def set_value(name, value):
    def change(found):
        found[name] = found[name].clone()
        found[name].view(-1)[7] = value

    return lambda m: tensors(m, change)


def replace(name, tensor):
    return lambda m: tensors(m, lambda found: found.update({name: tensor(found[name])}))


def header(m, change):
    raw = (m / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    new = change(raw[8 : 8 + length].decode()).encode()
    (m / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])


def only(name, content=b"x"):
    def build(m):
        (m / WEIGHTS).unlink()
        (m / name).write_bytes(content)

    return build


def split(m, lost=False, wrong=False):
    tensors = load_file(m / WEIGHTS)
    (m / WEIGHTS).unlink()
    names = sorted(tensors)
    where = {n: f"model-0000{1 + (i > 5)}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(where.values()):
        save_file({n: tensors[n] for n in names if where[n] == file}, m / file)
    if wrong:
        where[names[0]], where[names[-1]] = where[names[-1]], where[names[0]]
    (m / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": where}))
    if lost:
        (m / "model-00002-of-00002.safetensors").unlink()


def fill_out(m):
    (m.parent / "out").mkdir()
    (m.parent / "out" / "thesis.tex").write_text("mine")


def earlier_run(m):
    quantize(m, m.parent / "out", bits=8, method="rtn")
    (m.parent / "out" / "config.json").rename(m.parent / "kept.json")


def recipe(text):
    def build(m):
        (m / "r.toml").write_text(text)

    return build


def nothing(m):
    pass


Case = namedtuple("Case", "name build code message options", defaults=[{}])
CASES = [
    Case("folder missing", lambda m: shutil.rmtree(m), 3, "no folder"),
    Case("folder empty", lambda m: [p.unlink() for p in m.iterdir()], 3, "holds no *.safetensors"),
    Case("config missing", lambda m: (m / "config.json").unlink(), 3, "has no config.json"),
    Case("config not JSON", lambda m: (m / "config.json").write_text("{'a': 1}"), 3, "valid JSON"),
    Case("config a list", lambda m: (m / "config.json").write_text("[]"), 3, "must hold a JSON object"),
    Case("config binary", lambda m: (m / "config.json").write_bytes(b"\xff\xfe\x00"), 3, "valid JSON"),
    Case("config names no family", lambda m: config(m, model_type=...), 3, "has no model_type"),
    Case("family unknown", lambda m: config(m, model_type="brain"), 5, "model_type 'brain'"),
    Case("config with a word for a number", lambda m: config(m, hidden_size="big"), 3, "config.json"),
    Case("config of a wider model", lambda m: config(m, hidden_size=128), 3, "config.json asks for"),
    Case("config of another vocabulary", lambda m: config(m, vocab_size=161), 3, "asks for (161, 64)"),
    Case("config of a deeper model", lambda m: config(m, num_hidden_layers=3), 3, "model.layers.2"),
    Case("config of an absurd model", lambda m: config(m, num_hidden_layers=10**9), 3, "num_hidden_layers = 1000000000"),
    Case("weights truncated", lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes()[:-100]), 3, "truncated"),
    Case("weights cut in the header", lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes()[:90]), 3, "truncated"),
    Case("weights of no bytes", only(WEIGHTS, b""), 3, "too short for a safetensors file"),
    Case("weights a web page", only(WEIGHTS, b"<!doctype html><title>404</title>"), 3, "not a safetensors file"),
    Case("weights left in Git LFS", only(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid x\n"), 3, "git lfs pull"),
    Case("weights with bytes to spare", lambda m: (m / WEIGHTS).open("ab").write(b"more"), 3, "truncated or padded"),
    Case("dtype unknown", lambda m: header(m, lambda h: h.replace('"F32"', '"F33"', 1)), 3, "dtype 'F33'"),
    Case("shape not the bytes", lambda m: header(m, lambda h: h.replace("[64,64]", "[64,65]", 1)), 3, "bytes but has"),
    Case("shape permuted", lambda m: header(m, lambda h: h.replace("[96,64]", "[64,96]", 1)), 3, "config.json asks for"),
    Case("offsets overlap", lambda m: header(m, lambda h: h.replace("[0,", "[4,", 1)), 3, "bytes but has"),
    Case("name twice", lambda m: header(m, lambda h: h.replace("layers.1.mlp.up", "layers.0.mlp.up")), 3, "occurs twice"),
    Case("tensor missing", lambda m: tensors(m, lambda t: t.pop(Q)), 3, f"lacks {Q}"),
    Case("shard missing", lambda m: split(m, lost=True), 3, "fetch 1 missing file"),
    Case("index at odds with its files", lambda m: split(m, wrong=True), 3, "fetch the model again"),
    Case("only a pickle", only("pytorch_model.bin"), 5, "is a pickle"),
    Case("only a GGUF", only("model.gguf"), 3, "which is named by its file: "),
    Case("only an adapter", only("adapter_config.json"), 5, "is a LoRA adapter"),
    Case("NaN in a linear weight", set_value(Q, torch.nan), 3, Q),
    Case("infinity in a linear weight", set_value(Q, torch.inf), 3, Q),
    Case("NaN in a norm", set_value(NORM, torch.nan), 3, f"{NORM} holds NaN"),
    Case("NaN in the embedding", set_value("model.embed_tokens.weight", torch.nan), 3, "embed_tokens.weight holds NaN"),
    Case("integers for a linear weight", replace(Q, lambda t: t.to(torch.int8)), 5, f"{Q} is I8"),
    Case("fp8 weights", replace(Q, lambda t: t.to(torch.float8_e4m3fn)), 5, "holds quantized weights"),
    Case("a linear weight of one dimension", replace(Q, lambda t: t.flatten()), 3, Q),
    Case("a linear weight of no rows", replace(Q, lambda t: t[:0]), 3, Q),
    Case("a format nobody knows", lambda m: config(m, quantization_config={"quant_method": "exl9"}), 5, "exl9"),
    Case("GPTQ that the config hides", lambda m: tensors(m, lambda t: t.update({"a.qweight": t.pop(Q)})), 5, "a.qweight"),
    Case("already lowq", lambda m: config(m, quantization_config={"quant_method": "lowq"}), 2, "already a lowq checkpoint"),
    Case("values that the dtype cannot hold", set_value(NORM, 1e30), 3, "does not fit float16", {"dtype": "float16"}),
    Case("bits that do not exist", nothing, 2, "bits: 5 is not a width", {"bits": 5}),
    Case("group that no kernel takes", nothing, 2, "group 24", {"group": 24}),
    Case("group that does not divide", nothing, 2, "does not divide K=96", {"overrides": ["down_proj=4:64"]}),
    Case("pattern that fits nothing", nothing, 2, "did you mean", {"overrides": ["down_porj=4"]}),
    Case("nothing left to quantize", nothing, 5, "(and 13 more): the recipe keeps it", {"skip": ["*"]}),
    Case("method unknown", nothing, 2, "use one of", {"method": "awesome"}),
    Case("method without its zero", nothing, 2, "--method rtn", {"method": "hqq", "zero": "none"}),
    Case("layout only in memory", nothing, 2, "rowstream, tile", {"layout": "strided"}),
    Case("recipe missing", nothing, 3, "recipe none.toml does not exist", {"recipe": "none.toml"}),
    Case("recipe not TOML", recipe("bits: 4"), 2, "not valid TOML", {"recipe": "{m}/r.toml"}),
    Case("recipe key misspelt", recipe("bitts = 4"), 2, "did you mean 'bits'", {"recipe": "{m}/r.toml"}),
    Case("option misspelt", nothing, 2, "no option 'shards'", {"shards": 4}),
    Case("shard size of nothing", nothing, 2, "must be positive", {"shard_size": 0}),
    Case("device unknown", nothing, 2, "use auto, cpu or cuda", {"device": "tpu"}),
    Case("output a file", lambda m: (m.parent / "out").write_text(""), 2, "cannot write to"),
    Case("output full of other files", fill_out, 2, "lowq did not write, such as thesis.tex"),
    Case("output the source", nothing, 2, "lowq did not write", {"out": "{m}"}),
    Case("output of another run", earlier_run, 2, "use --fresh or another --out"),
]


@pytest.fixture
def model(tmp_path, family_checkpoints):
    """A small sound model, to be spoilt."""
    return shutil.copytree(family_checkpoints("llama").dense, tmp_path / "model")


def refused(model, options):
    """The error of quantizing `model`."""
    options = {k: v.format(m=model) if isinstance(v, str) else v for k, v in options.items()}
    out = options.pop("out", model.parent / "out")
    with pytest.raises(LowqError) as error:
        quantize(model, out, **({"method": "rtn"} | options))
    return error.value


@pytest.mark.parametrize("case", CASES, ids=[c.name.replace(" ", "-") for c in CASES])
def test_bad_input(case, model):
    case.build(model)
    error = refused(model, case.options)
    assert case.message in str(error)
    assert error.exit_code == case.code
    assert "\n" not in str(error)
    assert not (model.parent / "out" / "config.json").exists()


def test_the_sound_model_passes(model):
    assert quantize(model, model.parent / "out", method="rtn")["quantized_fraction"] > 0.5
    split(model)
    assert quantize(model, model.parent / "again", method="rtn")["quantized_fraction"] > 0.5


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.jsonl", b"[" * 100_000 + b"\n", "one JSON object"),
        ("t.jsonl", b'{"text": "\\ud800"}\n', "one JSON object"),
        ("t.jsonl", b'{"text": 5}\n', "one JSON object"),
        ("t.txt", b"\xff", "is not UTF-8"),
        ("t.txt", b" ", "is empty"),
    ],
)
def test_invalid_calibration_texts_are_refused(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LowqError, match=says):
        texts.read_text(str(tmp_path / name))


def test_a_calibration_text_without_an_end(tmp_path):
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "sparse.txt").touch()
    os.truncate(tmp_path / "sparse.txt", 1 << 40)
    for name, says in (("zero.txt", "it is a device; name a file"), ("sparse.txt", "more than 4 GiB; give less of it")):
        with pytest.raises(LowqError, match=says):
            texts.read_text(str(tmp_path / name))
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "some.txt").write_text("words")
    assert texts.read_text(str(tmp_path)) == "words"


def test_the_names_differ():
    assert len({c.name for c in CASES}) == len(CASES) >= 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_cuda_without_a_gpu(model):
    error = refused(model, {"device": "cuda"})
    assert (error.exit_code, "use --device cpu" in str(error)) == (5, True)


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_an_output_that_does_not_fit_is_refused_before_anything_is_written(model, monkeypatch, what):
    if what == "memory":
        monkeypatch.setattr("lowq_cli.run.budget.available_memory", lambda: 1 << 20)
    else:
        usage = namedtuple("usage", "total used free")(1, 1, 1000)
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    error = refused(model, {})
    assert (error.exit_code, f"B of {what}, " in str(error)) == (4, True)
    assert not (model.parent / "out").exists()
