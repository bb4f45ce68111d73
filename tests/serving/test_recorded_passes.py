"""Recorded passes of every size against the same passes launched, for sequences at the limits of what fits in them.

While a pass is recorded the host knows of no sequences. What a launcher decides there, the sizes of tensors and of grids, holds
for all replays. So each recording is replayed with what it may meet: one prompt that fills it, prompts of one token in as many
rows as may be, positions at the start, at the ends of blocks and at the end of a sequence, windows that have lost blocks,
drafts that are right and wrong, adapters of some rows, pictures that are cut. Kernels in Triton run in its interpreter.
"""

import random
import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from asking import adapter, build
from simulated_graphs import Shared, as_a_gpu_computes, as_on_a_gpu

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "families"))
import pictured

from lowq_cli.engine import lora
from lowq_cli.engine.batch import KeyValues, States
from lowq_cli.engine.pictures import Shown
from lowq_cli.engine.plan import plan_of
from lowq_cli.engine.state import BLOCK, recurrent
from lowq_cli.files.adapter import read_adapter
from lowq_cli.serving import pass_sizes
from lowq_cli.serving.batch_state import BatchState
from lowq_cli.serving.draft_passes import Checked, DraftPasses
from lowq_cli.serving.model_runner import ModelRunner
from lowq_cli.serving.prompt_chunk import Piece, most_ends
from lowq_cli.serving.scheduler import MOST_PREFILLING
from lowq_kernels.decode import prompt
from lowq_kernels.decode.reference import MOST_DRAFTS
from lowq_kernels.dispatch import registry
from lowq_packers.arch.parts import Pages, Recurrent

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run in Triton's interpreter")
MOST, WIDTH = 3, 3  # sequences that step; blocks of a sequence
# Rows of passes with prompts: those of kinds that read prompts by chunks of 64 tokens, of the others; of all in other seeds.
TOTALS, FEW, ALL = {"llama": (16, 64), "deepseek_v2": (64,), "qwen3_next": (64,), "lfm2": (64,)}, (16,), (16, 64, 144)
LONGEST = WIDTH * BLOCK
ADAPTERS, PASSES = 2, 4
ONE = {"num_hidden_layers": 1}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
MODELS = {  # settings, and kernels that passes launch
    "llama": (ONE, {"_attend_kernel", "_attend_prompt_kernel"}),
    "llama with adapters": (ONE, {"_shrink_rows_kernel", "_gate_rows_kernel"}),
    "gemma3_text": (
        {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]},
        {"_attend_kernel", "_attend_prompt_kernel"},
    ),
    "qwen3_moe": (
        ONE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {"_route_kernel", "_attend_prompt_kernel"},
    ),
    "deepseek_v2": (
        ONE | LATENT | {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        {"_absorb_kernel", "_past_kernel"},
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, {"_conv_kernel", "_conv_run_kernel"}),
    "qwen3_next": (
        ONE | DELTA | {"layer_types": ["linear_attention"], "num_experts": 0},
        {"_chunks_kernel", "_scan_kernel"},
    ),
}
SEEING = {"qwen3_vl": {"_prepare_kernel", "_attend_prompt_kernel"}, "llava": {"_attend_kernel", "_attend_prompt_kernel"}}
DRAFTED = ("llama", "gemma3_text", "qwen3_moe", "deepseek_v2")


@contextmanager
def calls():
    """What dispatch is asked for inside; but for lengths of prompts, on which no recorded kernel may depend."""
    made, resolve, prompt_call = set(), registry.resolve, prompt.PromptCall

    def resolved(call, kernel):
        made.add(call)
        return resolve(call, kernel)

    def of_prompts(*facts):
        made.add(replace(prompt_call(*facts), units=0, sequences=0))
        return prompt_call(*facts)

    with patch.object(registry, "resolve", resolved), patch.object(prompt, "PromptCall", of_prompts):
        yield made


# windows, experts, adapters, pictures; the other kinds take two minutes
DEFAULT = ("llama with adapters", "gemma3_text", "qwen3_moe", "llava")


def kinds(names):
    return [kind if kind in DEFAULT else pytest.param(kind, marks=pytest.mark.more) for kind in names]


