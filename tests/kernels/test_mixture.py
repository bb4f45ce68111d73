"""Which kernel a mixture's layer takes on a GPU: each token's experts, or products grouped by expert."""

import pytest
import torch

pytest.importorskip("triton", reason="the grouped kernel is Triton's and CUDA's")

from lowq_kernels.decode import mixture
from lowq_kernels.decode.mixture import ExpertsCall
from lowq_kernels.dispatch import registry
from lowq_packers.errors import UnsupportedError
from lowq_packers.scheme import Scheme

EACH, GROUPED = "cuda/experts", "cuda/grouped_experts"
if GROUPED not in registry.kernels("experts"):
    pytest.skip("NVRTC is not installed, and without it our launchers do not import", allow_module_level=True)
from lowq_kernels.products.cuda import tile_wgmma_grouped

PLAIN = Scheme(4, 32, "none")


def call_of(tokens, capability, act="silu", down=(128, 32, PLAIN, "tile")):
    return ExpertsCall(tokens, 8, (64, 128, PLAIN, "tile"), down, 2, act, torch.float16, "cuda", capability)


def taken(tokens, capability, act="silu", capturing=False):
    """The kernel for such a call, None where the host groups its tokens."""
    choice = mixture.choice(call_of(tokens, capability, act), lambda: capturing)
    return choice and choice[0].name


@pytest.mark.parametrize(
    ("capability", "act", "wanted"),
    [
        ((9, 0), "silu", [EACH, GROUPED, GROUPED]),
        ((8, 0), "silu", [EACH, EACH, None]),
        ((9, 0), "gelu", [None, None, None]),
    ],
    ids=["Hopper", "Ampere", "an activation that no kernel has"],
)
def test_many_tokens_are_grouped_where_a_kernel_can(capability, act, wanted):
    assert [taken(tokens, capability, act) for tokens in (1, 3, 200)] == wanted


def test_wide_experts_are_grouped_from_64_slots_on():
    def kernel(tokens, width, bits=4, experts=256):
        s = Scheme(bits, 64, "none")
        facts = (2 * width, 128, s, "tile"), (128, width, s, "tile")
        return mixture.choice(ExpertsCall(tokens, experts, *facts, 8, "silu", torch.float16, "cuda", (9, 0)))[0].name

    assert [kernel(8, 1408), kernel(7, 1408), kernel(8, 768), kernel(8, 1408, 8)] == [GROUPED, EACH, EACH, EACH]
    assert kernel(8, 1408, experts=512) == EACH


def test_experts_of_4_bits_and_few_rows_have_tiles_of_8():
    assert [tile_wgmma_grouped.block(n, 128, 4) for n in (64, 512, 640)] == [8, 8, 16]
    assert tile_wgmma_grouped.block(64, 128, 8) == 16


def test_a_recording_takes_the_operations_that_can_be_recorded_for_many_tokens():
    assert taken(200, (8, 0), capturing=True) == EACH


@pytest.mark.parametrize("name", [EACH, GROUPED])
def test_a_forced_kernel_is_obeyed_for_any_number_of_tokens(monkeypatch, name):
    monkeypatch.setenv("LOWQ_KERNEL", name)
    assert [taken(tokens, (9, 0)) for tokens in (1, 2, 200)] == [name] * 3


def test_a_forced_kernel_that_cannot_says_why(monkeypatch):
    monkeypatch.setenv("LOWQ_KERNEL", GROUPED)
    with pytest.raises(UnsupportedError, match=r"needs wgmma \(Hopper\)"):
        taken(200, (8, 0))


def test_row_tiles_of_two_tables_are_refused():
    fitted, grouped = Scheme(4, 32, "none", "fitted"), registry.named(GROUPED)
    downs = [(48, 32, Scheme(4, 32, "none", "nf4"), "tile"), (48, 32, fitted, "tile")]
    assert grouped.why_not(call_of(2, (9, 0), down=downs[0])) is None
    assert "row tiles of a table" in grouped.why_not(call_of(2, (9, 0), down=downs[1]))
