"""How many threads a step takes, by a clock of the test's own, and that the C++ takes as many."""

import ctypes
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.sampling import Sampling
from lowq_cli.files.source import DEMO
from lowq_cli.run.pipeline import quantize
from lowq_cli.serving.cache_allocator import trial_runner
from lowq_kernels.decode import cpu
from lowq_kernels.products.cpu import native, team
from lowq_kernels.products.cpu.team import Team

TEXT = "Once upon a time there was a"


@pytest.fixture(autouse=True)
def threads():
    """torch's number, which tests set."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Clock:
    """Seconds that pass where a test says so."""

    now = 0.0

    def __call__(self):
        return self.now


def timed():
    return Team(Clock())


def run(of, n, seconds):
    """The threads of each of n steps of a team, whose seconds follow from its threads."""
    taken = []
    for _ in range(n):
        with of:
            taken.append(team.threads())
            of.clock.now += seconds(taken[-1])
    return taken


def quiet(threads):
    return 8.0 / threads


def late_beyond(free):
    return lambda threads: 8.0 / threads + 100 * max(0, threads - free)


def test_a_quiet_machine_tries_half_the_threads_once():
    for threads, taken in ((2, [2, 1] + 498 * [2]), (16, [16, 8] + 498 * [16]), (1, 500 * [1])):
        torch.set_num_threads(threads)
        assert run(timed(), 500, quiet) == taken


def test_late_from_the_start():
    assert run(timed(), 100, late_beyond(1)) == [2, 1, 2] + 97 * [1]
    assert run(timed(), 100, lambda threads: 8.0 if threads == 1 else 40.0)[5:] == 95 * [1]


def test_late_from_some_step_on_and_in_time_again():
    t = timed()
    run(t, 50, quiet)
    assert run(t, 100, late_beyond(1)) == [2] + 99 * [1]
    assert (after := run(t, 1000, quiet))[-500:] == 500 * [2]
    assert 1 in after


def test_trying_again_costs_little():
    taken = run(timed(), 5000, late_beyond(1))
    assert 5 < taken.count(2) < 5000 * 8 / 96 / team.PATIENCE * 1.2


def test_one_late_step_changes_nothing():
    t = timed()
    run(t, 50, quiet)
    assert run(t, 1, lambda _: 4 + 2 * team.LATE * 2) == [2]
    assert run(t, 50, quiet) == 50 * [2]


def test_the_time_of_half_the_threads_survives_a_bad_first_trial():
    t = timed()
    run(t, 1, quiet)
    assert run(t, 1, lambda _: 200.0) == [1]
    run(t, 50, quiet)
    assert run(t, 20, late_beyond(1)) == [2] + 19 * [1]


def test_where_fewer_threads_do_not_help_all_are_taken():
    taken = run(timed(), 2000, lambda threads: 200 + 8 / threads)
    assert taken.count(1) == 1


def test_many_threads_halve_until_they_have_cores():
    torch.set_num_threads(16)
    assert run(timed(), 60, late_beyond(2))[-1] == 2
    assert 1 not in run(timed(), 60, late_beyond(4))[-40:]


def test_steps_of_longer_texts_take_all_threads_still():
    t, taken = timed(), []
    for i in range(3000):
        taken += run(t, 1, lambda threads, i=i: (4 + i / 20) * 2 / threads)
    assert taken.count(1) < 300
    assert taken[-100:].count(1) < 50


def test_failed_steps_are_not_timed():
    t = timed()
    with pytest.raises(ZeroDivisionError), t:
        1 / 0  # noqa: B018
    assert not t.least
    assert team.threads() == torch.get_num_threads()


class Library:
    """The library, and the threads of what it is asked for."""

    def __init__(self, library):
        self.library, self.kinds, self.seen = library, (*cpu.ARGS, native.Args), []

    def lowq_cpu_run(self, which, calls, n):
        array = ctypes.cast(calls, ctypes.POINTER(native.Call)) if n > 1 else [calls._obj]
        for i in range(n):
            kind = self.kinds[array[i].what]
            self.seen.append(ctypes.cast(array[i].args, ctypes.POINTER(kind)).contents.threads)
        return self.library.lowq_cpu_run(which, calls, n)


@pytest.fixture
def library(monkeypatch):
    if native.library() is None:
        pytest.skip(f"lowq's CPU kernels are not in use: {native.why_not()}")
    watched = Library(native.library())
    monkeypatch.setattr(native, "library", lambda: watched)
    return watched


@pytest.fixture(scope="module")
def demo4(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "demo4"
    quantize("demo", out=out, bits=4, group=64, method="rtn")
    return out


def halved(times):
    """Steps of a quarter of the threads, or half of them, whatever time they take."""
    leader = Team()
    leader.ends = times * [math.inf]
    return team.Follower(leader)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_of_a_model_that_is_not_quantized_are_recorded_and_have_the_same_logits(dtype):
    logits = []
    for recorded in (True, False):
        decoder = NativeDecoder(AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype))
        decoder.start([list(range(5, 20))], Sampling(), 8)
        decoder.repeated = decoder.repeated if recorded else None
        for _ in range(4):
            decoder.step()
        assert not recorded or all(decoder.repeated.made.values())
        logits.append(decoder.sampler.logits.clone())
    assert torch.equal(*logits)


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_step_takes_the_threads_of_its_team_and_has_the_same_bits(library, demo4, times):
    torch.set_num_threads(4)
    model, tokenizer = ready(demo4, "cpu")
    decoder, prompt = decoder_of(model), [tokenizer(TEXT)["input_ids"]]
    logits = []
    for fewer in (0, times):
        decoder.start(prompt, Sampling(), 20)
        decoder.step()  # recorded in the first round
        decoder.repeated.team = halved(fewer)
        library.seen.clear()
        for _ in range(18):
            decoder.step()
        assert set(library.seen) == {4 >> fewer}
        logits.append(decoder.sampler.logits.clone())
    assert all(decoder.repeated.made.values())
    assert torch.equal(*logits)


def test_a_pass_of_the_server_takes_the_threads_of_its_team_too(library, demo4):
    torch.set_num_threads(4)
    passes = trial_runner(decoder_of(ready(demo4, "cpu")[0]).plan, "16", 2, 64, False)
    passes.teams |= {1: halved(0), 2: halved(1)}
    logits = []
    for n, taken in ((1, 4), (2, 2)):
        library.seen.clear()
        passes.rows.flush()
        with torch.inference_mode():
            logits.append(passes.run(n)[0].clone())
        assert set(library.seen) == {taken}
    assert torch.isfinite(torch.stack(logits)).all()
