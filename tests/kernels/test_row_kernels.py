"""Kernels of the work between products, of families beyond Llama's, against their torch definitions: interpreted on the CPU,
compiled where a GPU is."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first triton import
pytest.importorskip("triton")

from emulation import error
from lowq_kernels.decode import activation, elementwise, norms, norms_triton, prepare, prepare_triton, route_triton, router
from lowq_kernels.decode import route_tiles_triton as tiles
from lowq_kernels.decode.norms import Addition, Norm
from lowq_kernels.decode.prepare import PositionScale, Prepared
from lowq_kernels.decode.route import Routing
from lowq_kernels.decode.router import RouterFacts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float32: 1e-6}
EPS = 1e-5


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(23)


def randn(*shape, dtype=torch.float16):
    return torch.randn(*shape).to(DEVICE, dtype)


def norm(n, kind="rms", bias=False, groups=1, weight=True):
    own = randn(n, dtype=torch.float32) if weight else None
    return Norm(own, EPS, kind, randn(n) if bias else None, groups)


# HQ, HKV, D, R, facts
PREPARED = {
    "nothing but a turn": (4, 2, 16, 16, {}),
    "neighbours": (3, 1, 24, 8, {"pairing": "neighbours"}),
    "no turn": (4, 2, 20, 0, {"position_scale": PositionScale(0.3, 5, 1)}),
    "gated, norms of heads": (4, 2, 16, 12, {"gated": True, "q_norm": norm(16), "k_norm": norm(16)}),
    "by heads": (3, 3, 10, 4, {"order": "heads"}),
    "over all": (5, 3, 12, 12, {"over": "all", "q_norm": norm(60), "k_norm": norm(36), "key_scale": 0.37}),
    "layer norms of heads, each its own": (
        4, 2, 12, 12, {"over": "all", "q_norm": norm(48, "layer", groups=4), "k_norm": norm(24, "layer", groups=2)},
    ),
    "layer norms with a bias": (4, 2, 16, 6, {"q_norm": norm(16, "layer", True), "k_norm": norm(16, "layer", True)}),
    "after the turn": (4, 2, 16, 16, {"norm_last": True, "q_norm": norm(16), "k_norm": norm(16, weight=False)}),
    "values are keys": (4, 2, 16, 16, {"v_is_k": True, "k_norm": norm(16), "v_norm": norm(16, weight=False), "key_scale": 2.5}),
    "queries alone": (4, 2, 16, 16, {"writes": False, "q_norm": norm(16), "k_norm": norm(16)}),
    "all at once": (
        4, 4, 16, 8,
        {"gated": True, "norm_last": True, "q_norm": norm(16), "k_norm": norm(16), "v_norm": norm(16), "pairing": "neighbours"}
        | {"position_scale": PositionScale(0.1, 3), "key_scale": -0.5},
    ),
}  # fmt: skip


@pytest.mark.half_of("name", "dtype", "group")
@pytest.mark.parametrize("group", [1, 2], ids=["a head at once", "two heads at once"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", PREPARED)
def test_prepare(name, dtype, group, monkeypatch):
    monkeypatch.setattr(prepare_triton, "MANY", 1)
    monkeypatch.setattr(prepare_triton, "GROUP", group)
    HQ, HKV, D, R, facts = PREPARED[name]
    p = Prepared(HQ, HKV, D, **facts)
    assert prepare_triton.refuse(p) is None
    parts = HQ * (2 if p.gated else 1) + (HKV * (1 if p.v_is_k else 2) if p.writes else 0)
    pos = torch.tensor([0, 17, 39, 8, 17], dtype=torch.int32, device=DEVICE)
    turn = torch.rand(40, R // 2).repeat(1, 2) * 6
    turn[[1, 2, 9, 38]] = float("nan")  # of positions where no token stands
    tables = (turn.cos().to(DEVICE, dtype), turn.sin().to(DEVICE, dtype)) if R else (None, None)
    qkv = randn(5, parts * D, dtype=torch.float32).mul(torch.rand(5, 1).mul(6).exp().to(DEVICE)).to(dtype)
    y, gate = prepare_triton.prepare(qkv, p, pos, *tables)
    wanted, wanted_gate = prepare.prepare(qkv, p, pos, *tables)
    assert y.dtype == dtype
    for row in range(5):
        assert error(y[row], wanted[row]) < TOLERANCE[dtype]
    assert (gate is None) == (wanted_gate is None)
    assert gate is None or torch.equal(gate, wanted_gate)


def test_calls_that_prepare_refuses_go_to_the_definition():
    p = Prepared(4, 2, 16, over="all", norm_last=True, q_norm=norm(64), k_norm=norm(32))
    assert "after the rotation" in prepare_triton.refuse(p)
    qkv, pos = randn(3, 8 * 16), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert torch.equal(prepare_triton.prepare(qkv, p, pos)[0], prepare.prepare(qkv, p, pos)[0])


# K, of the norm, of what is added: its norm, its factor, whether there is a factor after
UPDATES = {
    "a norm": (80, {}, None),
    "layer norm": (100, {"kind": "layer"}, None),
    "with a bias": (1000, {"kind": "layer", "bias": True}, (None, 1.0, False)),
    "by groups": (60, {"groups": 3}, (None, 1.0, False)),
    "without factors": (48, {"weight": False}, (None, 0.22, False)),
    "an update alone": (64, None, ({}, 0.5, True)),
    "sandwich": (72, {}, ({"weight": False}, 1.0, True)),
    "sandwich of layer norms": (72, {"kind": "layer"}, ({"kind": "layer", "bias": True}, -2.0, False)),
    "groups alike": (72, {"groups": 2}, ({"groups": 2}, 1.0, False)),
    "groups that differ": (72, {"groups": 2}, ({"groups": 4}, 1.0, False)),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_softcapped(dtype):
    x = torch.cat((randn(3000, dtype=dtype) * 40, torch.tensor([0.0, -0.0, 3e4, -3e4, 1e-3], device=DEVICE).to(dtype)))
    y, wanted = elementwise.softcapped(x[None], 30.0), activation.softcapped(x[None], 30.0)
    assert y.dtype == torch.float32
    assert (y - wanted).abs().max() < 1e-5
    assert (y - x.float()).abs().max() > 1


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_update_norm(name, dtype):
    K, own, update = UPDATES[name]
    x, delta = (randn(3, K, dtype=dtype) * s for s in (3, 0.7))
    own = None if own is None else norm(K, **own)
    post, scale, after = update or (None, 1.0, False)
    post = None if post is None else norm(K, **post)
    given = (post, scale, torch.tensor([0.3], device=DEVICE, dtype=dtype) if after else None)
    given = (*given, randn(3, K, dtype=dtype)) if name in ("an update alone", "sandwich", "by groups") else given
    how, ours, theirs = Addition(*given), x.clone(), x.clone()
    if own is None:
        assert norms_triton.add(ours, delta, how) is None
        norms.add(theirs, delta, how)
    else:
        y = norms_triton.update_norm(ours, None if update is None else delta, own, how)
        assert error(y, norms.update_norm(theirs, None if update is None else delta, own, how)) < TOLERANCE[dtype]
    assert error(ours, theirs) < TOLERANCE[dtype]
    assert torch.equal(ours, x) == (update is None)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_branches_have_norms_of_their_own(dtype):
    """What two branches give, each normed before the sum; with a norm after the sum, and with kinds that the kernel refuses."""
    x, delta, second = (randn(3, 72, dtype=dtype) * s for s in (3, 0.7, 20))
    after = torch.tensor([0.3], device=DEVICE, dtype=dtype)
    for own in ((norm(72), norm(72)), (norm(72), norm(72, "layer"))):
        how = Addition(norm(72), 0.5, after, second, own)
        ours, theirs, swapped = x.clone(), x.clone(), x.clone()
        y = norms_triton.update_norm(ours, delta, norm(72), how)
        assert y.shape == x.shape
        norms.add(theirs, delta, how)
        assert error(ours, theirs) < TOLERANCE[dtype]
        norms_triton.add(swapped, delta, how._replace(own=own[::-1]))
        assert error(swapped, theirs) > 10 * TOLERANCE[dtype]
        ours = x.clone()
        norms_triton.add(ours, delta, how)
        assert error(ours, theirs) < TOLERANCE[dtype]


TWO = {"plain": ({}, {}), "layer norms": ({"kind": "layer", "bias": True}, {"kind": "layer", "bias": True})}
TWO |= {"of two kinds": ({}, {"kind": "layer"}), "one without a weight": ({}, {"weight": False})}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", TWO)
def test_two_norms_of_one_stream(name, dtype):
    x, delta, pair = randn(3, 72, dtype=dtype) * 3, randn(3, 72, dtype=dtype), tuple(norm(72, **facts) for facts in TWO[name])
    for update in (delta, None):
        ours, theirs = x.clone(), x.clone()
        found = norms_triton.update_norms(ours, update, pair, Addition(norm(72), 0.5))
        if update is None:
            assert torch.equal(ours, x)
        else:
            assert error(ours, x) > 0.01
        theirs.copy_(ours)  # the update is `test_update_norm`'s
        for y, wanted in zip(found, norms.update_norms(theirs, None, pair), strict=True):
            assert error(y, wanted) < TOLERANCE[dtype]


BESIDE = {  # the norms of two rows that are put side by side
    "both": ({}, {}),
    "neither": (None, None),
    "one alone": ({}, None),
    "another kind": ({}, {"kind": "layer"}),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", BESIDE)
def test_beside(name, dtype):
    a, b = (randn(3, 72, dtype=dtype) * s for s in (3, 0.7))
    one, two = (None if facts is None else norm(72, **facts) for facts in BESIDE[name])
    y = norms_triton.beside(a, b, one, two)
    assert y.shape == (3, 144)
    assert error(y, norms.beside(a, b, one, two)) < TOLERANCE[dtype]
    assert error(y, norms.beside(b, a, one, two)) > 0.1
    if name == "both":
        assert error(y, norms.beside(a, b, two, one)) > 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 40)])
def test_normed(shape):
    x = randn(*shape)
    for own in (norm(40), norm(40, "layer", True), norm(40, groups=5)):
        assert error(norms_triton.normed(x, own), norms.normed(x, own)) < TOLERANCE[x.dtype]
    wide = Norm(randn(shape[-2], 40, dtype=torch.float32), EPS)  # factors of each row: not what the kernel takes
    assert norms_triton.refuse(x, wide)
    assert torch.equal(norms_triton.normed(x, wide), norms.normed(x, wide))
    turned = x.transpose(-1, -2)
    assert torch.equal(norms_triton.normed(turned, Norm(None, EPS)), norms.normed(turned, Norm(None, EPS)))


@pytest.mark.parametrize("act", sorted(activation.ACTIVATIONS))
@pytest.mark.parametrize("width", [8, 1500])
def test_activations(act, width):
    x = randn(3, 2 * width) * 3
    assert error(elementwise.activated(x, act), activation.activated(x, act)) < TOLERANCE[x.dtype]
    by = randn(3, 4 * width)[:, width : 3 * width]
    assert error(elementwise.activated(x, act, by), activation.activated(x, act, by)) < TOLERANCE[x.dtype]
    assert error(elementwise.gated(x, act), activation.gated(x, act)) < TOLERANCE[x.dtype]
    assert error(elementwise.gated(x, act, 0.3), activation.gated(x, act, 0.3)) < TOLERANCE[x.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_opened(dtype):
    y, x, weight = randn(3, 1200, dtype=dtype), randn(3, 70, dtype=dtype), randn(1, 70, dtype=dtype)
    for gate in (randn(3, 1200, dtype=dtype) * 4, randn(3, 1, dtype=dtype)):
        assert error(elementwise.opened(y, gate), activation.opened(y, gate)) < TOLERANCE[dtype]
    assert error(elementwise.opened_by(y, x, weight), activation.opened_by(y, x, weight)) < TOLERANCE[dtype]
    assert error(elementwise.opened(y[:, ::2], y[:, ::2]), activation.opened(y[:, ::2], y[:, ::2])) < TOLERANCE[dtype]


# E, H, top_k, facts; numbers of a norm or of factors stand for tensors of that many values
ROUTERS = {
    "sigmoid, a bias for the choice": (24, 64, 4, {"score": "sigmoid", "choice_bias": 24, "sum_eps": 1e-20, "factor": 2.5}),
    "groups by their best two": (40, 70, 6, {"score": "sigmoid", "choice_bias": 40, "groups": (5, 2), "factor": 0.7}),
    "groups by their best": (60, 48, 3, {"groups": (6, 2), "group_score": "max", "normalise": False, "factor": 16.0}),
    "all groups": (16, 48, 3, {"groups": (4, 4), "each": 16, "rounded": True}),
    "one expert": (8, 48, 1, {"score": "sigmoid", "normalise": False, "logits_bias": 8}),
    "normed for itself": (40, 2100, 8, {"norm": 0, "scale": 2100, "each": 40}),
    "normed with factors": (20, 100, 2, {"norm": 100, "normalise": False}),
}  # fmt: skip


# each with one dtype in turn; with all of them what is of x's dtype itself: rounded logits, and their bias
OF_X = ("all groups", "one expert")
ROUTED = [(name, d) for i, name in enumerate(ROUTERS) for d in (TOLERANCE if name in OF_X else [list(TOLERANCE)[i % 3]])]


@pytest.mark.parametrize(("name", "dtype"), ROUTED, ids=str)
def test_route_by_facts(name, dtype):
    E, H, top_k, facts = ROUTERS[name]
    tensors = {key: randn(n, dtype=torch.float32) for key, n in facts.items() if key in ("choice_bias", "each", "scale")}
    if "norm" in facts:
        tensors["norm"] = norm(facts["norm"] or H, weight=facts["norm"] > 0)
    if "logits_bias" in facts:
        tensors["logits_bias"] = randn(facts["logits_bias"], dtype=dtype)
    f = RouterFacts((randn(E, H, dtype=torch.float32) / H**0.5).to(dtype), top_k, **(facts | tensors))
    x = randn(3, H, dtype=dtype)
    for _ in range(2):  # twice: the counters that the first launch used must be left at zero
        r = Routing.of(x, f)
        ids = route_triton.route(r, {})
    wanted_ids, wanted = router.route_by(x, f)
    assert torch.equal(ids, wanted_ids)
    assert error(r.weights, wanted) < (TOLERANCE[dtype] if f.rounded else 1e-5)
    many = Routing.of(x.repeat(25, 1), f)
    assert torch.equal(tiles.route_many(many, {}), wanted_ids.repeat(25, 1))
    assert error(many.weights, wanted.repeat(25, 1)) < (TOLERANCE[dtype] if f.rounded else 1e-5)


def test_logits_of_a_router_in_fp32_are_not_rounded():
    f, x = RouterFacts(randn(16, 64, dtype=torch.float32) / 8, 3), randn(5, 64)
    wanted_ids, wanted = router.route_by(x, f)
    for kernel in (route_triton.route, tiles.route_many):
        r = Routing.of(x, f)
        assert torch.equal(kernel(r, {}), wanted_ids)
        assert error(r.weights, wanted) < 1e-5


def test_a_router_of_nan_still_names_experts():
    f = RouterFacts(randn(12, 64), 3, "sigmoid", choice_bias=randn(12), groups=(4, 2))
    x = randn(2, 64) * float("nan")
    ids = route_triton.route(Routing.of(x, f), {})
    assert 0 <= int(ids.min()) <= int(ids.max()) < 12


def test_a_router_with_a_layer_norm_goes_by_the_definition():
    f = RouterFacts(randn(12, 64), 3, norm=norm(64, "layer"))
    x = randn(2, 64)
    ids = route_triton.route(Routing.of(x, f), {})
    assert torch.equal(ids, router.route_by(x, f)[0])
