"""Folders of the most used families, as their publishers write them: every command takes each, as transformers does."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from published import FAMILIES
from walking import STEPS, Walk, cells

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "accuracy" / "folders.json"
ROWS = {row["family"]: row for row in json.loads(RESULTS.read_text())["rows"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_folder_is_walked(family, tmp_path):
    walk = Walk(family, tmp_path)
    assert {step: why for step, why in walk.take().items() if why} == {}
    assert {step: ROWS[family][step] for step in STEPS} == cells(walk)


def test_a_walk_sees_differences(tmp_path):
    """Beside transformers with other weights, another tokenizer, a table that says otherwise."""
    walk, other = Walk("qwen3", tmp_path / "a"), Walk("r1-distill-qwen", tmp_path / "b")
    walk.readable, walk.theirs = other.readable, other.theirs
    result = walk.take()
    assert "ids" in result["tokens"] or "transformers has" in result["tokens"]
    assert "behind the likeliest" in result["generate"]
    assert "tokens of the conversation" in result["serve"]
    assert cells(walk, result)["tokens"] == "fails"


def test_the_table_has_every_family():
    assert list(ROWS) == list(FAMILIES)
