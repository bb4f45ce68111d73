"""A cache in few bits on a CPU: codes and attention in C++ (products/cpu/coded.h) against the definitions in torch."""

from dataclasses import replace

import pytest
import torch

from cpu_sets import isa, pytestmark
from lowq_kernels.decode import cpu, kv, kv_cpu, latent, latent_cpu, reference
from lowq_kernels.decode.latent import Latent
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.reference import Heads, Packed, Places
from lowq_kernels.products.cpu import native

__all__ = ["isa", "pytestmark"]
CODED = kv.KINDS[1:]
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 3e-6}  # relative Frobenius error
# HQ, HKV, D, rotated, window, norms and sinks: one to four queries of a key head, odd numbers of registers
HEADS = [(8, 2, 64, 64, 0, False), (6, 6, 80, 40, 0, True), (10, 2, 128, 128, 20, False), (4, 4, 16, 16, 7, True)]
HEADS += [(4, 2, 32, 32, 0, False), (6, 2, 112, 96, 37, False), (3, 1, 256, 64, 0, True)]
S, PAGE = 96, 16


def draw(*shape, dtype=torch.float32, seed=0):
    """Normal numbers, two dims of which are far larger, as keys have them."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[..., [1, shape[-1] // 2]] = x[..., [1, shape[-1] // 2]] * 3 + 4
    return x.to(dtype)


def error(y, ref):
    return float((y.double() - ref.double()).norm() / ref.double().norm())


def copied(cache):
    return replace(cache, codes=cache.codes.clone(), scales=cache.scales.clone())


@pytest.fixture
def ran(monkeypatch):
    """The names of the library's calls so far."""
    calls = []
    run = native.run

    def noted(what, *operands, **numbers):
        calls.append(native.NAMES[what])
        run(what, *operands, **numbers)

    monkeypatch.setattr(native, "run", noted)
    return calls