@pytest.fixture(scope="module", params=kinds(MODELS))
def model(request, tmp_path_factory):
    """A kind of model, its plan with the operations of a GPU, and the kernels of its passes."""
    (settings, kernels), (family, _, adapted) = MODELS[request.param], request.param.partition(" ")
    with as_on_a_gpu():
        made = build(family, **settings)
        plan = as_a_gpu_computes(plan_of(made))
        if adapted:
            folder = tmp_path_factory.mktemp("adapters")
            lora.adapt(plan, [read_adapter(str(adapter(folder / str(i), made, i))) for i in range(ADAPTERS)])
        yield request.param, plan, kernels


@pytest.fixture(scope="module", params=kinds(SEEING))
def seeing(request):
    """The same of a kind that takes pictures."""
    with as_on_a_gpu(), patch.object(pass_sizes, "PICTURED", ()):  # as large ones take the interpreter minutes
        yield as_a_gpu_computes(plan_of(pictured.model(request.param))), SEEING[request.param]


class Side:
    """Passes of a model over caches and states of its own, which hold random numbers."""

    def __init__(self, plan, totals):
        self.windows = sorted({spec.window for spec in plan.states if isinstance(spec, Pages)})
        count, g, state = MOST + MOST_PREFILLING, torch.Generator().manual_seed(1), list[KeyValues | States]()
        self.rows = BatchState(count, [WIDTH + 1] * len(self.windows), torch.device("cpu"), separate=True)
        for spec in plan.states:
            if isinstance(spec, Recurrent):
                state.append(recurrent(spec, count + 1, plan.dtype, plan.device))
                for t in state[-1].tensors.values():
                    t.copy_(torch.randn(t.shape, generator=g))
                continue
            shape = (1 + count * WIDTH, spec.heads, BLOCK)
            k, v = (torch.randn(*shape, D, generator=g) if D else None for D in (spec.k_dim, spec.v_dim))
            state.append(KeyValues(k, v, self.rows.tables[self.windows.index(spec.window)]))
        self.passes = ModelRunner(plan, self.rows, MOST, state, (WIDTH + 1) * BLOCK)
        self.passes.sizes.padded, self.passes.sizes.totals = True, totals
        self.passes.noted = {}
        self.drafts = DraftPasses(self.passes)

    def record(self, pictures=False):
        """Record all passes, or all with pictures. Returns the recordings."""
        shared = Shared()
        self.passes.capture = shared.capture
        with torch.inference_mode(), patch.object(ModelRunner, "measure"):
            while pictures and self.passes.record_pictured():
                pass
            if not pictures:
                self.passes.record()
            assert self.passes.reason == ""
        return shared

    def clear(self):
        for row in range(self.rows.null_row):
            self.rows.clear(row)

    def put(self, row, pos, adapter, drawn=True, shift=0):
        """A sequence in a row, whose next token is at `pos`; windows have lost the blocks before them."""
        for group, window in enumerate(self.windows):
            lost = max(0, pos + 1 - window) // BLOCK if window else 0
            self.rows.set_table(group, row, [0] * lost + list(range(1 + row * WIDTH + lost, 1 + (row + 1) * WIDTH)))
        self.rows.place(row, 0, 0.0, pos, drawn, shift)
        self.rows.set_slot(row, 1 + row)
        self.rows.set_adapter(row, adapter)
        self.rows.token[row] = 7 + row

    def held(self):
        """What passes leave: newest tokens and positions, caches but for the null block, states but for slot 0."""
        tensors = [t[: self.rows.null_row] for t in (self.rows.token, self.rows.pos)]
        caches = [t[1:] for one in self.passes.state if isinstance(one, KeyValues) for t in (one.k, one.v) if t is not None]
        return [*tensors, *caches, *(t[1:] for one in self.passes.recurrent for t in one.tensors.values())]

    def run(self, steps, prompts):
        """A pass of steps (position, adapter, shift) and prompts (first position, adapter, tokens, whether it ends, pictures);
        returns logits and hidden states of the rows that count."""
        self.clear()
        for row, (pos, number, shift) in enumerate(steps):
            self.put(row, pos, number, shift=shift)
        pieces = list[Piece]()
        for row, (first, number, tokens, ends, shown) in enumerate(prompts, MOST):
            self.put(row, first, number, drawn=False)
            pieces.append(Piece(row, first, tokens, row if ends else -1, 1 + row, shown))
        self.rows.set_order(sorted(range(len(steps)), key=lambda row: -steps[row][0]))
        self.rows.flush()
        with torch.inference_mode():
            logits = self.passes.run(len(steps), pieces, np.arange(len(steps)))
        C = sum(len(p.tokens) for p in pieces)
        n, (b, _) = len(steps), self.passes.sizes.size(len(steps), C)
        drawn, rows = [*range(n), *range(b, b + sum(p.target >= 0 for p in pieces))], [*range(n), *range(b, b + C)]
        return logits[drawn], {i: h[rows] for i, h in self.passes.noted.items()}

    def check(self, sequences):
        """A pass with drafts of sequences (position, tokens); returns tokens, right drafts, rows' tokens, and logits."""
        self.clear()
        for row, (pos, _) in enumerate(sequences):
            self.put(row, pos, 0)
        self.rows.flush()
        with torch.inference_mode():
            result, logits = self.drafts.run([Checked(row, row, tokens) for row, (_, tokens) in enumerate(sequences)])
        n = sum(len(tokens) for _, tokens in sequences)
        drawn, right, own = result.chunk(3)
        return drawn[:n].tolist(), right[: len(sequences)].tolist(), own[:n].tolist(), logits[:n]


