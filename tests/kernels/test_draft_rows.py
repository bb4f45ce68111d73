"""Rows of which several are of one sequence: their attention, how many drafts were right, and recurrent states after each."""

import itertools
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first triton import
pytest.importorskip("triton")

import emulation
from lowq_kernels.decode import attend_rows, attend_triton, cpu, kv, reference, sample
from lowq_kernels.decode.reference import MOST_DRAFTS, Heads, Places
from lowq_kernels.dispatch import registry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, BLOCKS = 16, 24


def rows_of(texts, dtype, device, D, HKV=2, HQ=4):
    """(qkv, k, v, pos, table) of rows of texts (first position, rows each), whose caches hold all before, and NaN past it."""
    torch.manual_seed(len(texts))
    M, width = sum(n for _, n in texts), 6
    tables = torch.randperm(BLOCKS)[: len(texts) * width].reshape(len(texts), width).int()
    k, v = (torch.randn(BLOCKS, HKV, BLOCK, D).to(dtype) for _ in range(2))
    for (first, _), table in zip(texts, tables, strict=True):
        for slot in range(first, width * BLOCK):
            for cache in (k, v):
                cache[table[slot // BLOCK], :, slot % BLOCK] = float("nan")
    pos = torch.cat([torch.arange(first, first + n, dtype=torch.int32) for first, n in texts])
    table = torch.cat([t.repeat(n, 1) for t, (_, n) in zip(tables, texts, strict=True)])
    qkv = torch.randn(M, (HQ + 2 * HKV) * D).to(dtype)
    return [t.to(device) for t in (qkv, k, v, pos, table)]


def one_by_one(qkv, k, v, pos, table, cos, sin, h):
    """The same, a row after another: what steps without drafts do."""
    y = [reference.attend(qkv[i : i + 1], k, v, Places(pos[i : i + 1], cos, sin, table[i : i + 1]), h) for i in range(len(qkv))]
    return torch.cat(y)


CASES = {"one": [(40, 5)], "three": [(0, 3), (31, 16), (63, 1)], "over a block's end": [(14, 4), (47, 2)]}
CASES |= {"pieces of prompts": [(0, 20), (9, 33), (30, 1)]}  # in several groups each
FACTS = {
    "plain": {},
    "window": {"window": 20},
    "normed": {"norms": True},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
}


def heads(D, facts, dtype):
    facts = dict(facts)
    norms = tuple(torch.randn(D, device=DEVICE).to(dtype) for _ in range(2)) if facts.pop("norms", False) else (None, None)
    sinks = torch.randn(4, device=DEVICE) if facts.pop("sinks", False) else None
    return Heads(4, 2, D, 0.3, facts.pop("window", 0), 1e-6, *norms, sinks, **facts)


@pytest.fixture
def interpreted():
    """Steps take Triton's kernel without a GPU, too, in its interpreter."""
    with emulation.changed_kernels():
        if DEVICE == "cpu":
            registry.register("test/interpreted", op="attend", devices=("cpu",), dtypes=(torch.float32,))(attend_triton.attend)
        yield


@pytest.mark.half_of("fact", "case")
@pytest.mark.parametrize("fact", FACTS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("interpreted")
def test_attention_of_rows_is_that_of_one_row_after_another(case, fact):
    qkv, k, v, pos, table = rows_of(CASES[case], torch.float32, DEVICE, 32)
    h = heads(32, FACTS[fact], torch.float32)
    cos, sin = (f(torch.rand(6 * BLOCK, 16, device=DEVICE).repeat(1, 2)) for f in (torch.cos, torch.sin))
    expected = one_by_one(qkv, k.clone(), v.clone(), pos, table, cos, sin, h)
    ends = list(itertools.accumulate(n for _, n in CASES[case]))
    groups = [(at, min(16, end - at)) for (_, n), end in zip(CASES[case], ends, strict=True) for at in range(end - n, end, 16)]
    first, counts = torch.tensor(groups + [(0, 0)] * max(1, ends[-1] - len(groups)), device=DEVICE).T  # (0, 0): what fills up
    for groups in (None, (first.contiguous(), counts.contiguous(), 16)):
        caches = k.clone(), v.clone()
        result = attend_rows.attend_rows(qkv, *caches, Places(pos, cos, sin, table), h, groups=groups)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_on_a_cpu_the_bits_are_those_of_one_row_after_another(case):
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        qkv, k, v, pos, table = rows_of(CASES[case], torch.bfloat16, "cpu", 32)
        h, cos = Heads(4, 2, 32, 0.3), torch.ones(6 * BLOCK, 32, dtype=torch.bfloat16)
        caches = k.clone(), v.clone()
        expected = [
            cpu.attend(qkv[i : i + 1], *caches, Places(pos[i : i + 1], cos, cos * 0.5, table[i : i + 1]), h)
            for i in range(len(qkv))
        ]
        caches = k.clone(), v.clone()
        assert torch.equal(cpu.attend(qkv, *caches, Places(pos, cos, cos * 0.5, table), h), torch.cat(expected))
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["fp8", "4"])
@pytest.mark.skipif(DEVICE == "cpu", reason="attention over coded caches of many rows needs a GPU's tiles")
def test_over_a_cache_in_few_bits_rows_are_as_near_as_its_steps(kind):
    qkv, k, v, pos, table = rows_of(CASES["three"], torch.float16, DEVICE, 64)
    h, cos = Heads(4, 2, 64, 0.3), torch.ones(6 * BLOCK, 64, dtype=torch.float16, device=DEVICE)
    coded = []
    for cache in (k, v):
        held = kv.zeros(kind, cache.shape, cache.dtype, DEVICE)
        held[:] = torch.nan_to_num(cache)
        coded.append(held)
    result = attend_rows.attend_rows(qkv, *coded, Places(pos, cos, cos * 0, table), h)
    expected = one_by_one(qkv, *coded, pos, table, cos, cos * 0, h)
    assert (result - expected).float().norm() < 1e-2 * expected.float().norm()


@pytest.mark.parametrize("accept", [reference.accept, sample.accept], ids=["torch", "triton"])
def test_drafts_are_right_up_to_the_first_that_is_not(accept):
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        counts = torch.randint(1, MOST_DRAFTS + 2, (5,), generator=g).tolist()
        ids, drawn, expected = [], [], []
        for count in counts:
            own = torch.randint(0, 50, (count + 1,), generator=g).tolist()
            depth = int(torch.randint(0, count, (1,), generator=g))
            ids += own[: depth + 1] + [99] * (count - depth - 1)
            drawn += own[1:]
            expected.append((depth, own[depth + 1]))
        first = torch.tensor([sum(counts[:i]) for i in range(5)], device=DEVICE)
        rows = torch.tensor([6, 0, 3, 1, 4], device=DEVICE)
        token, pos = torch.zeros(8, dtype=torch.int64, device=DEVICE), torch.full((8,), 30, dtype=torch.int32, device=DEVICE)
        accepted = torch.full((5,), -1, device=DEVICE)
        given = (torch.tensor(t, device=DEVICE) for t in (drawn, ids))
        accept(*given, first, torch.tensor(counts, device=DEVICE), rows, token, pos, accepted)
        assert accepted.tolist() == [depth for depth, _ in expected]
        assert token[rows].tolist() == [t for _, t in expected]
        assert (pos[rows] - 31).tolist() == accepted.tolist()
        assert token.tolist()[2] == 0
        assert pos.tolist()[2] == 30
