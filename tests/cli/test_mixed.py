"""A budget of bits: predicted and measured loss agree, the budget holds, weights that engines fuse stay together."""

import json
import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

from lowq_cli.calibrate import mixed, sensitivity
from lowq_cli.calibrate.texts import Text
from lowq_cli.files.source import open_source
from lowq_cli.files.tensor_parallel import fusion_problems
from lowq_cli.main import app
from lowq_cli.plan.planner import free_candidates, make_plan
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import pipeline
from lowq_packers.errors import UsageError
from lowq_packers.scheme import Scheme

CPU = torch.device("cpu")
FINE = {"group": 16, "dtype": "bfloat16"}  # 2 bits take 4 with their scales and zeros


@pytest.fixture
def fine(text):
    """Fields of a recipe, with a text of which each run reads all tokens: those of the bundled one take 0.3 s."""
    return {**FINE, "calib": text}


@pytest.fixture
def small(own_cache):
    """The cache's folder of measurements, empty yet."""
    return own_cache / "sensitivity"


def resolve(model, recipe):
    """`mixed.resolve` of a folder, on the CPU."""
    with open_source(model) as source:
        return mixed.resolve(source, recipe, Text.read(recipe.calib), CPU)


def schemes(plan):
    return {i.name: i.scheme for i in plan.items if i.scheme}


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *((f, "lowq") for f in ("llama", "llama-tied", "phi3", "gemma3", "gpt2", "mixtral", "qwen3-moe")),
        *((f, "table-e4m3") for f in ("phi3", "llama-tied")),
        pytest.param("mixtral", "table-e4m3", marks=pytest.mark.more),
    ],
)
def test_budgets_hold_and_fused_weights_agree(family, form, family_checkpoints, small, fine, tmp_path):
    folder = family_checkpoints(family, schemes={}).dense
    sizes = []
    for bpw in (4.7, 6.5):
        recipe, found = resolve(folder, make_recipe(bpw=bpw, format=form, **fine))
        assert any(s.scheme and s.scheme.table for s in found.shares) == (form != "lowq")
        assert found.in_nats
        assert bpw - 0.7 < found.bpw <= bpw
        with open_source(folder) as source:
            plan = make_plan(source, recipe)
        assert not fusion_problems(schemes(plan))
        assert {i.kind for i in plan.items if i.scheme} >= {
            "attention",
            "expert" if "mix" in family or "moe" in family else "mlp",
        }
        quantized = sum(i.nbytes for i in plan.items if i.scheme)
        assert quantized + sum(s.nbytes for s in found.shares if s.scheme is None) == sum(s.nbytes for s in found.shares)
        sizes.append(found.error)
    assert sizes[0] > sizes[1] > 0


def test_the_forecast_is_the_cost_of_one_group(small, family_checkpoints):
    """Each group alone: the KL divergence of the logits is within a factor of two of the estimate."""
    from transformers import AutoModelForCausalLM

    from lowq_cli.quantizers import rtn

    folder = family_checkpoints("llama-tied").dense
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, 160, (16, 32), generator=torch.Generator().manual_seed(0))
    scheme = Scheme(4, 16)
    with open_source(folder) as source:
        candidates = free_candidates(source, make_recipe())
        rounded = lambda W, s: rtn.quantize(W, s).dequantize()  # noqa: E731
        judged = {c.name: [scheme] for c in candidates}
        errors = sensitivity.Sensitivities(source, candidates, judged, rounded, CPU).measure(ids, 4)
    with torch.no_grad():
        log_p = model(ids).logits.log_softmax(-1)
        for name in ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.up_proj",
                     "model.embed_tokens"):  # fmt: skip
            weight = model.get_submodule(name).weight
            original = weight.data.clone()
            weight.data.copy_(rounded(original, scheme))
            kl = float((log_p.exp() * (log_p - model(ids).logits.log_softmax(-1))).sum(-1).mean())
            weight.data.copy_(original)
            assert 0.5 < errors[name][scheme] / kl < 2, name


def test_sensitivities_are_measured_once(family_checkpoints, small, fine, tmp_path):
    folder = family_checkpoints("llama").dense
    first = pipeline.quantize(folder, tmp_path / "out", bpw=4.7, **fine)
    assert 0 < first["quantized_bpw"] <= 4.7
    (measured,) = small.iterdir()
    written = measured.stat().st_mtime_ns
    assert pipeline.quantize(folder, tmp_path / "out", bpw=4.7, **fine)["already_done"]
    wider = pipeline.quantize(folder, tmp_path / "wider", bpw=6, **fine)  # another folder, the same model
    assert wider["bytes"] > first["bytes"]
    assert measured.stat().st_mtime_ns == written
    report = json.loads((tmp_path / "wider" / "lowq_report.json").read_text())
    again = make_recipe(**report["recipe"])
    with open_source(folder) as source:
        assert {t["name"]: t["scheme"] for t in report["tensors"] if "scheme" in t} == {
            n: str(s) for n, s in schemes(make_plan(source, again)).items()
        }


def test_the_same_run_gives_the_same_bytes(family_checkpoints, small, tmp_path):
    folder = family_checkpoints("llama").dense
    for name in ("a", "b"):
        more = {"method": "gptq", "device": "cpu", "calib": "bundled", "calib_tokens": 4096}
        pipeline.quantize(folder, tmp_path / name, bpw=4.7, **FINE, **more)
    for path in (tmp_path / "a").iterdir():
        if path.name != "lowq.log":
            assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_a_size_is_kept_to_the_byte(family_checkpoints, small, fine, tmp_path):
    folder = family_checkpoints("llama").dense
    for size in (120_000, 90_123):
        result = pipeline.quantize(folder, tmp_path / str(size), size=size, **fine)
        assert 0.9 * size < result["bytes"] <= size


