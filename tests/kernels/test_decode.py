"""The decode kernels against their torch definitions: interpreted on the CPU, compiled where a GPU is."""

import dataclasses
import os
from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first triton import
pytest.importorskip("triton")

from emulation import error
from lowq_kernels.decode import attend_triton, elementwise, kv, kv_triton, prompt, reference, route_triton, sample
from lowq_kernels.decode.reference import Places
from lowq_kernels.decode.route import Routing
from lowq_kernels.decode.router import RouterFacts, route_by

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16
TOLERANCE = 2e-3
EACH_DTYPE = pytest.mark.parametrize(("dtype", "tolerance"), [(DTYPE, TOLERANCE), (torch.float32, 1e-5)], ids=["fp16", "fp32"])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


def randn(*shape, dtype=DTYPE):
    return torch.randn(*shape, dtype=torch.float32).to(DEVICE, dtype)


@pytest.mark.parametrize("H", [64, 80, 1000])
@pytest.mark.parametrize("kind", ["norm", "add", "sandwich"])
def test_add_norm(H, kind):
    x, weight, post = randn(3, H), randn(H), randn(H)
    delta = None if kind == "norm" else randn(3, H)
    args = (weight, 1e-5, post if kind == "sandwich" else None)
    residual, wanted_residual = x.clone(), x.clone()
    y = elementwise.add_norm(residual, delta, *args)
    expected = reference.add_norm(wanted_residual, delta, *args)
    assert error(y, expected) < TOLERANCE
    assert error(residual, wanted_residual) < TOLERANCE
    assert torch.equal(residual, x) == (kind == "norm")


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [8, 1500])
def test_gated(act, width):
    gate_up = randn(3, 2 * width) * 4
    assert error(elementwise.gated(gate_up, act), reference.gated(gate_up, act)) < TOLERANCE


def test_gated_of_large_gates_stays_finite():
    gate_up = torch.tensor([[-60000.0, 60000.0, 1.0, 1.0]], device=DEVICE)
    for act in ("silu", "gelu_tanh"):
        assert elementwise.gated(gate_up, act).tolist() == [[0.0, 60000.0]]


# HQ, HKV, D, R, window, with q/k norm, positions, further facts
ATTENTION = {
    "llama": (8, 2, 64, 64, 0, False, [0, 90]),
    "qwen3": (4, 2, 32, 32, 0, True, [33, 64]),
    "phi3": (2, 2, 96, 72, 0, False, [31, 32]),
    "one head": (1, 1, 16, 16, 0, False, [70]),
    "window": (4, 1, 32, 32, 40, True, [39, 40, 95]),
    "many": (12, 4, 16, 16, 0, False, [95, 64]),
    "sinks": (6, 2, 32, 32, 0, False, [70, 3]),
    "sinks and a window": (4, 1, 16, 16, 24, True, [95, 10]),
    "window, heads of 64": (2, 1, 64, 64, 24, False, [95, 10]),
    "capped": (4, 2, 32, 32, 0, False, [90, 5], {"softcap": 1.3}),
    "capped, a window, sinks": (4, 1, 32, 16, 40, True, [95, 39], {"softcap": 2.0}),
    "chunks": (4, 2, 16, 16, 0, True, [95, 39, 40], {"chunk": 40}),
    "chunks and a window": (4, 2, 16, 0, 24, False, [95, 45], {"chunk": 40}),
    "wide": (2, 1, 512, 64, 0, True, [70, 3], {"softcap": 1.1}),
}