def place(rng, n):
    """Where n tokens of a sequence may stand: at its start, behind some, at the ends of blocks, at the end of all."""
    ends = [max(0, end - n) for end in (BLOCK, 2 * BLOCK, LONGEST)]
    return rng.choice([0, 0, min(1, ends[-1]), min(BLOCK, ends[-1]), *ends, rng.randint(0, ends[-1])])


def lengths(rng, most, count, each):
    """Lengths, `count` of them and `each` in one at most, that fill a pass of `most` rows or a part of it: limits first."""
    yield [min(most, each)]
    ones = [1] * min(count, most)
    yield ones if most <= 2 * count else [*ones[:-1], min(most - count + 1, each)]
    if most > 2:
        yield [min(most - 1, each), 1][:count]
    while True:
        left, made = rng.choice([most, most, rng.randint(1, most)]), list[int]()
        while left and len(made) < count:
            made.append(min(each, rng.choice([1, left, rng.randint(1, left)])))
            left -= made[-1]
        yield made


def shown_to(rng, plan, end):
    """A prompt of `end` tokens with pictures, whose features are random."""
    images, left, ids, pictures = plan.model.images, end, list[int](), []
    while left:
        size = rng.randint(1, 4), rng.randint(1, 5)
        seen = pictured.picture("qwen3_vl" if images.sections else "llava", rng.randrange(9), *size)
        text = rng.randint(0, min(left, 20))
        ids += [rng.randrange(20, 150) for _ in range(text)]
        left -= text
        if seen.rows <= left:
            ids += [images.token] * seen.rows
            left -= seen.rows
            pictures.append(seen)
    g, H = torch.Generator().manual_seed(rng.randrange(99)), plan.model.hidden
    features = [tuple(torch.randn(1 + images.deepstack, p.rows, H, generator=g)) for p in pictures]
    shown = Shown(images, ids, pictures)
    return shown.see([(first, more) for first, *more in features], plan.device, plan.dtype) if pictures else None, ids