def test_matrices_with_a_scheme_of_their_own_take_no_part(family_checkpoints, small, fine, tmp_path):
    folder = family_checkpoints("llama").dense
    recipe = make_recipe(bpw=4.7, **fine, lm_head="keep", overrides=["layers.0.mlp.down_proj=8:16"], skip=["layers.1.mlp"])
    resolved, found = resolve(folder, recipe)
    names = {s.group for s in found.shares}
    assert names == {"model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.gate_up_proj",
                     "model.layers.1.self_attn.qkv_proj", "model.layers.1.self_attn.o_proj"}  # fmt: skip
    with open_source(folder) as source:
        got = schemes(make_plan(source, resolved))
    assert got["model.layers.0.mlp.down_proj"] == Scheme(8, 16)
    assert not any("lm_head" in n or "embed" in n or "layers.1.mlp" in n for n in got)


def test_without_a_tokenizer_weights_are_compared(family_checkpoints, tmp_path):
    folder = shutil.copytree(family_checkpoints("llama").dense, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*"))
    _, found = resolve(folder, make_recipe(bpw=4.7, **FINE))
    assert not found.in_nats
    assert "tokenizer" in found.why_not_nats
    assert found.bpw <= 4.7


def test_refusals(family_checkpoints, small, tmp_path):
    folder = family_checkpoints("llama").dense
    for flags, why in (
        ({"bpw": 3, "size": 5}, "2 budgets"),
        ({"bpw": 3, "bits": 4}, "leave --bits out"),
        ({"bpw": 0.5}, "from 1 to 16"),
        ({"bpw": 3, "widths": "5"}, "not a width"),
    ):
        with pytest.raises(UsageError, match=why):
            make_recipe(**flags)
    with pytest.raises(UsageError, match="the smallest widths take"):
        pipeline.quantize(folder, tmp_path / "a", bpw=2, **FINE)
    with pytest.raises(UsageError, match=r"--size 2.0 kB is too little: the smallest widths take [\d.]+ kB;"):
        pipeline.quantize(folder, tmp_path / "a", size=2000, **FINE)
    least = mixed._too_small(make_recipe(size=2000), 2001, 2000, 1)
    assert least == "--size 2,000 B is too little: the smallest widths take 2,001 B; --widths may allow smaller"
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("budget", [{"bpw": 2}, {"size": 2000}], ids=["bpw", "size"])
def test_an_impossible_budget_is_reported_before_anything_is_measured(budget, family_checkpoints, small):
    with pytest.raises(UsageError, match="is too little: the smallest widths take"):
        resolve(family_checkpoints("llama").dense, make_recipe(**budget, **FINE))
    assert not small.exists()


def test_flags_that_nothing_would_read_are_refused(family_checkpoints):
    folder = str(family_checkpoints("llama").dense)
    for flags, why in (
        (["--widths", "4"], "--widths 4 needs --bpw, --size"),
        (["--calib-tokens", "8192"], "--calib-tokens is for methods that read a text"),
    ):
        error = CliRunner().invoke(app, ["quantize", folder, "--dry-run", *flags]).exception
        assert isinstance(error, UsageError)
        assert why in str(error)


def test_the_plan_is_shown_and_drawn(family_checkpoints, small, tmp_path):
    folder = str(family_checkpoints("llama").dense)
    png = tmp_path / "p.png"
    flags = ["--bpw", "7.5", "--group", "16", "--out", str(tmp_path / "o"), "--dry-run", "--json", "--plot", str(png)]
    done = CliRunner().invoke(app, ["quantize", folder, *flags])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["mixed"]
    assert told["bpw"] <= 7.5
    assert told["expected_kl"] == pytest.approx(sum(g["error"] for g in told["groups"]))
    assert png.stat().st_size > 1000
    assert not (tmp_path / "o").exists()


def test_numbers_in_the_plot_are_light_where_the_colour_is_dark(monkeypatch, tmp_path):
    """4.5 bits next to 8 are at the dark end of the scale; black on violet could not be read."""
    drawn = []
    monkeypatch.setattr(mixed.drawing, "save", lambda fig, path: drawn.append(fig))
    sizes = {"layers.0.a": 9, "layers.1.a": 17}  # bytes of 16 weights
    shares = tuple(mixed.Share(f"model.{name}", "mlp", 16, nbytes, None, 0.0) for name, nbytes in sizes.items())
    mixed.plot(mixed.Allocation(shares, True, ""), tmp_path / "p.png")
    assert {t.get_text(): t.get_color() for t in drawn[0].axes[0].texts} == {"4.5": "white", "8.5": "black"}


def test_the_plan_says_what_training_would_take(family_checkpoints, small, tmp_path):
    folder = str(family_checkpoints("llama").dense)
    for more, said in (([], True), (["--method", "gptq", "--calib", "bundled"], False)):
        done = CliRunner().invoke(app, ["quantize", folder, "--bpw", "7.5", "--device", "cpu", "--dry-run", *more])
        assert done.exit_code == 0, done.output
        found = re.search(r"--method distill loses less in as many bits: it trains all layers together, about \d", done.output)
        assert bool(found) == said
        assert bool(re.search(r"by gptq.* on cpu, about \d.*\(within 2x\)", done.output)) == (not said)
