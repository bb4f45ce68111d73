"""Every fact that changes the computation is kept in an export, or the export is refused with the reason."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vocabularies import tokenizer

import lowq
from lowq_cli.engine.prompts import stop_ids
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.interop.export_checks import commands, refusal
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import QUANT_SECTIONS
from lowq_cli.run.pipeline import quantize
from lowq_packers.arch.config import read_config
from lowq_packers.arch.parts import Attention, walk
from lowq_packers.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("own_cache")
BEGIN, END, OTHER = 400, 401, 402  # tokens
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 416, "max_position_embeddings": 64, "bos_token_id": BEGIN, "eos_token_id": END,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {},
    "mixtral": {"sliding_window": None} | MIXTURE, "qwen3_moe": {"norm_topk_prob": True} | MIXTURE,
}  # fmt: skip


def turned(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
WINDOW = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
FACTS = {
    "nothing": {},
    "tied": {"tie_word_embeddings": True},
    "eps": {"rms_norm_eps": 0.3},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 30.0}},
    "llama3": turned("llama3", **LLAMA_3),
    "linear": turned("linear", factor=4.0),
    "yarn": turned("yarn", factor=4.0, original_max_position_embeddings=16),
    "part of a head": turned("llama3", partial_rotary_factor=0.5, **LLAMA_3),
    "gelu": {"hidden_act": "gelu"},
    "wide heads": {"head_dim": 32},
    "one head of keys": {"num_key_value_heads": 1},
    "window": WINDOW,
    "window switched off": WINDOW | {"use_sliding_window": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "three stops": {"eos_token_id": [OTHER, END, 5]},
    "not normed": {"norm_topk_prob": False},
    "a dense layer": {"mlp_only_layers": [0]},
}
OF_MIXTURES = ("not normed", "a dense layer")
OF_A_FAMILY = ("nothing", "tied", "biases", "window", "window switched off")  # which families hold in ways of their own
# the other facts are read alike for all: these families take half of them each
ALIKE = ("mistral", "qwen2", "qwen3", "mixtral")


def facts(family):
    others = [fact for fact in FACTS if fact not in (*OF_A_FAMILY, *OF_MIXTURES)]
    if family in ALIKE:
        return (*OF_A_FAMILY, *others[ALIKE.index(family) % 2 :: 2])
    return (*OF_A_FAMILY, *others, *(OF_MIXTURES if family == "qwen3_moe" else ()))


CASES = [(family, fact) for family in FAMILIES for fact in facts(family)]
LLAMA_CPP = {  # what its graphs of these families compute otherwise -> the reason
    "linear": "rotary embedding 'linear'", "yarn": "rotary embedding 'yarn'", "part of a head": "rotates 8 of the 16 values",
    "gelu": "activation is gelu", "not normed": "router does not normalise", "a dense layer": "have no experts",
}  # fmt: skip
NOT_READ_BACK = (
    "scales its rotary frequencies",
    "expert_count",
    "architecture qwen3moe",
    "order of rows",
)  # by lowq, which says so
IDS = torch.arange(7, 7 + 48 * 7, 7)[None] % BEGIN


def write(folder: Path, family: str, fact: str) -> Path:
    """A dense folder whose weights are random, norms and biases too."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**(SMALL | FAMILIES[family] | FACTS[fact]))
    model = AutoModelForCausalLM.from_config(config).float()
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.3 if p.dim() == 1 else 0.15)
    model.bfloat16().save_pretrained(folder)
    tokens = tokenizer("llama3", ("<|begin|>", "<|end|>", "<|other|>"))
    tokens.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | named))
    return folder


def read(folder: Path) -> tuple[torch.Tensor, frozenset[int], list[int], bool]:
    """Logits, the tokens that end a text, those of a text, and whether the head is the embedding."""
    model, tokens = lowq.load(folder, device="cpu", dtype="float32")
    with torch.inference_mode():
        logits = model(IDS).logits.float()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return logits, stop_ids(model, tokens), list(tokens("the old man, 1234 of it")["input_ids"]), tied


