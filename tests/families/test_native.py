"""Every described family by its plan, in fp32: transformers' logits whole, in pieces, side by side, after a rewind, and served.

Each fact of its description is one that shows: taken out, the logits are others.
"""

import sys
import threading
from copy import deepcopy
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from described import NAMES, TEXTS, WRAPPERS, config, here, shared
from described import model as random_model
from native import facts_of, logits_of, off, planned, shared_plan, texts, without

from emulation import sampled
from lowq_cli.engine import kernel_launches, weights
from lowq_cli.engine import steps as s
from lowq_cli.engine.batch import States
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.plan import plan_of
from lowq_cli.engine.sampling import Sampling
from lowq_cli.hf import experts
from lowq_cli.serving.cache_allocator import trial_runner
from lowq_cli.serving.continuous import ContinuousEngine
from lowq_cli.serving.prompt_chunk import Piece
from lowq_cli.serving.request import Request
from lowq_kernels.modules.stack import Stack
from lowq_packers.arch.parts import Attention, Norm, Router, walk

CLOSE = 1e-4  # relative, of logits in fp32: twenty times the largest seen, 4e-6 but for gated delta's 4e-5
SEEN = 1e-3
VOCAB = 160


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    """Whole texts; then prompts of different lengths in pieces of seven tokens, and token by token side by side."""
    theirs, decoder = shared(name), NativeDecoder(shared_plan(name))
    a, b = texts(VOCAB, 37, 21)
    result = decoder.logits(torch.tensor([a[:21], b]))
    assert off(result[0], logits_of(theirs, a[:21])) < CLOSE
    assert off(result[1], logits_of(theirs, b)) < CLOSE
    decoder.make_room(2, 60)
    decoder.chunk = 7
    decoder.start([a, b], Sampling(), 20)
    steps = []
    for _ in range(8):
        steps.append(decoder.sampler.logits.clone())
        for i, ids in enumerate((a, b)):
            ids.append(int(decoder.token[i]))
        decoder.step()
    for i, ids in enumerate((a, b)):
        for ours, wanted in zip(steps, logits_of(theirs, ids)[-9:-1], strict=True):
            assert off(ours[i], wanted) < CLOSE


@pytest.mark.parametrize("name", NAMES)
def test_precompiled_operations_find_their_inputs(name):
    """Every operation that has kernels on zeros, alone: on a GPU a failure here would delay compiling to the first use."""
    plan, of_torch = plan_of(shared_plan(name)), s.Keep | s.Take | s.Drop
    with torch.inference_mode():
        for prompt in (False, True):
            for launch in kernel_launches.step_launches(
                plan, plan.steps, 3, "16", prompt, lambda step: not isinstance(step, of_torch)
            ):
                launch()


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_is_rewound_and_the_text_goes_on(name):
    """Over a paged cache: a prompt, three rows of a draft that are wrong, then other tokens from where the draft began."""
    theirs, ours = shared(name), shared_plan(name)
    (ids, wrong, right) = texts(VOCAB, 30, 3, 5)
    with torch.inference_mode():
        runner = trial_runner(plan_of(ours), "16", 1, 64, False)
        runner.state = grown(runner)
        for group in range(len(runner.rows.tables)):
            runner.rows.set_table(group, 0, [1])
        runner.rows.set_slot(0, 1)
        runner.rows.flush()
        wanted = logits_of(theirs, ids + right)
        assert off(read(runner, 0, ids), wanted[len(ids) - 1]) < CLOSE
        runner.copy([(1, 2)])  # a snapshot of what recurrent layers remember
        assert off(read(runner, 30, wrong), logits_of(theirs, ids + wrong)[-1]) < CLOSE
        runner.copy([(2, 1)])
        assert off(read(runner, 30, right), wanted[-1]) < CLOSE


@pytest.mark.parametrize("name", WRAPPERS)
def test_tokens_that_stand_for_pictures_and_sound_are_read_as_transformers_reads_them(name):
    """In a text without any: some families give them another token's embedding, some their own."""
    made = config(name)
    fields = [f for f in vars(made) if f.endswith(("_token_id", "_token_index")) and isinstance(getattr(made, f), int)]
    ids = {f: 20 + i for i, f in enumerate(fields) if not f.startswith(("bos", "eos", "pad"))}
    theirs = random_model(name, outer=ids)
    ours = deepcopy(theirs)
    ((*text,),) = texts(VOCAB, 9)
    text += [token for placeholder in ids.values() for token in (placeholder, 5)]
    assert off(NativeDecoder(planned(ours)).logits(torch.tensor([text]))[0], logits_of(theirs, text)) < CLOSE


def grown(runner):
    """The runner's state with slots for a text and a snapshot."""
    made = [
        States({k: torch.zeros(3, *t.shape[1:], dtype=t.dtype) for k, t in one.tensors.items()})
        if isinstance(one, States)
        else one
        for one in runner.state
    ]
    runner.recurrent = [one for one in made if isinstance(one, States)]
    return made


