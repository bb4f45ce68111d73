"""Which kernel a mixture's layer takes on a GPU: each token's experts, or products grouped by expert."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="the grouped kernel is Triton's and CUDA's")

from lowq_kernels.decode import grouped_experts, mixture
from lowq_kernels.modules.stack import Stack
from lowq_packers.scheme import Scheme


class OnGpu:
    """A batch of tokens, as far as the choice of a kernel looks at it."""

    is_cuda, dtype, device = True, torch.float16, torch.device("cuda:0")

    def __init__(self, tokens, H):
        self.shape = (tokens, H)


@pytest.fixture
def routes(monkeypatch):
    """The kernels that `mixture` calls, in order."""
    called = []
    spec = mock.Mock(launch=lambda *a: called.append("once a token"))
    monkeypatch.setattr(mixture, "fused", lambda *a: (spec, {}))
    monkeypatch.setattr(grouped_experts, "grouped_experts", lambda *a: called.append("grouped"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    mixture.grouped_problem.cache_clear()
    yield called
    mixture.grouped_problem.cache_clear()


@pytest.mark.parametrize(
    ("capability", "act", "wanted"),
    [
        ((9, 0), "silu", ["once a token", "grouped", "grouped"]),
        ((8, 0), "silu", ["once a token", "once a token", None]),
        ((9, 0), "gelu", ["once a token", "once a token", None]),
    ],
    ids=["Hopper", "Ampere", "an activation that is not fused"],
)
def test_many_tokens_are_grouped_where_a_kernel_can(routes, monkeypatch, capability, act, wanted):
    monkeypatch.setattr(grouped_experts, "capability", lambda device: capability)
    words, scheme = torch.zeros(8, 1), Scheme(4, 32, "none")
    up, down = (Stack(words, None, None, None, scheme, N, K, "tile") for N, K in ((64, 128), (128, 32)))
    for tokens, route in zip((1, 2, 200), wanted, strict=True):
        routes.clear()
        found = mixture.mixture(OnGpu(tokens, 128), torch.zeros(tokens, 2, dtype=torch.int64), None, up, down, act)
        assert routes == ([] if route is None else [route])
        assert found is None  # of these kernels, or because there is none


def test_row_tiles_of_two_tables_are_refused(monkeypatch):
    monkeypatch.setattr(grouped_experts, "capability", lambda device: (9, 0))
    fitted = Scheme(4, 32, "none", "fitted")
    facts = [(N, 128, s, "tile") for N, s in ((64, fitted), (48, Scheme(4, 32, "none", "nf4")), (48, fitted))]
    assert grouped_experts.why_not(facts[0], facts[1], torch.device("cuda:0")) is None
    assert "row tiles of a table" in grouped_experts.why_not(facts[0], facts[2], torch.device("cuda:0"))
