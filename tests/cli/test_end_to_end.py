"""All layers learn together: closer to the original's predictions, the learnt values are stored, the same bytes each time."""

import pytest
import torch
from checkpoints import SMALL, Family
from safetensors.torch import load_file

from lowq_cli.calibrate import end_to_end, requirements, texts
from lowq_cli.calibrate.calibration import Calibration
from lowq_cli.calibrate.cuda_graph import Recorded, adam
from lowq_cli.calibrate.end_to_end import EndToEnd
from lowq_cli.calibrate.learn import WARM
from lowq_cli.calibrate.requirements import LayerDone, PassDone
from lowq_cli.files.source import open_source
from lowq_cli.hf.tokenizer import load_tokenizer
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import own_text_plan, pipeline, prepare

CONVOLVED: Family = ("lfm2", SMALL | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False})
LINEAR: Family = (
    "qwen3_5_text",
    SMALL
    | {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    quicken(monkeypatch, 10)


def written(path, times):
    path.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * times)
    return str(path)


@pytest.fixture
def text(tmp_path):
    """56 windows of 32: with 64, some of random tokens would be added, which gptq and yaqa do not read."""
    return written(tmp_path / "text.txt", 24)


@pytest.fixture
def short(tmp_path):
    """32 windows, for tests that do not ask how much is learnt."""
    return written(tmp_path / "short.txt", 14)


def quicken(monkeypatch, factor):
    """A few steps must do what thousands do, of which most codes do not move."""

    def rates(bits, weights):
        scales, norms, codes = requirements.rates(bits, weights)
        return factor * scales, factor * norms, (codes > 0) * factor * (5e-4 if bits in requirements.STRAIGHT else 6e-3)

    monkeypatch.setattr(end_to_end, "rates", rates)


def recipe(text, bits=2, method="distill", **more):
    return make_recipe(bits=bits, group=16, method=method, calib=text, **more)


def alone(bits):
    """The method whose result all layers start from together."""
    return "yaqa" if bits in requirements.BOTH_SIDES else "gptq" if bits in requirements.STRAIGHT else "learn"


def weights(folder):
    return {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}


@pytest.mark.parametrize(
    ("family", "bits", "norms", "form"),
    [
        pytest.param("llama", 2, 4, "lowq", marks=pytest.mark.more),
        ("llama-tied", 3, 4, "lowq"),
        pytest.param("phi3", 3, 4, "table", marks=pytest.mark.more),
        ("phi3", 2, 4, "table-e4m3"),
        pytest.param("gpt2", 3, 4, "lowq", marks=pytest.mark.more),
        ("gemma3", 3, 12, "lowq"),
        ("mixtral", 2, 4, "lowq"),
    ],
)
def test_predictions_come_nearer(family, bits, norms, form, family_checkpoints, text, tmp_path):
    dense = family_checkpoints(family, schemes={}, positions=32).dense
    events = pipeline.run(dense, recipe(text, bits, format=form), tmp_path / "together")
    losses = [e.loss for e in events if isinstance(e, PassDone)]
    assert len(losses) == (requirements.MORE_PASSES if bits == 2 else requirements.PASSES)
    assert losses[-1] < 0.97 * losses[0]
    list(pipeline.run(dense, recipe(text, bits, alone(bits), format=form), tmp_path / "alone"))
    together, before = (load_file(tmp_path / n / "model.safetensors") for n in ("together", "alone"))
    changed = {n for n, t in together.items() if not torch.equal(t, before[n])}
    learnt = {n for n in changed if n.endswith("norm.weight") or ".ln_" in n}
    assert len(learnt) == norms + 1  # the one behind the layers
    tables = {n for n in changed if n.endswith(("embed_tokens.weight", "embed_in.weight", "wte.weight"))}
    assert len(tables) == 1
    codes = {n for n in changed - learnt - tables if n.endswith(".weight")}
    assert codes
    others = changed - learnt - tables - codes
    assert others
    assert all(n.endswith((".weight_scale", ".weight_zero", ".weight_table")) for n in others)
    assert any(n.endswith(".weight_table") for n in changed) == form.startswith("table")
    if family == "mixtral":
        assert not any(".experts." in n for n in changed)


def test_the_loss_is_that_of_the_stored_bytes(family_checkpoints, text, tmp_path, monkeypatch):
    """The phase computes layer by layer what transformers' model computes with the checkpoint's weights and norms."""
    from lowq_cli.hf.load import load_model

    dense = family_checkpoints("llama", schemes={}, positions=32).dense
    quicken(monkeypatch, 3)
    seen, loss = [], EndToEnd.loss
    monkeypatch.setattr(EndToEnd, "loss", lambda self, *a: seen.append(loss(self, *a)) or seen[-1])
    list(pipeline.run(dense, recipe(text, lm_head="keep"), tmp_path / "o"))
    with open_source(dense) as a, open_source(tmp_path / "o") as b, torch.no_grad():
        original, quantized = (load_model(source, "cpu", torch.float32) for source in (a, b))
        ids = texts.Text.read(text).windows(load_tokenizer(a), 1 << 20, original)
        p, q = (m(input_ids=ids).logits.log_softmax(-1) for m in (original, quantized))
    assert seen[1] < seen[0]
    assert float((p.exp() * (p - q)).sum(-1).mean()) == pytest.approx(seen[1], rel=2e-2)


@pytest.mark.parametrize("own", [False, True], ids=["given", "own"])
def test_twice_the_same_bytes_also_behind_an_interruption_in_each_phase(own, family_checkpoints, short, tmp_path):
    dense = family_checkpoints("llama", schemes={}, positions=32).dense
    asked = recipe("self", calib_tokens=4096) if own else recipe(short)
    list(pipeline.run(dense, asked, tmp_path / "first"))
    for stop in (LayerDone, PassDone):
        events = pipeline.run(dense, asked, tmp_path / "again")
        while not isinstance(next(events), stop):
            pass
        events.close()
    passes = [e for e in pipeline.run(dense, asked, tmp_path / "again") if isinstance(e, PassDone)]
    assert len(passes) == requirements.MORE_PASSES - 1
    assert weights(tmp_path / "again") == weights(tmp_path / "first")


@pytest.mark.parametrize(("family", "head"), [("llama-tied", "keep"), ("llama-tied", "auto"), ("gemma3", "keep")])
def test_each_pass_reads_its_own_part_of_what_the_model_wrote(family, head, family_checkpoints, tmp_path, monkeypatch):
    """The original's predictions on a part are those of the walk: the first part, entered once more, has the same loss."""
    dense = family_checkpoints(family, schemes={}, positions=32).dense
    entered, losses, enter, loss = [], [], EndToEnd._enter, EndToEnd.loss

    def entering(self, ids, *given):
        entered.append(ids)
        return enter(self, ids, *given)

    def measured(self, logits, words, start, targets, others):
        first = loss(self, logits, words, start, targets, others)
        if not losses:
            words = enter(self, torch.cat(words), start, targets, others, self.blocks.inside(tables[0]))
            losses.append((first, loss(self, logits, words, start, targets, others)))
        return first

    tables, made = [], Calibration._tables
    monkeypatch.setattr(Calibration, "_tables", lambda self: tables.append(made(self)) or tables[-1])
    monkeypatch.setattr(EndToEnd, "_enter", entering)
    monkeypatch.setattr(EndToEnd, "loss", measured)
    overrides = ["embed_tokens=8:16"] if head == "auto" else []
    asked = recipe("self", lm_head=head, calib_tokens=4096, overrides=overrides)
    read = [e for e in pipeline.run(dense, asked, tmp_path / "o") if isinstance(e, PassDone)]
    assert [e.part for e in read] == list(range(1, requirements.MORE_PASSES + 1))
    assert bool(tables[0]) == (head == "auto")
    assert losses[0][1] == pytest.approx(losses[0][0], rel=1e-4)
    assert len(entered) == requirements.MORE_PASSES  # all but the first pass's, and the first again for the last loss
    assert len({tuple(ids.flatten().tolist()) for ids in entered}) == requirements.MORE_PASSES


@pytest.mark.parametrize(("method", "bits", "form", "parts"), [
    ("distill", 2, "lowq", requirements.MORE_PASSES), ("distill", 4, "table-e4m3", requirements.MORE_PASSES),
    ("distill", 3, "lowq", 1), ("gptq", 2, "lowq", 1),
])  # fmt: skip
def test_the_model_writes_a_part_for_each_pass_that_starts_from_gptq(method, bits, form, parts, family_checkpoints):
    dense, cpu = family_checkpoints("llama-tied", schemes={}).dense, torch.device("cpu")
    asked = make_recipe(bits=bits, group=16, method=method, format=form, calib_tokens=4096)
    with open_source(dense) as source:
        decided, outlook, line = own_text_plan.decide(str(dense), source, asked, cpu)
    assert decided.calib == "self"
    assert outlook.parts == parts
    assert f"own text, {parts * 4096:,} tokens" in line


def test_codes_that_too_few_steps_cannot_move_cost_nothing(family_checkpoints, short, tmp_path, monkeypatch):
    """The same bytes as with their training, which takes 12 bytes a weight."""
    monkeypatch.setattr(end_to_end, "rates", requirements.rates)
    trained = []

    class Watched(end_to_end.Grid):
        def __init__(self, *given):
            super().__init__(*given)
            trained.append(self.moved is not None)

    monkeypatch.setattr(end_to_end, "Grid", Watched)
    dense = family_checkpoints("llama-tied", schemes={}, positions=32).dense
    list(pipeline.run(dense, recipe(short, 3), tmp_path / "still"))
    assert trained
    assert not any(trained)
    trained.clear()
    monkeypatch.setattr(end_to_end, "can_move", lambda *_: True)
    list(pipeline.run(dense, recipe(short, 3), tmp_path / "moving"))
    assert all(trained)
    assert weights(tmp_path / "still") == weights(tmp_path / "moving")


@pytest.mark.parametrize("steps", [2, 20, 72, 84, 200])
def test_no_gradients_move_a_code_that_is_said_to_stay(steps):
    """Gradients that grow by b2 / b1 a step make Adam's longest steps."""
    rate = requirements.TOGETHER[3][2]
    code = torch.zeros(1, requires_grad=True)
    optimizer = adam([{"params": [code], "lr": rate}], torch.device("cpu"))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / WARM, 1 - step / steps)
        code.grad = torch.full((1,), -((0.95 / 0.9) ** step))
        optimizer.step()
    assert requirements.can_move(rate, steps) == (steps > 84)
    assert (float(code.detach()) > 0.5) == (steps > 84)