def read(runner, first, tokens):
    """Logits of the last of some tokens of the text in row 0."""
    return runner.run(0, [Piece(0, first, tokens, 0, 1)], None)[0].clone()


def served(model, asked, n, **how):
    """The greedy tokens of texts that are asked for at once, and the engine's statistics."""
    engine, events, ended = ContinuousEngine(model, 64, **how), {}, threading.Event()
    numbers = []

    def sink(told):
        for number, e in told:
            events.setdefault(number, []).append(e)
        if len(numbers) == len(asked) and all(events.get(i) and events[i][-1].finish_reason for i in numbers):
            ended.set()

    engine.start(sink)
    numbers += [engine.submit(Request(tuple(ids), n)) for ids in asked]
    sink([])
    assert ended.wait(120)
    stats = engine.stats()
    engine.stop(1)
    assert {events[i][-1].finish_reason for i in numbers} == {"length"}, events[numbers[0]][-1]
    return [[e.token for e in events[i]] for i in numbers], stats


@pytest.mark.parametrize("name", sampled(NAMES, left=0))
def test_served_eight_at_once_they_are_as_alone(name):
    """Prompts of other lengths, two that begin as others do, a cache that is too small for all.

    Alone: each token is the likeliest after those before it, by the logits of the whole text.
    """
    model = shared_plan(name)
    asked = texts(VOCAB, 37, 70, 5, 90, 64, 65, 20)
    asked += [[*asked[3], 7, 8], [*asked[1][:64], 9, 9, 9]]
    answers, stats = served(model, asked, 4, running=8)
    assert stats.prefix_hits >= 64
    whole = torch.zeros(len(asked), max(map(len, asked)) + 4, dtype=torch.long)
    for row, ids, answer in zip(whole, asked, answers, strict=True):
        row[: len(ids) + 4] = torch.tensor(ids + answer)
    best = NativeDecoder(model).logits(whole).argmax(-1)
    for row, ids, answer in zip(best, asked, answers, strict=True):
        assert row[len(ids) - 1 : len(ids) + 3].tolist() == answer
    long = [i for i, ids in enumerate(asked) if len(ids) >= 64]  # two blocks each, of five
    assert served(model, [asked[i] for i in long], 4, running=4, cache_tokens=320)[0] == [answers[i] for i in long]


def idle(described, fact):
    """Whether a fact of a description changes nothing: a norm without weights commutes with the rotation, one group is all."""
    parts = list(walk(described))
    if fact == "norm_last":
        return not any(part.q_norm is not None and part.q_norm.name for part in parts if isinstance(part, Attention))
    if fact == "eps":  # OLMo's is a constant, which tiny models cannot make large
        return all(part.eps <= 1e-5 for part in parts if isinstance(part, Norm))
    return fact == "group_score" and all(part.groups[0] == part.groups[1] for part in parts if isinstance(part, Router))


@pytest.mark.parametrize("name", [*filter(here, TEXTS)])
def test_every_fact_of_a_description_shows(name):
    described, _ = weights.describe(shared(name).config)
    (ids,) = texts(VOCAB, 60)
    expected = logits_of(shared(name), ids)
    model = planned(random_model(name))
    for kind, fact in facts_of(described):
        if idle(described, fact):
            continue
        if fact == "embed_scale" and plan_of(model).scale == 1.0:  # transformers' module multiplies by it
            continue
        try:
            changed = NativeDecoder(planned(model, without(described, kind, fact))).logits(torch.tensor([ids]))[0]
        except Exception:  # tensors that no longer fit one another show it, too
            continue
        assert off(changed, expected) > SEEN, f"{kind}.{fact}"


def test_of_experts_without_a_kernel_only_small_steps_are_recorded():
    """A graph holds copies of the experts of every row: two of each here, of which 32 are few."""
    for name, largest in (("qwen3_moe", 16), ("llama", 128)):
        runner = trial_runner(plan_of(shared_plan(name)), "16", 128, 64, False)
        assert max(rows for _, rows in runner.sizes.recorded() if name == "qwen3_moe" or rows <= 128) == largest


def test_copies_of_experts_are_bounded():
    g = torch.Generator().manual_seed(0)
    x, weights = torch.randn(11, 24, generator=g), torch.randn(5, 16, 24, generator=g)
    taken = []

    class Counting(Stack):
        def take(self, chosen):
            taken.append(len(chosen))
            return super().take(chosen)

    ids, stack = torch.randint(0, 5, (11,), generator=g), Counting(weights, None, None, None, None, 16, 24, "rowstream")
    result = experts.row_by_row(x, ids, stack, copied=3 * weights[0].nbytes)
    assert off(result, torch.einsum("sk,snk->sn", x, weights[ids])) < 1e-6
    assert taken == [3, 3, 3, 2]
