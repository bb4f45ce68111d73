"""What tests of texts with drafter heads share."""

import sys

import pytest
import torch

from lowq_cli.engine.drafts import draft_length, drafting


@pytest.fixture
def every_step(monkeypatch):
    """A small model is faster without drafts: here every step has them, whatever it takes."""
    monkeypatch.setattr(drafting, "ENOUGH", 0)
    monkeypatch.setattr(draft_length, "ENOUGH", sys.maxsize)  # what steps take is never known
    monkeypatch.setattr(drafting.Drafting, "allowed", property(lambda _: True))
    if torch.cuda.is_available():  # there an estimate from the plan decides before the clock does
        monkeypatch.setattr(drafting, "worth", lambda guess, costs, widths, *more: widths[0] - 1)
