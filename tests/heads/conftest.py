"""What tests of texts with drafter heads share."""

import sys

import pytest

from lowq_cli.engine.drafts import draft_length, drafting


@pytest.fixture
def every_step(monkeypatch):
    """A small model on a CPU is faster without drafts: here every step has them, whatever it takes."""
    monkeypatch.setattr(drafting, "ENOUGH", 0)
    monkeypatch.setattr(draft_length, "ENOUGH", sys.maxsize)  # what steps take is never known
