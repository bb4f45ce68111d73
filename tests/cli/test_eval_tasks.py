"""`lowq eval --tasks`: answers to lm-eval compared with values worked out by hand, and a user's task from end to end."""

import importlib.util
import itertools
import json
import math
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lowq_cli import main
from lowq_cli.evaluate import tasks
from lowq_cli.evaluate.tasks import Judge
from lowq_packers.errors import NotFoundError, UnsupportedError, UsageError

ROWS = torch.randn(160, 160, generator=torch.Generator().manual_seed(0)) * 2
LOG_P = torch.log_softmax(ROWS.double(), -1)  # of the next token after each


class Bytes:
    """A tokenizer: a text's bytes, up to 160."""

    bos_token_id = 1

    def __call__(self, text, **_):
        return {"input_ids": [b % 160 for b in text.encode()]}

    def decode(self, ids):
        return "".join(map(chr, ids))


class Table(torch.nn.Module):
    """A model whose next-token logits depend on the current token alone: ROWS."""

    def __init__(self, limit):
        super().__init__()
        self.rows, self.read = torch.nn.Parameter(ROWS), []
        self.config = SimpleNamespace(vocab_size=160, max_position_embeddings=limit)
        self.config.get_text_config = lambda: self.config

    def forward(self, input_ids, use_cache):
        self.read += input_ids.tolist()
        return SimpleNamespace(logits=self.rows[input_ids])


@contextmanager
def unseen(label, total):
    yield lambda done, note: None


def judge(limit=None, answers=None):
    return Judge(Table(limit), Bytes(), answers, unseen)


@pytest.fixture
def invoke(capsys):
    """Run a command in this process: its exit code and its output."""

    def call(*args):
        code = main.main([*map(str, args)])
        out, err = capsys.readouterr()
        return SimpleNamespace(exit_code=code, stdout=out, stderr=err)

    return call


def asked(*requests):
    return [SimpleNamespace(args=r) for r in requests]


def log_p(before, text):
    ids = [before, *(b % 160 for b in text.encode())]
    return sum(float(LOG_P[a, b]) for a, b in itertools.pairwise(ids))


def test_likelihoods_of_continuations():
    best = chr(int(ROWS[ord("a"), 32:127].argmax()) + 32)
    greedy = bool(ROWS[ord("a")].argmax() == ord(best))
    result = judge().loglikelihood(asked(("ab", "cd"), ("ab", "ce"), ("ab ", "x"), ("", "hi"), ("za", best)))
    expected = [log_p(ord("b"), "cd"), log_p(ord("b"), "ce"), log_p(ord("b"), " x"), log_p(1, "hi"), log_p(ord("a"), best)]
    assert [f[0] for f in result] == pytest.approx(expected, abs=1e-5)
    assert result[4][1] is greedy


def test_a_row_is_read_once_whatever_its_last_token():
    model = Table(None)
    Judge(model, Bytes(), None, unseen).loglikelihood(asked(("abc", "x"), ("abc", "y"), ("abc", "zz")))
    assert sorted(map(len, model.read)) == [3, 4]


def test_contexts_too_long_lose_their_beginning():
    long = "q" * 50 + "ab"
    (kept,) = judge(limit=8).loglikelihood(asked((long, "cd")))
    assert kept[0] == pytest.approx(log_p(ord("b"), "cd"), abs=1e-5)
    with pytest.raises(UsageError, match="continuation of 9 tokens exceeds the context of 8"):
        judge(limit=8).loglikelihood(asked(("a", "123456789")))
    with pytest.raises(UsageError, match="no token"):
        judge().loglikelihood(asked(("a", "")))


@pytest.mark.parametrize("length", [3, 8, 9, 20])
def test_every_token_of_a_document_counts_once(length):
    text = "abcdefghijklmnopqrst"[:length]
    (result,) = judge(limit=8).loglikelihood_rolling(asked((text,)))
    assert result == pytest.approx(log_p(1, text), abs=1e-4)  # the model looks at one token alone: windows change nothing


