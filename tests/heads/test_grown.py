"""A small model and its EAGLE-3 head inside a larger shape (benchmarks/grown.py): the texts and guesses of the small ones."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks")]
import publishing as pub
from draft_heads import guessed
from grown import grown, grown_head
from test_heads import native

from lowq_cli.engine.drafts.heads import load
from lowq_cli.engine.plan import plan_of

SHAPE = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 3,
    "head_dim": 64, "vocab_size": 300, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random Llama with tied embeddings, as `lowq draft train` and `grown` read it, in fp16's values."""
    folder = tmp_path_factory.mktemp("small")
    pub.target(folder, tie_word_embeddings=True, attention_bias=False, mlp_bias=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": config["rope_parameters"]["rope_theta"]}))
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t.half().float() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    for part in ("tokenizer.json", "tokenizer_config.json"):
        (folder / part).write_text("{}")
    return folder


@pytest.mark.parametrize("guesses", [pub.VOCAB, pub.GUESSES])
@pytest.mark.parametrize("count", [300, 200])
def test_a_head_in_a_larger_shape_guesses_as_the_small_one(guesses, count, small, tmp_path):
    tensors = pub.eagle3_tensors(guesses=guesses)
    pub.specforge(tmp_path / "head", tensors, eagle_aux_hidden_state_layer_ids=[1, 3, pub.LAYERS])
    grown(small, tmp_path / "large", SHAPE, "cpu", 16)
    grown_head(tmp_path / "head", tmp_path / "large-head", SHAPE, "cpu", count)
    for folder in (tmp_path / "large", tmp_path / "large-head"):  # in fp32 only the order of sums differs
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    texts, made = torch.randint(3, pub.VOCAB, (2, 24), generator=torch.Generator().manual_seed(1)), []
    for folder, head in (("small", "head"), ("large", "large-head")):
        model = native(small if folder == "small" else tmp_path / folder)
        drafter = load(str(tmp_path / head), model)
        made.append(guessed(plan_of(model), drafter, texts))
    assert torch.equal(*made)
    assert len(made[0].unique()) > 20
    written = load_file(tmp_path / "large-head" / "model.safetensors")
    assert len(written["lm_head.weight"]) == count == written.get("t2d", torch.ones(300)).sum()
