"""Attention's definitions, with soft caps, chunks and keys of another layer, against a loop in fp64; and who refuses these."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first triton import
pytest.importorskip("triton")

import dataclasses

from emulation import error
from lowq_kernels.decode import attend_triton, cpu, kv, prepare, prompt, reference
from lowq_kernels.decode.attend import AttendCall
from lowq_kernels.decode.attend import attend as dispatched
from lowq_kernels.decode.prompt_call import PromptCall
from lowq_kernels.decode.reference import Heads, Packed, Places
from lowq_kernels.dispatch.registry import refusals, select

S, BLOCK = 96, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of what Triton runs: interpreted without a GPU
# facts, positions of the sequences
CASES = {
    "plain": ({}, [0, 40, 95]),
    "softcap": ({"softcap": 3.0}, [7, 95]),
    "softcap and a window": ({"softcap": 2.0, "window": 20}, [19, 20, 70]),
    "softcap and sinks": ({"softcap": 2.0, "sinks": True}, [33, 2]),
    "chunk": ({"chunk": 24}, [23, 24, 95]),
    "chunk of three blocks": ({"chunk": 48}, [47, 48, 90]),
    "odd chunk and sinks": ({"chunk": 31, "sinks": True}, [61, 62]),
    "window": ({"window": 33}, [5, 32, 33, 95]),
    "keys of another layer": ({"writes": False}, [1, 50]),
    "all of it": ({"writes": False, "window": 40, "softcap": 1.5, "sinks": True, "norms": True}, [30, 80]),
    "normed": ({"norms": True, "softcap": 5.0}, [12, 64]),
}
SHAPES = [(4, 2, 16), (3, 1, 24), (2, 2, 32)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


def heads(facts, shape):
    HQ, HKV, D = shape
    facts = dict(facts)
    norms = (torch.randn(D), torch.randn(D)) if facts.pop("norms", False) else (None, None)
    sinks = torch.randn(HQ) + 1 if facts.pop("sinks", False) else None
    return Heads(HQ, HKV, D, 0.4, facts.pop("window", 0), 1e-6, *norms, sinks, **facts)


def case(name, shape, dtype=torch.float32):
    facts, places = CASES[name]
    h, B = heads(facts, shape), len(places)
    caches = [torch.randn(B, h.HKV, S, h.D).to(dtype) for _ in range(2)]
    for b, p in enumerate(places):
        for c in caches:
            c[b, :, p if h.writes else p + 1 :] = float("nan")  # what no token has reached yet is of no effect
    angles = torch.rand(S, h.D // 4).repeat(1, 2) * 6
    rows = h.HQ + (2 * h.HKV if h.writes else 0)
    return (
        torch.randn(B, rows * h.D).to(dtype),
        caches,
        torch.tensor(places, dtype=torch.int32),
        (angles.cos(), angles.sin()),
        h,
    )


def truth(qkv, caches, pos, tables, h):
    """The definition, a loop over tokens, heads and slots in fp64; caches get k and v."""
    y = torch.zeros(qkv.shape[0], h.HQ, h.D, dtype=torch.float64)
    for b, p in enumerate(pos.tolist()):
        q, k, v = (t.double() for t in reference.split_heads(qkv[b], tables[0][p], tables[1][p], h))
        if h.writes:
            caches[0][b, :, p], caches[1][b, :, p] = k, v
        for i in range(h.HQ):
            scores, values = [], []
            for s in range(p + 1):
                if (h.window and s <= p - h.window) or (h.chunk and s // h.chunk != p // h.chunk):
                    continue
                score = h.scale * (q[i] @ caches[0][b, i // (h.HQ // h.HKV), s].double())
                scores.append(h.softcap * torch.tanh(score / h.softcap) if h.softcap else score)
                values.append(caches[1][b, i // (h.HQ // h.HKV), s].double())
            if h.sinks is not None:
                scores.append(h.sinks[i].double())
                values.append(torch.zeros(h.D, dtype=torch.float64))
            y[b, i] = torch.stack(scores).softmax(0) @ torch.stack(values)
    return y.flatten(1)


def paged(caches, spare=5):
    """Pools of blocks in mixed order, poisoned where no cache is, and the table."""
    B, HKV, _, D = caches[0].shape
    n = S // BLOCK
    table = torch.randperm(B * n + spare)[: B * n].reshape(B, n).to(torch.int32)
    pools = []
    for c in caches:
        pool = torch.full((B * n + spare, HKV, BLOCK, D), float("nan"), dtype=c.dtype)
        pool[table.long().flatten()] = c.reshape(B, HKV, n, BLOCK, D).transpose(1, 2).flatten(0, 1)
        pools.append(pool)
    return pools, table


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_steps(name, shape):
    qkv, caches, pos, tables, h = case(name, shape)
    theirs = [c.clone() for c in caches]
    expected = truth(qkv, theirs, pos, tables, h)
    ours = [c.clone() for c in caches]
    assert error(reference.attend_fixed(qkv, *ours, Places(pos, *tables), h), expected) < 1e-6
    for mine, truly in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, truly, atol=1e-6, equal_nan=True)  # k and v are written, and nothing else
    pools, table = paged(caches)
    before = [p.isnan().sum() for p in pools]
    assert error(reference.attend_fixed(qkv, *pools, Places(pos, *tables, table), h), expected) < 1e-6
    written = qkv.shape[0] * h.HKV * h.D if h.writes else 0
    assert [p.isnan().sum() for p in pools] == [n - written for n in before]
    for attend in (reference.attend, cpu.attend, dispatched):
        clean = [c.nan_to_num() for c in caches]
        assert error(attend(qkv, *clean, Places(pos, *tables), h), expected) < 1e-5
        pools, table = paged(clean)
        assert error(attend(qkv, *pools, Places(pos, *tables, table), h), expected) < 1e-5
    for fact, plain in {"softcap": 0.0, "chunk": 0, "window": 0, "sinks": None}.items():
        if getattr(h, fact) is not None and getattr(h, fact) != plain:
            less = reference.attend_fixed(
                qkv, *[c.nan_to_num() for c in caches], Places(pos, *tables), dataclasses.replace(h, **{fact: plain})
            )
            assert error(less, expected) > 1e-3, fact


@pytest.mark.parametrize("kind", ["fp8", "4"])
def test_steps_over_caches_in_few_bits(kind):
    qkv, caches, pos, tables, h = case("softcap and a window", (4, 2, 16))
    coded = [[kv.holding(kind, c.nan_to_num()) for c in caches] for _ in range(2)]
    y = reference.attend_fixed(qkv, *coded[0], Places(pos, *tables), h)
    assert error(y, reference.attend(qkv, *coded[1], Places(pos, *tables), h)) < 1e-6
    assert error(y, truth(qkv, [c.nan_to_num() for c in caches], pos, tables, h)) > 1e-3  # it is rounded


@pytest.mark.half_of("name", "shape")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [n for n in CASES if n != "plain"])
def test_prompts(name, shape):
    """A run of tokens, one after another by the loop, in a cache and in blocks."""
    h = heads(CASES[name][0], shape)
    start, T = 29, 45
    angles = torch.rand(S, h.D // 4).repeat(1, 2) * 6
    tables = (angles.cos(), angles.sin())
    caches = [torch.randn(1, h.HKV, S, h.D) for _ in range(2)]
    qkv = torch.randn(1, T, (h.HQ + (2 * h.HKV if h.writes else 0)) * h.D)
    theirs = [c.clone() for c in caches]
    at = torch.arange(start, start + T, dtype=torch.int32)
    expected = torch.cat([truth(qkv[:, t], theirs, at[t : t + 1], tables, h) for t in range(T)])
    for attend in (reference.attend_prompt, prompt.attend_prompt):
        ours = [c.clone() for c in caches]
        assert error(attend(qkv, *ours, start, *tables, h)[0], expected) < 1e-6
        assert all(map(torch.allclose, ours, theirs))
    tiles = torch.tensor([[0, 20], [20, 20], [20, T]], dtype=torch.int32)
    for attend in (reference.attend_packed, prompt.attend_packed):
        pools, table = paged(caches)
        p = Packed(table, torch.zeros(T, dtype=torch.int32), at, tiles)
        assert error(attend(qkv[0], *pools, p, *tables, h), expected) < 1e-6


@pytest.mark.parametrize("name", ["softcap", "chunk", "keys of another layer"])
def test_triton_prompts_in_half_precision(name):
    h = heads(CASES[name][0], (4, 2, 16))
    caches = [torch.randn(1, 2, S, 16).half().to(DEVICE) for _ in range(2)]
    tables = [torch.ones(S, 16, device=DEVICE), torch.zeros(S, 16, device=DEVICE)]
    qkv = torch.randn(1, 40, (4 if not h.writes else 8) * 16).half().to(DEVICE)
    expected = reference.attend_prompt(qkv, *[c.clone() for c in caches], 30, *tables, h)
    assert error(prompt.attend_prompt(qkv, *[c.clone() for c in caches], 30, *tables, h), expected) < 2e-3


def test_kernels_refuse_unknown_heads():
    plain = Heads(8, 2, 64, 0.125)
    changed = ({"softcap": 30.0}, {"chunk": 64}, {"writes": False})
    call = AttendCall(4, 512, 64, 8, 2, 64, None, torch.bfloat16, "cuda", (9, 0))
    assert not set(refusals(call)) & {"triton/attend"}
    many = PromptCall(300, 64, 64, kv.PLAIN, torch.bfloat16, "cuda", (9, 0))
    assert select(many)[0].name == "cuda/prompt"
    for facts in changed:
        beyond = dataclasses.replace(plain, **facts).beyond
        assert len(beyond) == 1
        assert AttendCall.of(torch.zeros(1, 64), 8, 64, dataclasses.replace(plain, **facts)).beyond == beyond
        one = dataclasses.replace(call, beyond=beyond)
        refusing = {"cuda/attend"} if facts.get("writes", True) else set()  # in steps, keys of another layer are known to both
        assert select(one)[0].name == ("triton/attend" if refusing else "cuda/attend")
        assert {name for name, why in refusals(one).items() if beyond[0] in why} == refusing
        run = dataclasses.replace(many, beyond=beyond)
        assert select(run)[0].name == "triton/prompt"
        assert {name for name, why in refusals(run).items() if beyond[0] in why} == {"cuda/prompt", "cuda/prompt8"}
        for wide in (dataclasses.replace(one, D=512), dataclasses.replace(run, D=512)):
            assert select(wide)[0].name.startswith("triton/" if refusing or isinstance(wide, PromptCall) else "cuda/")
            assert any("not D=512 over fp8" in why for why in refusals(dataclasses.replace(wide, kv="fp8")).values())


def test_kernels_turn_nothing_by_the_tables_of_no_rotation():
    """What `prepare` leaves to be done to heads."""
    h = Heads(4, 2, 16, 0.3)
    caches, qkv = [torch.randn(2, 2, S, 16).half() for _ in range(2)], torch.randn(2, 8 * 16).half()
    pos = torch.tensor([9, 50], dtype=torch.int32)
    none, unrotated = [torch.empty(S, 0).half()] * 2, prepare.unrotated(S, 16, qkv)
    expected = reference.attend(qkv, *[c.clone() for c in caches], Places(pos, *none), h)
    assert torch.equal(reference.attend(qkv, *[c.clone() for c in caches], Places(pos, *unrotated), h), expected)
    for tables in (none, unrotated):
        there = [t.to(DEVICE) for t in (qkv, *caches, pos, *tables)]  # a copy only where there is a GPU
        y = attend_triton.attend(there[0], *[c.clone() for c in there[1:3]], Places(*there[3:]), h)
        assert error(y.cpu(), expected) < 2e-3
        assert error(cpu.attend(qkv, *[c.clone() for c in caches], Places(pos, *tables), h), expected) < 2e-3
    run = torch.randn(1, 20, 8 * 16).half()
    expected = reference.attend_prompt(run, *[c[:1].clone() for c in caches], 30, *none, h)
    there = [t.to(DEVICE) for t in (run, *[c[:1].clone() for c in caches], *unrotated)]
    y = prompt.attend_prompt(*there[:3], 30, *there[3:], h)
    assert error(y.cpu(), expected) < 2e-3
    call = AttendCall(1, 8192, 0, 8, 2, 64, None, torch.bfloat16, "cuda", (9, 0))
    assert "R=0" in refusals(call)["cuda/attend"]  # it would read a row of no dims
