"""Heads and draft models in the server: each answer is the one without, and what is guessed is what the drafter guesses of that
text read whole, alone: among others, in pieces, from a beginning that the cache held.
"""

import json
import math
import sys
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import asking
import numpy as np
import pytest
import torch
from asking import ON_GPU, Client, check_all
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "heads"))
import publishing as pub
from test_assistants import TARGETS, assistant
from test_assistants import guessed as guessed_by_assistant
from test_blocks import made as block
from test_heads import WITH_MTP, eagle, native, states_of

from lowq_cli.engine.batch import KeyValues
from lowq_cli.engine.drafts import heads
from lowq_cli.engine.drafts.drafter import GUESSED, DraftRows, Guess
from lowq_cli.engine.drafts.drafter_choice import served
from lowq_cli.engine.drafts.model import ModelDrafter
from lowq_cli.engine.drafts.ngram import NGram
from lowq_cli.engine.drafts.rates import BEFORE, Rates
from lowq_cli.engine.mixer_steps import AttendLatent
from lowq_cli.engine.model_record import tuned_by
from lowq_cli.engine.plan import Plan, plan_of
from lowq_cli.hf.experts import FEW_ROWS
from lowq_cli.serving.device_drafts import NUMBERS, Rows, recorded, why_not
from lowq_cli.serving.draft_budget import choose
from lowq_cli.serving.draft_graphs import MOST, After, DraftGraphs
from lowq_cli.serving.draft_passes import FEWEST, MOST_ROWS
from lowq_cli.serving.draft_rounds import MISSED, SHORT
from lowq_cli.serving.guessing import Guessed
from lowq_cli.serving.pass_sizes import RECORDED, TOTALS
from lowq_kernels.decode.mixture import FEW_TOKENS

STOPS = (2,)  # as the models' configs have it
WORDS = SimpleNamespace(eos_token_id=None, decode=lambda ids, **kw: "x" * len(ids))
HEADS = {
    "EAGLE-3": lambda folder: eagle(folder, "SpecForge"),
    "EAGLE-3.1": lambda folder: eagle(folder, "EAGLE-3.1"),
    "P-EAGLE": lambda f: pub.speculators(f, pub.peagle_tensors(), speculators_model_type="peagle", mask_token_id=7),
    "DFlash": lambda folder: block(folder, "z-lab's"),
    "DSpark": lambda folder: block(folder, "DeepSpec, rnn"),
}
ASSISTANT = "assistant of "
KINDS = (
    *HEADS,
    *(f"{ASSISTANT}{family}" for family in TARGETS),
    *(f"MTP of {family}" for family in WITH_MTP),
    "itself",
    "another model",
)


def prompts(*lengths, seed=3):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, pub.VOCAB, (n,), generator=g).tolist() for n in lengths]


def made(kind, folder, device="cpu", dtype="float32"):
    """A model and what drafts for it."""
    family = kind.removeprefix("MTP of ").removeprefix(ASSISTANT)
    make, _, more = WITH_MTP.get(family, (None, None, {}))
    named = family if make or kind.startswith(ASSISTANT) else "llama"
    pub.target(folder / "model", named, max_position_embeddings=512, **more)
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    if make:
        pub.with_heads(folder / "model", make, *([4] if make is pub.nextn else []))
    model = native(folder / "model", torch.device(device))
    tuned_by(model, str(folder / "model"))
    if kind.startswith(ASSISTANT):
        assistant(folder / "head", family)
        return model, heads.load(str(folder / "head"), model)
    if kind in HEADS:
        HEADS[kind](folder / "head")
        return model, heads.load(str(folder / "head"), model)
    if make:
        return model, heads.inside(model)
    if kind == "itself":
        return model, ModelDrafter(plan_of(model), "itself", pub.VOCAB)
    pub.target(folder / "other", max_position_embeddings=512, intermediate_size=48)
    return model, ModelDrafter(plan_of(native(folder / "other", torch.device(device))), "another", pub.VOCAB)


# on a GPU in fp32; others are compared in half precision, below
ELSEWHERE = ("EAGLE-3", "MTP of deepseek_v3", "MTP of glm4_moe")


@pytest.fixture(scope="module", params=[*KINDS, *(pytest.param(f"{kind}, on a GPU", marks=ON_GPU) for kind in ELSEWHERE)])
def both(request, tmp_path_factory):
    kind, _, gpu = request.param.partition(", ")
    return made(kind, tmp_path_factory.mktemp("kind"), "cuda" if gpu else "cpu")


def always(client, ahead=False):
    """The client's engine with guesses that are made after every pass, and checked, whatever they bring. ahead: as on a GPU.

    client.kept: by sequence number, each guess with the number of tokens that it goes on from.
    """
    drafts, client.kept = client.engine.drafts, defaultdict(list)
    if ahead:
        client.engine.pipeline.ahead = 1
        drafts.go_ahead()
    guessing = drafts._guessing

    def keep(texts, flight, guesses):
        guessing(texts, flight, guesses)
        for text, guess in zip(texts, [] if guesses is None else guesses.tolist(), strict=False):
            client.kept[text.number].append((int(drafts.rows.pos[text.row]) + 1, guess))

    drafts._guessing = keep
    check_all(drafts)
    believed = Believed([BEFORE] * drafts.guesses.drafter.most)
    drafts.wanted = lambda drafted: drafts.guesses.drafter.most
    drafts.drafter = lambda: Trusting(believed, NGram())
    return client


