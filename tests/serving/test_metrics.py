"""The share of the memory's speed, from two moments of an engine."""

from types import SimpleNamespace

import pytest

from lowq_cli.engine import explain
from lowq_cli.serving.http import metrics
from lowq_cli.serving.request import Stats


def test_the_share_of_the_memorys_speed(monkeypatch):
    """40 steps of 3 sequences in half a second, each of which reads 1 MB and 10 kB a sequence, of 100 MB/s."""
    monkeypatch.setattr(metrics, "decoder_of", lambda model: None)
    monkeypatch.setattr(explain, "bytes_per_token", lambda model, decoder, batch=1: 1_000_000 + 10_000 * batch)
    monkeypatch.setattr(explain, "memory_speed", lambda device, n: (100e6, ""))
    share = metrics.roofline(SimpleNamespace(device=None))
    before, now = Stats(steps=10, new_tokens=5, busy_s=1.0), Stats(steps=50, new_tokens=125, busy_s=1.5)
    assert share(before, now) == pytest.approx(1_030_000 * 40 / 0.5 / 100e6)
    assert share(now, now) is None
    page = metrics.Metrics(SimpleNamespace(stats=lambda: now), lambda before, now: 0.25).text().decode()
    assert "lowq_roofline_ratio 0.25" in page


def test_no_share_where_memory_is_not_the_limit(monkeypatch):
    monkeypatch.setattr(metrics, "decoder_of", lambda model: None)
    monkeypatch.setattr(explain, "bytes_per_token", lambda model, decoder, batch=1: 1)
    monkeypatch.setattr(explain, "memory_speed", lambda device, n: (None, "stays in the cache"))
    share = metrics.roofline(SimpleNamespace(device=None))
    assert share(Stats(), Stats(steps=1, busy_s=1.0)) is None
