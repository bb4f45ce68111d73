"""A short soak: dozens of requests, a third broken off, a tenth malformed, hostile clients during most of them; every answer is
that of its prompt alone.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from shallow import shallow

SCRIPT = Path(__file__).parents[1] / "fuzz" / "soak.py"


@pytest.fixture(scope="module")
def soak(tmp_path_factory):
    return partial(run, shallow(tmp_path_factory.mktemp("soak") / "one", layers=1))


def run(model, *args):
    line = [sys.executable, SCRIPT, model, "--device", "cpu", *map(str, args)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900)
    assert done.stdout, done.stderr
    row = json.loads(done.stdout)
    assert done.returncode == 0, row
    return row


def test_nothing_is_lost_or_mixed_up(soak):
    """With a cache for a few of the longest texts, so that requests wait; this seed asks each kind of bad request."""
    requests = ["--requests", "100", "--prompts", "8", "--users", "12", "--seed", "1", "--tokens", "10"]
    row = soak(*requests, "--args=--deterministic --cache-tokens 512")
    assert row["counts"]["all"] == 100
    assert row["counts"]["equal"] > 40
    assert {"json 400", "types 400", "large 413", "long 400", "utf8 400", "half", "slow 200"} <= set(row["counts"])
    assert row["internal_errors"] == row["wrong"] == row["failed"] == 0
    # 377 -> 440 MB on a machine that takes two seconds, where the first second is a quarter; 445 after 900 requests
    assert row["rss_mb"]["end"] - row["rss_mb"]["after_a_quarter"] < 100


@pytest.mark.slow
def test_nothing_is_lost_where_the_cache_is_too_small(soak):
    """Texts give back their blocks and are computed again, those of one request first, which run at once on any machine."""
    requests = ["--requests", "12", "--prompts", "8", "--users", "12", "--seed", "3", "--tokens", "100"]
    row = soak(*requests, "--args=--deterministic --cache-tokens 384")
    assert row["preemptions"] > 0
    assert row["counts"]["equal"] > 3
    assert row["internal_errors"] == row["wrong"] == row["failed"] == 0
