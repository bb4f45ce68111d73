"""When steps with drafts are recorded, on a simulated GPU; and recording in slices, emulated on a CPU."""

import random
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from simulated_gpu import SimulatedGPU

from lowq_cli.engine.drafts import drafting
from lowq_cli.engine.drafts.ngram import NGram
from lowq_cli.engine.drafts.recordings import AT_ONCE_S, Recordings
from lowq_cli.engine.expert_steps import Experts
from lowq_cli.engine.graph import Captured, keep
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.slices import Sliced
from lowq_cli.engine.stream import Generation
from lowq_packers.arch.parts import Recurrent

PLAIN_S = {"1b": 0.38e-3, "8b": 1.3e-3}
RECORD_S = {"1b": 2.5e-3, "8b": 5e-3}


@pytest.fixture(scope="module")
def demo():
    return ready("demo", "cpu")


def plan_of_steps(seconds, steps=(), states=(None,)):
    """A plan with as many bytes of weights, which have no memory, as make its steps take so many seconds."""
    weights = round((seconds - len(states) * drafting.LAYER_S) * drafting.READ)
    linears = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(weights, dtype=torch.uint8, device="meta"), False)])
    plan = SimpleNamespace(linears=linears, steps=steps, states=states)
    assert drafting.step_s(plan) == pytest.approx(seconds)
    return plan


@pytest.fixture
def gpu():
    """A simulated GPU with a model of a shape; its steps of 4 to 16 rows take 1.2 to 1.5 plain steps."""

    def make(shape, **how):
        plain = PLAIN_S[shape]
        plan = plan_of_steps(1.15 * plain, states=[None] * (32 if shape == "8b" else 16))
        assert drafting.is_large(plan)
        return SimulatedGPU(plan, lambda rows: plain * (1.0 if rows == 1 else 1.1 + 0.025 * rows), RECORD_S[shape], **how)

    return make


def text(n, copied, seed=0):
    """(prompt, answer of n tokens): of the answer a share `copied` repeats the prompt, in runs of 8 to 40 tokens."""
    rng = random.Random(seed)
    prompt, answer = [rng.randrange(5, 900) for _ in range(300)], []
    while len(answer) < n:
        run, at = rng.randrange(8, 40), rng.randrange(len(prompt) - 40)
        answer += prompt[at : at + run] if rng.random() < copied else [rng.randrange(5, 900) for _ in range(run)]
    return prompt, answer[:n]


@pytest.mark.half_of("shape", "new", "copied")
@pytest.mark.parametrize("shape", PLAIN_S)
@pytest.mark.parametrize("new", [32, 64, 250])
@pytest.mark.parametrize("copied", [0.0, 0.2, 0.5, 1.0])
def test_no_text_is_slower_than_by_plain_steps(demo, gpu, shape, new, copied):
    for seed in range(6):
        prompt, answer = text(new, copied, seed)
        plain, _ = gpu(shape).text(demo[1], prompt, answer, drafts=False)
        device = gpu(shape)
        for _ in range(3):  # the first, in which steps are recorded, and later ones
            assert plain / device.text(demo[1], prompt, answer)[0] >= 0.98
        assert not device.at_once
        assert len(set(device.in_slices)) == len(device.in_slices)


@pytest.mark.parametrize("shape", PLAIN_S)
def test_copying_is_faster_in_the_first_text_already(demo, gpu, shape):
    prompt, answer = text(250, 1.0)
    plain, _ = gpu(shape).text(demo[1], prompt, answer, drafts=False)
    device = gpu(shape)
    seconds, g = device.text(demo[1], prompt, answer)
    assert plain / seconds > 1.5
    assert g.drafting.about().endswith("recorded: " + ", ".join(map(str, sorted(device.in_slices))))


def test_a_text_that_never_copies_records_nothing(demo, gpu):
    device = gpu("8b")
    _, g = device.text(demo[1], *text(1000, 0.0))
    assert g.drafting.about().endswith("recorded: none")
    assert not device.in_slices + device.at_once + device.widths


def test_steps_have_only_widths_that_are_recorded(demo, gpu):
    device = gpu("8b")
    for seed in range(4):
        device.text(demo[1], *text(250, 0.7, seed))
        assert set(device.widths) <= set(device.in_slices)
    assert len(device.in_slices) > 1


