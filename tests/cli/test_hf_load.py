"""lowq.load: folder, demo and bad folders; device and dtype; the tokenizer."""

import json
import logging
import shutil

import pytest
import torch
from folders import write_tokenizer
from typer.testing import CliRunner

import lowq
from lowq_cli import console
from lowq_cli.files.source import open_source
from lowq_cli.hf.load import load_model
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError, UsageError


@pytest.fixture
def packed(family_checkpoints, tmp_path):
    """A packed llama with a tokenizer, in a folder that tests may spoil."""
    folder = tmp_path / "model"
    shutil.copytree(family_checkpoints("llama").packed, folder)
    write_tokenizer(folder)
    return folder


def test_loads_a_packed_folder_in_bf16_on_a_cpu(packed):
    model, tokenizer = lowq.load(packed, device="cpu")
    assert model.dtype == torch.bfloat16  # though the checkpoint is fp32: the 4-bit kernel takes nothing else
    assert not model.training
    ids = tokenizer("w5 w17 w3", return_tensors="pt").input_ids
    assert ids.tolist() == [[5, 17, 3]]
    assert model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, 6)


def test_dtype_is_the_requested_one(packed):
    model, _ = lowq.load(str(packed), device="cpu", dtype="float16")
    assert model.dtype == torch.float16
    assert model.model.layers[0].self_attn.q_proj.weight_scale.dtype == torch.float16


def test_loads_the_demo_in_its_own_dtype():
    model, tokenizer = lowq.load("demo", device="cpu")
    assert model.dtype == torch.bfloat16
    assert tokenizer.decode(tokenizer("Once upon a time").input_ids, skip_special_tokens=True).strip() == "Once upon a time"


def _edit(folder, file="config.json", **changes):
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _as_folder(path):
    path.unlink()
    path.mkdir()


BAD = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), NotFoundError, "holds no"),
    "truncated": (_truncate, DamagedError, "truncated"),
    "no config": (lambda f: (f / "config.json").unlink(), NotFoundError, "no config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), DamagedError, "valid JSON"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], NotFoundError, "has no tokenizer"),
    "a tokenizer that is cut off": (
        lambda f: (f / "tokenizer.json").write_text("{"),
        DamagedError,
        "tokenizer.json does not begin and end as a JSON object does",
    ),
    "tokenizer is no JSON": (
        lambda f: (f / "tokenizer.json").write_text('{"model": }'),
        DamagedError,
        r"tokenizer of .*\(tokenizer.json\)",
    ),
    "a token without text": (
        lambda f: _edit(f, "tokenizer.json", added_tokens=[{"id": "x"}]),
        DamagedError,
        r"tokenizer of .*\(tokenizer.json\)",
    ),
    "a token that is a number": (
        lambda f: _edit(f, "tokenizer_config.json", eos_token=5),
        DamagedError,
        r"\(tokenizer.json, tokenizer_config.json\) cannot be read",
    ),
    "a word for the longest text": (
        lambda f: _edit(f, "tokenizer_config.json", model_max_length="x"),
        DamagedError,
        "model_max_length in .*tokenizer_config.json must be a number",
    ),
    "settings that are no table": (
        lambda f: (f / "generation_config.json").write_text("NaN"),
        DamagedError,
        "generation_config.json must hold a JSON object",
    ),
    "settings that are a folder": (
        lambda f: _as_folder(f / "generation_config.json"),
        DamagedError,
        "generation_config.json is not a regular file",
    ),
    "unknown family": (lambda f: _edit(f, model_type="nonsense"), UnsupportedError, "'nonsense'"),
    "no text model": (lambda f: _edit(f, architectures=["LlamaModel"]), UnsupportedError, "generates no text"),
    "packing not declared": (lambda f: _edit(f, quantization_config=None), UnsupportedError, "does not say what its codes"),
    "foreign format": (lambda f: _edit(f, quantization_config={"quant_method": "exl3"}), UnsupportedError, "'exl3'"),
    "config of another size": (lambda f: _edit(f, intermediate_size=128), DamagedError, "needs I32|rows"),
    "more layers": (lambda f: _edit(f, num_hidden_layers=3), DamagedError, "lacks model.layers.2"),
    "heads that do not divide": (lambda f: _edit(f, num_attention_heads="4"), DamagedError, "num_attention_heads|llama|Llama"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders_give_one_line(case, packed):
    spoil, error, match = BAD[case]
    spoil(packed)
    with pytest.raises(error, match=match) as e:
        lowq.load(packed, device="cpu")
    assert "\n" not in str(e.value)


@pytest.fixture
def reports():
    """The log of transformers while a model is loaded, which it would print in many lines."""
    result = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: result.append(record.getMessage())
    logging.getLogger("transformers").addHandler(handler)
    yield result
    logging.getLogger("transformers").removeHandler(handler)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"head_dim": 32}, "k_proj.weight is 32 x 64, not 64 x 64$"),
        ({"num_hidden_layers": 3}, r"model.layers.2.\S+ is missing; fetch the model again$"),
    ],
    ids=["shapes", "layers"],
)
def test_a_dense_model_that_does_not_fit_its_config_is_one_line(change, match, family_checkpoints, tmp_path, reports):
    folder = shutil.copytree(family_checkpoints("llama").dense, tmp_path / "m")
    _edit(folder, **change)
    with pytest.raises(DamagedError, match=match), open_source(folder) as source:
        load_model(source, "cpu")
    assert not reports