def attention_case(name, dtype=DTYPE):
    HQ, HKV, D, R, window, norm, places, *more = ATTENTION[name]
    B, S = len(places), 100
    q_norm, k_norm = (randn(D, dtype=dtype), randn(D, dtype=dtype)) if norm else (None, None)
    sinks = randn(HQ, dtype=torch.float32) + 2 if "sinks" in name else None
    h = reference.Heads(HQ, HKV, D, D**-0.5, window, 1e-6, q_norm, k_norm, sinks, **(more[0] if more else {}))
    angles = torch.rand(S, R // 2).repeat(1, 2) * 6
    caches = [randn(B, HKV, S, D, dtype=dtype) for _ in range(2)]
    pos = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    for b, p in enumerate(places):  # what no text has reached yet must not be read
        for cache in caches:
            cache[b, :, p:] = float("nan")
    tables = (angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype))
    return randn(B, (HQ + 2 * HKV) * D, dtype=dtype), caches, pos, tables, h


# of attend_triton, the rule's on a GPU; fewer programs in the interpreter, which runs one after the other
CUT = None if DEVICE == "cuda" else {"SPLITS": 4, "LEAST": 0}


@pytest.mark.parametrize("name", ATTENTION)
def test_attend(name):
    qkv, caches, pos, tables, h = attention_case(name)
    ours, theirs = [c.clone() for c in caches], [c.nan_to_num() for c in caches]
    for _ in range(2):  # twice: the counters that the first launch used must be left at zero
        y = attend_triton.attend(qkv, *ours, Places(pos, *tables), h, config=CUT)
    expected = reference.attend(qkv, *theirs, Places(pos, *tables), h)
    assert error(y, expected) < TOLERANCE
    for b, p in enumerate(pos.tolist()):
        for cache, truth, before in zip(ours, theirs, caches, strict=True):
            assert error(cache[b, :, p], truth[b, :, p]) < TOLERANCE
            assert torch.equal(cache[b, :, :p], before[b, :, :p])
            assert cache[b, :, p + 1 :].isnan().all()


INTERPRETED_BF16 = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter multiplies the bit patterns of bf16")


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param(torch.bfloat16, 1.2e-2, marks=INTERPRETED_BF16), (torch.float32, 1e-5)]
)
def test_attend_in_other_dtypes(dtype, tolerance):
    qkv, caches, pos, tables, h = attention_case("qwen3", dtype)
    y = attend_triton.attend(qkv, *[c.clone() for c in caches], Places(pos, *tables), h, config={"SPLITS": 2, "LEAST": 0})
    assert error(y, reference.attend(qkv, *[c.nan_to_num() for c in caches], Places(pos, *tables), h)) < tolerance


@pytest.mark.parametrize("splits", [1, 32])
def test_attend_is_the_same_however_it_is_split(splits):
    qkv, caches, pos, tables, h = attention_case("llama")
    y = attend_triton.attend(qkv, *[c.clone() for c in caches], Places(pos, *tables), h, config={"SPLITS": splits, "LEAST": 0})
    assert error(y, reference.attend(qkv, *[c.nan_to_num() for c in caches], Places(pos, *tables), h)) < TOLERANCE