class Believed(Rates):
    """Rates that no check changes."""

    def note(self, checked, accepted):
        pass


class Trusting(Guessed):
    """Guesses of the drafter whenever there are some, believed."""

    def __init__(self, *how):
        super().__init__(*how)
        self.rates.note = lambda *_: None
        self.rates.begin([0.9] * len(self.rates.tried))


@pytest.fixture(params=["results read first", "passes launched ahead"])
def client(both, request):
    if both[1].plan.device.type == "cuda" and request.param != "passes launched ahead":
        pytest.skip("a GPU's passes are launched ahead")
    clients = []

    def make(**how):
        clients.append(always(Client(both[0], draft=both[1], **how), request.param == "passes launched ahead"))
        return clients[-1]

    yield make
    for c in clients:
        c.engine.stop(0)


alone = partial(asking.alone, tokenizer=WORDS)


def counted(c):
    s = c.engine.stats()
    assert 0 < s.drafted >= s.accepted
    assert (s.running, s.waiting, s.blocks_used) == (0, 0, 0)
    return s


def asked(c, *texts, **how):
    """Texts at once; their answers, and what was guessed for each."""
    numbers = [c.ask(p, n, stop=STOPS, **how) for p, n in texts]
    return c.tokens(*numbers), [c.kept[number] for number in numbers]


def reference(model, drafter, text, n, K):
    """What a drafter guesses after n tokens of a text, which it has read whole."""
    t, device = n - 1, plan_of(model).device
    ids = torch.tensor(text[:n], device=device)
    if drafter.plan.model.lent:
        return guessed_by_assistant(drafter, model, ids, K, 512)
    drafter.make_room(1, 512)
    pos, zeros = (torch.arange(t, dtype=torch.int32, device=device), torch.zeros(t, dtype=torch.int64, device=device))
    layers = drafter.layers
    hidden = dict(zip(layers, states_of(model, layers, ids[:t], 512), strict=True)) if layers else {}
    before = {i: h[: t - 1] for i, h in hidden.items()}
    drafter.read(ids[1:t] if layers else ids[: t - 1], before, DraftRows(pos[: t - 1], zeros[: t - 1], t - 1))
    if not layers:
        drafter.read(ids[t - 1 : t], {}, DraftRows(pos[t - 1 :], zeros[:1], 1))
    last = {i: h[t - 1 :] for i, h in hidden.items()}
    return drafter.draft(ids[t:], last, DraftRows(pos[t - 1 :], zeros[:1], 1), zeros[:1], K)[0].tolist()


