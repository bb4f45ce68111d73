"""Gradient descent after gptq: a layer's output comes closer to the original one's, with the same bytes on every run."""

import inspect
import sys
from dataclasses import replace

import pytest
import torch

from lowq_cli import quantizers
from lowq_cli.calibrate import calibration, learn, texts
from lowq_cli.files.source import open_source
from lowq_cli.hf.tokenizer import load_tokenizer
from lowq_cli.plan.planner import make_plan
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.quantizers import gptq, yaqa
from lowq_cli.run import pipeline
from lowq_cli.run.prepare import prepare
from lowq_packers.errors import SchemeError
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

FACTS = {
    quantizers.needs_text: "TEXT",
    quantizers.needs_scales: "SCALES",
    quantizers.needs_learning: "LEARN",
    quantizers.needs_distilling: "DISTILL",
    quantizers.needs_curvature: "CURVATURE",
    quantizers.carries_errors: "CARRIES",
}


@pytest.fixture
def losses(monkeypatch):
    """(before, after) of each layer: squared distance of its output to the original model's."""
    found = []

    def distance(layer, original, behind):
        pairs = zip(original, behind, strict=True)
        return sum(float((layer.run(b, layer.quantized) - layer.run(x, layer.original)).square().sum()) for x, b in pairs)

    def spy(layer, results, dtypes, original, behind):
        before = distance(layer, original, behind)
        better = learn.learn(layer, results, dtypes, original, behind)
        assert set(better) <= set(results)
        for name, q in better.items():
            assert torch.equal(q.scales, q.held(dtypes[name]).held(torch.float32).scales)
            layer.set(name, q.dequantize())
        found.append((before, distance(layer, original, behind)))
        return better

    monkeypatch.setattr(calibration, "learn", spy)
    return found


@pytest.mark.parametrize(
    ("family", "bits", "form"),
    [
        pytest.param("llama", 2, "lowq", marks=pytest.mark.more),
        ("llama", 1, "lowq"),
        ("phi3", 2, "table"),
        ("gpt2", 4, "lowq"),
        ("mixtral", 3, "lowq"),
    ],
)
def test_layers_come_nearer(family, bits, form, family_checkpoints, text, tmp_path, losses):
    dense = family_checkpoints(family, schemes={}).dense
    list(pipeline.run(dense, make_recipe(bits=bits, group=16, method="learn", calib=text, format=form), tmp_path / "out"))
    assert len(losses) == 2
    assert all(after <= before for before, after in losses)
    assert sum(after for _, after in losses) < 0.98 * sum(before for before, _ in losses)


@pytest.mark.parametrize(
    ("zero", "form"), [("int", "lowq"), pytest.param("none", "lowq", marks=pytest.mark.more), ("none", "table-e4m3")]
)
def test_zeros_and_scales_stay_of_their_kind(zero, form, family_checkpoints, text, tmp_path, losses):
    dense = family_checkpoints("llama", schemes={}).dense
    recipe = make_recipe(bits=2, group=16, method="learn", calib=text, zero=zero, format=form)
    list(pipeline.run(dense, recipe, tmp_path / "out"))
    assert sum(after for _, after in losses) < sum(before for before, _ in losses)


def test_twice_the_same_bytes_also_behind_an_interruption(family_checkpoints, text, tmp_path):
    dense = family_checkpoints("llama", schemes={}).dense
    recipe = make_recipe(bits=2, group=16, method="learn", calib=text)
    list(pipeline.run(dense, recipe, tmp_path / "first"))
    events = pipeline.run(dense, recipe, tmp_path / "second")
    while not isinstance(next(events), calibration.LayerDone):
        pass
    events.close()
    with prepare(dense, recipe, tmp_path / "second", device="cpu") as again:
        assert any("holds an unfinished run: less is left to do" in note for note in again.plan.notes)
    list(pipeline.run(dense, recipe, tmp_path / "second"))
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / n).glob("*.safetensors")} for n in ("first", "second"))
    assert first == second