def paginate(caches, page):
    """Caches (B, HKV, S, D) in blocks at random places of a pool, what is between them NaN; (pools, table)."""
    B, HKV, S, D = caches[0].shape
    width = -(-S // page)
    places = torch.randperm(B * width + 3)[: B * width].reshape(B, width)
    pools = [torch.full((B * width + 3, HKV, page, D), float("nan"), dtype=c.dtype, device=c.device) for c in caches]
    for pool, cache in zip(pools, caches, strict=True):
        whole = torch.full((B, HKV, width * page, D), float("nan"), dtype=cache.dtype, device=cache.device)
        whole[:, :, :S] = cache
        pool[places.flatten()] = whole.reshape(B, HKV, width, page, D).transpose(1, 2).flatten(0, 1)
    return pools, places.to(cache.device, torch.int32)


def collected(pool, table):
    """The pool's blocks as caches again, (B, HKV, S, D)."""
    return pool[table.long()].transpose(1, 2).flatten(2, 3)


@pytest.mark.parametrize(
    ("name", "page"), [("llama", 16), ("phi3", 64), ("window", 64), ("window", 16), ("capped", 16), ("chunks", 16)]
)
def test_attend_over_a_paged_cache(name, page):
    """By the kernel and by the reference, against the reference over caches of their own."""
    qkv, caches, pos, tables, h = attention_case(name)
    theirs = [c.nan_to_num() for c in caches]
    expected = reference.attend(qkv, *theirs, Places(pos, *tables), h)
    for attend in (partial(attend_triton.attend, config=CUT), reference.attend):
        pools, table = paginate(caches, page)
        before = [p.clone() for p in pools]
        y = attend(qkv, *pools, Places(pos, *tables, table), h)
        assert error(y, expected) < TOLERANCE
        for pool, old, cache, truth in zip(pools, before, caches, theirs, strict=True):
            new = collected(pool, table)
            for b, p in enumerate(pos.tolist()):
                assert error(new[b, :, p], truth[b, :, p]) < TOLERANCE
                assert torch.equal(new[b, :, :p], cache[b, :, :p])
            written = (pool.nan_to_num(7) != old.nan_to_num(7)).any(-1).sum()
            assert written == len(pos) * h.HKV  # one slot of each sequence and no other


def test_long_texts_over_a_paged_cache_are_cut_up_where_short_ones_are_not():
    assert attend_triton.cut(2, paged=True) == {"SPLITS": 16, "LEAST": 0}
    assert attend_triton.cut(256, paged=True) == {"SPLITS": 4, "LEAST": 512}  # heads alone fill the GPU
    assert attend_triton.cut(256, paged=False) == {"SPLITS": 1, "LEAST": 0}
    h = reference.Heads(2, 1, 16, 0.25)
    caches, qkv = [randn(2, 1, 400, 16) for _ in range(2)], randn(2, 4 * 16)
    pos = torch.tensor([399, 60], dtype=torch.int32, device=DEVICE)
    tables = [torch.rand(400, 16).to(DEVICE, DTYPE) for _ in range(2)]
    expected = reference.attend(qkv, *[c.clone() for c in caches], Places(pos, *tables), h)
    pools, table = paginate(caches, 16)
    cut = {"SPLITS": 4, "LEAST": 128}
    assert error(attend_triton.attend(qkv, *pools, Places(pos, *tables, table), h, config=cut), expected) < TOLERANCE


PASSES = {
    "llama": [(0, 70)],
    "qwen3": [(0, 33), (33, 70)],
    "phi3": [(0, 1), (1, 40)],
    "window": [(0, 70), (70, 105)],
    "window, heads of 64": [(0, 70)],
    "sinks": [(0, 40), (40, 50)],
    "capped, a window, sinks": [(0, 60), (60, 70)],
    "chunks": [(0, 50), (50, 97)],
    "chunks and a window": [(0, 90)],
    "wide": [(0, 20), (20, 37)],
}


@EACH_DTYPE
@pytest.mark.parametrize("name", PASSES)
def test_attend_prompt(name, dtype, tolerance):
    """Passes over prompts of two sequences, each from where the last one ended."""
    config = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2}  # several blocks of prompts that are short
    HQ, HKV, D, R = ATTENTION[name][:4]
    h = attention_case(name, dtype)[-1]
    S = PASSES[name][-1][1] + 7
    angles = torch.rand(S, R // 2).repeat(1, 2) * 6
    tables = angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)
    ours, theirs = ([torch.zeros(2, HKV, S, D, dtype=dtype, device=DEVICE) for _ in range(2)] for _ in range(2))
    for start, end in PASSES[name]:
        for cache in ours:
            cache[:, :, start:] = float("nan")  # nothing past the text so far may be read
        qkv = randn(2, end - start, (HQ + 2 * HKV) * D, dtype=dtype)
        y = prompt.attend_prompt(qkv, *ours, start, *tables, h, config)
        expected = reference.attend_prompt(qkv, *theirs, start, *tables, h)
        assert error(y, expected) < tolerance
        for cache, truth in zip(ours, theirs, strict=True):
            assert error(cache[:, :, :end], truth[:, :, :end]) < tolerance
            assert cache[:, :, end:].isnan().all()


