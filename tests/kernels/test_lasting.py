"""Tensors that stay, and what a recording of a CUDA graph makes of them."""

from unittest.mock import patch

import pytest
import torch

from lowq_cli.engine.lora_product import Adapters
from lowq_kernels import lasting


@lasting.lasting
def ones(n, device):
    return torch.ones(n, device=device)


def of_all():
    adapters = Adapters(all=2)
    return lambda rows: adapters.of_all(rows, torch.device("cpu"))


@pytest.mark.parametrize("made", [lambda n: ones(n, torch.device("cpu")), of_all()], ids=["lasting", "adapters of all rows"])
def test_only_what_is_made_outside_of_a_recording_is_kept(made):
    with patch.object(lasting, "recording", return_value=True):
        first, second = made(3), made(3)
    assert torch.equal(first, second)
    assert first is not second
    outside = made(3)
    assert outside is made(3)
    with patch.object(lasting, "recording", return_value=True):
        assert made(3) is outside
        assert made(4) is not made(4)
