"""All layers learn together: closer to the original's predictions, the learnt values are stored, the same bytes each time."""

import pytest
import torch
from safetensors.torch import load_file

from lowq_cli.calibrate import end_to_end, learn, requirements
from lowq_cli.calibrate.end_to_end import EndToEnd
from lowq_cli.calibrate.requirements import LayerDone, PassDone
from lowq_cli.files.source import open_source
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import pipeline


@pytest.fixture(autouse=True)
def small(small_calibration, monkeypatch):
    monkeypatch.setattr(learn, "EPOCHS", 2)
    monkeypatch.setattr(end_to_end, "PASSES", 3)
    quicken(monkeypatch, 10)


def quicken(monkeypatch, factor):
    """A few steps must do what thousands do, of which most codes do not move."""

    def rates(bits, weights):
        scales, norms, codes = requirements.rates(bits, weights)
        return factor * scales, factor * norms, (codes > 0) * factor * 6e-3

    monkeypatch.setattr(end_to_end, "rates", rates)


def recipe(text, bits=2, **more):
    return make_recipe(bits=bits, group=16, method="distill", calib=text, **more)


def weights(folder):
    return {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}


@pytest.mark.parametrize(
    ("family", "bits", "norms"),
    [
        ("llama", 2, 4),
        ("llama-tied", 3, 4),
        ("phi3", 3, 4),
        ("gpt2", 2, 4),
        ("gemma3", 3, 12),
        ("mixtral", 2, 4),
    ],
)
def test_predictions_come_nearer(family, bits, norms, family_checkpoints, text, tmp_path, monkeypatch):
    seen = []
    loss = EndToEnd._loss

    def spy(self, *args):
        seen.append(loss(self, *args))
        return seen[-1]

    monkeypatch.setattr(EndToEnd, "_loss", spy)
    dense = family_checkpoints(family, schemes={}).dense
    form = "table" if family == "phi3" else "lowq"
    list(pipeline.run(dense, recipe(text, bits, format=form), tmp_path / "together"))
    before, after = seen
    assert after < 0.97 * before
    monkeypatch.setattr(end_to_end, "PASSES", 0)
    list(pipeline.run(dense, recipe(text, bits, format=form), tmp_path / "alone"))
    together, alone = (load_file(tmp_path / n / "model.safetensors") for n in ("together", "alone"))
    changed = {n for n, t in together.items() if not torch.equal(t, alone[n])}
    learnt = {n for n in changed if n.endswith("norm.weight") or ".ln_" in n}
    assert len(learnt) == norms
    codes = {n for n in changed - learnt if n.endswith(".weight")}
    assert codes
    assert changed - learnt - codes
    assert all(n.endswith((".weight_scale", ".weight_zero", ".weight_table")) for n in changed - learnt - codes)
    assert any(n.endswith(".weight_table") for n in changed) == (form == "table")
    if family == "mixtral":
        assert not any(".experts." in n for n in changed)


def test_the_loss_is_that_of_the_stored_bytes(family_checkpoints, text, tmp_path, monkeypatch):
    """The phase computes layer by layer what transformers' model computes with the checkpoint's weights and norms."""
    from lowq_cli.hf.load import load_model

    dense = family_checkpoints("llama", schemes={}).dense
    seen, found = [], {}
    loss, run = EndToEnd._loss, EndToEnd.run
    monkeypatch.setattr(EndToEnd, "_loss", lambda self, *a: seen.append(loss(self, *a)) or seen[-1])
    monkeypatch.setattr(EndToEnd, "run", lambda self, ids, *a: found.update(ids=ids) or run(self, ids, *a))
    list(pipeline.run(dense, recipe(text, lm_head="keep"), tmp_path / "o"))
    with open_source(dense) as a, open_source(tmp_path / "o") as b, torch.no_grad():
        original, quantized = (load_model(source, "cpu", torch.float32) for source in (a, b))
        p, q = (m(input_ids=found["ids"]).logits.log_softmax(-1) for m in (original, quantized))
    assert float((p.exp() * (p - q)).sum(-1).mean()) == pytest.approx(seen[1], rel=2e-2)


def test_twice_the_same_bytes_also_behind_an_interruption_in_each_phase(family_checkpoints, text, tmp_path, monkeypatch):
    monkeypatch.setattr(learn, "EPOCHS", 1)
    monkeypatch.setattr(end_to_end, "PASSES", 2)
    dense = family_checkpoints("llama", schemes={}).dense
    list(pipeline.run(dense, recipe(text), tmp_path / "first"))
    for name, stop, left in (("a", LayerDone, 2), ("b", PassDone, 1)):
        events = pipeline.run(dense, recipe(text), tmp_path / name)
        while not isinstance(next(events), stop):
            pass
        events.close()
        passes = [e for e in pipeline.run(dense, recipe(text), tmp_path / name) if isinstance(e, PassDone)]
        assert len(passes) == left
        assert weights(tmp_path / name) == weights(tmp_path / "first")


def test_a_result_that_is_not_better_is_not_used(family_checkpoints, text, tmp_path, monkeypatch):
    dense = family_checkpoints("llama", schemes={}).dense
    for name, factor, passes in (("wild", 5000, 2), ("none", 0, 0)):
        quicken(monkeypatch, factor)
        monkeypatch.setattr(end_to_end, "PASSES", passes)
        list(pipeline.run(dense, recipe(text), tmp_path / name))
    assert weights(tmp_path / "wild") == weights(tmp_path / "none")