PIECES = {  # tokens of each sequence that were there before, and those that are new
    "llama": [(0, 33), (40, 1), (16, 16), (0, 5)],
    "qwen3": [(63, 40), (0, 32)],
    "phi3": [(31, 2), (5, 1)],
    "window": [(70, 35), (0, 80), (39, 2)],
    "sinks": [(20, 3), (0, 33)],
    "capped": [(20, 33), (0, 5)],
    "chunks": [(70, 35), (0, 80), (39, 2)],
}


@pytest.mark.parametrize(
    ("name", "page"),
    [("llama", 16), ("qwen3", 64), ("phi3", 64), ("window", 16), ("sinks", 16), ("capped", 16), ("chunks", 64)],
)
@EACH_DTYPE
def test_attend_packed(name, page, dtype, tolerance):
    """Pieces of several texts in one pass, by the kernel and by the reference, each as that text's own prompt would be."""
    config = {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    HQ, HKV, D, R = ATTENTION[name][:4]
    h, pieces = attention_case(name, dtype)[-1], PIECES[name]
    S = max(start + new for start, new in pieces)
    angles = torch.rand(S, R // 2).repeat(1, 2) * 6
    turned = angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)
    caches = [randn(len(pieces), HKV, S, D, dtype=dtype) for _ in range(2)]
    for b, (start, _) in enumerate(pieces):
        for cache in caches:
            cache[b, :, start:] = float("nan")
    qkv = randn(sum(new for _, new in pieces) + 3, (HQ + 2 * HKV) * D, dtype=dtype)
    rows, pos, tiles, expected, truth = [], [], [], [], []
    for b, (start, new) in enumerate(pieces):
        own = [c[b : b + 1].nan_to_num() for c in caches]
        first = len(rows)
        expected.append(reference.attend_prompt(qkv[None, first : first + new], *own, start, *turned, h)[0])
        truth.append(own)
        rows += [b] * new
        pos += range(start, start + new)
        tiles += [[t, min(t + 32, first + new)] for t in range(first, first + new, 32)]
    filled = [rows + [len(pieces)] * 3, pos + [0] * 3, [*tiles, [0, 0]]]  # what only fills up, in a block of its own
    for attend in (partial(prompt.attend_packed, config=config), reference.attend_packed):
        pools, table = paginate(caches, page)
        spare = next(i for i in range(len(pools[0])) if i not in table.flatten().tolist())
        table = torch.cat([table, torch.full_like(table[:1], spare)])
        p = reference.Packed(table, *(torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in filled))
        y = attend(qkv, *pools, p, *turned, h)
        assert y.isfinite().all()
        assert error(y[: len(pos)], torch.cat(expected)) < tolerance
        for i, pool in enumerate(pools):
            for b, (start, new) in enumerate(pieces):
                assert error(collected(pool, table)[b, :, : start + new], truth[b][i][0, :, : start + new]) < tolerance
                assert collected(pool, table)[b, :, start + new :].isnan().all()


@pytest.mark.parametrize("kind", kv.KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "capped, a window, sinks"])
def test_queries_of_a_layer_that_attends_to_the_keys_of_another(name, kind):
    """They give what the same queries gave in the layer that wrote those keys, and write nothing."""
    qkv, caches, pos, tables, h = attention_case(name)
    caches = [kv.holding(kind, c.nan_to_num()) for c in caches]
    alone, q = dataclasses.replace(h, writes=False, k_norm=None), qkv[:, : h.HQ * h.D].contiguous()
    expected = attend_triton.attend(qkv, *caches, Places(pos, *tables), h, config=CUT)
    before = [kv_triton.numbers(c).clone() for c in caches]
    assert error(attend_triton.attend(q, *caches, Places(pos, *tables), alone, config=CUT), expected) < TOLERANCE
    assert error(reference.attend(q, *caches, Places(pos, *tables), alone), expected) < TOLERANCE
    rows = torch.arange(len(pos), dtype=torch.int32, device=DEVICE)
    for page in (0, 16):
        if not page and kind == kv.PLAIN:
            y = prompt.attend_prompt(q[:1, None].contiguous(), *(c[:1] for c in caches), int(pos[0]), *tables, alone)[:, 0]
        elif kind == kv.PLAIN:
            pools, table = paginate(caches, page)
            tiles = torch.stack((rows, rows + 1), 1)
            y = prompt.attend_packed(q, *pools, reference.Packed(table, rows, pos, tiles), *tables, alone)
        else:
            continue
        assert error(y, expected[: len(y)]) < TOLERANCE
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(kv_triton.numbers(cache), old)


