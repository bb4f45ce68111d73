"""What a drafter computes after passes drawn at random, by simulated CUDA graphs and launched: equal states, equal guesses.

Passes have steps, pieces of prompts that end there or do not, that begin in the middle, and drafts; the drafter has followed
some or all of their sequences. Rows only fill up passes, prompts are too long for recordings, recordings fail.
"""

import itertools
import math
import random
from unittest.mock import Mock, patch

import pytest
import torch
from simulated_graphs import OPS, Recording, as_a_gpu_computes, as_on_a_gpu, as_recorded
from test_device_drafts import ASSISTANT, TARGETS, made

from lowq_cli.engine.batch import KeyValues
from lowq_cli.engine.plan import Plan, plan_of
from lowq_cli.engine.state import BLOCK
from lowq_cli.serving import device_drafts
from lowq_cli.serving.batch_state import BatchState
from lowq_cli.serving.device_drafts import DeviceDrafts, Rows
from lowq_cli.serving.draft_passes import FEWEST
from lowq_cli.serving.pass_sizes import buckets
from lowq_packers.arch.parts import Pages

ON_A_CPU = [pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run in Triton's interpreter")]
BY_KERNELS = "by Triton's kernels"
KINDS = (
    *("EAGLE-3", "DFlash", "MTP of deepseek_v3", "another model"),
    *(
        pytest.param(f"{kind}, {BY_KERNELS}", marks=[*ON_A_CPU, pytest.mark.more])
        for kind in ("another model", "EAGLE-3", "MTP of deepseek_v3")
    ),
    *(
        pytest.param(kind, marks=pytest.mark.more)
        for kind in ("EAGLE-3.1", "P-EAGLE", "DSpark", "MTP of glm4_moe", "MTP of mimo", f"{ASSISTANT}{TARGETS[0]}", "itself")
    ),
)
WIDTH = 4  # blocks of a sequence
TOTALS = [4, 32, 48]  # rows of passes with pieces of prompts
PASSES = 48


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    kind, _, triton = request.param.partition(", ")
    model, drafter = made(kind, tmp_path_factory.mktemp("kind"))
    drafter.plan.ops, plan_of(model).ops = OPS, OPS
    drafter.plan.refold()
    drafter.most = min(drafter.most, 3)
    if triton:
        pytest.importorskip("triton")
    with as_on_a_gpu() if triton else as_recorded():
        if triton:
            as_a_gpu_computes(drafter.plan)
        yield plan_of(model), drafter


class Side:
    """A drafter over keys and values of its own. count: its rows of sequences."""

    def __init__(self, plan, drafter, count):
        self.rows = BatchState(count, [WIDTH], torch.device("cpu"), separate=True)
        for row in range(count):
            self.rows.set_table(0, row, range(1 + row * (WIDTH - 1), 1 + (row + 1) * (WIDTH - 1)))
        self.rows.flush()
        g = torch.Generator().manual_seed(1)

        def pages(spec):
            shape = (1 + count * (WIDTH - 1), spec.heads, BLOCK)
            k, v = (torch.randn(*shape, D, generator=g).to(plan.dtype) if D else None for D in (spec.k_dim, spec.v_dim))
            return KeyValues(k, v, self.rows.tables[0])

        of_model = [pages(spec) if isinstance(spec, Pages) else None for spec in plan.states]
        state = [*(pages(spec) for spec in drafter.plan.states), *drafter.lent(of_model)]
        self.drafts = DeviceDrafts(drafter, self.rows, state, WIDTH * BLOCK)

    def held(self):
        """What may not differ: all but what belongs to no sequence."""
        tensors = [t[1:] for one in self.drafts.state for t in (one.k, one.v) if t is not None]
        return [*tensors, self.rows.guesses[: self.rows.null_row].float()]


def sizes_for(most):
    """Rows of passes with drafts, as those of a GPU have them for `most` sequences."""
    return sorted({*FEWEST, *(n for n in buckets(most) if n >= FEWEST[0]), *TOTALS})


class Passes:
    """Passes of a model that is not there: its hidden states and tokens are drawn at random, the same for all sides."""

    def __init__(self, rng, plan, drafter, sides, most):
        self.rng, self.layers, self.most, self.sides = rng, drafter.layers, most, sides
        self.sizes = sizes_for(most)
        self.vocabulary, self.hidden, self.K = drafter.plan.vocabulary, plan.model.hidden, drafter.most
        self.g, self.lengths = torch.Generator().manual_seed(rng.randrange(1 << 30)), {}  # row -> tokens that were read
        self.longest = (WIDTH - 1) * BLOCK - drafter.reach - 2

    def tokens(self, n):
        return torch.randint(3, min(self.vocabulary, 150), (n,), generator=self.g)

    def noted(self, rows):
        """Hidden states of a pass, of no more rows than there are or of some more."""
        P = self.rng.choice([rows, rows + self.rng.randint(0, 9), next((t for t in TOTALS if t >= rows), rows)])
        return {i: torch.randn(P, self.hidden, generator=self.g) for i in (*self.layers, -1)}

    def drawn(self, rows):
        """Move sequences on: what a pass draws for them."""
        new = self.tokens(len(rows))
        for side in self.sides:
            for row, token in zip(rows, new, strict=True):
                side.rows.token[row] = token
                side.rows.pos[row] = self.lengths[row]

    def ended(self, row):
        """Whether a sequence has no room for another pass, or ends all the same; its row is free then."""
        if self.lengths[row] + 20 > self.longest or self.rng.random() < 0.2:
            del self.lengths[row]
        return row not in self.lengths

    def plain(self):
        rng, running = self.rng, [row for row in list(self.lengths) if not self.ended(row)]
        before = [side.rows.token.clone() if not self.layers else None for side in self.sides]
        steps = rng.sample(running, rng.randint(0, len(running)))
        b, pieces, taken = max(running, default=-1) + 1, [], []
        for row in (row for row in range(self.most) if row not in self.lengths):
            if rng.random() < 0.4:
                break
            first, n = rng.choice([0, 0, rng.randint(1, 90)]), rng.choice([1, 1, 2, 3, rng.randint(4, 30), rng.randint(16, 70)])
            table, ends, known = rng.choice([row, self.most + row]), rng.random() < 0.7, self.tokens(n + 1).tolist()
            pieces.append(Rows(table, b, row if ends else -1, n, first, known[:n], known[1 : n + (not ends)]))
            b += n + rng.choice([0, 0, 3])  # rows of sequences that the drafter does not follow
            if ends:
                taken.append((row, first + n))
        if not steps and not pieces:
            return None
        for row in steps:
            self.lengths[row] += 1
        self.lengths |= dict(taken)
        self.drawn([*steps, *(row for row, _ in taken)])
        hidden, K = self.noted(max(b, 1)), rng.choice([0, *range(1, self.K + 1)])
        at = [Rows(row, row, row) for row in steps]
        both = zip(self.sides, before, strict=True)
        guesses = [side.drafts.passed(at, pieces, hidden, last, K) for side, last in both]
        for side in self.sides:  # sequences whose prompts have ended get the blocks that these were read into
            tables = side.rows.tables[0]
            for one in (one for one in pieces if one.row >= 0):
                tables[one.row], tables[one.table] = tables[one.table].clone(), tables[one.row].clone()
        return guesses

    def drafted(self):
        rng, running = self.rng, [row for row in list(self.lengths) if not self.ended(row)]
        if not running:
            return None
        counts = [rng.randint(1, 1 + self.K) for _ in running]
        M = next((size for size in self.sizes if size >= sum(counts)), None)
        if M is None:
            return None
        right = [rng.randint(0, n - 1) for n in counts]
        accepted = torch.zeros(M, dtype=torch.int64)
        accepted[: len(right)] = torch.tensor(right)
        result = torch.cat((self.tokens(M), accepted, self.tokens(M)))
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        for row, n in zip(running, right, strict=True):
            self.lengths[row] += n + 1
        self.drawn(running)
        order = sorted(rng.sample(range(len(running)), rng.randint(1, len(running))))
        texts = [Rows(running[i], firsts[i], running[i], counts[i]) for i in order]
        hidden = {i: torch.randn(M, self.hidden, generator=self.g) for i in (*self.layers, -1)}
        K = rng.choice([0, *range(1, self.K + 1)])
        return [side.drafts.checked(texts, order, hidden, result, K) for side in self.sides]


# max. rows of a recording, where no kernel takes the experts of the drafter's layers
LIMITS = [(seed, (math.inf, 2, 8, 40)[seed % 4]) for seed in range(1, 18)]


@pytest.mark.parametrize(
    ("seed", "limit"), [(0, math.inf), (0, 5), *(pytest.param(*one, marks=pytest.mark.more) for one in LIMITS)]
)
def test_recordings_compute_what_is_computed_without(both, seed, limit):
    """Recorded one after another while passes come; or at the start, and then no pass without drafts is recorded any more."""
    plan, drafter = both
    rng, most, fails = random.Random(seed), (3, 2, 1, 4, 5, 9)[seed % 6], seed % 6 in (1, 4)
    launched, recorded = sides = [Side(plan, drafter, 2 * most) for _ in range(2)]
    runner, made, interpreted = Recording(), 0, drafter.plan.ops.name == "triton"
    count = PASSES // 4 if interpreted else PASSES
    if fails:
        capture, full = runner.capture, Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
        runner.capture = lambda *how: (full if rng.random() < 0.1 else capture)(*how)
    with patch.object(Plan, "most_recorded", limit):
        rows = device_drafts.recorded(drafter, recorded.drafts.state, sizes_for(most), TOTALS)
    recorded.drafts.record(runner, *rows, most)
    noted = {i: torch.randn(9, plan.model.hidden) for i in (*drafter.layers, -1)}
    left = [recorded.drafts.combinations(noted) for _ in range(2)]
    at_first, passes = seed % 3 == 0, Passes(rng, plan, drafter, sides, most)
    with torch.inference_mode(), patch.object(device_drafts, "SLOTS", rng.choice([400, 3000, 1 << 20])):
        while at_first and left:
            left = left if next(left[0], False) else left[1:]
        for _ in range(count):
            while left and rng.random() < 0.6:
                left = left if next(left[0], False) else left[1:]
            known, drafted = len(runner.graphs), rng.random() < 0.3
            guesses = passes.drafted() if drafted else passes.plain()
            assert not at_first or drafted or len(runner.graphs) == known
            if guesses is not None and guesses[0] is not None:
                assert torch.equal(*guesses)
                made += 1
            for mine, theirs in zip(launched.held(), recorded.held(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert made > count // 4
    assert sum(graph.replays for graph in runner.graphs) > count // 4 or fails
    assert not interpreted or any({"_attend_rows_kernel", "_past_kernel"} & graph.kernels for graph in runner.graphs)
    sizes = [(M, N) for graphs in recorded.drafts.graphs.values() for M, N, *_ in graphs._recorded]
    assert max(itertools.chain(*sizes)) <= limit
    assert fails or {graphs.reason for graphs in recorded.drafts.graphs.values()} == {""}
