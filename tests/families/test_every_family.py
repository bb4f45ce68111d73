"""Families quantized to 8 bits: 95% of their linear weights packed, logits as they were, saved as read, decoded.

Here the ones that hold their weights in a way of their own; all of them: `python -m tests.families`, whose rows are checked.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.aria.modeling_aria import AriaExperts

sys.path.insert(0, str(Path(__file__).parent))
from family_judge import SAME, Verdict, as_stored, judge, loaded, off, packed_weights, same_files
from known import EXCEPTIONS
from tiny import build, model_types

from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.sampling import Sampling
from lowq_cli.run.pipeline import quantize

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "accuracy" / "families.json"
FOUND = json.loads(RESULTS.read_text())
ROWS = {row["family"]: Verdict(**row) for row in FOUND["rows"]}
OWN_WAYS = ("gpt2", "deepseek_v3", "qwen3_next", "llama4_text", "falcon", "zamba", "aria_text", "granitemoe", "jetmoe")


@pytest.mark.parametrize("family", OWN_WAYS)
def test_a_family_comes_through(family):
    if family == "aria_text" and not hasattr(AriaExperts, "_apply_gate"):
        pytest.skip("transformers 5.17 holds Aria's experts in products of its own, which stay as they are")
    assert judge(family).unmet == []


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "llama4_text", "qwen3_next"])
def test_a_family_in_nvfp4_computes_with_its_dequantized_weights(family):
    """In 4 bits a random model's logits equal those of its dequantized weights, also after save and reload."""
    result = judge(family, format="nvfp4")
    assert result.fault == ""
    assert result.exact < SAME
    assert result.coverage > 0.95
    assert result.saved
    assert result.decoder


@pytest.mark.skipif(FOUND["transformers"] != transformers.__version__, reason="families.json is of another transformers")
def test_the_table_has_every_family_of_transformers():
    assert sorted(ROWS) == sorted(model_types())


def test_every_family_comes_through_but_for_known_reasons():
    broken = {family: row.unmet for family, row in ROWS.items() if row.unmet}
    assert broken.keys() == EXCEPTIONS.keys(), {f: broken.get(f) for f in broken.keys() ^ EXCEPTIONS.keys()}


@pytest.mark.parametrize("kept", [(), ("layers.0.mlp.experts.*.down_proj",)], ids=["packed", "down dense"])
def test_gpt_oss_decodes_in_the_fused_decoder_as_dequantized(tmp_path, kept):
    """Sinks, windows, a router with a bias, interleaved experts with biases behind a clamped gate; a stack kept as it is."""
    dense = build("gpt_oss", sliding_window=16)
    dense.save_pretrained(tmp_path / "dense")
    quantize(tmp_path / "dense", tmp_path / "packed", bits=4, group=16, method="rtn", device="cpu", skip=list(kept))
    packed = loaded(tmp_path / "packed")
    packed.save_pretrained(tmp_path / "saved")
    assert same_files(tmp_path / "packed", tmp_path / "saved")
    with torch.no_grad():
        values = packed_weights(packed)
        for name, p in dense.named_parameters():
            if name in values:
                p.copy_(as_stored(values[name], dense.get_submodule(name.rpartition(".")[0]), name))
        decoder = decoder_of(packed)
        assert decoder.name == "native"
        ids = torch.randint(3, 150, (2, 40), generator=torch.Generator().manual_seed(2))
        assert off(decoder.logits(ids), dense(input_ids=ids, use_cache=False).logits) < SAME
        tokens = [decoder.start(ids.tolist(), Sampling(), 6).clone(), *(decoder.step().clone() for _ in range(5))]
        for token in tokens:
            logits = dense(input_ids=ids, use_cache=False).logits[:, -1]
            assert torch.equal(token, logits.argmax(-1))
            ids = torch.cat([ids, token[:, None]], 1)


def test_a_verdict_sees_each_fault():
    good = {"linear": 10, "coverage": 1.0, "off": 0.01, "exact": 0.0, "saved": True, "decoder": "hf_eager"}
    assert Verdict("x", **good).unmet == []
    for worse in ({"coverage": 0.94}, {"off": 0.06}, {"off": None}, {"exact": 2e-4}, {"saved": False}, {"fault": "load: no"}):
        assert len(Verdict("x", **(good | worse)).unmet) == 1, worse