def test_a_sink_takes_its_share_of_the_softmax():
    """By the formula, of one key head with two queries."""
    q, k, v = (
        randn(1, 2, 1, 8, dtype=torch.float32),
        randn(1, 1, 5, 8, dtype=torch.float32),
        randn(1, 1, 5, 8, dtype=torch.float32),
    )
    sinks = torch.tensor([1.5, -0.5], device=DEVICE)
    y = reference.softmax_product(q.transpose(1, 2), k, v, None, reference.Heads(2, 1, 8, 0.3, sinks=sinks))
    for head in range(2):
        p = (q[0, head, 0] @ k[0, 0].T * 0.3).exp()
        assert error(y[0, 0, head], p @ v[0, 0] / (p.sum() + sinks[head].exp())) < 1e-5


def test_attend_reference_is_attention_over_the_text_so_far():
    """The reference itself, one token at a time, against one causal pass over the whole text."""
    h = reference.Heads(4, 2, 16, 0.3, 5, 1e-6, randn(16), randn(16))
    angles = torch.rand(12, 8).repeat(1, 2)
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    qkv = randn(2, 12, 8 * 16, dtype=torch.float32)
    caches = [torch.zeros(2, 2, 12, 16, device=DEVICE) for _ in range(2)]
    whole = reference.attend_prompt(qkv, *[c.clone() for c in caches], 0, cos, sin, h)
    half = [c.clone() for c in caches]
    parts = [reference.attend_prompt(qkv[:, i : i + 5], *half, i, cos, sin, h) for i in (0, 5, 10)]
    assert error(torch.cat(parts, 1), whole) < 1e-5
    for t in range(12):
        pos = torch.full((2,), t, dtype=torch.int32, device=DEVICE)
        y = reference.attend(qkv[:, t], *caches, Places(pos, cos, sin), h)
        assert error(y, whole[:, t]) < 1e-5


# experts, H, top_k, whether weights sum to 1, whether they are rounded
ROUTERS = [(8, 64, 2, True, False), (128, 200, 8, True, True), (60, 96, 4, False, False), (5, 2500, 3, True, True)]


def routed(x, facts):
    r = Routing.of(x, facts)
    return route_triton.route(r, {}), r.weights


@pytest.mark.parametrize(("E", "H", "top_k", "normalise", "rounded"), ROUTERS)
def test_route(E, H, top_k, normalise, rounded):
    x, weight, bias = randn(3, H), randn(E, H) / H**0.5, randn(E) if E > 5 else None
    facts = RouterFacts(weight, top_k, normalise=normalise, rounded=rounded, logits_bias=bias)
    for _ in range(2):  # twice: the counters that the first launch used must be left at zero
        ids, weights = routed(x, facts)
    wanted_ids, expected = route_by(x, facts)
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(weights, expected, atol=1e-3 if rounded else 1e-6)


def test_route_of_nan_still_names_experts():
    ids, _ = routed(randn(2, 64) * float("nan"), RouterFacts(randn(6, 64), 3))
    assert 0 <= int(ids.min()) <= int(ids.max()) < 6


