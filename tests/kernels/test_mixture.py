"""Which kernel a mixture's layer takes on a GPU: each token's experts, or products grouped by expert."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="the grouped kernel is Triton's and CUDA's")

from lowq_kernels.decode import mixture
from lowq_kernels.dispatch import registry
from lowq_kernels.modules.stack import ExpertsCall, Stack
from lowq_packers.errors import UnsupportedError
from lowq_packers.scheme import Scheme

EACH, GROUPED = "cuda/experts", "cuda/grouped_experts"
if GROUPED not in registry.kernels("experts"):
    pytest.skip("NVRTC is not installed, and without it our launchers do not import", allow_module_level=True)
PLAIN = Scheme(4, 32, "none")


def call_of(tokens, capability, act="silu", down=(128, 32, PLAIN, "tile")):
    return ExpertsCall(tokens, 8, (64, 128, PLAIN, "tile"), down, 2, act, torch.float16, "cuda", capability)


@pytest.fixture
def taken(monkeypatch):
    """tokens, capability, act -> what `mixture` launches for such a call, None for nothing."""
    called = []

    def run(tokens, capability, act="silu"):
        def find(call):
            found = registry.find(call_of(call.M, capability, act))
            return found and (dataclasses.replace(found[0], launch=lambda *a: called.append(found[0].name)), found[1])

        monkeypatch.setattr(mixture, "find", find)
        words = torch.zeros(8, 1)
        up, down = (Stack(words, None, None, None, PLAIN, N, K, "tile") for N, K in ((64, 128), (128, 32)))
        called.clear()
        x = torch.zeros(tokens, 128, dtype=torch.float16)
        mixture.mixture(x, torch.zeros(tokens, 2, dtype=torch.int64), torch.zeros(tokens, 2), up, down, act)
        return called[0] if called else None

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return run


@pytest.mark.parametrize(
    ("capability", "act", "wanted"),
    [
        ((9, 0), "silu", [EACH, GROUPED, GROUPED]),
        ((8, 0), "silu", [EACH, EACH, None]),
        ((9, 0), "gelu", [None, None, None]),
    ],
    ids=["Hopper", "Ampere", "an activation that no kernel has"],
)
def test_many_tokens_are_grouped_where_a_kernel_can(taken, capability, act, wanted):
    assert [taken(tokens, capability, act) for tokens in (1, 3, 200)] == wanted


def test_a_recording_takes_what_it_can_for_many_tokens(taken, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert taken(200, (8, 0)) == EACH


@pytest.mark.parametrize("name", [EACH, GROUPED])
def test_a_forced_kernel_is_obeyed_for_any_number_of_tokens(taken, monkeypatch, name):
    monkeypatch.setenv("LOWQ_KERNEL", name)
    assert [taken(tokens, (9, 0)) for tokens in (1, 2, 200)] == [name] * 3


def test_a_forced_kernel_that_cannot_says_why(taken, monkeypatch):
    monkeypatch.setenv("LOWQ_KERNEL", GROUPED)
    with pytest.raises(UnsupportedError, match=r"needs wgmma \(Hopper\)"):
        taken(200, (8, 0))


def test_row_tiles_of_two_tables_are_refused():
    fitted, grouped = Scheme(4, 32, "none", "fitted"), registry.named(GROUPED)
    downs = [(48, 32, Scheme(4, 32, "none", "nf4"), "tile"), (48, 32, fitted, "tile")]
    assert grouped.why_not(call_of(2, (9, 0), down=downs[0])) is None
    assert "row tiles of a table" in grouped.why_not(call_of(2, (9, 0), down=downs[1]))
