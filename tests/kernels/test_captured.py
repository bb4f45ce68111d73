"""Definitions of one step of several sequences inside a CUDA graph, replayed for other positions and slots.

Without a GPU they run on tensors that have no values (torch's fake ones): an operation that would need one raises, as it would
stop a graph's recording.
"""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from emulation import error
from lowq_kernels.decode import activation, latent, norms, reference
from lowq_kernels.decode import prepare as preparing
from lowq_kernels.decode.norms import Addition, Norm
from lowq_kernels.decode.prepare import PositionScale, Prepared
from lowq_kernels.decode.recurrent import delta, mamba2, short_conv
from lowq_kernels.decode.reference import Heads, Places
from lowq_kernels.decode.router import RouterFacts, route_by

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if GPU else []
DEVICE = "cuda" if GPU else "cpu"
B, S, BLOCK, DTYPE = 4, 128, 16, torch.bfloat16


@pytest.fixture(autouse=True)
def values():
    """Seeded on a GPU; none elsewhere."""
    torch.manual_seed(31)
    with contextlib.nullcontext() if GPU else FakeTensorMode():
        yield


def randn(*shape, dtype=DTYPE):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def angles(R):
    a = torch.rand(S, R // 2, device=DEVICE).repeat(1, 2) * 6
    return a.cos().to(DTYPE), a.sin().to(DTYPE)


def table():
    return torch.randperm(B * S // BLOCK, device=DEVICE).reshape(B, -1).to(torch.int32)


def replayed(step, held, inputs, draw):
    """step(*inputs) recorded once; replayed for inputs drawn anew it gives, and leaves in `held`, what it does by itself."""
    if not GPU:
        step(*inputs)
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(*inputs)
    outputs = []
    for _ in range(3):
        for t, new in zip(inputs, draw(), strict=True):
            t.copy_(new)
        before = [t.clone() for t in held]
        graph.replay()
        recorded, after = [t.clone() for t in (y if isinstance(y, tuple) else (y,))], [t.clone() for t in held]
        for t, old in zip(held, before, strict=True):
            t.copy_(old)
        again = step(*inputs)
        for ours, expected in zip(recorded, again if isinstance(again, tuple) else (again,), strict=True):
            assert error(ours.float(), expected.float()) < 1e-6
            assert not expected.isnan().any()
        assert all(map(torch.equal, after, held))
        assert not held or not all(map(torch.equal, after, before))
        outputs.append(recorded[0])
    assert not torch.equal(outputs[0].float(), outputs[1].float())


def positions():
    return torch.randint(0, S, (B,), dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("facts", [{}, {"softcap": 3.0}, {"chunk": 48}, {"window": 33}], ids=str)
def test_attention(facts, paged):
    h, where = Heads(8, 2, 64, 0.125, **facts), table() if paged else None
    shape = (B * S // BLOCK, 2, BLOCK, 64) if paged else (B, 2, S, 64)
    held, turned = [randn(*shape), randn(*shape)], angles(64)

    def step(qkv, pos):
        return reference.attend_fixed(qkv, *held, Places(pos, *turned, where), h)

    def draw():
        return randn(B, 12 * 64), positions()

    replayed(step, held, draw(), draw)
    if not GPU:
        return
    qkv, pos = draw()
    eager = reference.attend(qkv, *[c.clone() for c in held], Places(pos, *turned, where), h)
    assert error(step(qkv, pos).float(), eager.float()) < 1.2e-2


@pytest.mark.parametrize("paged", [False, True])
def test_latent_attention(paged):
    f = latent.Latent(8, 32, 16, 32, 64, 0.14, randn(8, 32, 64), randn(8, 32, 64), Norm(randn(64), 1e-6), "neighbours")
    held, turned = [randn(*((B * S // BLOCK, 1, BLOCK, 80) if paged else (B, 1, S, 80)))], angles(16)
    where = table() if paged else None

    def draw():
        return randn(B, 8 * 48), randn(B, 80), positions()

    replayed(lambda q, rows, pos: latent.step_fixed(q, rows, held[0], Places(pos, *turned, where), f), held, draw(), draw)


def mixers():
    def fp32(*shape):
        return randn(*shape, dtype=torch.float32)

    d = delta.Delta(2, 4, 32, 32, True, randn(256, 4), None, fp32(4), fp32(4), Norm(randn(32), 1e-6))
    m = mamba2.Mamba2(4, 32, 2, 16, randn(192, 4), randn(192), fp32(4), fp32(4), fp32(4), Norm(randn(128), 1e-6, groups=2))
    return {
        "delta": (delta, d, 2 * 4 * 32 + 2 * 64 + 8, {"conv": (256, 3), "S": (4, 32, 32)}),
        "mamba2": (mamba2, m, 128 + 192 + 4, {"conv": (192, 3), "S": (4, 32, 16)}),
        "short_conv": (short_conv, short_conv.ShortConv(randn(40, 3), None), 120, {"conv": (40, 2)}),
    }


@pytest.mark.parametrize("name", ["delta", "mamba2", "short_conv"])
def test_recurrent_mixers(name):
    module, f, N, shapes = mixers()[name]
    states = {n: randn(9, *s, dtype=torch.float32 if n == "S" else DTYPE) for n, s in shapes.items()}

    def draw():
        return randn(B, N), torch.randperm(9, device=DEVICE)[:B]

    replayed(lambda x, slots: module.step(x, f, states, slots), list(states.values()), draw(), draw)
    if not GPU:
        return
    whole, parts = ({n: t.clone() for n, t in states.items()} for _ in range(2))
    x = randn(200, N)
    y = module.run(x, f, whole, 3)
    again = torch.cat([module.run(x[:77], f, parts, 3), module.run(x[77:], f, parts, 3)])
    assert error(again.float(), y.float()) < 4e-3
    assert all(error(parts[n].float(), whole[n].float()) < 1e-4 for n in whole)


def test_row_wise_operations_are_recorded():
    n, after = Norm(randn(64), 1e-6), randn(1)
    x = randn(B, 64)
    replayed(lambda x: norms.normed(x, n), [], (x,), lambda: (randn(B, 64),))  # fmt: skip

    def added(x, delta):
        y = x.clone()
        norms.add(y, delta, Addition(n, 0.3, after))
        return activation.opened(activation.gated(y, "relu2", 0.5), activation.activated(delta[:, :32], "gelu"))

    replayed(added, [], (x, randn(B, 64)), lambda: (randn(B, 64), randn(B, 64)))
    p = Prepared(4, 2, 32, gated=True, q_norm=Norm(randn(32), 1e-6), v_norm=Norm(None, 1e-6), pairing="neighbours",
                 position_scale=PositionScale(0.2, 9.0), key_scale=0.4)  # fmt: skip
    turned = angles(16)

    def draw():
        return randn(B, 12 * 32), positions()

    replayed(lambda qkv, pos: preparing.prepare(qkv, p, pos, *turned), [], draw(), draw)
    f = RouterFacts(randn(16, 64), 3, "sigmoid", None, randn(16), (4, 2), factor=2.5, scale=randn(64), norm=n, each=randn(16))
    replayed(lambda x: route_by(x, f)[::-1], [], (x,), lambda: (randn(B, 64),))


@pytest.mark.skipif(GPU, reason="what fake tensors are for")
def test_operations_that_need_values_are_found():
    h, held, turned = Heads(8, 2, 64, 0.125), [randn(B, 2, S, 64), randn(B, 2, S, 64)], angles(64)
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        reference.attend(randn(B, 12 * 64), *held, Places(positions(), *turned), h)
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        positions().nonzero()
