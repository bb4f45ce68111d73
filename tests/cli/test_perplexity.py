"""Perplexity, KL and agreement against values worked out by hand; the text and gate errors of `lowq eval`."""

import json
import math
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import lowq
from lowq_cli import main
from lowq_cli.evaluate import perplexity
from lowq_packers.errors import DamagedError, NotFoundError, UsageError

from .folders import write_tokenizer


class Table(torch.nn.Module):
    """A model whose next-token logits depend on the current token alone: rows of `logits`."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.as_tensor(logits, dtype=torch.float32))
        self.config = SimpleNamespace(vocab_size=self.logits.shape[1])

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.logits[input_ids])


UNIFORM = Table(torch.zeros(4, 4))
SURE = Table([[0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9], [9, 0, 0, 0]])  # after t comes t + 1


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_a_packed_mixture_is_evaluated_as_its_dequantized_model(family, family_checkpoints, tmp_path):
    c, result = family_checkpoints(family), []
    text = " ".join(f"w{(7 * i * i + 3) % 160}" for i in range(400))
    for folder in (c.packed, c.dequantized):
        copy = shutil.copytree(folder, tmp_path / folder.name)
        write_tokenizer(copy)
        result.append(lowq.perplexity(copy, text, device="cpu")["ppl"])
    assert result[0] == pytest.approx(result[1], rel=1e-2)  # bf16 on a CPU where packed


def test_uniform_predictions_have_the_vocabulary_as_perplexity():
    r = perplexity.evaluate(UNIFORM, torch.arange(12) % 4, window=4)
    assert r.ppl == pytest.approx(4, rel=1e-6)
    assert (r.tokens, r.predicted, r.window) == (12, 9, 4)
    assert r.base_ppl is r.kl is r.top1_agreement is r.ppl_increase_pct is None


def test_kl_agreement_and_increase():
    ids = torch.arange(8) % 4
    r = perplexity.evaluate(UNIFORM, ids, SURE, window=8)
    p = math.exp(9) / (math.exp(9) + 3)
    q = (1 - p) / 3
    assert r.base_ppl == pytest.approx(1 / p, rel=1e-6)
    assert r.kl == pytest.approx(p * math.log(4 * p) + 3 * q * math.log(4 * q), rel=1e-5)
    assert r.top1_agreement == pytest.approx(1 / 7 + 0)  # UNIFORM's argmax is 0, right only after token 3
    assert r.ppl_increase_pct == pytest.approx(100 * (4 * p - 1), rel=1e-5)
    same = perplexity.evaluate(SURE, ids, SURE, window=8)
    assert (same.kl, same.top1_agreement, same.ppl_increase_pct) == (0, 1, 0)


def test_logits_that_are_no_numbers_are_an_error_of_either_model():
    """Before, perplexity was inf and the exit code 0; compared with such an original every bound was met."""
    broken, ids = Table(torch.full((4, 4), math.nan)), torch.arange(8) % 4
    for pair in ((broken, None), (UNIFORM, broken)):
        with pytest.raises(DamagedError, match="is NaN or infinite"):
            perplexity.evaluate(pair[0], ids, pair[1], window=8)


def test_batches_change_nothing():
    g = torch.Generator().manual_seed(0)
    model, ids = Table(torch.randn(16, 16, generator=g)), torch.randint(0, 16, (333,), generator=g)
    whole = perplexity.evaluate(model, ids, SURE_16, window=10)
    assert perplexity.evaluate(model, ids, SURE_16, window=10, most_logits=1).kl == pytest.approx(whole.kl, rel=1e-6)
    assert perplexity.evaluate(model, ids, window=10, most_logits=1).ppl == pytest.approx(whole.ppl, rel=1e-6)


def test_a_large_gpu_holds_more_logits():
    """By the memory it has, not by what is free: batches, and with them roundings, are the same on every run."""
    gpu = torch.device("cuda", 0)
    for total, expected in ((8 << 30, 1 << 26), (24 << 30, 3 << 25), (144 << 30, 9 << 26)):
        with mock.patch("torch.cuda.get_device_properties", return_value=SimpleNamespace(total_memory=total)):
            assert perplexity.logits_at_once(gpu) == expected
    assert perplexity.logits_at_once(torch.device("cpu")) == 1 << 26


SURE_16 = Table(torch.eye(16) * 3)


def test_windows():
    ids = torch.arange(10)
    assert perplexity.windows(ids, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert perplexity.windows(ids, 4, max_tokens=5).tolist() == [[0, 1, 2, 3]]
    assert perplexity.windows(ids, 512).tolist() == [list(range(10))]
    with pytest.raises(UsageError, match="at least 2 tokens"):
        perplexity.windows(ids[:1])


def test_different_vocabularies_are_refused():
    with pytest.raises(UsageError, match="vocabularies differ: 4 and 16"):
        perplexity.evaluate(UNIFORM, torch.arange(8) % 4, SURE_16)


def test_tokens_that_the_model_lacks_are_refused():
    with pytest.raises(UsageError, match="token id 4000000000 is not one of the model's ids, 0 to"):
        perplexity.evaluate(UNIFORM, torch.tensor([1, 4_000_000_000, 2]))


def test_text_errors(tmp_path):
    assert len(perplexity.read_text(None)) > 50_000
    with pytest.raises(NotFoundError, match="No such file"):
        perplexity.read_text(tmp_path / "none.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        perplexity.read_text(tmp_path / "binary")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(UsageError, match="is empty"):
        perplexity.read_text(tmp_path / "empty")


@pytest.fixture(scope="module")
def two_models(family_checkpoints, tmp_path_factory):
    """Folders: "uniform" finds all 160 tokens equally likely; "worse" is sure of tokens that do not come."""
    folders = {}
    for name, factor in (("uniform", 0.0), ("worse", 100.0)):
        folders[name] = shutil.copytree(family_checkpoints("llama").dense, tmp_path_factory.mktemp(name) / name)
        tensors = load_file(folders[name] / "model.safetensors")
        save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] * factor}, folders[name] / "model.safetensors")
    return folders


@pytest.fixture
def run(two_models, tmp_path):
    """Run `lowq eval` on a text of 400 tokens; the words "uniform" and "worse" stand for those folders."""
    (tmp_path / "text").write_text("It was the best of times. " * 16)
    where = ["--text", str(tmp_path / "text"), "--device", "cpu"]
    return lambda *words: main.main(["eval", *(str(two_models.get(w, w)) for w in words), *where])


def test_eval_prints_the_documented_keys(run, capsys):
    assert run("uniform", "--against", "worse", "--json") == 0
    keys = json.loads(capsys.readouterr().out)
    assert {"ppl", "tokens", "base_ppl", "kl", "top1_agreement"} <= set(keys)
    assert keys["ppl"] == pytest.approx(160, rel=1e-5)
    assert run("uniform") == 0
    assert "160.000" in capsys.readouterr().out


def test_eval_gate(run, capsys):
    assert run("worse", "--against", "worse", "--max-ppl-increase", "0") == 0
    assert run("uniform", "--against", "worse", "--max-ppl-increase", "0") == 0
    assert run("worse", "--against", "uniform", "--max-ppl-increase", "5") == 6
    assert "limit is 5%" in capsys.readouterr().err
    assert run("worse", "--max-ppl-increase", "5") == 2


def test_a_missed_gate_with_json_is_one_object(run, capsys):
    """The numbers and the error together: two objects would be no JSON."""
    assert run("worse", "--against", "uniform", "--max-ppl-increase", "5", "--json") == 6
    result = json.loads(capsys.readouterr().out)
    assert result["ppl"] > result["base_ppl"]
    assert "limit is 5%" in result["error"]
    assert result["exit_code"] == 6