def windowed(folder: Path) -> bool:
    _, model, _ = read_config(json.loads((folder / "config.json").read_text()))
    return any(part.window for part in walk(model.layers) if isinstance(part, Attention))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(family, fact) -> a checkpoint that GGUF and most other formats hold; not to be written into."""

    @cache
    def made(*case):
        folder = tmp_path_factory.mktemp("packed")
        quantize(write(folder / "dense", *case), folder / "m", bits=4, group="32", method="rtn", zero="none", lm_head="keep")
        return folder / "m"

    return made


@pytest.mark.parametrize(
    ("family", "fact"), [pytest.param(*c, marks=[pytest.mark.more] * (i % 2)) for i, c in enumerate(CASES)]
)
def test_a_file_of_llama_cpp(family, fact, checkpoint, tmp_path):
    packed, gguf = checkpoint(family, fact), pytest.importorskip("gguf", reason="needs the package gguf (extra interop)")
    reason = "sliding window" if windowed(packed) else LLAMA_CPP.get(fact)
    if fact == "biases" and family.startswith("qwen3"):
        reason = f"has a bias, which llama.cpp's graph of {family.replace('_', '')} does not add"
    if reason:
        with pytest.raises(UnsupportedError, match=reason):
            export(packed, "gguf", tmp_path / "m.gguf")
        return
    export(packed, "gguf", tmp_path / "m.gguf")
    expected = read(packed)
    config, of = json.loads((packed / "config.json").read_text()), gguf.GGUFReader(tmp_path / "m.gguf").fields
    facts = {name.partition(".")[2]: field.contents() for name, field in of.items()}
    assert facts["attention.layer_norm_rms_epsilon"] == pytest.approx(config["rms_norm_eps"])
    assert facts["rope.freq_base"] == pytest.approx(config["rope_parameters"]["rope_theta"])
    assert facts["attention.head_count_kv"] == config["num_key_value_heads"]
    assert facts["ggml.eos_token_id"] == END
    stops = {facts.get(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    assert stops == expected[1]
    if fact == "llama3" or family in ("mixtral", "qwen3_moe") or (family, fact) == ("llama", "biases"):
        with pytest.raises(UnsupportedError, match="|".join(NOT_READ_BACK)):
            read(tmp_path / "m.gguf")
        return
    result = read(tmp_path / "m.gguf")
    assert torch.allclose(result[0], expected[0], rtol=0, atol=1e-4 * float(expected[0].abs().max()))
    assert result[1:] == expected[1:]


@pytest.mark.parametrize(  # each pair of a family, a fact and a kind of zero
    ("family", "fact", "zero"),
    [
        *(("llama", "nothing", "none"), ("llama", "tied", "int"), ("llama", "biases", "none"), ("llama", "three stops", "int")),
        *(("qwen3_moe", "nothing", "int"), ("qwen3_moe", "tied", "none")),
        *(("qwen3_moe", "biases", "int"), ("qwen3_moe", "three stops", "none")),
    ],
)
def test_folders_of_every_format(family, fact, zero, tmp_path):
    dense = write(tmp_path / "dense", family, fact)
    quantize(dense, tmp_path / "m", bits=4, group="32", method="rtn", zero=zero, lm_head="keep")
    expected = read(tmp_path / "m")
    with (result := open_checkpoint(tmp_path / "m")).source:
        ways = {to: how for to, how in commands(result).items() if to != "gguf" and "--round" not in how}
    assert len(ways) >= 3
    for to in ways:
        out = tmp_path / to
        export(tmp_path / "m", to, out)
        ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "m", out))
        assert {k: v for k, v in ours.items() if k not in QUANT_SECTIONS}.items() <= theirs.items()
        result = read(out)
        assert torch.allclose(result[0], expected[0], rtol=0, atol=1e-4 * float(expected[0].abs().max())), to
        assert result[1:] == expected[1:], to


@pytest.mark.parametrize(("family", "fact"), CASES)
def test_mlx_computes_the_same(family, fact, checkpoint, tmp_path):
    """But for windows, which the note says: equal before the window ends."""
    load_model = pytest.importorskip("mlx_lm.utils", reason="needs the package mlx-lm").load_model
    import mlx.core as mx
    import numpy as np

    with (result := open_checkpoint(packed := checkpoint(family, fact))).source:
        if reason := refusal(result, "mlx"):
            assert "mlx-lm" in reason
            return
    done = export(packed, "mlx", tmp_path / "out")
    model, _ = load_model(tmp_path / "out")
    model.set_dtype(mx.float32)
    theirs = torch.from_numpy(np.array(model(mx.array(IDS.numpy())).astype(mx.float32)))
    noted = any("sliding window" in note for note in done.notes)
    assert noted == windowed(packed)
    expected, near = read(packed)[0], slice(0, WINDOW["sliding_window"] if noted else None)
    assert torch.allclose(theirs[:, near], expected[:, near], rtol=0, atol=5e-3 * float(expected.abs().max()))
