"""GGUF files as a source: their weights, the tokenizer that their metadata hold, and files that lie."""

import contextlib
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lowq
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.templates import chat_templates
from lowq_cli.interop import gguf_export, gguf_source, gguf_tokenizer
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import open_decoded
from lowq_cli.interop.gguf_file import head, text, u32
from lowq_cli.interop.inspection import inspect_model
from lowq_packers.errors import DamagedError, LowqError, NotFoundError, UnsupportedError

DEMO = Path(gguf_export.__file__).parents[1] / "demo"
pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_gguf_file_is_a_source(demo4, demo_gguf, tmp_path):
    """Without a config.json, and in Hugging Face's order of rows."""
    alone = tmp_path / "alone.gguf"
    shutil.copy(demo_gguf, alone)
    checkpoint = open_checkpoint(demo4)
    with open_decoded(alone) as source:
        assert source.config["model_type"] == "llama"
        assert source.config["num_key_value_heads"] == 4
        assert source.config["tie_word_embeddings"]
        for t in checkpoint.tensors:
            name = f"{t.name}.weight" if t.scheme else t.name
            expected = checkpoint.read_matrix(t).dequantize() if t.scheme else checkpoint.source.read(t.name).reshape(t.shape)
            assert torch.equal(
                source.read(name).reshape(t.shape),
                expected.to(torch.float16) if t.scheme else expected.to(source.read(name).dtype),
            ), name
    shown = inspect_model(str(alone))
    assert shown.format == "gguf"
    assert {r.scheme for r in shown.rows if r.quantized} == {"Q4_0", "Q8_0"}
    assert "llama.cpp" in shown.engines
    lowq.quantize(alone, out=tmp_path / "again", bits=3, group=32, method="rtn")


def test_heads_that_config_leaves_out_are_as_hugging_face_has_them(tmp_path):
    """The first Llama configs have no num_key_value_heads: k_proj has as many heads as q_proj, and its rows are moved back."""
    from checkpoints import SMALL
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL | {"num_key_value_heads": 4})).half().save_pretrained(tmp_path / "m")
    shutil.copy(DEMO / "tokenizer.json", tmp_path / "m")
    vocabulary = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"] = {t: i for t, i in vocabulary["model"]["vocab"].items() if i < 160}
    vocabulary["model"]["merges"], vocabulary["added_tokens"] = [], []
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(vocabulary))
    lowq.quantize(tmp_path / "m", out=tmp_path / "q", bits=4, group=32, method="rtn", zero="none", lm_head="keep")
    export(tmp_path / "q", "gguf", tmp_path / "g" / "m.gguf")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    name = "model.layers.0.self_attn.k_proj"
    checkpoint = open_checkpoint(tmp_path / "q")
    expected = checkpoint.read_matrix(next(t for t in checkpoint.tensors if t.name == name)).dequantize()
    for changes in ({}, {"num_key_value_heads": None}):
        kept = {k: v for k, v in (config | changes).items() if v is not None}
        (tmp_path / "g" / "config.json").write_text(json.dumps(kept))
        with open_decoded(tmp_path / "g" / "m.gguf") as source:
            assert torch.equal(source.read(f"{name}.weight").reshape(64, 64).float(), expected.half().float())
    for changes in ({"num_key_value_heads": 2}, {"num_attention_heads": None}, {"hidden_size": 32}, {"rope_theta": 5.0}):
        (tmp_path / "g" / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v is not None}))
        with pytest.raises(DamagedError, match=next(iter(changes))):
            open_decoded(tmp_path / "g" / "m.gguf")


def test_a_gguf_file_runs_alone(demo_gguf, demo4):
    """With the tokenizer that its metadata stand for."""
    ours, tokenizer = lowq.load(demo4, device="cpu", dtype="float32")
    theirs, made = lowq.load(demo_gguf, device="cpu", dtype="float32")
    text = 'Once upon a time, in 1897, there was  a naïve <|endoftext|> 模型\n\n\tHe\'d said "yes".'
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert made(text).input_ids == ids[0].tolist()
    assert made.decode(ids[0]) == tokenizer.decode(ids[0])
    assert (made.bos_token, made.eos_token, made.pad_token) == (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    with torch.inference_mode():
        a, b = ours(ids).logits, theirs(ids).logits
    assert (a - b).norm() / a.norm() < 1e-4


@pytest.mark.parametrize(
    ("key", "value"), [("rope.dimension_count", 8), ("attention.value_length", 8), ("attention.causal", False)]
)
def test_metadata_that_change_the_computation_are_refused(key, value):
    """llama.cpp would rotate a part of each head, or use bidirectional attention; before, lowq computed the usual model."""
    fields = dict.fromkeys(gguf_source.FIELDS.values(), 4) | {"embedding_length": 64, "rope.dimension_count": 16}
    metadata = {f"llama.{k}": v for k, v in fields.items()}
    tensors = {"token_embd.weight": gguf_source.Entry((160, 64), "F16", 0)}
    assert gguf_source.config_of(Path("m.gguf"), "llama", metadata, tensors)["head_dim"] == 16
    with pytest.raises(UnsupportedError, match=f"llama.{key}={value}"):
        gguf_source.config_of(Path("m.gguf"), "llama", metadata | {f"llama.{key}": value}, tensors)


HEAD = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
ROW = struct.pack("<Q", 1) + b"t" + struct.pack("<I", 2)


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        (b"", DamagedError, "ends inside"),
        (b"GGUF", DamagedError, "ends inside"),
        (b"PK\x03\x04" + bytes(40), DamagedError, "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), UnsupportedError, "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), DamagedError, "1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 40), DamagedError, "characters"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 99),
            DamagedError,
            "unknown type 99",
        ),
        (HEAD + ROW + struct.pack("<QQIQ", 64, 1, 16, 0), UnsupportedError, "GGUF type 16"),
        (HEAD + struct.pack("<Q", 8) + b"a\n\x1b]0;b\x07", DamagedError, r"the name 'a\\n\\x1b"),
        (HEAD + struct.pack("<Q", 65) + 65 * b"a", DamagedError, "of the name 'a{64}'; fetch"),
        (HEAD + ROW + struct.pack("<QQIQ", 33, 1, 2, 0), DamagedError, "whole blocks"),
        (
            HEAD + struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 64, 2, 0),
            DamagedError,
            "whole blocks",
        ),  # a norm in codes
        (HEAD + ROW + struct.pack("<QQIQ", 1 << 39, 1 << 39, 0, 0), DamagedError, "beyond the end"),
        (HEAD + ROW + struct.pack("<QQIQ", 64, 1, 0, 1 << 50), DamagedError, "beyond the end"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), UnsupportedError, "architecture None"),
    ],
)
def test_hostile_gguf_files(tmp_path, raw, error, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(error, match=message):
        open_decoded(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 3000), value=st.integers(0, 255))
