"""Routers, experts and steps of latent attention on a CPU: the C++ against plain arithmetic in fp64.

Latent attention is compared with its definition in fp32, which test_latent.py holds to a loop in fp64.
"""

import dataclasses
from itertools import product

import pytest
import torch

from cpu_sets import TOLERANCE, isa, pytestmark
from emulation import error, weight
from lowq_kernels.decode import activation, latent, latent_cpu, mixture_cpu, ops, router
from lowq_kernels.decode.latent import Latent
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.prepare import PositionScale
from lowq_kernels.decode.reference import Places
from lowq_kernels.decode.router import RouterFacts
from lowq_kernels.modules.stack import Stack
from lowq_kernels.products.cpu import native
from lowq_packers.layouts import pack

__all__ = ["isa", "pytestmark"]


@pytest.fixture
def ran():
    """Names of the library's calls so far: that a result is right does not show who computed it."""
    native.noting.calls = []
    yield lambda: [native.NAMES[call.what] for call, _, _ in native.noting.calls]
    native.noting.calls = None


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


def routers(E, H, dtype):
    """Facts of every kind: each value of each of them, and pairs of the first four."""
    for i, (score, normalise, groups, biased) in enumerate(
        product(("softmax", "sigmoid"), (False, True), ((1, 1), (3, 2), (3, 1)), (False, True))
    ):
        more = {"choice_bias": torch.randn(E) / 4} if biased else {}
        more |= {"norm": Norm(torch.rand(H) + 0.5, 1e-6), "scale": torch.rand(H) + 4} if i % 5 == 1 else {}
        more |= {"factor": 2.5, "each": torch.rand(E)} if i % 3 == 1 else {}
        more |= {"logits_bias": torch.randn(E).to(dtype)} if i % 4 == 2 else {}
        f = RouterFacts(torch.randn(E, H).to(torch.float32 if i % 2 else dtype) / H**0.5, 3, score, normalise=normalise)
        yield dataclasses.replace(f, groups=groups, group_score="max" if i % 7 == 3 else "top2", rounded=i % 6 == 5, **more)


def scores_of(x, f):
    """Scores (M, E) in fp64, of logits that the definition rounds to the router's dtype where nothing lies beyond a softmax."""
    y = x.double()
    if f.norm is not None:
        y = y / (y.square().mean(-1, keepdim=True) + f.norm.eps).sqrt() * f.norm.weight.double()
    y = y if f.scale is None else y * f.scale.double() / y.shape[1] ** 0.5
    logits = y @ f.weight.double().T + (0 if f.logits_bias is None else f.logits_bias.double())
    if not f.beyond:
        logits = logits.to(f.weight.dtype).double()
    return logits.softmax(-1) if f.score == "softmax" else logits.sigmoid()


def near(a, b):
    return abs(float(a) - float(b)) <= 1e-2 * abs(float(b)) + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("M", "E", "H"), [(1, 24, 64), (2, 9, 35), (2, 129, 72)])