def passes_of(rng, b, M, adapted, seeing=None):
    """Steps and prompts of passes of M rows, b of which step, as `Side.run` takes them. seeing: the plan of a model that takes
    pictures: some row has some."""
    of_prompts = lengths(rng, M - b, most_ends(M - b), M - b) if b < M else None
    while True:
        numbers, n = range(ADAPTERS + 1) if adapted else (0,), rng.choice([b, b, rng.randint(1, b)]) if 0 < b < M else b
        steps = [(pos, rng.choice(numbers), -rng.randint(0, pos) if seeing else 0) for pos in (place(rng, 1) for _ in range(n))]
        prompts = []
        for length in next(of_prompts) if of_prompts else ():
            first, number, ends = place(rng, length), rng.choice(numbers), not prompts or rng.random() < 0.5
            shown, tokens = None, [rng.randrange(3, 150) for _ in range(length)]
            if seeing and rng.random() < 0.8:
                shown, ids = shown_to(rng, seeing, first + length + rng.choice([0, 5]))
                tokens = ids[first : first + length]
            prompts.append((first, number, tokens, ends, shown))
        some = [number for _, number, *_ in (*steps, *prompts)] if adapted else [1]
        seen = [*(shift for *_, shift in steps), *(shown for *_, shown in prompts)] if seeing else [1]
        if any(some) and any(seen):
            yield steps, prompts


def compared(recorded, launched, *outputs):
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(recorded.held(), launched.held(), rtol=1e-4, atol=1e-4)


SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.more) for seed in (1, 2))])


@SEEDS
def test_recorded_passes_are_those_launched(model, seed):
    (kind, plan, kernels), rng = model, random.Random(seed)
    recorded, launched = (Side(plan, ALL if seed else TOTALS.get(kind, FEW)) for _ in range(2))
    with calls() as known:
        shared = recorded.record()
    keys = recorded.passes.sizes.keys
    assert len(shared.graphs) == len(keys)
    assert kernels <= {name for graph in shared.graphs for name in graph.kernels}
    for b, M, adapted in keys:
        for steps, prompts in islice(passes_of(rng, b, M, adapted), PASSES):
            with calls() as met:
                compared(recorded, launched, recorded.run(steps, prompts), launched.run(steps, prompts))
            assert met <= known
        assert recorded.passes.captured[b, M, adapted][0].own.replays >= PASSES - 1  # one at random may be a smaller pass


@SEEDS
def test_recorded_passes_with_pictures_are_those_launched(seeing, seed):
    """The places and features of pictures are in tensors that recordings read, and made anew for passes that are launched."""
    (plan, kernels), rng = seeing, random.Random(seed)
    recorded, launched = (Side(plan, ALL if seed else FEW) for _ in range(2))
    shared = recorded.record(pictures=True)
    assert kernels <= {name for graph in shared.graphs for name in graph.kernels}
    known = recorded.passes.showing
    assert known.keys() == set(recorded.passes.sizes.pictured())
    for b, M, adapted in known:
        for steps, prompts in islice(passes_of(rng, b, M, adapted, plan), PASSES):
            compared(recorded, launched, recorded.run(steps, prompts), launched.run(steps, prompts))
    assert all(graph.replays > 1 for graph in shared.graphs)


@SEEDS
def test_recorded_passes_with_drafts_are_those_launched(model, seed):
    """Some drafts are right: each pass is launched once before, and what it draws after rows are the drafts of the next."""
    (kind, plan, _), rng, right = model, random.Random(seed), 0
    if kind not in DRAFTED:
        pytest.skip("without drafts on a GPU")
    recorded, launched = Side(plan, FEW), Side(plan, FEW)
    shared = recorded.record()
    with torch.inference_mode(), patch.object(ModelRunner, "timed"):
        recorded.drafts.record()
    assert recorded.drafts.reason == ""
    for M in recorded.drafts.sizes:
        for counts in islice(lengths(rng, M, MOST, MOST_DRAFTS + 1), 3):
            sequences = [(place(rng, n), [rng.randrange(3, 300) for _ in range(n)]) for n in counts]
            for _ in range(2):
                drawn = iter(launched.check(sequences)[0])
                after = [[next(drawn) for _ in tokens] for _, tokens in sequences]
                known = rng.randint(1, MOST_DRAFTS)
                sequences = [(p, [t[0], *d[:-1][:known], *t[1 + known :]]) for (p, t), d in zip(sequences, after, strict=True)]
            ours = recorded.check(sequences)
            compared(recorded, launched, ours, launched.check(sequences))
            right += sum(ours[1])
    assert right
    assert all(graph.replays for graph in shared.graphs[-len(recorded.drafts.sizes) :])