def test_weights_that_the_model_does_not_know_are_one_warning(family_checkpoints, tmp_path, capsys, reports):
    folder = shutil.copytree(family_checkpoints("llama").dense, tmp_path / "m")
    _edit(folder, num_hidden_layers=1)
    console.stderr.cache_clear()  # it may hold another test's stderr
    with open_source(folder) as source:
        load_model(source, "cpu")
    assert not reports
    err = capsys.readouterr().err
    assert err.count("\n") == 1  # in a log it is never broken
    assert "which are ignored: model.layers.1.input_layernorm.weight and 8 more" in err


def test_nothing_there_and_bad_arguments(packed, tmp_path):
    with pytest.raises(NotFoundError, match="no folder"):
        lowq.load(tmp_path / "absent")
    with pytest.raises(UsageError, match="does not exist; use auto"):
        lowq.load(packed, device="abacus")
    with pytest.raises(UsageError, match="dtype 'int8' is not one"):
        lowq.load(packed, device="cpu", dtype="int8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(packed):
    with pytest.raises(UnsupportedError, match="can use 0 CUDA GPU"):
        lowq.load(packed, device="cuda")


def test_a_tokenizer_that_is_code_is_refused_without_a_question(packed):
    """transformers would ask on stdin for 15 s, and run the code where the answer, perhaps a line of piped text, is y."""
    (packed / "own.py").write_text(f"open({str(packed / 'ran')!r}, 'w')")
    config = json.loads((packed / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (packed / "tokenizer_config.json").write_text(json.dumps(config))
    refused = pytest.raises(UnsupportedError, match="is code of its own, which lowq does not run")
    with CliRunner().isolation("y\n"), refused:
        lowq.load(packed, device="cpu")
    assert not (packed / "ran").exists()


def test_a_mistake_of_ours_while_loading_is_not_called_a_damaged_folder(packed, monkeypatch):
    """What transformers calls of ours, and what runs after it."""
    from lowq_cli.hf import load, quantizer

    source = open_source(packed)
    with monkeypatch.context() as patched:
        patched.setattr(load, "prepare", lambda model: model.no_such_name)
        with pytest.raises(AttributeError):
            load_model(source, torch.device("cpu"))
    broken = "def broken(self, model, **_):\n    return self.no_such_name\n"
    exec(broken, scope := {"__name__": "lowq_cli.hf.quantizer"})
    monkeypatch.setattr(quantizer.LowqQuantizer, "_process_model_before_weight_loading", scope["broken"])
    with pytest.raises(AttributeError):
        load_model(source, torch.device("cpu"))
