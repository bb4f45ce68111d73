"""DFlash and DSpark heads as published: the rounds of a plain torch reference, after every place of a text."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import publishing as pub
from plain_torch import Blocks
from test_heads import TEXT, native, rounds, theirs

from lowq_cli.engine.drafts.heads import BlockDrafter, load
from lowq_packers.errors import DamagedError, UnsupportedError

QWEN3 = {"model_type": "qwen3", **pub.FLAT, "num_hidden_layers": 2}
ZLAB = {"architectures": ["DFlashDraftModel"], **QWEN3, "block_size": 5, "num_target_layers": 6}
MASKED = {"mask_token_id": 9, "target_layer_ids": [0, 2, 4]}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "speculators_version": "0.4.0", "block_size": 5,
    "transformer_layer_config": QWEN3, "mask_token_id": 9, "aux_hidden_state_layer_ids": [1, 3, 5], "draft_vocab_size": 48,
}  # fmt: skip
DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"],
    **QWEN3,
    "block_size": 4,
    "num_anchors": 2,
    "enable_confidence_head": True,
    **MASKED,
}
MARKOV = {"markov_rank": 8, "confidence_head_with_markov": True}
VANILLA, GATED, RNN = ({"markov_head_type": kind} for kind in ("vanilla", "gated", "rnn"))
DSPARK = {"projector_type": "dspark"}
OF_DSPARK = SPECULATORS | MARKOV | {"speculators_model_type": "dspark"}
CASES = {  # name -> (kind, config.json, tensors, where names begin)
    "z-lab's": ("DFlash", ZLAB | {"dflash_config": MASKED}, {}, ""),
    "rows that see those before them": ("DFlash", ZLAB | {"dflash_config": MASKED | {"causal": True}}, {}, ""),
    "a mask with a vector of its own": ("DFlash", ZLAB | {"dflash_config": MASKED}, {"vector": True}, "model."),
    "the embeddings and the end": ("DFlash", ZLAB | {"dflash_config": MASKED | {"target_layer_ids": [-1, 2, 5]}}, {}, ""),
    "speculators, fewer tokens": ("DFlash", SPECULATORS, {"guesses": 48}, ""),
    "speculators, from the anchor": ("DFlash", SPECULATORS | {"sample_from_anchor": True}, {"guesses": 48}, ""),
    "DeepSpec, vanilla": ("DSpark", DEEPSPEC | MARKOV | VANILLA, {"markov": "vanilla", "embed": True}, ""),
    "DeepSpec, gated": ("DSpark", DEEPSPEC | MARKOV | GATED, {"markov": "gated", "embed": True}, ""),
    "DeepSpec, rnn": ("DSpark", DEEPSPEC | MARKOV | RNN, {"markov": "rnn", "embed": True}, "model."),
    "without a correction": ("DSpark", DEEPSPEC | {"markov_rank": 0}, {}, ""),
    "SpecForge": ("DSpark", ZLAB | {"dflash_config": MASKED | MARKOV | DSPARK}, {"markov": "vanilla"}, ""),
    "speculators, DSpark": ("DSpark", OF_DSPARK, {"guesses": 48, "markov": "vanilla"}, ""),
}  # fmt: skip


def made(folder, name):
    """A head's folder, and the reference's config."""
    kind, config, how, prefix = CASES[name]
    tensors = pub.block_tensors(**how)
    named = {n if n in ("d2t", "t2d") or "head" in n else prefix + n: t for n, t in tensors.items()}
    pub.written(folder, config, named)
    own = {**config, **config.get("dflash_config", {})}
    output = {**QWEN3, **own, "kind": kind, "is_causal": own.get("causal")}
    return tensors, {"markov_head_type": "vanilla", "markov_rank": 0, **output}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return pub.target(folder), native(folder)


def wanted(model, tensors, config, layers, K):
    embed, lm_head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    reference, states = Blocks(tensors, config, embed, lm_head), theirs(model, layers)
    return [reference(int(TEXT[t]), [x[:t] for x in states], K) for t in range(2, len(TEXT) - 1)]


@pytest.mark.parametrize("name", CASES)
def test_rounds_of_a_block_are_those_of_the_reference(name, llama, tmp_path):
    model, ours = llama
    tensors, config = made(tmp_path / "head", name)
    drafter = load(str(tmp_path / "head"), ours)
    assert isinstance(drafter, BlockDrafter)
    assert drafter.name == CASES[name][0]
    assert drafter.most == config["block_size"] - (config["kind"] == "DFlash" and not config.get("sample_from_anchor"))
    assert rounds(drafter, ours, TEXT, drafter.most) == wanted(model, tensors, config, drafter.layers, drafter.most)
    assert rounds(drafter, ours, TEXT, 2) == [row[:2] for row in wanted(model, tensors, config, drafter.layers, drafter.most)]


WRONG = {  # what of a block is done otherwise
    "is_causal": True, "mask_token_id": 10, "sample_from_anchor": True, "rope_theta": 90.0, "block_size": 4,
    "markov_head_type": "vanilla",
}  # fmt: skip


@pytest.mark.parametrize("fact", WRONG)
def test_a_fact_of_a_block_that_is_read_otherwise_shows(fact, llama, tmp_path):
    model, ours = llama
    name = "DeepSpec, gated" if "markov" in fact else "z-lab's"
    tensors, config = made(tmp_path / "head", name)
    drafter = load(str(tmp_path / "head"), ours)
    assert rounds(drafter, ours, TEXT, 3) != wanted(model, tensors, config | {fact: WRONG[fact]}, drafter.layers, 3)


REFUSED = {
    "no layers": ({"target_layer_ids": None}, {}, "does not say which layers it reads"),
    "layers that are not there": ({"target_layer_ids": [0, 2, 40]}, {}, "reads layers [0, 2, 40] of a model that has 6"),
    "no mask": ({"mask_token_id": None}, {}, "mask_token_id = None"),
    "a window": ({}, {"layer_types": ["sliding_attention", "full_attention"]}, "have sliding-window attention"),
    "sinks": ({"attention_sink_bias": True}, {}, "attention_sink_bias"),
    "Domino": ({"projector_type": "domino"}, {}, "its projector is domino"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_blocks_that_are_not_run_are_refused_in_a_line(what, llama, tmp_path):
    inside, outside, line = REFUSED[what]
    config = ZLAB | outside | {"dflash_config": MASKED | inside}
    pub.written(tmp_path / "head", config, pub.block_tensors())
    with pytest.raises((UnsupportedError, DamagedError)) as refused:
        load(str(tmp_path / "head"), llama[1])
    assert line in str(refused.value)


def test_a_block_that_lacks_a_tensor_is_refused(llama, tmp_path):
    tensors = pub.block_tensors()
    del tensors["layers.1.self_attn.k_norm.weight"]
    pub.written(tmp_path / "head", ZLAB | {"dflash_config": MASKED}, tensors)
    with pytest.raises(DamagedError, match=r"no tensor layers\.1\.self_attn\.k_norm\.weight"):
        load(str(tmp_path / "head"), llama[1])
