"""A bound on the loss: the checkpoint is just below it, as measured on its own bytes, also after a kill."""

import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from folders import files
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lowq_cli.calibrate.mixed import Allocation, Share
from lowq_cli.calibrate.texts import read_text
from lowq_cli.engine import bandwidth
from lowq_cli.evaluate import perplexity
from lowq_cli.files import memo
from lowq_cli.files.source import DEMO
from lowq_cli.main import app
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import bound, pipeline
from lowq_cli.run.events import Finished
from lowq_cli.run.prepare import prepare
from lowq_packers.errors import QualityError, UsageError
from lowq_packers.scheme import Scheme

ASKED = {"max_kl": 0.05, "widths": (8, 4, 3, 2)}


@pytest.fixture
def cache(own_cache):
    """The folder of measurements, empty."""
    return own_cache / "bounds"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Short texts: one batch of windows to calibrate on, and one to judge by."""
    folder, whole = tmp_path_factory.mktemp("texts"), read_text(None)
    for name, letters in (("calib", 24_000), ("judge", 4_000)):
        (folder / name).write_text(whole[:letters])
    return {name: str(folder / name) for name in ("calib", "judge")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The first layer of the demo: trained, and quick."""
    folder = tmp_path_factory.mktemp("model")
    for path in DEMO.glob("tokenizer*"):
        shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(json.loads((DEMO / "config.json").read_text()) | {"num_hidden_layers": 1}))
    tensors = load_file(DEMO / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".layers." not in n or ".layers.0." in n}, folder / "model.safetensors")
    return folder


def quantized(model, out, make=None, **asked):
    """(bound, result) of a model quantized under a bound."""
    recipe = make_recipe(**{**ASKED, **asked})
    with prepare(model, recipe, out, "cpu", make=make or pipeline.maker(str(model), "cpu")) as prepared:
        return prepared.bound, next(e.result for e in pipeline.execute(prepared) if isinstance(e, Finished))


def test_the_bound_is_met_closely_and_the_checkpoint_says_the_same(model, texts, cache, tmp_path):
    actual, result = quantized(model, tmp_path / "a", **texts)
    assert 0.9 * 0.05 <= actual.measured <= 0.05
    assert actual.binding == "max_kl"
    assert not result.already_done
    again = perplexity.measure(tmp_path / "a", perplexity.read_text(texts["judge"]), model, "cpu")
    assert again.kl == pytest.approx(actual.measured, rel=1e-6)
    assert actual.more < actual.measured < actual.less
    report = json.loads((tmp_path / "a" / "lowq_report.json").read_text())
    plain = make_recipe(**{k: v for k, v in report["recipe"].items() if k not in ("bits",)})  # the recipe alone makes it again
    list(pipeline.run(model, plain, tmp_path / "b", "cpu"))
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert [p.name for p in next(cache.iterdir()).iterdir()] == ["measured.json"]  # no trial is left
    second, result = quantized(model, tmp_path / "a", **texts)
    assert result.already_done
    assert second == actual


def test_killed_when_a_trial_is_made_it_is_not_made_again(model, texts, cache, tmp_path):
    results = []

    def make(recipe, folder):
        weights = folder / "model.safetensors"
        before = weights.exists() and weights.stat().st_ino
        pipeline.maker(str(model), "cpu")(recipe, folder)
        results.append((folder.name, before, weights.stat().st_ino))
        if len(results) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantized(model, tmp_path / "a", make, max_kl=0.03, **texts)
    assert not (tmp_path / "a").exists()
    result, _ = quantized(model, tmp_path / "a", make, max_kl=0.03, **texts)
    assert len(results) == 1 + len(result.trials)
    name, _, inode = results[0]
    assert results[1] == (name, inode, inode)
    assert not any(before for _, before, _ in results[2:])
    assert 0.9 * 0.03 <= result.measured <= 0.03


def test_bounds_that_cannot_be_met(model, texts, cache, tmp_path):
    with pytest.raises(QualityError, match=r"--max-kl 0.001 is not met: .* --widths 3,2 allow"):
        quantized(model, tmp_path / "a", max_kl=0.001, widths=(3, 2), lm_head="keep", **texts)
    with pytest.raises(UsageError, match=r"--fit 100.0 kB is too little: the smallest widths take"):
        quantized(model, tmp_path / "a", fit=100_000, **texts)
    assert not (tmp_path / "a").exists()


class Curve:
    """A spread whose expected error halves with every half bit; 1000 weights, sizes of whole bytes."""

    params, why_not_nats = 8000, ""
    least, most = 2000, 8000

    def __init__(self):
        self.source = SimpleNamespace(identity="x")
        self.plain = make_recipe()

    def at(self, budget):
        share = Share("g", "mlp", 8000, budget, Scheme(4, 64), 2 * math.exp2(-2 * 8 * budget / 8000))
        return make_recipe(bits=4, skip=[f"x{budget}"]), Allocation((share,), True, "")


