"""triton/route_tiles against the definition, and where dispatch takes it."""

import dataclasses
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first triton import
pytest.importorskip("triton")

from emulation import error
from lowq_kernels.decode import route_tiles_triton as tiles
from lowq_kernels.decode import router
from lowq_kernels.decode.route import RouteCall, Routing
from lowq_kernels.decode.router import RouterFacts
from lowq_kernels.dispatch.registry import refusals, select

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F16 = torch.bfloat16, torch.float16
# M, E, H, top_k, facts; numbers of a bias or of factors stand for tensors of that many values
CASES = {
    "DeepSeek V3's": (
        33,
        64,
        700,
        6,
        {"score": "sigmoid", "choice_bias": 64, "groups": (8, 4), "sum_eps": 1e-20, "factor": 2.5},
    ),
    "the best of groups": (9, 60, 130, 3, {"groups": (6, 2), "group_score": "max", "normalise": False, "factor": 16.0}),
    "a softmax": (64, 40, 257, 4, {}),
    "a bias of the logits": (17, 5, 96, 2, {"logits_bias": 5, "rounded": True}),
    "many tokens": (101, 12, 200, 2, {}),
    "factors of experts": (12, 33, 64, 8, {"score": "sigmoid", "normalise": False, "each": 33}),
}
INTERPRETED_BF16 = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter multiplies the bit patterns of bf16")
DTYPES = [F16, pytest.param(BF16, marks=INTERPRETED_BF16)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(31)


def randn(*shape, dtype=F16):
    return torch.randn(*shape).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_experts_and_weights(name, dtype):
    M, E, H, top_k, facts = CASES[name]
    tensors = {key: randn(n, dtype=torch.float32) for key, n in facts.items() if key in ("choice_bias", "each")}
    tensors |= {"logits_bias": randn(E, dtype=dtype)} if "logits_bias" in facts else {}
    f = RouterFacts((randn(E, H, dtype=torch.float32) / H**0.5).to(dtype), top_k, **(facts | tensors))
    x = randn(M, H, dtype=dtype)
    r = Routing.of(x, f)
    r.ids.fill_(-1)
    r.weights.fill_(float("nan"))
    tiles.route(r, {})
    ids, weights = router.route_by(x, f)
    dense = [torch.zeros(M, E, device=x.device).scatter(1, i, w) for i, w in ((r.ids, r.weights), (ids, weights))]
    # the definition rounds logits after sums in another order: at a tie of two experts either may be chosen
    alike = (r.ids == ids).all(1)
    assert alike.float().mean() > (0.85 if not f.beyond else 0.99)
    assert error(dense[0][alike], dense[1][alike]) < (1e-2 if f.rounded or not f.beyond else 1e-5)
    again = Routing.of(x, f)
    tiles.route(again, {})
    assert torch.equal(again.ids, r.ids)
    assert torch.equal(again.weights, r.weights)


def test_nan_still_names_experts():
    x = randn(9, 64)
    x[3] = float("nan")
    f = RouterFacts(randn(12, 64), 3, "sigmoid", choice_bias=randn(12), groups=(4, 2))
    ids = tiles.route(Routing.of(x, f), {})
    assert 0 <= int(ids.min()) <= int(ids.max()) < 12


def test_who_takes_what():
    call = RouteCall(64, 256, 7168, 8, BF16, "cuda", (9, 0), ("sigmoid", "choice_bias", "groups", "sum_eps", "factor"))
    assert select(call)[0].name == "triton/route_tiles"
    assert select(dataclasses.replace(call, M=8))[0].name == "triton/route"
    assert select(dataclasses.replace(call, M=128))[0].name == "triton/route_tiles"
    assert select(dataclasses.replace(call, M=129))[0].name == "triton/route_many"
    assert select(dataclasses.replace(call, E=384, M=64))[0].name == "triton/route_tiles"
    assert select(dataclasses.replace(call, E=384, M=65))[0].name == "triton/route_many"  # its programs are more than SMs
    plain = dataclasses.replace(call, E=256, H=3072, beyond=())
    names = {M: select(dataclasses.replace(plain, M=M))[0].name for M in (64, 128, 256)}
    assert names == {64: "cuda/route", 128: "triton/route_tiles", 256: "triton/route_many"}
    assert select(dataclasses.replace(plain, E=128, M=256))[0].name == "cuda/route"
    assert select(dataclasses.replace(call, E=128, H=2048, beyond=()))[0].name == "cuda/route"
    assert "norm" in refusals(dataclasses.replace(call, beyond=("norm", "scale")))["triton/route_tiles"]