def test_routers_against_plain_arithmetic(isa, ran, dtype, M, E, H):
    every = [*routers(E, H, dtype)]
    for f in every:
        x = torch.randn(M, H).to(dtype)
        ids, weights = mixture_cpu.route_by(x, f)
        scores, n = scores_of(x, f), f.groups[0]
        choice = scores if f.choice_bias is None else scores + f.choice_bias.double()
        for m in range(M):
            chosen = ids[m].tolist()
            assert len({*chosen}) == 3
            assert all(0 <= e < E for e in chosen)
            by_group = choice[m].reshape(n, -1)
            rank = by_group.topk(2).values.sum(-1) if f.group_score == "top2" else by_group.amax(-1)
            allowed = {*rank.topk(f.groups[1]).indices.tolist()} if f.groups[1] < n else {*range(n)}
            margin = rank.sort(descending=True).values
            if f.groups[1] == n or not near(margin[f.groups[1]], margin[f.groups[1] - 1]):
                assert {e // (E // n) for e in chosen} <= allowed
                open_to = [e for e in range(E) if e // (E // n) in allowed]
                wanted = sorted((float(choice[m, e]) for e in open_to), reverse=True)[:3]
                assert all(near(choice[m, e], w) for e, w in zip(chosen, wanted, strict=True))  # the best, best first
            w = scores[m, chosen]
            w = (w / (w.sum() + f.sum_eps) if f.normalise else w) * f.factor
            w = w if f.each is None else w * f.each[chosen].double()
            assert error(weights[m], w) < (4e-3 if f.rounded or not f.beyond else 1e-5)
            assert not f.rounded or torch.equal(weights, weights.to(dtype).float())
    assert ran() == ["route"] * len(every)


def test_of_equal_experts_the_first_are_chosen_and_nan_chooses_some(isa):
    weights = torch.randn(12, 32).bfloat16()[[0, 1, 1, 2, 1, 3, 3, 3, 1, 4, 4, 5]]
    for f in (RouterFacts(weights, 4), RouterFacts(weights, 4, "sigmoid")):
        x = (weights[1] / 8)[None].contiguous()
        ids, shares = mixture_cpu.route_by(x, f)
        assert ids[0].tolist()[:3] == [1, 2, 4]
        assert len({*shares[0, :3].tolist()}) == 1
        ids, _ = mixture_cpu.route_by(torch.full((2, 32), float("nan")).bfloat16(), f)
        assert all(len({*row}) == 4 and min(row) >= 0 and max(row) < 12 for row in ids.tolist())


def test_other_routers_are_the_definition_s(ran):
    f = RouterFacts(torch.randn(8, 16), 2)
    many, apart = torch.randn(mixture_cpu.MOST + 1, 16), torch.randn(3, 32)[:, ::2]
    mixed = dataclasses.replace(f, weight=f.weight.half())
    for x, facts in ((many, f), (apart, f), (many[:2].bfloat16(), mixed), (many[:2].double(), f)):
        if x.dtype != torch.float64:
            assert all(map(torch.equal, mixture_cpu.route_by(x, facts), router.route_by(x, facts)))
    assert ran() == []


def other_rows(q, e):
    """A weight whose rows, and factor where it has one, are moved by e."""
    rows = {name: None if (t := getattr(q, name)) is None else t.roll(e, 0) for name in ("W_q", "scales", "zeros")}
    return dataclasses.replace(q, **rows, table=None if q.table is None else q.table * (1 + e / 4))


def stack(E, N, K, scheme, dtype, bias):
    """(Stack in the layout that the library reads, its weights (E, N, K) in fp64)."""
    own = torch.randn(E, N).to(dtype) / 4 if bias else None
    if scheme is None:
        words = (torch.randn(E, N, K) / K**0.5).to(dtype)
        return Stack(words, None, None, None, None, N, K, "rowstream", bias=own), words.double()
    bits, group, kind = scheme
    whole = [other_rows(weight(N, K, bits, group, kind, dtype), e) for e in range(E)]
    packed = [pack(q, "cpu") for q in whole]
    fields = zip(*((p.words, p.scales, p.zeros, p.aux, p.table) for p in packed), strict=True)
    words, scales, zeros, aux, table = (None if f[0] is None else torch.stack(f) for f in fields)
    made = Stack(words, scales, zeros, aux, packed[0].scheme, N, K, packed[0].layout, table, own)
    return made, torch.stack([q.dequantize().double() for q in whole])


SCHEMES = [(4, 32, "float"), (8, 64, "none"), (3, 32, "float"), (4, 16, "e2m1/e4m3"), (4, 32, "e2m1/e8m0"), None]


@pytest.mark.parametrize("act", ["silu", "gelu", "clamped_swiglu", "ungated relu2", "ungated silu"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_experts_against_plain_arithmetic(isa, ran, scheme, act):
    E, H, inner, alone, bare = 5, 64, 192, act.startswith("ungated"), act.removeprefix("ungated ")
    for dtype, tolerance in TOLERANCE.items():
        up, up_w = stack(E, inner if alone else 2 * inner, H, scheme, dtype, act == "clamped_swiglu")
        down, down_w = stack(E, 48, inner, scheme, dtype, act == "clamped_swiglu")
        for M, top_k in ((1, 3), (2, 1), (7, 4)):
            x, weights = torch.randn(M, H).to(dtype), torch.rand(M, top_k)
            ids = torch.stack([torch.randperm(E - 1)[:top_k] for _ in range(M)])  # one expert is never chosen
            ids[0, -1] = ids[0, 0]  # a token may take an expert twice
            y = mixture_cpu.experts(x, ids, weights, up, down, act)
            truth = torch.zeros(M, 48, dtype=torch.float64)
            for m, j in product(range(M), range(top_k)):
                e = ids[m, j]
                h = up_w[e] @ x[m].double() + (0 if up.bias is None else up.bias[e].double())
                a = activation.activated(h[None].float(), bare) if alone else activation.gated(h[None].float(), bare)
                out = down_w[e] @ a[0].double() + (0 if down.bias is None else down.bias[e].double())
                truth[m] += weights[m, j].double() * out
            assert error(y, truth) < tolerance, (dtype, M)
            alone_in_batch = mixture_cpu.experts(x[-1:].contiguous(), ids[-1:], weights[-1:], up, down, act)
            assert torch.equal(alone_in_batch, y[-1:])
            ids[-1, 0] = (ids[-1, 0] + 1) % E
            assert not torch.equal(mixture_cpu.experts(x, ids, weights, up, down, act), y)
    assert {*ran()} == {"experts"}


def test_experts_that_the_library_does_not_take(ran):
    up, _ = stack(3, 64, 32, (4, 32, "float"), torch.bfloat16, False)
    down, _ = stack(3, 32, 32, (4, 32, "float"), torch.bfloat16, False)
    x, ids, weights = torch.randn(2, 32).bfloat16(), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    assert mixture_cpu.experts(x, ids, weights, up, down, "silu") is not None
    refused = [
        (x.float(), ids, weights, up, down, "silu"), (x, ids.int(), weights, up, down, "silu"),
        (x, ids, weights.bfloat16(), up, down, "silu"), (x, ids, weights, up, down, "ungated clamped_swiglu"),
        (x, ids, weights, dataclasses.replace(up, layout="rowstream"), down, "silu"),
        (x, ids, weights, up, dataclasses.replace(down, bias=torch.ones(3, 32)), "silu"),
    ]  # fmt: skip
    assert all(mixture_cpu.experts(*operands) is None for operands in refused)
    assert ran() == ["experts"]


def text(f, n, dtype):
    q = torch.randn(n, f.heads * (f.nope + f.rotated)).to(dtype)
    return q, torch.randn(n, f.rank + f.rotated).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(6, 16, 8, 12, 40), (1, 5, 16, 7, 32), (3, 8, 4, 9, 12)], ids=str)
def test_steps_of_latent_attention(isa, ran, dtype, shape):
    heads, nope, rotated, v_dim, rank = shape
    for pairing, scale in (("neighbours", None), ("halves", PositionScale(0.4, 7.0, 1))):
        ups = torch.randn(heads, nope + v_dim, rank).to(dtype) / rank**0.5  # as models hold both, in one product
        norm = Norm(torch.rand(rank).to(dtype) + 0.5, 1e-5)
        f = Latent(*shape, 0.3, ups[:, :nope], ups[:, nope:], norm, pairing, scale)
        angles = torch.rand(96, rotated // 2).repeat(1, 2) * 6
        turned, n, width = (angles.cos().to(dtype), angles.sin().to(dtype)), 37, rank + rotated
        q, rows = text(f, n, dtype)
        held = torch.full((1, 1, 96, width), float("nan"))
        wanted = latent.prompt(q[None].float(), rows[None].float(), held, 0, *turned, f)[0]
        cache = torch.full((2, 1, 96, width), float("nan"), dtype=dtype)
        table = torch.randperm(14)[:12].reshape(2, 6).to(torch.int32)
        pool = torch.full((14, 1, 16, width), float("nan"), dtype=dtype)
        got, paged = [], []
        for t in range(n):  # the second row is behind the first
            pair, pos = torch.tensor([t, max(0, t - 3)]), torch.tensor([t, max(0, t - 3)], dtype=torch.int32)
            operands = q[pair].contiguous(), rows[pair].contiguous()
            got.append(latent_cpu.step(*operands, cache, Places(pos, *turned), f)[0])
            paged.append(latent_cpu.step(*operands, pool, Places(pos, *turned, table), f))
        tolerance = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 2e-6}[dtype]
        assert error(torch.stack(got), wanted) < tolerance
        assert error(torch.stack(paged)[:, 0], wanted) < tolerance
        assert error(paged[-1][1], wanted[n - 4]) < tolerance
        assert cache[:, :, n:].isnan().all()
        assert error(torch.stack(got), torch.stack(got).roll(1, 0)) > 0.1
        drafts = torch.full((1, 1, 96, width), float("nan"), dtype=dtype)
        at, same = torch.arange(5, dtype=torch.int32), torch.zeros(5, 1, dtype=torch.int32)
        together = latent_cpu.step(q[:5], rows[:5], drafts, Places(at, *turned, same), f)  # rows of one text
        assert torch.equal(together, torch.stack(got[:5]))
    assert {*ran()} == ({"latent"} if width % 16 == 0 else set())


def test_activations_and_gates_by_a_product(isa, ran):
    for act in activation.ACTIVATIONS:
        x, by = torch.randn(3, 300) * 4, torch.randn(3, 700)[:, 100:400]
        for other in (None, by):
            assert error(ops("cpu").activated(x, act, other), activation.activated(x.double(), act, other)) < 1e-6
        for scale in (1.0, 0.3):
            pair = torch.randn(3, 2 * 301) * 4
            assert error(ops("cpu").gated(pair, act, scale), activation.gated(pair.double(), act, scale)) < 1e-6
    pair = torch.randn(3, 2 * 301) * 6
    assert error(ops("cpu").gated(pair, "clamped_swiglu"), activation.gated(pair.double(), "clamped_swiglu")) < 1e-6
    y, x, w = torch.randn(3, 40).bfloat16(), torch.randn(3, 72).bfloat16() / 8, torch.randn(1, 72).bfloat16()
    assert error(ops("cpu").opened_by(y, x, w), y.double() * torch.sigmoid(x.double() @ w.double().T)) < 8e-3
    assert {*ran()} == {"gated", "product", "open"}
    assert float(ops("cpu").activated(torch.full((1, 1), -12.0), "gelu")) == pytest.approx(-12 * 1.776e-33, rel=1e-2)
