"""Tokenizers loaded by transformers: ids and texts equal its own, also in another process, as in a server."""

import copy
import json
import pickle
import shutil
from contextlib import suppress

import pytest
from transformers import AutoTokenizer

from lowq_cli.engine.open_model import tokenizer
from lowq_cli.engine.tokenizer import BYTE_OF, FastTokenizer
from lowq_cli.engine.tokenizer_file import read_tokenizer
from lowq_cli.files.source import DEMO, open_source
from lowq_cli.hf.tokenizer import load_tokenizer
from lowq_packers.arch.config import NotPlain
from lowq_packers.errors import LowqError, UnsupportedError

TEXTS = ("", "Once upon a time", " two  spaces\n\nand 12345", "naïve 🙂 日本語", "<|endoftext|>x")
TALK, TOOLS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", "{{ tools | tojson }}" + "{{ bos_token }}"
SAID, ASKED = [{"role": "user", "content": "Hi"}], {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SEVERAL = [{"name": "default", "template": TALK}, {"name": "tool_use", "template": TOOLS}]
KINDS = {
    "GPT2TokenizerFast": {"tokenizer_class": "GPT2TokenizerFast"},
    "LlamaTokenizerFast": {"tokenizer_class": "LlamaTokenizerFast"},
    "no class": {"tokenizer_class": None},
    "several templates": {"chat_template": SEVERAL},
    "a special token that is new": {"pad_token": "<|pad|>"},
    "split special tokens": {"split_special_tokens": True},
}


def folder(where, **facts):
    shutil.copytree(DEMO, where)
    path = where / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TALK} | facts))
    return where


def read(where):
    with open_source(where) as source:
        return tokenizer(source)


def same(ours, theirs):
    for text in TEXTS:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours(text, add_special_tokens=special)["input_ids"] == ids
            for skip in (True, False):
                how = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
                assert ours.decode(ids, **how) == theirs.decode(ids, **how)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for tools in ({}, {"tools": [TOOL]}):
        assert ours.apply_chat_template(SAID, **ASKED, **tools) == theirs.apply_chat_template(SAID, **ASKED, **tools)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_gives_the_ids_of_transformers_in_another_process_too(tmp_path, kind):
    where = folder(tmp_path / "m", **KINDS[kind])
    ours, theirs = read(where), AutoTokenizer.from_pretrained(str(where))
    assert isinstance(ours, FastTokenizer)
    for one in (ours, pickle.loads(pickle.dumps(ours))):
        same(one, theirs)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))], ids=["copied", "pickled"])
def test_a_loaded_tokenizer_can_be_copied_and_pickled(tmp_path, twin):
    where = folder(tmp_path / "m", tokenizer_class="LlamaTokenizerFast")
    with open_source(where) as source:
        result = load_tokenizer(source)
    other = twin(result)
    other.add_tokens(["<new>"])
    assert len(other) == len(result) + 1
    assert len(other("<new>", add_special_tokens=False)["input_ids"]) == 1
    assert len(result("<new>", add_special_tokens=False)["input_ids"]) > 1
    same(other, AutoTokenizer.from_pretrained(str(where)))


def test_templates_by_name_without_a_default_are_refused_by_name(tmp_path):
    result = read(folder(tmp_path / "m", chat_template=SEVERAL[1:]))
    assert result.template(with_tools=True) == TOOLS
    with pytest.raises(UnsupportedError, match="templates are tool_use, and none is the default"):
        result.template()


FIELDS = ("chat_template", "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens", "bos_token")
FIELDS += ("tokenizer_class", "auto_map", "model_max_length", "split_special_tokens", "image_token")
OTHER = (True, 0, 1.5, "x", [], [1], [{}], [[]], [None], {}, {"a": 1}, {"0": 3}, {"x": {}}, {"0": {"content": 5}})


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_another_type_is_refused_or_left_to_transformers(tmp_path, field):
    where = folder(tmp_path / "m")
    for value in OTHER:
        path = where / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads((DEMO / path.name).read_text()) | {field: value}))
        with suppress(NotPlain, LowqError):
            assert read_tokenizer(where, "llama").template() in ("", "x")
            assert (field, value) != ("bos_token", True)  # templates had written True for it


@pytest.mark.parametrize(
    "files", [("chat_template.jinja",), ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")]
)
def test_template_files_win_as_in_transformers(tmp_path, files):
    where = folder(tmp_path / "m", chat_template="of the config")
    for name, text in zip(files, (TALK, TOOLS), strict=False):
        (where / name).parent.mkdir(exist_ok=True)
        (where / name).write_text(text)
    same(read(where), AutoTokenizer.from_pretrained(str(where)))


@pytest.mark.parametrize("cls", ["PreTrainedTokenizerFast", "GPT2Tokenizer"])
def test_the_template_of_a_processor_is_the_last_resort(tmp_path, cls):
    where = folder(tmp_path / "m", tokenizer_class=cls, chat_template=None)
    (where / "chat_template.json").write_text(json.dumps({"chat_template": TALK}))
    result = read(where)
    assert result.template() == TALK
    assert result.decode(result.apply_chat_template(SAID, **ASKED)) == "[user]Hi"


def test_bytes_of_a_byte_level_token_are_those_it_stands_for():
    result = read(DEMO)
    ids = result("é", add_special_tokens=False)["input_ids"]
    assert bytes(b for i in ids for b in result.token_bytes(i)) == "é".encode()
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert result.token_bytes(1 << 30) is None