def test_methods_that_round_as_gptq_does_carry_errors():
    """Facts are read from a method's file as they stand there: learn had CARRIES from gptq's, and --bpw did not know."""
    names = quantizers.methods()
    rounders = [m for m in names if quantizers.get(m).__module__ in (gptq.__name__, yaqa.__name__)]
    assert [m for m in names if quantizers.carries_errors(m)] == rounders


@pytest.mark.parametrize("method", quantizers.methods())
def test_the_facts_of_a_method_are_those_that_its_file_sets(method):
    """However they are written there: the reader takes lines that begin with `FACT = True` alone."""
    takes = inspect.signature(quantizers.get(method)).parameters
    module = sys.modules[f"{quantizers.__name__}.{method}"]
    for says, fact in FACTS.items():
        assert says(method) == getattr(module, fact, False), fact
    assert ("moments" in takes) == quantizers.needs_text(method)
    assert ("table" in takes) == takes_tables(method)
    assert "outputs" in takes or not quantizers.needs_curvature(method)


def takes_tables(method):
    """Whether `check_scheme` lets a table pass."""
    try:
        quantizers.check_scheme(method, Scheme(4, 64, "none", "nf4"))
    except SchemeError:
        return False
    return True


def test_nothing_is_taken_that_is_no_better(family_checkpoints, text, tmp_path, monkeypatch):
    dense = family_checkpoints("llama", schemes={}).dense
    monkeypatch.setattr(learn, "RATES", {2: (3.0, 3.0)})
    for method in ("gptq", "learn"):
        list(pipeline.run(dense, make_recipe(bits=2, group=16, method=method, calib=text), tmp_path / method))
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / n).glob("*.safetensors")} for n in ("gptq", "learn"))
    assert first == second


