"""What is checked is what is loaded: files that a folder smuggles in are refused or not seen; hostile sizes end at once."""

import json
import os
import shutil
import time

import pytest
import torch
from folders import write_tokenizer
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

import lowq
from lowq_cli import main
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.prompts import encode
from lowq_cli.engine.tokenizer import FastTokenizer
from lowq_cli.engine.tokenizer_file import read_tokenizer
from lowq_cli.files.checkpoint import is_checkpoint, open_checkpoint
from lowq_cli.files.safetensors_io import parse_header, read_json
from lowq_cli.files.source import open_source
from lowq_cli.hf import chat_template
from lowq_cli.hf.tokenizer import load_tokenizer
from lowq_packers.errors import DamagedError, LowqError, UnsupportedError

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path, family_checkpoints):
    folder = shutil.copytree(family_checkpoints("llama").dense, tmp_path / "model")
    write_tokenizer(folder)
    return folder


def config(folder, **changes):
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(old | changes))


def zeroed(folder, name):
    tensors = load_file(folder / WEIGHTS)
    save_file({n: torch.zeros_like(t) for n, t in tensors.items()}, folder / name, metadata={"format": "pt"})


def test_weights_that_config_names_are_refused(model):
    zeroed(model, "other.safetensors")
    config(model, transformers_weights="other.safetensors")
    with pytest.raises(UnsupportedError, match="transformers_weights"):
        lowq.load(model, "cpu")


def test_a_config_that_config_names_is_refused(model):
    shutil.copy(model / "config.json", model / "config.5.0.0.json")
    config(model, configuration_files=["config.5.0.0.json"])
    with pytest.raises(UnsupportedError, match="configuration_files"):
        open_source(model)


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation_internal", "experts_implementation"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_kernel_of_the_hub_is_refused(model, field, nested):
    config(model, **({"text_config": {field: "org/kernel:fn"}} if nested else {field: "org/kernel:fn"}))
    with pytest.raises(UnsupportedError, match=f"{field}='org/kernel:fn'"):
        open_source(model)


@pytest.mark.parametrize("stray", ["pickle", "shard", "adapter"])
def test_files_that_transformers_would_rather_take_are_not_seen(model, stray):
    expected = load_file(model / WEIGHTS)["model.norm.weight"]
    if stray == "pickle":
        (model / WEIGHTS).rename(model / "weights.safetensors")
        torch.save({"model.norm.weight": torch.zeros(64)}, model / "pytorch_model.bin")
    elif stray == "shard":
        zeroed(model, "shard-00000-model-00001-of-00001.safetensors")
    else:
        (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/nowhere"}))
    loaded, tokenizer = lowq.load(model, "cpu")
    assert torch.equal(loaded.model.norm.weight, expected)
    assert tokenizer("w5")["input_ids"] == [5]
    assert loaded.name_or_path == tokenizer.name_or_path == str(model)


def test_tokenizer_files_elsewhere_are_not_read(model):
    facts = read_json(model / "tokenizer_config.json")
    (model / "tokenizer_config.json").write_text(
        json.dumps(facts | {"tokenizer_file": "/etc/hostname", "vocab_file": "/etc/x"})
    )
    assert lowq.load(model, "cpu")[1]("w5")["input_ids"] == [5]
    (model / "tokenizer_config.json").write_text(json.dumps(facts | {"fast_tokenizer_files": ["tokenizer.1.0.0.json"]}))
    with pytest.raises(UnsupportedError, match="fast_tokenizer_files"):
        lowq.load(model, "cpu")


def test_companions_that_link_elsewhere_are_refused(model):
    (model.parent / "elsewhere").mkdir()
    (model.parent / "elsewhere" / "LICENSE").write_text("free")
    (model / "LICENSE").symlink_to(model.parent / "elsewhere" / "LICENSE")  # as `ln -s elsewhere/* .` makes
    assert model / "LICENSE" in open_source(model).companions()
    (model / "NOTICE").symlink_to("/etc/passwd")
    with pytest.raises(DamagedError, match=r"NOTICE is a link to /etc/passwd"):
        open_source(model).companions()


def test_only_regular_files_are_read(model):
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert not is_checkpoint(model)
    with pytest.raises(DamagedError, match="not a regular file"):
        read_json(model / "config.json")
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("/dev/zero")
    with pytest.raises(DamagedError, match="not a regular file"):
        read_json(model / "config.json")
    (sparse := model / "sparse.json").touch()
    os.truncate(sparse, 1 << 40)
    with pytest.raises(DamagedError, match="has 1099511627776 bytes"):
        read_json(sparse)


@pytest.mark.parametrize("number", ["10000000000", "999999999", "9" * 900, "9" * 5000])
def test_a_layer_of_any_number_is_refused_at_once(family_checkpoints, tmp_path, number):
    folder = shutil.copytree(family_checkpoints("llama").packed, tmp_path / "m")
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, f"model.layers.{number}.x": torch.zeros(1)}, folder / WEIGHTS)
    began = time.process_time()
    with pytest.raises(DamagedError):
        open_checkpoint(folder)
    assert time.process_time() - began < 5


