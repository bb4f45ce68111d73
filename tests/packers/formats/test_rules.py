"""Patterns of files match what Python's `re` matches, and never take long."""

import contextlib
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowq_packers.errors import LowqError
from lowq_packers.formats import _common
from lowq_packers.formats._rules import Rules

NAMES = ["model.layers.0.mlp.up_proj", "model.layers.12.self_attn.q_proj", "lm_head", "", "a\n", "aaaa", "ab.ba", "_x 1"]
PATTERNS = [
    *(".*", "^lm_head$", r"model\.layers\.(0|1)\.mlp.*", r".*down.*|.*up_proj", "(a|b)+$", "a{2,3}", "a{2}$", "(a*)*b?"),
    *(r"\w+\.\d*", r"(?!.*mlp).*proj$", r"(?=model).*q_proj", "[^a-l]+", r"[\w.]+\.1?2\.", r".*\bq_proj\b", "a??a"),
    *("(?:x|)lm", r"\Alm_head\Z", "", r"model\.layers\.\d+\.(mlp|self_attn)\.(up|q)_proj$", "a*?b", r"\D\S", ".{4}$", "a$"),
]
SLOW = ["(a+)+$", "(a|aa)+$", "(a*)*$", "(.*a){20}$", "((((a*)*)*)*)*b", "(a|a|a|a)*b", "(?=(a+)+$)x"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_they_match_as_re_does(pattern):
    for name in NAMES:
        assert (Rules([(pattern, True)]).first(name) is True) == bool(re.match(pattern, name)), name


@pytest.mark.filterwarnings("ignore:Possible nested set")
@settings(max_examples=400, deadline=None)
@given(pattern=st.text("ab.()|*+?^$[]{}1,-", max_size=12), name=st.text("ab1\n", max_size=6))
def test_so_do_random_ones(pattern, name):
    try:
        expected = bool(re.match(pattern, name))
        result = Rules([(pattern, True)]).first(name) is True
    except (re.error, LowqError, FutureWarning, OverflowError):
        return
    assert result == expected


@pytest.mark.parametrize("pattern", SLOW)
def test_none_takes_long(pattern):
    began = time.process_time()
    with contextlib.suppress(LowqError):
        Rules([(pattern, True)]).first("a" * 500 + "!")
    assert time.process_time() - began < 6


@pytest.mark.parametrize("pattern", [r"(a)\1", "(?<=a)b", "(?i)A", "(?i:A)", "(", "a" * 3000, "(?P<n>a)(?P=n)", "a++", "(?>a)"])
def test_patterns_that_need_backtracking_are_refused(pattern):
    with pytest.raises(LowqError, match="quantization_config"):
        Rules([(pattern, True)])


def test_the_first_rule_wins_and_exact_ones_are_looked_up():
    rules = Rules([("^a.b$", 1), ("^axb$", 2), (_common.exactly("m.q_proj"), 3), (".*", 4)])
    assert [rules.first(n) for n in ("axb", "m.q_proj", "m.qkv_proj", "mxq_proj")] == [1, 3, 3, 4]
    many = Rules([(_common.exactly(f"model.layers.{i}.mlp.up_proj"), i) for i in range(20_000)])
    assert all(many.first(f"model.layers.{i}.mlp.up_proj") == i for i in range(20_000))