def test_any_flipped_byte_of_a_head_is_an_error_or_a_file(demo_gguf, tmp_path, at, value):
    path = tmp_path / "m.gguf"
    raw = bytearray(demo_gguf.read_bytes())
    raw[at] = value
    path.write_bytes(raw)
    with contextlib.suppress(LowqError), open_decoded(path) as source:
        source.read("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("rule", ["llama-bpe", "qwen2", "gpt-2"])
@pytest.mark.parametrize("bos", [True, False])
def test_a_tokenizer_there_and_back(rule, bos, tmp_path):
    """tokenizer.json -> metadata -> tokenizer.json: the same tokens of any text, a bos in front where one belongs."""
    from tokenizers import Tokenizer

    content = json.loads((DEMO / "tokenizer.json").read_text())
    split, byte_level = content["pre_tokenizer"]["pretokenizers"]
    if rule == "gpt-2":
        content["pre_tokenizer"] = {**byte_level, "use_regex": True}
    else:
        split["pattern"]["Regex"] = next(r for r, name in gguf_tokenizer.PRE_TOKENIZERS.items() if name == rule)
    if bos:
        content["post_processor"] = gguf_tokenizer.post_processor("<|endoftext|>", None, {"<|endoftext|>": 0})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    values = gguf_tokenizer.tokenizer_metadata(tmp_path, {"eos_token_id": 0, "bos_token_id": 0}, 8200)
    made = gguf_tokenizer.made_tokenizer({key: v.value for key, v in values})
    assert made["tokenizer_config.json"]["chat_template"] == "{{ messages }}"
    assert made["tokenizer_config.json"]["eos_token"] == "<|endoftext|>"
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    back = Tokenizer.from_str(json.dumps(made["tokenizer.json"]))
    sample = (DEMO / "sample.txt").read_text()[:20000] + " 1234567 x2 <|endoftext|>\r\n  naïve 模型 don't DON'T"
    assert back.encode(sample).ids == ours.encode(sample).ids
    assert (back.encode("a").ids[0] == 0) == bos


def test_every_template_of_a_folder_goes_there_and_back(tmp_path):
    """A file of its own wins over tokenizer_config.json, as in transformers; others have names, as llama.cpp has them."""
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ old }}"}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    values = {key: v.value for key, v in gguf_tokenizer.tokenizer_metadata(tmp_path, {}, 8200)}
    assert values["tokenizer.chat_template"] == "{{ messages }}"
    assert values["tokenizer.chat_templates"] == ["tool_use"]
    assert values["tokenizer.chat_template.tool_use"] == "{{ tools }}"
    made = gguf_tokenizer.made_tokenizer(values)
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "tokenizer_config.json").write_text(json.dumps(made["tokenizer_config.json"]))
    result = chat_templates(tmp_path / "back", made["tokenizer_config.json"])
    assert result == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}


def test_an_unsupported_tokenizer_can_be_given_as_a_file(demo_gguf, tmp_path):
    """Also later: the import that was made without it takes it up."""
    out, name = tmp_path / "m" / "demo.gguf", b"llama-bpe"  # the file's rule for splitting text into words
    out.parent.mkdir()
    assert demo_gguf.read_bytes().count(name) == 1
    out.write_bytes(demo_gguf.read_bytes().replace(name, b"other-bpe"))
    with pytest.raises(NotFoundError, match="has no tokenizer; copy"):
        lowq.load(out, device="cpu")
    for path in DEMO.glob("tokenizer*"):
        shutil.copy(path, out.with_name(path.name))
    _, tokenizer = lowq.load(out, device="cpu")
    assert tokenizer("Once").input_ids


@pytest.mark.parametrize("broken", [{"tokens": 3}, {"token_type": [1]}, {"merges": None}, {"model": "llama"}, {"pre": []}])
def test_metadata_without_a_tokenizer_give_no_tokenizer(broken):
    sound = {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "b"], "token_type": [1, 1], "merges": []}
    assert gguf_tokenizer.made_tokenizer({f"tokenizer.ggml.{k}": v for k, v in sound.items()})
    assert not gguf_tokenizer.made_tokenizer({f"tokenizer.ggml.{k}": v for k, v in (sound | broken).items()})


def test_a_key_that_is_there_twice_is_damage(tmp_path):
    """Even behind a right alignment: readers differ in which of two they take."""
    twice = [("general.alignment", u32(32)), ("general.architecture", text("llama")), ("general.alignment", u32(64))]
    (tmp_path / "m.gguf").write_bytes(head(twice, []))
    with pytest.raises(DamagedError, match=r"'general\.alignment' twice"):
        gguf_source.read_gguf(tmp_path / "m.gguf")
