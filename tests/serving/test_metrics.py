"""The share of the memory's speed, from two moments of an engine."""

from types import SimpleNamespace

import pytest

from lowq_cli.engine.open_model import ready
from lowq_cli.serving.http import metrics
from lowq_cli.serving.request import Stats


def test_the_share_of_the_memorys_speed():
    """40 steps of 3 sequences in half a second, of 100 MB/s; then of 70, more than there were texts to count for.

    A step reads 1 MB and 10 kB a sequence, and no more for more than 24.
    """
    result = metrics.Roofline(100e6, tuple(1_000_000 + 10_000 * min(1 << i, 24) for i in range(8)))
    before, now = Stats(steps=10, new_tokens=5, busy_s=1.0), Stats(steps=50, new_tokens=125, busy_s=1.5)
    assert result.share(before, now) == pytest.approx(1_030_000 * 40 / 0.5 / 100e6)
    assert result.share(before, Stats(steps=50, new_tokens=2805, busy_s=1.5)) == pytest.approx(1_240_000 * 40 / 0.5 / 100e6)
    assert result.share(now, now) is None
    all_ = metrics.Metrics()
    all_.watch("m", SimpleNamespace(stats=lambda: now), metrics.Roofline(100e6, (1_000_000,)))
    page = all_.text().decode()
    assert 'lowq_steps_total{model="m"} 50.0' in page
    assert 'lowq_roofline_ratio{model="m"}' not in page  # no step since


def test_counters_of_a_model_that_is_loaded_again_go_on():
    all_, stats = metrics.Metrics(), Stats(new_tokens=7, running=2, drafted=5, accepted=3)
    for _ in range(2):
        all_.watch("m", SimpleNamespace(stats=lambda: stats), metrics.Roofline())
        assert 'lowq_requests_running{model="m"} 2.0' in all_.text().decode()
        all_.leave("m")
    page = all_.text().decode()
    assert 'lowq_generation_tokens_total{model="m"} 14.0' in page
    assert 'lowq_model_loads_total{model="m"} 2.0' in page
    assert 'lowq_draft_tokens_total{model="m"} 10.0' in page
    assert 'lowq_draft_tokens_accepted_total{model="m"} 6.0' in page
    assert 'lowq_requests_running{model="m"}' not in page


def test_no_share_where_memory_is_not_the_limit():
    """The bundled model stays in the cache of a processor; a step of more sequences reads no less of its weights."""
    model, _ = ready("demo", "cpu")
    result = metrics.roofline(model, 8)
    assert result.speed is None
    assert len(result.read) == 5
    assert 0 < result.read[0] <= result.read[-1]
    assert result.share(Stats(), Stats(steps=1, busy_s=1.0)) is None