def test_a_step_that_cannot_be_recorded_in_slices_is_recorded_at_once_when_it_has_paid_for_that(demo, gpu):
    device = gpu("8b", fails=True)
    device.text(demo[1], *text(64, 0.4))
    assert not device.at_once
    for seed in range(8):
        device.text(demo[1], *text(250, 1.0, seed))
    assert device.at_once
    assert not device.in_slices
    assert device.now > AT_ONCE_S


class Replayed:
    """A recorded step that is emulated: `replay` runs it."""

    def __init__(self, step, pool):
        self.replay, self.pool = step, lambda: pool


@pytest.fixture
def emulated(demo):
    """(decoder of the demo on a CPU as if on a GPU, recordings in slices as they come); a recording leaves no trace."""
    decoder, came = NativeDecoder(demo[0]), []

    def recorded(step, pool, ended):
        back = keep([*decoder.sampler.state, *(v.result for v in decoder.wide.values())])
        came.append(pool)
        step()
        ended()
        back()
        return Captured(Replayed(step, pool))

    decoder.capture_aside = recorded
    return decoder, came


@pytest.mark.parametrize("rows", [2, 5])
def test_a_step_recorded_in_slices_is_replayed(demo, emulated, rows):
    decoder, came = emulated
    decoder.drafts = True
    decoder.start([[5, 6, 7, 5, 6]], Sampling(), 60)
    decoder.graphs, decoder.run = True, Captured(Replayed(decoder.forward_step, "the plain step's memory"))
    step, before = decoder.verification(rows), decoder.sampler.logits
    step.lazy, step.repeated = False, None  # as on a GPU
    assert not step.ready
    launched = []
    slices = decoder.record_aside(rows, [lambda: launched.append(rows)])
    slices.lend(time.perf_counter() + 60)
    slices.finish()
    assert slices.error is None
    assert launched
    assert came == ["the plain step's memory"]
    assert step.ready
    assert decoder.sampler.logits is before
    assert not decoder.verify([3] * (rows - 1), rows).new
    assert decoder.sampler.logits is next(iter(step.captured.values())).logits


def test_a_text_with_steps_recorded_in_slices_is_the_text_without_drafts(demo, emulated):
    """The whole loop with its thread; a plain step is said to take so long that a recording ends within one."""
    _, tokenizer = demo
    decoder, _ = emulated

    def not_run(step, pool, ended):  # a recording runs nothing
        for _ in range(20):
            next(step.pause for step in decoder.wide.values() if step.pause)()
        ended()
        came.append(pool)
        step.__self__.logits = decoder.sampler.logits
        return Captured(Replayed(step, pool))

    decoder.capture_aside = not_run
    came = list[int]()
    prompt, texts = tokenizer("one two three four. " * 4)["input_ids"], []
    how = {"stop_ids": frozenset(), "stop": [], "limited_by": "length", "began": 0.0}

    class AsOnGPU:
        """The decoder, on another kind of device."""

        device, ahead, graphs = torch.device("cuda"), False, True

        def __getattr__(self, name):
            return getattr(decoder, name)

    for drafts in (False, True):
        decoder.drafts, decoder.held, decoder.graphs = drafts, [], False
        start = decoder.start

        def started(*args, start=start):
            token = start(*args)
            decoder.graphs, decoder.run = True, Captured(Replayed(decoder.forward_step, 0))
            decoder.run.logits = decoder.sampler.logits
            return token

        proxy = AsOnGPU()
        proxy.start = started
        drafter = drafting.FromHost(NGram(), proxy) if drafts else None
        if drafter:
            drafter.costs = lambda rows: 1.0
            drafter.recordings = proxy.recordings["ngram"] = Recordings(proxy, drafter.widths, drafter.step_s)
            drafter.balance = SimpleNamespace(allowed=True, plain_s=10.0, note=lambda *step: None)
        g = Generation(proxy, tokenizer, [prompt], Sampling(), 120, **how, drafting=drafter)
        list(g)
        texts.append(g.tokens)
    assert texts[0] == texts[1]
    assert came
    assert drafter.accepted


