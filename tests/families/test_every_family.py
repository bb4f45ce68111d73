"""Families quantized to 8 bits: 95% of their linear weights packed, logits as they were, saved as read, decoded.

Here the ones that hold their weights in a way of their own; all of them: `python -m tests.families`, whose rows are checked.
"""

import json
import sys
from pathlib import Path

import pytest
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from judge import Verdict, judge
from known import EXCEPTIONS
from tiny import model_types

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "accuracy" / "families.json"
FOUND = json.loads(RESULTS.read_text())
ROWS = {row["family"]: Verdict(**row) for row in FOUND["rows"]}
OWN_WAYS = ("gpt2", "deepseek_v3", "qwen3_next", "nemotron_h")


@pytest.mark.parametrize("family", OWN_WAYS)
def test_a_family_comes_through(family):
    assert judge(family).unmet == []


@pytest.mark.skipif(FOUND["transformers"] != transformers.__version__, reason="families.json is of another transformers")
def test_the_table_has_every_family_of_transformers():
    assert sorted(ROWS) == sorted(model_types())


def test_every_family_comes_through_but_for_known_reasons():
    broken = {family: row.unmet for family, row in ROWS.items() if row.unmet}
    assert broken.keys() == EXCEPTIONS.keys(), {f: broken.get(f) for f in broken.keys() ^ EXCEPTIONS.keys()}


def test_a_verdict_sees_each_fault():
    good = {"linear": 10, "coverage": 1.0, "off": 0.01, "exact": 0.0, "saved": True, "decoder": "plain"}
    assert Verdict("x", **good).unmet == []
    for worse in ({"coverage": 0.94}, {"off": 0.06}, {"off": None}, {"exact": 2e-4}, {"saved": False}, {"fault": "load: no"}):
        assert len(Verdict("x", **(good | worse)).unmet) == 1, worse