def timed(model, out, monkeypatch, seconds, **asked):
    """`quantized` where a checkpoint of so many bytes decodes as `seconds` says; its own decoder is asked too, once."""
    real, sizes = bound.speed, []

    def speed(folder, text, device):
        nbytes = (folder / "model.safetensors").stat().st_size
        assert sizes or real(folder, text, device) > 0
        sizes.append(nbytes)
        return 1 / seconds(nbytes)

    monkeypatch.setattr(bound, "speed", speed)
    bandwidth.measured(torch.device("cpu"))
    memo.keep(bandwidth.FILE, dict.fromkeys(memo.recall(bandwidth.FILE), 1e9))
    return quantized(model, out, **asked)[0], sizes


def test_a_speed_is_a_further_bound(model, texts, cache, tmp_path, monkeypatch):
    result, sizes = timed(model, tmp_path / "a", monkeypatch, lambda n: n / 1e9, tokens_per_s=1e9 / 4e6, **texts)
    assert result.binding == "max_kl"
    here, slower, faster = result.tps
    assert here == pytest.approx(1e9 / sizes[-1]) or here in [t.tps for t in result.trials]
    assert slower < here < faster  # by a bit of every weight that takes part, at the memory's speed
    a_bit = 1 / slower - 1 / here
    assert a_bit == pytest.approx(1 / here - 1 / faster)
    by_the_loss = r"measured [\d.]+ nats of KL divergence in \d+ rounds: the limit is --max-kl 0.05; with one bit per weight "
    assert re.match(by_the_loss, result.summary)
    assert f"{here:.4g} tokens/s here" in result.summary
    report = json.loads((tmp_path / "a" / "lowq_report.json").read_text())
    assert report["recipe"]["tokens_per_s"] is None  # the recipe that makes the checkpoint names no bound


def test_a_speed_that_the_loss_does_not_leave(model, texts, cache, tmp_path, monkeypatch):
    with pytest.raises(QualityError, match=r"--tokens-per-s 1e\+06 is not met: --max-kl 0.05 leaves .* allow more loss"):
        timed(model, tmp_path / "a", monkeypatch, lambda n: n / 1e9, tokens_per_s=1e6, **texts)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("limit", [0.5, 0.1, 0.02, 0.003])
@pytest.mark.parametrize("truth", [lambda e: 0.4 * e, lambda e: 3 * e, lambda e: e**1.4, lambda e: e**0.7 + 1e-4])
@pytest.mark.parametrize("flag", ["max_kl", "max_ppl"])
def test_the_search_lands_near_its_bound_however_wrong_the_estimate_is(limit, truth, flag, tmp_path, monkeypatch):
    """Within five rounds, whether the estimate is off by a factor or by a power."""
    curve = Curve()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = {}

    def make(recipe, folder):
        folder.mkdir(parents=True)
        made[folder] = truth(2 * math.exp2(-2 * 8 * int(recipe.skip[0][1:]) / 8000))

    def measure(folder, *_):
        return SimpleNamespace(kl=made[folder], ppl_increase_pct=100 * math.expm1(made[folder]))

    asked = make_recipe(**{flag: limit if flag == "max_kl" else 100 * math.expm1(limit)})
    _, _, result = bound.Search("m", curve, asked, ("", ""), "cpu", make, lambda *_: None, measure).run()
    if result.binding == flag:
        assert 0.9 * result.limit < result.measured <= result.limit
        assert len(result.trials) <= 5
    else:
        assert result.measured <= result.limit
        assert truth(2 * math.exp2(-4)) <= limit


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--max-kl", "0.1", "--bpw", "3"], "--bpw and --max-kl are 2 budgets"),
        (["--max-kl", "0.1", "--bits", "3"], "--max-kl chooses the bits"),
        (["--max-kl", "-1"], "must be a number above 0 and below 1000, such as 0.02"),
        (["--max-ppl", "1000%"], "--max-ppl 1000.0 must be a number above 0 and below 1000, such as 1%"),
        (["--max-ppl", "much"], "is not a percentage"),
        (["--tokens-per-s", "9"], "--tokens-per-s goes with --max-kl or --max-ppl"),
        (["--max-kl", "0.1", "--tokens-per-s", "-2"], "above 0 and below 1000000000, such as 30"),
        (["--fit", "2GB"], "--fit goes with --max-kl or --max-ppl; alone it is --size"),
        (["--max-ppl", "1%", "--judge", "none.txt"], "cannot read the text"),
    ],
)
def test_flags_that_do_not_go_together(flags, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["quantize", "demo", *flags])
    assert result.exit_code != 0
    assert why in str(result.exception) + result.output
    assert not list(tmp_path.iterdir())