def test_a_failed_recording_is_told_and_the_work_ends(demo, emulated):
    decoder, _ = emulated
    decoder.drafts = True
    decoder.start([[5, 6, 7]], Sampling(), 60)
    decoder.run = Captured(Replayed(decoder.forward_step, 0))

    def refused(step, pool, ended):
        raise RuntimeError("operation not permitted when stream is capturing")

    decoder.capture_aside = refused
    step = decoder.verification(4)
    slices = decoder.record_aside(4, [])
    slices.finish()
    assert "not permitted" in str(slices.error)
    assert not step.ready


def test_work_runs_only_while_it_is_lent_time():
    done = []

    def work(slices):
        for i in range(50):
            slices.pause()
            done.append(i)

    slices = Sliced(work)
    assert not done
    slices.lend(time.perf_counter() - 1)
    assert not done
    while not slices.ended:
        before = len(done)
        slices.lend(time.perf_counter() - 1)
        assert len(done) == before
        slices.lend(time.perf_counter() + 1e-4)  # may be over before the work's thread runs
    slices.finish()
    assert done == list(range(50))


def test_work_that_is_not_lent_time_any_more_ends_by_itself():
    over = threading.Event()

    def work(slices):
        for _ in range(50):
            slices.pause()
        over.set()

    Sliced(work)
    assert over.wait(60)


def test_the_caller_goes_on_where_work_does_not_hand_back_control():
    gate, done = threading.Event(), []

    def work(slices):
        gate.wait(60)
        slices.pause()
        done.append(1)

    slices = Sliced(work)
    slices.lend(time.perf_counter() + 1e-3)  # the work waits for the gate
    slices.lend(time.perf_counter() + 3600)  # returns at once
    assert not done
    gate.set()
    slices.finish()
    assert done


def test_work_is_stopped_at_its_next_pause_unless_it_has_committed_itself():
    gate, done = threading.Event(), []

    def work(slices):
        done.append(1)
        gate.wait(60)
        slices.pause()
        slices.commit()
        done.append(2)

    slices = Sliced(work)
    slices.lend(time.perf_counter() + 1e-3)
    assert slices.stop()
    gate.set()
    slices.finish()
    assert done == [1]
    later = Sliced(work)
    later.finish()
    assert not later.stop()
    assert done == [1, 1, 2]


def test_a_next_text_does_not_wait_for_a_compiler(emulated):
    """The recording that is given up there is begun again once the compiler has returned."""
    decoder, _ = emulated
    decoder.drafts = True
    decoder.start([[5, 6, 7]], Sampling(), 60)
    decoder.run = Captured(Replayed(decoder.forward_step, 0))
    entered, gate = threading.Event(), threading.Event()

    def compiles():
        entered.set()
        gate.wait(60)

    def begin():
        rows.rates = {4: 1.0}
        rows.note(1, 100, True)
        rows.meanwhile(time.perf_counter() + 1e-3)

    rows = decoder.recordings["ngram"] = Recordings(decoder, (4,), 1e-3, lambda *a: [compiles])
    begin()
    assert entered.wait(60)
    decoder.make_room(1, 60)
    assert rows.slices is None
    begin()
    assert rows.slices is None
    gate.set()
    rows.stopped.finish()
    while not rows.ready:
        begin()
    assert rows.ready == [4]


def test_large_models_are_dense_ones_with_long_steps():
    assert [drafting.is_large(plan_of_steps(seconds)) for seconds in (1.3e-3, 0.45e-3, 0.1e-3)] == [True, True, False]
    assert not drafting.is_large(plan_of_steps(1.3e-3, steps=[object.__new__(Experts)]))
    assert not drafting.is_large(plan_of_steps(1.3e-3, states=[Recurrent(())]))


def test_a_command_does_not_wait_at_its_end_for_a_compiler():
    """The work sleeps in one call, as in a compiler, for longer than the test waits."""
    lines = ("import time, torch", "from lowq_cli import main", "from lowq_cli.engine.slices import Sliced")
    lines += ("s = Sliced(lambda s: time.sleep(600))", "s.lend(time.perf_counter() + 0.01)", "s.stop()", "main._end(7)")
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], timeout=120).returncode == 7
