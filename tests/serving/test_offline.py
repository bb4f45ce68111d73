"""Many texts from many prompts: the texts of `stream`, one prompt after the other."""

import pytest
from asking import TOKENIZER, Replayed, build, prompts

from lowq_cli.engine import stream
from lowq_cli.engine.sampling import Sampling
from lowq_cli.serving.continuous import ContinuousEngine
from lowq_cli.serving.offline import answer_all


@pytest.fixture(scope="module")
def model():
    return build("llama")


def alone(model, asked, **how):
    results = []
    for p in asked:
        g = stream(model, TOKENIZER, p, **how)
        list(g)
        results.append((g.texts[0], g.tokens[0], g.finish_reasons[0]))
    return results


def together(model, asked, n, sampling=None, **how):
    return [(a.text, a.tokens, a.finish_reason) for a in answer_all(model, TOKENIZER, asked, n, sampling or Sampling(), **how)]


@pytest.mark.parametrize("at_once", [1, 3, None])
def test_texts_and_reasons_are_those_of_each_alone(model, at_once):
    prompt_ids = prompts(3, 70, 505, 20, 64)  # the context ends at 512
    expected = alone(model, prompt_ids, max_new_tokens=30)
    assert [reason for _, _, reason in expected] == ["length", "length", "context", "length", "length"]
    assert together(model, prompt_ids, 30, at_once=at_once) == expected
    stop = [expected[0][0][4:6], expected[3][0][9:10]]
    cut = alone(model, prompt_ids, max_new_tokens=30, stop=stop)
    assert "stop" in [reason for _, _, reason in cut]
    assert together(model, prompt_ids, 30, stop=stop, at_once=at_once) == cut


def test_no_tokens_and_seeds(model):
    prompt_ids = prompts(9, 9, 9)
    assert together(model, prompt_ids, 0) == [("", [], "length")] * 3
    how = Sampling(temperature=1.0, seed=5)
    drawn = together(model, [prompt_ids[0]] * 3, 12, how)
    assert len({tuple(tokens) for _, tokens, _ in drawn}) == 3
    assert together(model, [prompt_ids[0]] * 3, 12, how, at_once=1) == drawn
    assert together(model, [prompt_ids[0]] * 2, 12, Sampling(temperature=1.0, seed=6)) == drawn[1:]


def late(made, expected_reads, capture):
    """An engine on a CPU that records passes when their size comes again, as on a GPU; its passes go into `made`."""

    class Late(ContinuousEngine):
        def __init__(self, *args, reads, **how):
            super().__init__(*args, **how)
            p = self.passes
            assert reads == expected_reads
            p.sizes.padded, p.met, p.pool, p.capture = True, set(), object(), capture
            made.append(p)

    return Late


def test_passes_are_recorded_the_second_time_that_they_come(model):
    """On a GPU; here a recording is the pass itself, and its logits are where they were when it was recorded."""
    made, recorded = [], []

    def capture(step, pool):
        assert pool is not None  # else `graph.capture` would run the step, and so move the texts on
        recorded.append(Replayed(step, made[0].rows))
        return recorded[-1]

    prompt_ids = prompts(20, 20, 20)
    expected = alone(model, prompt_ids, max_new_tokens=30)
    assert together(model, prompt_ids, 30, at_once=2, engine_type=late(made, 3 * 20, capture)) == expected
    assert len(recorded) == len(made[0].captured) < len(made[0].met)
    assert sum(one.count for one in recorded) > 30


def test_a_recording_that_fails_while_texts_are_under_way_does_not_move_them_on(model):
    failures = []

    def capture(step, pool):
        failures.append(step)
        raise RuntimeError("operation not permitted when stream is capturing")

    prompt_ids = prompts(20, 20, 20)
    expected = alone(model, prompt_ids, max_new_tokens=30)
    assert together(model, prompt_ids, 30, at_once=2, engine_type=late([], 3 * 20, capture)) == expected
    assert failures
