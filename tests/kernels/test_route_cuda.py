"""route.cu against its definition in fp32. On a GPU it runs there; elsewhere emulated thread by thread, in two orders."""

import dataclasses

import pytest
import torch

import emulation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
emulation.require("cuda/route", compiler=DEVICE == "cpu")
from lowq_kernels.decode import route_cuda
from lowq_kernels.decode import router as definition
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.route import MIXED, RouteCall, Routing, route_by
from lowq_kernels.decode.router import RouterFacts
from lowq_kernels.dispatch.registry import named, select

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
if DEVICE == "cuda" and not torch.cuda.get_device_capability() >= route_cuda.CLUSTERS:
    pytest.skip("a GPU without clusters", allow_module_level=True)
F16, BF16 = torch.float16, torch.bfloat16
# tokens, experts, H, top_k, normalise, rounded, bias, dtype
CASES = {
    "a tile a block": (1, 128, 544, 8, True, False, False, BF16),
    "eleven tokens": (11, 128, 512, 8, True, True, True, F16),
    "two tiles a block, the last one of a few": (3, 200, 520, 6, False, False, True, F16),
    "four blocks share a row": (9, 32, 2888, 4, True, False, True, BF16),
    "eight do, and half a tile": (2, 8, 4096, 2, True, True, False, F16),
    "sixty experts": (8, 60, 96, 4, False, True, False, BF16),
    "one of five": (1, 5, 40, 1, False, False, True, F16),
    "a softmax whose last steps wait in shared memory": (2, 250, 3064, 8, True, False, False, F16),
}


@pytest.fixture(autouse=True, scope="module")
def built():
    def every():
        for case in CASES.values():
            routed(*operands(*case))
        for case in BEYOND.values():
            routed(*beyond(*case))
        routed(torch.ones(2, 64, dtype=F16), RouterFacts(torch.ones(128, 64, dtype=F16), 6, "sigmoid"))

    with emulation.without_a_gpu(route_cuda, every):
        yield


# tokens, experts, H, top_k, dtype, facts; numbers stand for tensors of that many values
BEYOND = {
    "gemma 4": (3, 40, 776, 8, F16, {"norm": True, "scale": 776, "each": 40}),
    "gemma 4 in bf16, parts of k": (1, 16, 1032, 2, BF16, {"norm": True, "scale": 1032, "each": 16, "rounded": True}),
    "glm": (1, 128, 520, 8, BF16, {"score": "sigmoid", "choice_bias": 128, "sum_eps": 1e-20, "factor": 2.5}),
    "minimax, two of six steps in shared memory": (9, 256, 3064, 8, BF16, {"score": "sigmoid", "choice_bias": 256}),
    "a norm, eight of fourteen steps there": (2, 120, 7160, 6, F16, {"norm": True, "scale": 7160, "each": 120}),
    "sigmoid, more tokens than a cluster has blocks": (11, 24, 64, 3, F16, {"score": "sigmoid", "normalise": False}),
    "a softmax with a factor": (2, 60, 96, 4, F16, {"factor": 16.0, "normalise": False, "logits_bias": 60}),
    "a bias for the choice of a softmax": (2, 250, 264, 6, F16, {"choice_bias": 250, "sum_eps": 1e-3}),
}


def beyond(M, E, H, top_k, dtype, facts):
    torch.manual_seed(M + E)
    own = torch.float32 if M % 2 else dtype  # of vectors
    tensors = {n: torch.randn(v, device=DEVICE).to(own) for n, v in facts.items() if n in ("choice_bias", "each", "scale")}
    if "scale" in tensors:
        tensors["scale"] = (1 + tensors["scale"].float().abs() * 3).to(own)
    if "logits_bias" in facts:
        tensors["logits_bias"] = torch.randn(facts["logits_bias"], device=DEVICE).to(dtype)
    if facts.get("norm"):
        tensors["norm"] = Norm(None, 1e-6)
    x = (torch.randn(M, H, device=DEVICE) * 30).to(dtype) if "norm" in facts else torch.randn(M, H, device=DEVICE).to(dtype)
    return x, RouterFacts((torch.randn(E, H, device=DEVICE) / H**0.5).to(dtype), top_k, **(facts | tensors))


@pytest.mark.parametrize("name", BEYOND)
def test_facts_beyond_a_softmax(name):
    """The definition's experts and weights; without one of the facts the weights differ."""
    x, f = beyond(*BEYOND[name])
    ids, weights = emulation.twice(lambda: routed(x, f))
    wanted_ids, wanted = definition.route_by(x, f)
    assert torch.equal(ids, wanted_ids)
    assert emulation.error(weights, wanted) < (2e-3 if f.rounded else 1e-5)
    for fact in BEYOND[name][-1]:
        plain = {f.name: f.default for f in dataclasses.fields(RouterFacts)}[fact]
        other = dataclasses.replace(f, **{fact: plain if fact != "normalise" else True})
        if fact not in ("rounded", "sum_eps"):
            assert emulation.error(definition.route_by(x, other)[1], wanted) > 1e-3