def test_a_key_given_twice_among_many_is_found_at_once():
    names = [f't{i}": {{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(60_000)]
    began = time.process_time()
    with pytest.raises(DamagedError, match="'t59999' occurs twice"):
        parse_header(('{"' + ', "'.join([*names, names[-1]]) + "}").encode(), 0, 0, "file")
    assert time.process_time() - began < 5


def test_half_a_character_is_refused(model):
    (model / "config.json").write_text('{"model_type": "\\ud800"}')
    with pytest.raises(DamagedError, match="surrogates"):
        read_json(model / "config.json")
    (model / "config.json").write_text('{"model_type": "\\ud83d\\ude00"}')
    assert read_json(model / "config.json") == {"model_type": "\U0001f600"}


@pytest.mark.parametrize("field", [{"intermediate_size": 30_000_000}, {"num_hidden_layers": 4096}])
def test_sizes_that_the_files_cannot_hold_are_refused_before_memory_is_asked_for(model, field):
    config(model, **field)
    with pytest.raises(DamagedError, match=r"config\.json"):
        lowq.load(model, "cpu")


def test_a_tokenizer_whose_regular_expression_runs_wild_is_a_line():
    """The tokenizers library panics, which is not an Exception: it was a traceback before."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "!": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    result = FastTokenizer(tokenizer, {}, None)
    assert result("a")["input_ids"] == [0]
    with pytest.raises(DamagedError, match=r"tokenizer\.json is damaged: .*retry-limit"):
        result("a" * 40 + "!")
    with pytest.raises(DamagedError, match="retry-limit"):
        encode(result, "a" * 40 + "!")


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_file_of_brackets_is_a_line(model, name):
    (model / name).write_text("[" * 100_000)
    with pytest.raises(LowqError):
        ready(str(model), "cpu")


def told(folder):
    """The tokenizer of a folder without lowq's own reading of tokenizer.json, so by transformers."""
    with open_source(str(folder)) as source:
        return load_tokenizer(source)


def test_bare_exceptions_of_the_tokenizers_library_are_one_line(model):
    """A text with a character that a vocabulary without unknown tokens lacks: Exception itself, an internal error before."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="?"))
    with pytest.raises(DamagedError, match="Missing"):
        FastTokenizer(tokenizer, {}, None)("b")
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    result = told(model)
    assert result("a")["input_ids"] == [0]
    with pytest.raises(DamagedError, match="Missing"):
        result("b")


def test_a_model_that_its_own_code_cannot_compute_is_a_line(tmp_path, capsys):
    """Of a family that transformers computes: more angles than a head has dims, an internal error before."""
    from transformers import GPTJConfig, GPTJForCausalLM

    sizes = {"vocab_size": 160, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    GPTJForCausalLM(GPTJConfig(**sizes, rotary_dim=16)).save_pretrained(model := tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rotary_dim": 24}))
    write_tokenizer(model)
    assert main.main(["generate", str(model), "--prompt", "a", "--max-new-tokens", "2"]) == DamagedError.exit_code
    assert "the model cannot be computed, its config.json may contradict itself: RuntimeError" in capsys.readouterr().err


EIGHTFOLD = normalizers.Replace("a", "a" * 8)
TO_MANY = normalizers.Precompiled(bytes(4) + b"b" * 5000)


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        *(("normalizer", s) for s in ([EIGHTFOLD] * 9, [normalizers.Sequence([EIGHTFOLD] * 3)] * 2, [TO_MANY])),
        ("normalizer", [normalizers.Prepend("a" * 90), normalizers.Replace(Regex(""), "a" * 90)]),
        ("decoder", [decoders.Replace("a", "a" * 8)] * 9),
    ],
)
def test_a_tokenizer_that_makes_gigabytes_of_a_line_is_refused(model, part, steps):
    """37 characters stood for 5 GB, and the command had not ended after minutes."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    setattr(tokenizer, part, (normalizers if part == "normalizer" else decoders).Sequence(steps))
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    for read in (lambda: read_tokenizer(model, "llama"), lambda: told(model)):
        with pytest.raises(UnsupportedError, match=rf"{part} may make a text .* as long"):
            read()


class Words:
    """A tokenizer that is nothing but its template."""

    def __init__(self, template):
        self.chat_template = template

    def apply_chat_template(self, messages, **_):
        return [len(chat_template.render(self.chat_template, messages, True, {}))]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'A' * 3000000000 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('only users speak') }}",
        "{% if %}",
        "{{ messages[7].content.x.y }}",
    ],
)
def test_a_chat_template_that_fails_is_one_line(template):
    """Those that never end: tests/serving/test_template_bombs.py."""
    with pytest.raises(LowqError, match="the model's chat template"):
        encode(Words(template), "hello", chat=True)
    assert encode(Words("{{ messages[0].content }}"), "hello", chat=True) == [5], "and the next one is rendered"
