"""Passes in flight: what each writes to the device and when, and the order in which their tokens are read."""

from types import SimpleNamespace

import pytest
import torch

from lowq_cli.serving.batch_state import BatchState
from lowq_cli.serving.pass_pipeline import PassPipeline
from lowq_cli.serving.pass_sizes import PassSizes
from lowq_cli.serving.request import Draw, Request
from lowq_cli.serving.scheduler import StepPlan
from lowq_cli.serving.sequence import Sequence, Table
from lowq_cli.serving.token_budget import TokenBudget

ROWS, WIDTH, CPU = 6, 4, torch.device("cpu")


class Runner:
    """Passes without a model: each samples its own number, and notes what the device's tables were."""

    def __init__(self):
        self.rows, self.device, self.sizes = BatchState(ROWS, [WIDTH], CPU, separate=True), CPU, PassSizes(ROWS, padded=False)
        self.token_budget, self.tables, self.plan = TokenBudget((32, 64)), [], SimpleNamespace(dtype=torch.float16)
        self.zeroed, self.logits = [], 0.0

    def zero(self, slots):
        self.zeroed += slots

    def copy(self, pairs):
        assert not pairs

    def adapted(self, n, rows):
        return False

    def run(self, n, pieces, drawn):
        self.tables.append(self.rows.tables[0].clone())
        self.rows.token[:] = len(self.tables)
        return torch.full((n + len(pieces), 3), self.logits)


def sequence(number, prompt=3, row=0, blocks=(), **how):
    text = Sequence(number, Request(tuple(range(prompt)), 8, **how))
    text.row, text.tables = row, [Table(list(blocks))]
    return text


@pytest.fixture
def pipeline():
    return PassPipeline(Runner(), SimpleNamespace(), None)


def test_a_plans_changes_are_on_the_device_before_its_pass(pipeline):
    rows, a, b = pipeline.passes.rows, sequence(1, 5, 0, adapter=2, draw=Draw(temperature=0.5)), sequence(2, 9, 1)
    pipeline.write(StepPlan(steps=[a], placed=[(a, 4)], tables=[(0, 0, 1, [7, 8])], slots=[(0, 3)]), drafted=False)
    assert rows.pos[0] == 4
    assert rows.temperature[0] == 0.5
    assert (rows.adapter[0], rows.slot[0]) == (2, 3)
    assert rows.tables[0][0].tolist() == [0, 7, 8, 0]
    a.computed, b.computed = 5, 9
    pipeline.write(StepPlan(steps=[a, b], placed=[(b, 8)]), drafted=False)
    assert rows.order[:2].tolist() == [1, 0]  # the longest first
    pipeline.write(StepPlan(steps=[b], freed=[0]), drafted=True)
    assert rows.order[:2].tolist() == [1, 0]  # a pass with drafts takes no order
    assert rows.adapter[0] == rows.slot[0] == rows.pos[0] == 0
    assert not rows.tables[0][0].any()


def test_the_tables_of_a_prompt_that_ends_are_written_after_the_pass_in_which_its_row_may_still_be_used(pipeline):
    text, rows = sequence(1, 3, row=2, blocks=[5]), pipeline.passes.rows
    plan = StepPlan(pieces=[(text, ROWS - 1, 0, 3)], finishing=[text], zero=[4])
    pipeline.write(plan, drafted=False)
    assert pipeline.launch(plan, {})
    rows.flush()
    assert not pipeline.passes.tables[0][2].any()
    assert rows.tables[0][2].tolist() == [5, 0, 0, 0]
    assert pipeline.passes.zeroed == [4]
    assert not pipeline.launch(StepPlan(), {})
    assert pipeline.steps == 1


@pytest.mark.parametrize("ahead", [0, 1])
def test_tokens_are_read_in_the_order_of_the_passes_and_the_newest_stay_in_flight(pipeline, ahead):
    text, read = sequence(1), []
    for _ in range(4):
        pipeline.launch(StepPlan(steps=[text]), {})
        read += [tokens for (one, tokens) in (pair for drawn, _ in pipeline.land(ahead) for pair in drawn) if one is text]
        assert len(pipeline.flights) <= ahead
    assert read == [[1], [2], [3], [4]][: 4 - ahead]
    list(pipeline.land(0))
    assert not pipeline.flights


def test_a_sequence_whose_logits_are_no_numbers_fails_alone(pipeline):
    good, bad = sequence(1, row=0), sequence(2, row=1)
    pipeline.passes.logits = torch.nan
    pipeline.launch(StepPlan(steps=[bad]), {})
    list(pipeline.land(0))
    pipeline.passes.logits = 0.0
    pipeline.launch(StepPlan(steps=[good]), {})
    list(pipeline.land(0))
    assert "float16" in str(bad.failed)
    assert good.failed is None