def test_equal_scores_go_by_their_number_and_nan_still_names_experts():
    x, router = torch.ones(2, 64, dtype=F16, device=DEVICE), torch.zeros(128, 64, dtype=F16, device=DEVICE)
    router[[77, 5, 120]] = 0.25
    ids, weights = routed(x, RouterFacts(router, 6, "sigmoid"))
    assert ids.tolist() == [[5, 77, 120, 0, 1, 2]] * 2
    assert weights[0, 0] == weights[0, 2] > weights[0, 3]
    for score in ("sigmoid", "softmax"):
        ids, _ = routed(x * float("nan"), RouterFacts(router, 8, score, factor=2.0))
        assert all(len(set(row)) == 8 for row in ids.tolist())
        assert 0 <= ids.min() <= ids.max() < 128


def operands(M, E, H, top_k, normalise, rounded, bias, dtype):
    torch.manual_seed(M + E)
    x, router = (torch.randn(M, H, device=DEVICE)).to(dtype), (torch.randn(E, H, device=DEVICE) / H**0.5).to(dtype)
    own = torch.randn(E, device=DEVICE).to(dtype) if bias else None
    return x, RouterFacts(router, top_k, normalise=normalise, rounded=rounded, logits_bias=own)


def routed(x, facts):
    r = Routing.of(x, facts)
    return route_cuda.route(r, {}), r.weights


@pytest.mark.parametrize("name", CASES)
def test_experts_and_weights(name):
    """The chosen ones' logits are the largest to within rounding, and the weights are those of the ids."""
    x, f = operands(*CASES[name])
    router, top_k, normalise, rounded, bias = f.weight, f.top_k, f.normalise, f.rounded, f.logits_bias
    ids, weights = emulation.twice(lambda: routed(x, f))
    exact = torch.nn.functional.linear(x.float(), router.float(), None if bias is None else bias.float())
    step = 2 ** (-10 if x.dtype == F16 else -7)
    assert all(len(set(row)) == top_k for row in ids.tolist())
    own, best = exact.gather(1, ids), exact.topk(top_k).values
    assert (own - best).abs().max() <= step * exact.abs().max()
    wanted = exact.softmax(-1).gather(1, ids)
    wanted = wanted / wanted.sum(-1, keepdim=True) if normalise else wanted
    assert torch.allclose(weights, wanted, rtol=4 * step, atol=1e-6)
    assert not rounded or torch.equal(weights, weights.to(x.dtype).float())


def test_equal_logits_go_by_their_number():
    x, router = torch.ones(2, 64, dtype=F16, device=DEVICE), torch.zeros(128, 64, dtype=F16, device=DEVICE)
    router[[77, 5, 120]] = 0.25
    router[3] = -0.25
    ids, weights = routed(x, RouterFacts(router, 6))
    assert ids.tolist() == [[5, 77, 120, 0, 1, 2]] * 2
    assert weights[0, 0] == weights[0, 2] > weights[0, 3]


def test_nan_still_names_experts():
    x, router = torch.full((2, 64), float("nan"), dtype=F16, device=DEVICE), torch.randn(128, 64, device=DEVICE).to(F16)
    ids, _ = routed(x, RouterFacts(router, 8))
    assert ids.min() >= 0
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert ids.max() < 128


CALL = RouteCall(1, 128, 2048, 8, BF16, "cuda", (9, 0))


def test_routers_of_another_dtype_are_left_to_other_kernels():
    """The kernel would read their numbers as x's."""
    x, weight = torch.ones(1, 64, dtype=BF16), torch.ones(16, 64)
    assert Routing.of(x, RouterFacts(weight.to(BF16), 2)).call.beyond == ()
    for facts in (RouterFacts(weight, 2), RouterFacts(weight.to(BF16), 2, logits_bias=torch.ones(16))):
        assert Routing.of(x, facts).call.beyond == (MIXED,)
    assert select(dataclasses.replace(CALL, beyond=(MIXED,)))[0].name == "triton/route"


def test_who_takes_what():
    assert select(CALL)[0].name == "cuda/route"
    assert select(dataclasses.replace(CALL, M=4096))[0].name == "triton/route_many"
    assert select(dataclasses.replace(CALL, capability=(8, 0)))[0].name == "triton/route"
    assert select(dataclasses.replace(CALL, E=512))[0].name == "cuda/route"  # 32 loads a lane, 16 of them in shared memory
    assert select(dataclasses.replace(CALL, E=512, H=4096))[0].name == "triton/route"
    why = named("cuda/route").why_not
    assert select(dataclasses.replace(CALL, H=2816, beyond=("norm", "scale", "each")))[0].name == "cuda/route"
    assert select(dataclasses.replace(CALL, H=4096, beyond=("norm", "scale", "each")))[0].name == "cuda/route"
    assert "cluster holds" in why(dataclasses.replace(CALL, E=256, H=6144, beyond=("norm", "scale", "each")))
    assert select(dataclasses.replace(CALL, H=4096, beyond=("sigmoid", "choice_bias")))[0].name == "cuda/route"
    assert "groups" in why(dataclasses.replace(CALL, beyond=("sigmoid", "groups")))
    assert "factors" in why(dataclasses.replace(CALL, beyond=("norm", "a norm with factors")))
    assert "cluster holds" in why(dataclasses.replace(CALL, E=256, H=7168))
    assert "eights" in why(dataclasses.replace(CALL, H=2044))


def test_on_a_cpu_it_is_the_definition():
    x, router = torch.randn(3, 40), torch.randn(6, 40)
    f = RouterFacts(router, 2)
    for ours, truth in zip(route_by(x, f), definition.route_by(x, f), strict=True):
        assert torch.equal(ours, truth)