def test_answers_and_guesses_are_those_alone(both, client):
    model, drafter = both
    texts = [(p, 12) for p in prompts(3, 70, 64, 40)]
    expected = [alone(model, *one) for one in texts]
    c = client(running=3)
    result, kept = asked(c, *texts)
    assert result == expected
    s = counted(c)
    assert s.accepted >= 0.7 * s.drafted or drafter.name != "model itself"  # but where a text passes its last block
    for (prompt, _), answer, guesses in zip(texts, expected, kept, strict=True):
        assert guesses
        for n, guess in guesses[:: max(1, len(guesses) // 3)]:
            text = prompt + answer
            # past a text's last block a first guess may stand where nothing is held
            K = len(guess) if n % 64 and n % 64 + drafter.reach < 64 else 1
            with torch.inference_mode():
                assert guess[:K] == reference(model, drafter, text, n, len(guess))[:K]


FEW = ["EAGLE-3", "MTP of qwen3_5_text", "itself", pytest.param("MTP of glm4_moe, on a GPU", marks=ON_GPU)]


@pytest.mark.parametrize("both", FEW, indirect=True)
def test_thirty_two_at_once_and_cancellations(both, client):
    model, _ = both
    texts = [(p, 10) for p in prompts(*(5 + 2 * i for i in range(32)), seed=9)]
    expected = [alone(model, *one) for one in texts[::4]]
    c = client(running=32)
    numbers = [c.ask(p, n, stop=STOPS) for p, n in texts]
    for i in (1, 9, 30):
        while not c.heard.get(numbers[i]):
            c.hear()
        c.engine.cancel(numbers[i])
    assert c.tokens(*numbers)[::4] == expected
    counted(c)


@pytest.mark.parametrize("both", FEW, indirect=True)
def test_a_cache_too_small_for_all(both, client):
    """Texts that are put back are read again, by the drafter, too."""
    model, _ = both
    texts = [(p, 40) for p in prompts(*(34 + 7 * i for i in range(6)), seed=5)]
    expected = [alone(model, *one) for one in texts]
    c = client(running=6, cache_tokens=320)
    assert c.tokens(*[c.ask(p, n, stop=STOPS) for p, n in texts]) == expected
    counted(c)


def long_answer(model):
    """A prompt of more than two blocks whose answer does not end early."""
    for seed in range(9):
        [prompt] = prompts(130, seed=seed)
        if len(answer := alone(model, prompt, 16)) == 16:
            return prompt, answer
    raise AssertionError("every answer ends early")


def test_a_beginning_from_the_cache_is_known_to_the_drafter(both, client):
    """The same request again, and one that begins with its answer: found in the cache, guessed as the first time."""
    model, _ = both
    prompt, answer = long_answer(model)
    c = client(running=2)
    (first, [once]), (again, [twice]) = (asked(c, (prompt, 16)) for _ in range(2))
    assert first == again == [answer]
    assert c.engine.stats().prefix_hits > 0
    both_times = {n for n, _ in once} & {n for n, _ in twice}
    assert both_times
    assert {n: g for n, g in once if n in both_times} == {n: g for n, g in twice if n in both_times}
    counted(c)


def same(kept, others):
    """Whether texts had the same guesses wherever both times had some: where, depends on which requests came first."""
    pairs = [(dict(a), dict(b)) for a, b in zip(kept, others, strict=True)]
    return all(a.keys() & b.keys() and all(a[n] == b[n] for n in a.keys() & b.keys()) for a, b in pairs)


class Recording:
    """Recordings on a CPU: what is computed again from the same tensors when it is replayed, and not while it is recorded."""

    pool, device = None, torch.device("cpu")

    def __init__(self):
        self.replays = []  # of each recording

    def capture(self, step, pool):
        i = len(self.replays)
        self.replays.append(0)

        def replay():
            self.replays[i] += 1
            step()

        return SimpleNamespace(replay=replay)


def test_what_a_drafter_computes_after_passes_is_recorded(both, client):
    """For few numbers of rows, so that some rows and sequences only fill up; answers and guesses are those without."""
    model, _ = both
    texts = [(p, 20) for p in prompts(3, 70, 64, 40, 12)]
    without = client(running=5)
    without.engine.drafts.guesses.graphs = {}
    expected, guesses = asked(without, *texts)
    c, runner = client(running=5), Recording()
    of, on_gpu = c.engine.drafts.guesses, c.engine.device.type == "cuda"
    if not on_gpu:
        of.record(runner, [4, 8, 16, 32, 64], [32, 64, 128, 256], 5)
        asked(c, *texts)
        with torch.inference_mode():
            hidden = {i: torch.zeros(64, h.shape[1]) for i, h in c.engine.passes.noted.items()}
            of.warm(hidden)
            recorded = len(runner.replays)
            for _ in range(2):
                assert all(of.combinations(hidden))
            assert len(runner.replays) >= recorded + 3 * both[1].most
    result, kept = asked(c, *texts)
    assert result == expected == [alone(model, *one) for one in texts]
    assert same(kept, guesses)
    assert {graphs.reason for graphs in of.graphs.values()} == {""}
    assert all(of.graphs[compute, False]._recorded for compute in (of.write, of.guess))
    assert on_gpu or all(of.graphs[of.keep, pieces]._recorded for pieces in (False, True))
    assert of.graphs[of.write, True]._recorded or not of.totals
    assert on_gpu or sum(runner.replays) > 0
    counted(c)


@pytest.mark.parametrize("both", FEW[:2], indirect=True)
def test_what_cannot_be_recorded_is_launched(both, client):
    texts = [(p, 24) for p in prompts(3, 40)]
    expected, guesses = asked(client(running=2), *texts)
    c, runner = client(running=2), Recording()
    runner.capture = Mock(side_effect=RuntimeError("operation not permitted\nwhen stream is capturing"))
    c.engine.drafts.guesses.record(runner, [4, 8, 16, 32, 64])
    result, kept = asked(c, *texts)
    assert result == expected
    assert same(kept, guesses)
    reasons = {graphs.reason for graphs in c.engine.drafts.guesses.graphs.values()}
    assert "operation not permitted when stream is capturing" in reasons
    assert runner.capture.call_count <= 4  # the first product of a thread cannot be recorded, the next one can


def graphs_of(runner, compute=lambda numbers, after: [torch.zeros(after.N, after.K, dtype=torch.int64)]):
    """Recordings, and a function that runs what comes after a pass of these sizes."""
    graphs = DraftGraphs(runner, compute)
    numbers = np.zeros((NUMBERS, 4), np.int32)
    return graphs, lambda K: graphs.run(numbers, After({-1: torch.zeros(4, 8)}, M=4, N=2, K=K))[0]


def test_without_memory_for_a_recording_it_is_launched():
    """Also where the tensors that it would read have no room."""
    graphs, run = graphs_of(Recording())
    run(2)
    with patch.object(torch, "empty_like", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
        for reason in ("", "CUDA out of memory"):
            assert run(2).shape == (2, 2)
            assert graphs.reason == reason
    assert run(2).shape == (2, 2)


def test_a_launch_that_loads_kernels_or_records_is_not_repeated_and_the_balance_is_told():
    runner = Recording()
    graphs, run = graphs_of(runner)
    fresh = [run(K) is None or graphs.fresh for K in (2, 2, 2, 2, 3, 2)]
    assert fresh == [True, True, False, False, True, False]
    runner.capture = Mock(side_effect=RuntimeError("cannot be recorded"))
    fresh = [run(K) is None or graphs.fresh for K in (3, 3, 4)]
    assert fresh == [True, True, False]


def test_the_number_of_recordings_has_a_limit():
    runner = Recording()
    graphs, run = graphs_of(runner)
    for K in range(1, MOST + 9):
        assert run(K).shape == run(K).shape == (2, K)
    assert len(runner.replays) == MOST
    assert run(1).shape == (2, 1)
    assert sum(runner.replays) == MOST + 1
    assert graphs.reason


@pytest.mark.parametrize("both", ["EAGLE-3", "MTP of deepseek_v3", "MTP of glm4_moe"], indirect=True)
def test_passes_are_recorded_as_far_as_a_drafters_own_layers_can_be(both):
    """Whatever the model's can: here its experts are dense, which no kernel takes, or the host groups those of many tokens.
    Where only prompts cannot be recorded, passes with drafts are."""
    drafter = both[1]
    state = [KeyValues(torch.zeros(1), None) for _ in drafter.plan.states]

    def most(refuse=None, waits=False):
        latent = replace(drafter.plan.ops.latent, refuse=lambda *call: refuse)
        with patch.object(drafter.plan, "ops", replace(drafter.plan.ops, latent=latent, packed_waits=lambda *call: waits)):
            return [max(rows, default=0) for rows in recorded(drafter, state, (*FEWEST, 32, 64, 128, MOST_ROWS), TOTALS)]

    dense = drafter.name == "MTP"
    assert most() == ([FEW_ROWS // 2, 0] if dense else [MOST_ROWS, RECORDED])  # two experts for each token
    latents = any(isinstance(step, AttendLatent) for step in drafter.plan.steps)
    with patch.object(Plan, "most_recorded", math.inf):
        drafted, totals = most()
        assert [drafted, totals] == ([FEW_TOKENS, FEW_TOKENS] if dense else [MOST_ROWS, RECORDED])
        assert most(refuse="no kernel") == [drafted, 0 if latents else totals]
        assert most(waits=True) == [drafted, totals if latents else 0]


@pytest.mark.parametrize("both", ["EAGLE-3", "itself"], indirect=True)
def test_where_prompts_cannot_be_recorded_steps_are(both):
    c, runner, recording = always(Client(both[0], draft=both[1], running=2)), Recording(), []
    guesses, keep = c.engine.drafts.guesses, both[1].keep

    def refusing(ids, hidden, batch, held):
        if recording and batch.groups is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        keep(ids, hidden, batch, held)

    def capture(step, pool):
        recording.append(step)
        try:
            step()
        finally:
            recording.clear()
        return SimpleNamespace(replay=step)

    runner.capture = capture
    guesses.record(runner, [4, 8], [32, 64], 2)
    with torch.inference_mode(), patch.object(both[1], "keep", refusing):
        hidden, before = (
            {i: torch.zeros(8, pub.H) for i in (*both[1].layers, -1)},
            None if guesses.shifted else guesses.rows.token,
        )
        for compute, M in [(compute, M) for compute in (guesses.write, guesses.keep) for M in guesses.totals] * 2:
            after = After({i: hidden[i] for i in both[1].layers}, None, before, M, 2, pieces=True)
            guesses._run(compute, guesses._none(M), after)  # before anything else, as the first users' prompts come
        for _ in range(2):
            assert all(guesses.combinations(hidden))
    c.engine.stop(0)
    assert {compute.__name__ for (compute, pieces), one in guesses.graphs.items() if pieces and one.reason} == {"write", "keep"}
    assert all(one._recorded and not one.reason for (_, pieces), one in guesses.graphs.items() if not pieces)


@pytest.mark.parametrize("both", ["EAGLE-3"], indirect=True)
def test_what_fills_up_a_pass_with_prompts_reads_no_sequence(both):
    """A prompt ends beside a text of many tokens, where many more sequences could: these are not copies of that text."""
    c, written = always(Client(both[0], draft=both[1], running=16)), []
    guesses, write = c.engine.drafts.guesses, both[1].write
    guesses.record(Recording(), [4, 8, 16], [32], 16)
    hidden = {i: torch.zeros(9, pub.H) for i in (*both[1].layers, -1)}
    of, pieces = [Rows(0, 0, 0)], [Rows(1, 1, 1, 3, 0, [5, 6, 7], [6, 7]), Rows(2, 4, -1, 4, 0, [5] * 4, [5] * 4)]
    look = lambda ids, states, batch, held: written.append(batch.pos.tolist()) or write(ids, states, batch, held)  # noqa: E731
    with torch.inference_mode(), patch.object(both[1], "write", look):
        guesses.rows.pos[0], guesses.rows.pos[1] = 400, 3
        assert guesses.passed(of, pieces, hidden, None, 2).shape == (2, 2)
    c.engine.stop(0)
    assert written == [[399, 2, *[0] * 14]]


@pytest.mark.parametrize("both", ["EAGLE-3"], indirect=True)
def test_passes_of_more_rows_than_any_with_drafts_are_not_recorded(both, client):
    """Such as one with a prompt that the drafter does not read: a recording would keep the hidden states of all its rows."""
    c, runner = client(running=2), Recording()
    c.engine.drafts.guesses.record(runner, [4, 8])
    guesses = c.engine.drafts.guesses
    rows = [Rows(0, 0, 0)]
    with torch.inference_mode():
        guesses.rows.pos[0] = 4
    for P in (8, 8, 9, 9):
        noted = {i: torch.zeros(P, pub.H) for i in (*both[1].layers, -1)}
        with torch.inference_mode():
            assert guesses.passed(rows, [], noted, None, 2).shape == (1, 2)
    assert runner.replays == [1, 3]  # what reads 8 rows, and what guesses after any number of them


@pytest.mark.parametrize("both", ["EAGLE-3"], indirect=True)
def test_without_memory_to_load_kernels_beforehand_an_engine_goes_on(both, client):
    c, full = client(running=2), torch.OutOfMemoryError("CUDA out of memory")
    drafts, hidden = c.engine.drafts, {i: torch.zeros(256, pub.H) for i in (*both[1].layers, -1)}
    drafts.passes.captured[drafts.passes.sizes[-1], False] = SimpleNamespace(noted=hidden), None
    drafts.guesses.record(Recording(), [4, 8, 256])
    with patch.object(drafts.guesses, "warm", side_effect=full):
        drafts.warm()
    assert not drafts.record_next()
    with torch.inference_mode():
        drafts.warm()
        assert drafts.record_next()
        with patch.object(drafts.guesses, "_run", side_effect=full):
            assert not drafts.record_next()
    assert not drafts.record_next()
    drafts.passes.captured.clear()
    assert c.tokens(c.ask(prompts(9)[0], 4))


def refusing(c, waits):
    """The client's engine with drafts that do not pay while `waits()`."""
    none = {"passed": lambda *_: None, "interrupted": int, "plain_s": lambda n: 0.0, "give_up": lambda n: None}
    c.engine.drafts._trials = SimpleNamespace(allows=lambda n: not waits(), waits=lambda n: waits(), **none)
    c.engine.drafts.unpaid = SHORT if waits() else 0
    read, guesses = [], c.engine.drafts.guesses
    for name in ("passed", "checked"):
        of = getattr(guesses, name)
        setattr(guesses, name, lambda *args, of=of: read.append(args) or of(*args))
    return read


@pytest.mark.parametrize("client", ["passes launched ahead"], indirect=True)
@pytest.mark.parametrize("both", ["EAGLE-3", "MTP of deepseek_v3", "itself", FEW[-1]], indirect=True)
def test_guesses_that_the_host_has_not_read_are_checked_and_right_as_often(both, client):
    """N-grams that promise more are checked after the passes in flight are read: here those of answers that come again."""
    model, drafter = both
    texts = [(p, 40) for p in prompts(40, 60)]
    expected = [alone(model, *one) for one in texts]

    def known(c):
        """By draft that is checked, whether the host knows its tokens."""
        checked, run = [], c.engine.drafts.passes.run
        c.engine.drafts.passes.run = lambda texts: checked.extend(t.tokens[1:] for t in texts) or run(texts)
        for _ in range(2):
            assert c.tokens(*[c.ask(*one, stop=STOPS) for one in texts]) == expected
        return [GUESSED not in tokens for tokens in checked if tokens]

    c = client(running=2)
    assert known(c).count(False) > 10
    s = counted(c)
    if drafter.name == "model itself":
        assert s.accepted > 0.9 * s.drafted - 8 * drafter.most  # a text's last guesses pass its end
    other = client(running=2)
    drafts = other.engine.drafts
    drafts.drafter = lambda: Guessed(Rates([0.3] * drafter.most), NGram(drafts._answers))
    assert known(other).count(True) > 3


@pytest.mark.parametrize("both", ["EAGLE-3", "itself", FEW[-1]], indirect=True)
def test_a_text_that_is_drawn_on_the_host_has_its_guesses_read_before_they_are_checked(both, client):
    """Also where the pass after its own was one of prompts alone: such a pass is launched before its own is read."""
    model, _ = both
    [first, second] = prompts(9, 70)
    c = client(running=2)
    checked, run, null = [], c.engine.drafts.passes.run, c.engine.passes.rows.null_row
    c.engine.drafts.passes.run = lambda texts: checked.extend(t.tokens[1:] for t in texts if t.target == null) or run(texts)
    c.engine._pauses = lambda high, waiting: True
    early, later = c.ask(first, 60, stop=STOPS, logprobs=0), []
    for i in range(6):
        while len(c.heard.get(early, [])) < 4 * (i + 1) and not any(e.finish_reason for e in c.heard.get(early, [])):
            c.hear()
        later.append(([i + 3, *second], 2))
        assert c.tokens(c.ask(*later[-1], stop=STOPS)) == [alone(model, *later[-1])]
    assert c.tokens(early) == [alone(model, first, 60)]
    assert checked
    assert not [tokens for tokens in checked if GUESSED in tokens]


@pytest.mark.parametrize("both", ["EAGLE-3", "DFlash", "itself", FEW[-1]], indirect=True)
def test_guesses_past_a_prompts_blocks_are_written_to_none_of_another_text(both, client):
    """A prompt of few blocks is read in the row of one that had more, whose blocks are in the cache for its next request."""
    c = client(running=2)
    [first, second] = prompts(150, 61)
    asked(c, (first, 1))
    pool, state = c.engine.scheduler.cache.pages[0].pool, c.engine.drafts.guesses.state
    known = sorted(pool.names)
    before = [one.k[known].clone() for one in state]
    assert len(known) == 2
    asked(c, (second, 1))
    assert all(torch.equal(one.k[known], k) for one, k in zip(state, before, strict=True))


@pytest.mark.parametrize("both", ["EAGLE-3", "DFlash", "itself", f"{ASSISTANT}{TARGETS[0]}", FEW[-1]], indirect=True)
def test_guesses_for_no_sequence_are_made_however_many_passes_there_were(both, client):
    """Rows that only fill up a pass count a position that nobody resets; what is left to record is computed for no sequence,
    and changes nothing that one has."""
    model, _ = both
    texts = [(p, 12) for p in prompts(20, 70)]
    c = client(running=2)
    asked(c, *texts)
    while c.engine._unrecorded:  # on a GPU the idle engine records, and takes the rows of ended texts out of use
        time.sleep(0.01)
    guesses, device = c.engine.drafts.guesses, c.engine.device
    rows, of_model = guesses.rows, [one for one in c.engine.passes.state if isinstance(one, KeyValues)]
    assert rows.pos[rows.null_row] > 0

    def held():
        tensors = [one.k[1:] for one in (*of_model, *guesses.state)] + [rows.guesses[: rows.null_row], rows.token, rows.pos]
        return [t.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in tensors]  # some are NaN

    recorded = vars(guesses) | {}
    vars(guesses).update(sizes=[1, 2, 4, 8], totals=[32, 64], most=2, graphs={})
    with torch.inference_mode():
        rows.pos[rows.null_row] = 1 << 20
        before, hidden = held(), {i: torch.zeros(8, h.shape[1], device=device).to(h) for i, h in c.engine.passes.noted.items()}
        guesses.warm(hidden)
    assert all(map(torch.equal, held(), before))
    vars(guesses).update(recorded)
    assert asked(c, *texts)[0] == [alone(model, *one) for one in texts]


@pytest.mark.parametrize("both", FEW[:3], indirect=True)
def test_a_drafter_reads_nothing_while_drafts_do_not_pay(both, client):
    model, _ = both
    texts, off = [(p, 14) for p in prompts(3, 70, 40)], [True]
    c = client(running=3)
    read = refusing(c, lambda: off[0])
    result, kept = asked(c, *texts)
    assert result == [alone(model, *one) for one in texts]
    assert (read, kept) == ([], [[], [], []])
    off[0] = False
    again, kept = asked(c, *[([*p, 5], n) for p, n in texts])
    assert again == [alone(model, [*p, 5], n) for p, n in texts]
    assert read
    assert all(kept)


@pytest.mark.parametrize("both", FEW[:3], indirect=True)
def test_a_sequence_that_the_drafter_lacks_rows_of_gets_no_guesses_of_it(both, client):
    """It begins while drafts do not pay; another one begins when they do again, and its guesses are those alone."""
    model, drafter = both
    first, second = prompts(40, 20)
    expected = [alone(model, first, 60), alone(model, second, 12)]
    c, off = client(running=2), [True]
    refusing(c, lambda: off[0])
    early = c.ask(first, 60)
    while early not in c.heard:
        c.hear()
    off[0] = False
    late = c.ask(second, 12, stop=STOPS)
    assert c.tokens(early, late) == expected
    assert early not in c.kept
    n, guess = c.kept[late][0]
    with torch.inference_mode():
        assert guess[:1] == reference(model, drafter, second + expected[1], n, len(guess))[:1]


@pytest.mark.parametrize("both", FEW[:3], indirect=True)
def test_a_drafter_goes_on_reading_while_drafts_do_not_pay_for_a_few_passes(both, client):
    """As while a second user comes for one short answer."""
    model, _ = both
    c, off, [prompt] = client(running=2), [False], prompts(40)
    read = refusing(c, lambda: off[0])
    begun = c.engine.drafts.begin_turn
    turns = iter(range(10_000))

    def turn(*how):
        off[0] = 10 <= next(turns) < 10 + SHORT // 2
        begun(*how)

    c.engine.drafts.begin_turn = turn
    [answer], [kept] = asked(c, (prompt, 150))
    assert [answer] == [alone(model, prompt, 150)]
    assert len(read) >= SHORT // 2
    assert max(n for n, _ in kept) > 40 + SHORT // 2


@pytest.mark.parametrize("both", FEW[:3], indirect=True)
def test_a_sequence_that_is_read_again_from_its_beginning_is_followed(both, client):
    c = client(running=2)
    [prompt], drafts = prompts(9), c.engine.drafts
    text = SimpleNamespace(drafter=drafts.drafter())
    drafts.follows = False
    assert not drafts._read(text)
    drafts.follows = True
    assert not drafts._read(text)
    assert not drafts._read(text, first=3)
    assert drafts._read(text, first=0)
    assert drafts._read(text)
    assert c.tokens(c.ask(prompt, 4, stop=STOPS))


def test_after_a_long_delay_guesses_are_tried_again(both, client):
    """Passes that had no guesses, as they were believed to be late, cannot show that they are not."""
    model, drafter = both
    c = Client(model, draft=drafter, running=1)
    costs, [prompt] = c.engine.drafts.costs, prompts(9)
    costs.gap_s = costs.late_s = 10.0
    c.engine.drafts._trials = None
    c.tokens(c.ask(prompt, 4))
    assert costs.gap_s == 10.0
    for seed in range(30):
        c.tokens(c.ask(prompts(9, seed=seed)[0], 12))
    c.engine.stop(0)
    assert costs.gap_s < 1.0 > costs.late_s


@pytest.mark.parametrize("both", ["itself"], indirect=True)
def test_drafts_wait_for_other_sequences_where_the_drafter_has_missed_most(both):
    """A trial of drafts begins among texts that it has not read. That it can guess for none of them says nothing for a time."""
    c, given_up, passes = Client(both[0], draft=both[1], running=1), [], []
    drafts, [prompt], off = c.engine.drafts, prompts(9), SHORT + 20
    check_all(drafts)
    allows = lambda n: len(passes) > off  # noqa: E731
    noted = lambda size, tokens, n, now, once, away_s: passes.append(once)  # noqa: E731
    how = {"passed": noted, "interrupted": int, "plain_s": lambda n: 0.0, "waits": lambda n: not allows(n)}
    give_up = lambda size: given_up.append(len(passes))  # noqa: E731
    drafts._trials, drafts._latest = SimpleNamespace(allows=allows, give_up=give_up, **how), lambda texts: None
    with patch.object(NGram, "guess", lambda *_: Guess()):
        c.tokens(c.ask(prompt, off + MISSED + 40))
        assert not any(passes[:off])
        assert all(passes[off + 2 : -2])
        [end] = given_up
        assert abs(end - off - MISSED) < 4
        c.tokens(c.ask(prompts(9, seed=1)[0], 40))
    c.engine.stop(0)
    assert not passes[-1]
    assert c.engine.stats().drafted > 0


@pytest.mark.parametrize("both", ["itself"], indirect=True)
def test_passes_beside_prompts_do_not_turn_drafts_off(both):
    """They take none, whatever these would bring."""
    c, passes = Client(both[0], draft=both[1], running=2), []
    drafts, [prompt] = c.engine.drafts, prompts(9)
    check_all(drafts)
    noted = lambda size, tokens, n, now, once, away_s: passes.append(once)  # noqa: E731
    none = {"passed": noted, "interrupted": int, "plain_s": lambda n: 0.0, "waits": lambda n: False}
    drafts._trials, drafts._latest = SimpleNamespace(allows=lambda n: True, **none), lambda texts: None
    with patch.object(type(c.engine.scheduler), "admits", True), patch.object(drafts, "_misses_most", lambda plan: True):
        c.tokens(c.ask(prompt, 40))
    c.engine.stop(0)
    assert len(passes) > 30
    assert not any(passes)


def test_drawn_texts_and_all_that_requests_ask_for_besides(both, client):
    model, _ = both
    asked = [(p, 12) for p in prompts(40, 33, 20, 27, seed=6)]
    plain = Client(model, running=4)
    draws = ({"temperature": 0.8, "seed": 11}, {}, {"logprobs": 1, "repetition_penalty": 1.3})
    draws += ({"temperature": 0.7, "seed": 5, "top_k": 20, "top_p": 0.95},)

    def told(c):
        numbers = [c.ask(p, n, stop=STOPS, **how) for (p, n), how in zip(asked, draws, strict=True)]
        return c.tokens(*numbers)

    expected = told(plain)
    plain.engine.stop(0)
    c = client(running=4)
    assert told(c) == expected
    counted(c)


def test_the_drafter_is_named_or_the_reason_for_none(both):
    model, drafter = both
    for how, why in (({}, f"{drafter.name}, ngram"), ({"deterministic": True}, "none (the same kernels")):
        c = Client(model, draft=drafter, **how)
        assert c.engine.drafts_by.startswith(why)
        assert (c.engine.drafts is None) == bool(how)
        c.engine.stop(0)


def test_a_text_takes_the_guesses_that_promise_more_and_n_grams_go_on_behind_the_drafters():
    shared = Rates([0.8, 0.8])
    text = Guessed(shared, NGram())
    text.begin([5, 6, 7, 8, 9, 10, 11, 5, 6])
    alone = text.guess(4)
    assert alone.tokens[:3] == [7, 8, 9]
    text.give([7, 8])
    result = text.guess(6)
    assert list(result.tokens) == [7, 8, 9, 10, 11, 5]
    assert result.chances[:2] == [0.8, 0.8]
    text.give([3, 4])
    assert list(text.guess(6).tokens) == [3, 4]
    assert text.guess(6).own == 2
    for _ in range(200):
        text.checked(2, 0)
    text.give([3, 4])
    assert max(text.rates.chances[0], shared.chances[0]) < 0.5
    assert text.guess(3).tokens[:3] == [7, 8, 9]
    text.extend([7])
    assert text.given == []


def test_guesses_that_are_not_read_yet():
    """A stand-in is given for each; n-grams do not go on after them."""
    text = Guessed(Rates([0.8, 0.8]), NGram())
    text.begin([5, 6, 7, 8, 9, 10, 11, 5])
    text.made = 2
    assert list(text.guess(6).tokens) == [GUESSED, GUESSED]
    text.extend([6])
    assert list(text.guess(6).tokens) == [GUESSED, GUESSED]
    for _ in range(200):
        text.checked(2, 0)
    text.made = 2
    assert text.guess(3).tokens == [7, 8, 9]
    assert text.guess(3).own == 0
    text.made = 0
    assert text.guess(3).tokens == [7, 8, 9]


@pytest.mark.parametrize(
    ("kind", "device"), [("EAGLE-3", "cpu"), *(pytest.param(kind, "cuda", marks=ON_GPU) for kind in (*HEADS, "itself"))]
)
def test_answers_in_half_precision_are_those_of_fp32_or_as_likely(kind, device, tmp_path):
    """And guesses are those of the drafter alone, but where two are as likely."""
    model, drafter = made(kind, tmp_path, device, "float16")
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "model").float()
    texts = [(p, 24) for p in prompts(3, 70, 64, 40, 9, 100)]
    c = always(Client(model, draft=drafter, running=3))
    result, kept = asked(c, *texts)
    c.engine.stop(0)
    counted(c)
    equal = []
    for (prompt, _), answer, guesses in zip(texts, result, kept, strict=True):
        with torch.inference_mode():
            logits = exact(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        short = logits.amax(-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert short.max() <= 0.004 * logits.abs().max()
        for n, guess in guesses[:: max(1, len(guesses) // 4)]:
            with torch.inference_mode():
                equal.append(guess[0] == reference(model, drafter, prompt + answer, n, len(guess))[0])
    assert sum(equal) >= 0.9 * len(equal) > 10


def test_as_many_are_guessed_as_bring_the_most():
    sizes, flat = list(range(2, 65)), lambda rows: 1.0 + 0.01 * rows
    sure = [(1, [0.9] * 7)]

    def rounds(chances, sequences, sizes, seconds, plain_s, guess_s):
        counts = choose(chances, sequences, sizes, seconds, plain_s, guess_s=guess_s).counts
        return max(counts.values(), default=0)

    assert rounds(sure, 1, sizes, flat, 1.0, 0.0) == 7
    assert 0 < rounds(sure, 1, sizes, flat, 1.0, 0.4) < 7
    assert rounds(sure, 1, sizes, flat, 1.0, 2.0) == 0
    assert rounds([(1, [0.05] * 7)], 1, sizes, flat, 1.0, 0.1) == 0
    full = [(i, [0.9] * 7) for i in range(32)]
    assert rounds(full, 32, sizes, lambda rows: float(rows), 32.0, 0.1) == 0


def test_a_drafter_needs_layers_that_keep_all_tokens(tmp_path):
    model, drafter = made("EAGLE-3", tmp_path)
    assert why_not(drafter, plan_of(model)) == ""
    pub.target(tmp_path / "mamba", "mamba2")
    mamba = native(tmp_path / "mamba")
    assert "keeps keys and values of all tokens" in why_not(drafter, plan_of(mamba))
    c = Client(mamba, draft=ModelDrafter(plan_of(model), "small", pub.VOCAB))
    assert c.engine.drafts_by.startswith("ngram (model small does not: none of its layers")
    [prompt] = prompts(9)
    assert c.tokens(c.ask(prompt, 12, stop=STOPS)) == [alone(mamba, prompt, 12)]
    c.engine.stop(0)


def test_the_kind_of_draft_of_a_server(tmp_path):
    """As its process loads a model: a head's folder, MTP of the checkpoint, another checkpoint, names."""
    model, _ = made("EAGLE-3", tmp_path)
    words = SimpleNamespace(get_vocab=dict)
    assert [served(name, model, words) for name in ("none", "ngram", "auto")] == ["none", "ngram", "ngram"]
    assert served(str(tmp_path / "head"), model, words).name == "EAGLE-3"
    (tmp_path / "model" / "draft").symlink_to(tmp_path / "head")
    assert served("auto", model, words).name == "EAGLE-3"