@pytest.mark.parametrize(("bits", "still"), [(2, False), (3, True), (4, True), (8, False)])
def test_a_plan_says_where_codes_cannot_move(bits, still, family_checkpoints, tmp_path):
    dense, notes, sizes = family_checkpoints("llama-tied", schemes={}).dense, [], []
    for tokens in (65536, 262144):
        given = make_recipe(bits=bits, group=16, method="distill", calib=texts.BUNDLED, calib_tokens=tokens)
        with prepare.prepare(dense, given, tmp_path / "out", "cpu", headers_only=True) as run:
            notes.append([n for n in run.plan.notes if "distill trains no codes of" in n])
            layers = [i for i in run.plan.items if i.scheme and i.kind != "embedding"]
            weights, steps = sum(i.params for i in layers), requirements.step_count(tokens, 4)
            sizes.append([requirements.trains_codes(i, weights, steps) for i in layers])
    assert [len(n) for n in notes] == [still, 0]
    assert all(requirements.step_count(65536, 4) == int(n.split(": ")[1].split()[0]) for n in notes[0])
    assert sizes == [[bits == 2] * len(sizes[0]), [bits != 8] * len(sizes[1])]


def test_a_result_that_is_not_better_is_not_used(family_checkpoints, short, tmp_path, monkeypatch):
    dense = family_checkpoints("llama", schemes={}, positions=32).dense
    quicken(monkeypatch, 5000)
    for method in ("distill", alone(2)):
        list(pipeline.run(dense, recipe(short, method=method), tmp_path / method))
    assert weights(tmp_path / "distill") == weights(tmp_path / alone(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["llama-tied", "gemma3", "mixtral", CONVOLVED, LINEAR], ids=str)
def test_recorded_steps_have_the_losses_of_steps_that_are_not(family, family_checkpoints, text, tmp_path, monkeypatch):
    """Steps with experts are not recorded: the rows that an expert computes depend on values."""
    dense = family_checkpoints(family, schemes={}, positions=32).dense
    losses, steps = {}, []

    def recorded(*how):
        steps.append(Recorded(*how))
        return steps[-1]

    for way, made in (("recorded", recorded), ("plain", lambda work, *_: work)):
        monkeypatch.setattr(end_to_end, "Recorded", made)
        losses[way] = [e.loss for e in pipeline.run(dense, recipe(text), tmp_path / way) if isinstance(e, PassDone)]
    assert losses["recorded"] == pytest.approx(losses["plain"], rel=1e-3)
    assert all(step.graph for step in steps)
    assert bool(steps) == (family != "mixtral")