@pytest.fixture
def threads():
    """Sets torch's number of threads, for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("D", [16, 48, 80, 128, 256, 576])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_codes_are_the_definitions(isa, threads, kind, D, dtype):
    x = draw(3, 2, 70, D, dtype=dtype) * torch.logspace(-4, 3, 70)[:, None].to(dtype)
    x[0, 0, 5], x[1, 1, 6] = 0, torch.eye(D, dtype=dtype)[1] * 448
    theirs, ours = kv.holding(kind, x), kv_cpu.in_cpp(kv.zeros(kind, x.shape, dtype, x.device))
    threads(2)
    ours[:] = x
    assert (ours.codes != theirs.codes).float().mean() < 1e-3  # of a sum in another order another half is rounded
    assert (ours.scales != theirs.scales).float().mean() < 1e-2
    off, least = (((cache.part(...)[:].double() - x.double()) ** 2).sum(-1) for cache in (replace(theirs, codes=ours.codes,
                  scales=ours.scales), theirs))  # fmt: skip
    assert bool((off <= least * 1.001 + 1e-12).all())
    assert error(kv_cpu.in_cpp(theirs)[:], theirs[:]) < 1e-6
    assert torch.equal(kv_cpu.in_cpp(theirs)[1, :, 3:7], kv_cpu.in_cpp(theirs)[:][1, :, 3:7])


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(isa, kind, bad):
    x, h = draw(1, 1, 4, 32), Heads(1, 1, 32, 0.2)
    x[0, 0, 1, 3] = bad
    cache = kv_cpu.in_cpp(kv.zeros(kind, x.shape, x.dtype, x.device))
    cache[:] = x
    for held in (cache, kv.holding(kind, x.where(x.isfinite(), torch.nan))):  # torch makes a large number of an infinite one
        plain, turned = kv.zeros(kind, x.shape, x.dtype, x.device), [draw(4, 32, seed=i) for i in (1, 2)]
        at, qkv = Places(torch.tensor([3], dtype=torch.int32), *turned), draw(1, 3 * 32)
        assert cpu.attend(qkv, copied(held), plain, at, h).isnan().all()
        assert cpu.attend(qkv, plain, copied(held), at, h).isnan().all()
        assert cpu.attend(qkv, copied(held), plain, at, replace(h, window=2)).isfinite().all()  # sees slots 2 and 3


def case(kind, heads, dtype, paged, rows=3):
    """(qkv of rows, two equal pairs of caches, table, heads, cos and sin)."""
    HQ, HKV, D, R, window, normed = heads
    norms = [draw(D, dtype=dtype, seed=i) if normed else None for i in (1, 2)]
    sinks = draw(HQ, seed=9) + 2 if window else None
    shape, table = (rows, HKV, S, D), None
    if paged:
        width = S // PAGE
        shape = (rows * width + 2, HKV, PAGE, D)
        table = torch.randperm(rows * width + 2, generator=torch.Generator().manual_seed(0))[: rows * width].int()
        table = table.reshape(rows, width)
    pairs = [[kv.holding(kind, draw(*shape, dtype=dtype, seed=i)) for i in (5, 6)]]
    pairs.append([copied(cache) for cache in pairs[0]])
    qkv, (cos, sin) = draw(rows, S, (HQ + 2 * HKV) * D, dtype=dtype), (draw(S, R, dtype=dtype, seed=i) for i in (3, 4))
    return qkv, *pairs, table, Heads(HQ, HKV, D, D**-0.5, window, 1e-6, *norms, sinks), (cos, sin)


@pytest.mark.half_of("kind", "heads", "dtype", "paged")
@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("paged", [False, True])
def test_attention_of_a_step(isa, ran, threads, kind, heads, dtype, paged):
    qkv, ours, theirs, table, h, turned = case(kind, heads, dtype, paged)
    qkv, pos = qkv[:, 0].contiguous(), torch.tensor([5, S - 1, 0], dtype=torch.int32)
    again, at = [copied(cache) for cache in ours], Places(pos, *turned, table)
    ref = reference.attend(qkv, *theirs, at, h)
    y = cpu.attend(qkv, *ours, at, h)
    assert ran == ["attend"]
    assert error(y, ref) < TOLERANCE[dtype]
    for a, b in zip(ours, theirs, strict=True):
        assert error(a[:], b[:]) < 1e-3  # the sums of norms may round one value otherwise
    threads(3)
    assert torch.equal(cpu.attend(qkv, *again, at, h), y)
    again[1].codes[:] ^= 0x10
    assert not error(cpu.attend(qkv, *again, at, h), ref) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("kind", CODED)
def test_rows_of_one_sequence_see_each_other(isa, ran, kind):
    qkv, ours, theirs, table, h, turned = case(kind, HEADS[0], torch.bfloat16, True, rows=1)
    rows, at = (
        qkv[0, :5].contiguous(),
        Places(torch.arange(40, 45, dtype=torch.int32), *turned, table.expand(5, -1).contiguous()),
    )
    assert error(cpu.attend_rows(rows, *ours, at, h), reference.attend_rows(rows, *theirs, at, h)) < 3e-3
    assert ran == ["attend"]


@pytest.mark.parametrize("fact", [{"softcap": 5.0}, {"chunk": 32}, {"writes": False}], ids=str)
@pytest.mark.parametrize("kind", CODED)
def test_facts_beyond_the_kernel_are_the_definitions_over_decoded_values(isa, ran, kind, fact):
    qkv, ours, theirs, _, h, turned = case(kind, HEADS[0], torch.float32, False)
    h = replace(h, **fact)
    qkv = qkv[:, 0, : (h.HQ + 2 * h.HKV * h.writes) * h.D].contiguous()
    at = Places(torch.tensor([5, 63, 40], dtype=torch.int32), *turned)
    assert error(cpu.attend(qkv, *ours, at, h), reference.attend(qkv, *theirs, at, h)) < 3e-6
    assert set(ran) == {"codes"}


@pytest.mark.parametrize("at_once", [1, 1 << 22])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("heads", [HEADS[0], HEADS[1], HEADS[2]], ids=str)
@pytest.mark.parametrize("kind", CODED)
def test_prompts_in_pieces(isa, ran, monkeypatch, kind, heads, paged, at_once):
    """Two pieces of three sequences, a key head at a time and all together."""
    monkeypatch.setattr(kv_cpu, "AT_ONCE", at_once)
    qkv, ours, theirs, table, h, turned = case(kind, heads, torch.float32, paged)
    for first, end in ((0, 37), (37, 60)):
        piece = qkv[:, first:end].contiguous()
        if paged:
            T = end - first
            pos, rows = torch.arange(first, end).repeat(3).int(), torch.arange(3).repeat_interleave(T).int()
            p = Packed(table, rows, pos, torch.tensor([[i * T, (i + 1) * T] for i in range(3)]))
            y, ref = (
                way.attend_packed(piece.flatten(0, 1), *caches, p, *turned, h)
                for way, caches in ((cpu, ours), (reference, theirs))
            )
        else:
            y, ref = (
                way.attend_prompt(piece, *caches, first, *turned, h) for way, caches in ((cpu, ours), (reference, theirs))
            )
        assert error(y, ref) < 1e-4  # a code at half of two may be the other one
    assert set(ran) == {"codes"}


@pytest.mark.parametrize("shape", [(6, 16, 16, 24, 32), (5, 32, 32, 16, 80)], ids=str)  # heads, nope, rotated, v_dim, rank
@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_latent_attention(isa, ran, kind, shape, dtype):
    heads, nope, rotated, v_dim, rank = shape
    ups = [draw(heads, n, rank, dtype=dtype, seed=i) / rank**0.5 for i, n in ((1, nope), (2, v_dim))]
    f = Latent(*shape, 0.05, *ups, Norm(draw(rank, dtype=dtype, seed=3), 1e-5), "neighbours")
    q, rows = draw(3, 40, heads * (nope + rotated), dtype=dtype, seed=4), draw(3, 40, rank + rotated, dtype=dtype, seed=5)
    turned = [draw(S, rotated, dtype=dtype, seed=i) for i in (6, 7)]
    width = S // PAGE
    table = torch.randperm(3 * width, generator=torch.Generator().manual_seed(0)).int().reshape(3, width)
    made = []
    for step, prompt, packed in (
        (latent_cpu.step, latent_cpu.prompt, latent_cpu.packed),
        (latent.step, latent.prompt, latent.packed),
    ):
        own = kv.zeros(kind, (3, 1, S, rank + rotated), dtype, q.device)
        pool = kv.zeros(kind, (3 * width, 1, PAGE, rank + rotated), dtype, q.device)
        T, pos = 39, torch.full((3,), 39, dtype=torch.int32)
        p = Packed(table, torch.arange(3).repeat_interleave(T).int(), torch.arange(T).repeat(3).int(),
                   torch.tensor([[i * T, (i + 1) * T] for i in range(3)]))  # fmt: skip
        ys = [prompt(q[:, :T], rows[:, :T], own, 0, *turned, f)]
        ys.append(packed(q[:, :T].flatten(0, 1), rows[:, :T].flatten(0, 1), pool, p, *turned, f))
        last = q[:, T].contiguous(), rows[:, T].contiguous()
        ys += [step(*last, own, Places(pos, *turned), f), step(*last, pool, Places(pos, *turned, table), f)]
        made.append(ys)
    assert [name for name in ran if name == "latent"] == 2 * ["latent"]
    for y, ref in zip(*made, strict=True):
        assert error(y, ref) < (1e-2 if dtype == torch.bfloat16 else 1e-3)