def pick(logits, seed=0, temperature=0.0, advance=1, start=7, **block):
    B = logits.shape[0]
    token = torch.full((B,), -1, dtype=torch.int64, device=DEVICE)
    pos = torch.full((B,), start, dtype=torch.int32, device=DEVICE)
    sample.choose(logits, token, pos, torch.tensor([seed], device=DEVICE), temperature, advance, **block)
    assert pos.tolist() == [start + advance] * B
    return token.tolist()


@pytest.mark.parametrize("V", [3, 2048, 5001])
def test_choose_greedy_is_the_argmax(V):
    logits = randn(4, V)
    assert pick(logits) == logits.argmax(-1).tolist()
    assert pick(logits, advance=0) == logits.argmax(-1).tolist()


def test_choose_breaks_ties_at_the_lowest_id_and_survives_nan():
    logits = torch.zeros(1, 4000, device=DEVICE)
    logits[0, [2500, 3000]] = 1.0
    assert pick(logits) == [2500]
    assert 0 <= pick(torch.full((1, 4000), float("nan"), device=DEVICE))[0] < 4000


def test_choose_draws_by_seed_and_position():
    logits = torch.zeros(1, 700, device=DEVICE)
    draws = {pick(logits, seed, 1.0, start=start, block=512)[0] for seed in range(2) for start in range(3)}
    assert len(draws) > 4  # 6 draws among 700
    assert pick(logits, 5, 1.0, block=512) == pick(logits, 5, 1.0, block=256)


def test_choose_follows_the_probabilities():
    n = 4000 if DEVICE == "cuda" else 64  # the interpreter takes 0.1 s per program, most of it Philox
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, 2.5, -30.0], device=DEVICE)
    drawn = torch.tensor(pick(row.expand(n, -1).contiguous(), 3, 0.5, block=16))
    expected = (row.cpu() / 0.5).softmax(-1)
    assert (torch.bincount(drawn, minlength=6) / n - expected).abs().max() < 2 / n**0.5  # 4 sigma of a share of one half
    assert 5 not in drawn.tolist()


def test_rows_draw_by_their_own_seed_place_and_temperature():
    """What a text draws does not depend on its row, nor on who else is there; rows that are not named stay."""
    choosing = partial(sample.choose_rows, block=512)
    logits = randn(1, 700).expand(5, -1).contiguous()
    token, pos = torch.full((9,), -1, device=DEVICE), torch.arange(9, dtype=torch.int32, device=DEVICE)
    seed, temperature = torch.zeros(9, dtype=torch.int64, device=DEVICE), torch.ones(9, device=DEVICE)
    seed[[2, 7]], pos[[2, 7]], temperature[4] = 1 << 40, 30, 0.0
    rows = torch.tensor([7, 4, 2, 0, 8], dtype=torch.int32, device=DEVICE)
    before = pos.clone()
    choosing(logits, rows, token, pos, seed, temperature)
    assert token[2] == token[7]
    assert token[4] == logits[0].argmax()
    assert len({token[r].item() for r in (0, 2, 4, 8)}) == 4
    assert token[[1, 3, 5, 6]].tolist() == [-1] * 4
    assert (pos - before).tolist() == [1, 0, 1, 0, 1, 0, 0, 1, 1]
    for choose_rows in (reference.choose_rows, choosing):  # alone, in another row: the same
        alone, place = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.full((2,), 30, dtype=torch.int32, device=DEVICE)
        drawn = []
        for row in (0, 1, 1):
            where = torch.tensor([row], dtype=torch.int32, device=DEVICE)
            choose_rows(logits[:1], where, alone, place.fill_(30), seed[[2, 2]], temperature[:2])
            drawn.append(alone[row].item())
        assert len(set(drawn)) == 1
        assert choose_rows is reference.choose_rows or drawn[0] == token[2].item()