def test_texts_are_asked_for_as_the_task_says():
    seen = []

    def answers(model, tokenizer, prompts, settings):
        seen.append((prompts, settings))
        yield from (SimpleNamespace(text=f"{len(p)}") for p in prompts)

    greedy = {"until": ["\n", ""], "max_gen_toks": 3, "do_sample": False, "temperature": 0.7}
    drawn = {"do_sample": True, "top_p": 0.9}
    result = judge(12, answers).generate_until(asked(("abc", greedy), ("x", {"max_gen_toks": 2}), ("z" * 30, greedy)))
    assert result == ["3", "1", "9"]
    assert [len(prompts) for prompts, _ in seen] == [2, 1]
    assert {k: seen[0][1][k] for k in ("stop", "max_new_tokens", "temperature")} == {
        "stop": ["\n"],
        "max_new_tokens": 3,
        "temperature": 0.0,
    }
    judge(None, answers).generate_until(asked(("abc", drawn)))
    assert (seen[-1][1]["temperature"], seen[-1][1]["top_p"], seen[-1][1]["max_new_tokens"]) == (1.0, 0.9, 256)
    with pytest.raises(UnsupportedError, match="num_beams=4"):
        judge(None, answers).generate_until(asked(("abc", {"num_beams": 4})))
    with pytest.raises(UsageError, match="256 new tokens and the model's context ends at 12"):
        judge(12, answers).generate_until(asked(("abc", {})))


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed here")
def test_without_lm_eval_the_error_names_the_package(invoke):
    done = invoke("eval", "demo", "--tasks", "arc_easy")
    assert done.exit_code == 2
    assert done.stderr.strip() == "lowq: --tasks needs lm-eval; install it with: pip install 'lm-eval<0.5'"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tasks", "a", "--text", "b.txt"], "--text measures on a text"),
        (["--tasks", "a", "--layers", "--against", "demo"], "--layers measures on a text"),
        (["--tasks", "a", "--act", "all"], "--act all compares perplexities"),
        (["--limit", "3"], "--limit needs --tasks"),
        (["--fewshot", "3"], "--fewshot needs --tasks"),
    ],
)
def test_flags_that_contradict(invoke, flags, said):
    done = invoke("eval", "demo", *flags)
    assert done.exit_code == 2
    assert said in done.stderr


TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: rows.jsonl
test_split: test
doc_to_text: "{{{{before}}}}"
"""
PICK = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: right
metric_list:
  - metric: acc
  - metric: mcc
"""
WRITE = """output_type: generate_until
doc_to_target: "{{written}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


def test_a_task_of_ones_own(invoke, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'lm-eval<0.5'")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as the command itself sets it
    before = "Once upon a time there was a little girl, and she"
    written = json.loads(
        invoke("generate", "demo", "--prompt", before, "--max-new-tokens", "6", "--stop", ".", "--json").stdout
    )
    choices = [" was very happy", " xylophone quantum lattice", " zzzz qqqq jjjj"]
    rows = [
        {"before": before, "choices": choices, "right": 0, "written": written["text"]},
        {"before": before, "choices": choices, "right": 2, "written": "something else"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "pick.yaml").write_text(TASK.format(name="pick") + PICK)
    (tmp_path / "write.yaml").write_text(TASK.format(name="write") + WRITE)
    done = invoke("eval", "demo", "--tasks", f"{tmp_path / 'pick.yaml'},{tmp_path / 'write.yaml'}", "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(t["task"], t["metric"], t["value"], t["questions"]) for t in result["tasks"]] == [
        ("pick", "acc", 0.5, 2),
        ("pick", "mcc", 0.0, 2),
        ("write", "exact_match", 0.5, 2),
    ]
    assert math.isclose(result["tasks"][0]["stderr"], 0.5)
    assert "multiple_choice" in done.stderr  # the plan
    with pytest.raises(NotFoundError, match=r"no task file .*absent\.yaml"):
        tasks.load_tasks([str(tmp_path / "absent.yaml")])
    (tmp_path / "bare.yaml").write_text(TASK.format(name="bare").replace("rows.jsonl", "absent.jsonl") + PICK)
    with pytest.raises(NotFoundError, match=r"the task .* cannot be loaded"):
        tasks.load_tasks([str(tmp_path / "bare.yaml")])