def test_tokens_that_the_text_lacks_are_seen(family_checkpoints, tmp_path):
    """One window of random tokens to eight of text, for this method alone."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 1024)  # 64 windows of 128
    seen = {}
    with open_source(family_checkpoints("llama", schemes={}).dense) as source:
        for method in ("gptq", "learn"):
            plan = make_plan(source, make_recipe(bits=2, group=16, method=method, calib=str(text)))
            words, device = texts.Text.read(str(text)), torch.device("cpu")
            seen[method] = calibration.Calibration(source, plan, words, tmp_path, "hash", device).ids
        tokenizer = load_tokenizer(source)
    assert len(seen["gptq"]) == 64
    assert torch.equal(seen["learn"][:64], seen["gptq"])
    more = seen["learn"][64:]
    assert more.shape == (8, 128)
    assert len(more.unique()) > 60
    assert not set(more.unique().tolist()) & set(tokenizer.all_special_ids)
    assert torch.equal(more, texts.random_token_windows(tokenizer, 8, 160, 128))
    assert texts.random_token_windows(tokenizer, 4, 100, 32).max() < 100


IN_BYTES = [Scheme.of(4, 16, "e2m1/e4m3"), Scheme.of(4, 32, "e2m1/e8m0"), Scheme.of(3, 16, "fitted/e4m3")]


@pytest.mark.parametrize(
    "scheme", [Scheme(1, 32, "none"), Scheme(3, 32), *(Scheme.of(b, 32, "fitted") for b in (4, 2)), *IN_BYTES], ids=str
)
@pytest.mark.parametrize("near", [False, True])
def test_learning_begins_with_the_given_codes(scheme, near):
    W = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    q = quantizers.get("lsq")(W, scheme, torch.float16)
    if scheme.table == "fitted":  # in no order
        mixed = torch.randperm(scheme.levels, generator=torch.Generator().manual_seed(1))
        q = replace(q, W_q=mixed.argsort().to(torch.uint8)[q.W_q.int()], table=q.table[:, mixed])
    learnt = learn.Grid(q, torch.float16, q.W_q.device, 1e-3, 1e-2, W if near else None)
    assert bool(learnt.moved.any()) == near
    assert torch.equal(learnt.weight(), q.dequantize())
    found = learnt.quantized()
    assert torch.equal(found.W_q, q.W_q)
    assert torch.equal(found.dequantize(), q.dequantize())


def test_gradients_reach_codes_and_values_of_a_table():
    table = torch.tensor([[0.5, -1.0, 1.0, -0.25]])
    codes = torch.tensor([[0, 3, 1, 2]], dtype=torch.uint8)  # values 0.5, -0.25, -1, 1: places 2, 1, 0, 3
    q = QuantizedTensor.of(Scheme(2, 4, "none", "fitted"), codes, torch.full((1, 1), 2.0), None, table)
    learnt = learn.Grid(q, torch.float32, q.W_q.device, 1e-3, 1e-2)
    learnt.weight().sum().backward()
    assert learnt.moved.grad.tolist() == [[[2 * (1.0 + 0.25) / 2, 2 * (0.5 + 1.0) / 2, 2 * 0.75, 2 * 0.5]]]
    assert learnt.table.grad.tolist() == [2.0] * 4
    assert learnt.stretch.grad.item() == pytest.approx(2 * 0.25)
    learnt.table.data[3] = 1.5  # the largest value, which is code 2's
    assert learnt.quantized().table.tolist() == [[0.5, -1.0, 1.5, -0.25]]


def test_a_code_starts_where_its_weight_lies():
    q = QuantizedTensor(torch.tensor([[0, 3, 1, 2]], dtype=torch.uint8), torch.ones(1, 1) / 2, torch.full((1, 1), 1.5), 2, 4)
    W = torch.tensor([[-0.875, 0.75, -0.05, 0.5]])  # in codes -0.25, 3, 1.4 and 2.5: the last is as near to 3
    moved = learn.Grid(q, torch.float32, W.device, 1e-3, 1e-2, W).moved.flatten().tolist()
    assert moved == pytest.approx([-0.25, 0, 0.4, 0.49])
    table = torch.tensor([[0.5, -1.0, 1.0, -0.25]])
    q = QuantizedTensor.of(Scheme(2, 4, "none", "fitted"), q.W_q, torch.full((1, 1), 2.0), None, table)
    W = torch.tensor([[1.25, -0.125, -2.75, 2.0]])  # between codes of -2, -0.5, 1 and 2; codes are those of 1, -0.5, -2 and 2
    moved = learn.Grid(q, torch.float32, W.device, 1e-3, 1e-2, W).moved.flatten().tolist()
    assert moved == pytest.approx([0.25, 0.25, -0.49, 0])


@pytest.mark.parametrize("scheme", [Scheme(3, 32), Scheme.of(3, 32, "fitted"), *IN_BYTES], ids=str)
def test_all_parts_move_to_the_device(scheme):
    W, device = torch.randn(8, 64), torch.device("meta")  # where mixing devices raises, as on a GPU
    learnt = learn.Grid(quantizers.get("rtn")(W, scheme), torch.float32, device, 1e-3, 1e-2, W.to(device))
    learnt.weight().sum().backward()
    assert learnt.moved.grad.device == learnt.stretch.grad.device == device


@pytest.mark.parametrize("scheme", IN_BYTES, ids=str)
def test_scales_in_bytes_follow_their_gradients(scheme):
    W = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    q = quantizers.get("lsq")(W, scheme)
    q = replace(q, scales=q.scales - (8 if scheme.scale == "e4m3" else 1))  # half as large
    learnt = learn.Grid(q, torch.float32, W.device, 1e-3, 0)
    optimizer = torch.optim.Adam([{"params": [learnt.stretch], "lr": 0.02}])
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        (loss := (learnt.weight() - W).square().sum()).backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]
    assert torch.equal(learnt.quantized().dequantize(), learnt.weight().detach())


def test_gradients_reach_codes_scales_and_zeros():
    q = QuantizedTensor(torch.tensor([[0, 3, 1, 2]], dtype=torch.uint8), torch.ones(1, 1), torch.full((1, 1), 1.5), 2, 4)
    learnt = learn.Grid(q, torch.float32, q.W_q.device, 1e-3, 1e-2)
    learnt.weight().square().sum().backward()
    assert learnt.moved.grad.tolist() == [[[-3.0, 3.0, -1.0, 1.0]]]
    assert learnt.stretch.grad.item() == 2 * 5.0
    assert learnt.shift.grad.item() == 0.0
