"""The decode kernels against their torch definitions: interpreted on the CPU, compiled where a GPU is."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first triton import
pytest.importorskip("triton")

from lowq_kernels.decode import attention, elementwise, prompt, reference, router, sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16
TOLERANCE = 2e-3


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


def error(y, wanted):
    return ((y.float() - wanted.float()).norm() / wanted.float().norm()).item()


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
    wanted = reference.add_norm(wanted_residual, delta, *args)
    assert error(y, wanted) < TOLERANCE
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


# HQ, HKV, D, R, window, with q/k norm, positions
ATTENTION = {
    "llama": (8, 2, 64, 64, 0, False, [0, 90]),
    "qwen3": (4, 2, 32, 32, 0, True, [33, 64]),
    "phi3": (2, 2, 96, 72, 0, False, [31, 32]),
    "one head": (1, 1, 16, 16, 0, False, [70]),
    "window": (4, 1, 32, 32, 40, True, [39, 40, 95]),
    "many": (12, 4, 16, 16, 0, False, [95, 64]),
}


def attention_case(name, dtype=DTYPE):
    HQ, HKV, D, R, window, norm, places = ATTENTION[name]
    B, S = len(places), 100
    q_norm, k_norm = (randn(D, dtype=dtype), randn(D, dtype=dtype)) if norm else (None, None)
    h = reference.Heads(HQ, HKV, D, D**-0.5, window, 1e-6, q_norm, k_norm)
    angles = torch.rand(S, R // 2).repeat(1, 2) * 6
    caches = [randn(B, HKV, S, D, dtype=dtype) for _ in range(2)]
    pos = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    for b, p in enumerate(places):  # what no text has reached yet must not be read
        for cache in caches:
            cache[b, :, p:] = float("nan")
    tables = (angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype))
    return randn(B, (HQ + 2 * HKV) * D, dtype=dtype), caches, pos, tables, h


@pytest.mark.parametrize("name", ATTENTION)
def test_attend(name, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(attention, "splits_for", lambda heads: 4)  # the interpreter runs one program after the other
    qkv, caches, pos, tables, h = attention_case(name)
    ours, theirs = [c.clone() for c in caches], [c.nan_to_num() for c in caches]
    for _ in range(2):  # twice: the counters that the first launch used must be left at zero
        y = attention.attend(qkv, *ours, pos, *tables, h)
    wanted = reference.attend(qkv, *theirs, pos, *tables, h)
    assert error(y, wanted) < TOLERANCE
    for b, p in enumerate(pos.tolist()):
        for cache, truth, before in zip(ours, theirs, caches, strict=True):
            assert error(cache[b, :, p], truth[b, :, p]) < TOLERANCE
            assert torch.equal(cache[b, :, :p], before[b, :, :p])
            assert cache[b, :, p + 1 :].isnan().all()


INTERPRETED_BF16 = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter multiplies the bit patterns of bf16")


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param(torch.bfloat16, 1.2e-2, marks=INTERPRETED_BF16), (torch.float32, 1e-5)]
)
def test_attend_in_other_dtypes(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(attention, "splits_for", lambda heads: 2)
    qkv, caches, pos, tables, h = attention_case("qwen3", dtype)
    y = attention.attend(qkv, *[c.clone() for c in caches], pos, *tables, h)
    assert error(y, reference.attend(qkv, *[c.nan_to_num() for c in caches], pos, *tables, h)) < tolerance


@pytest.mark.parametrize("splits", [1, 32])
def test_attend_is_the_same_however_it_is_split(splits, monkeypatch):
    qkv, caches, pos, tables, h = attention_case("llama")
    monkeypatch.setattr(attention, "splits_for", lambda heads: splits)
    y = attention.attend(qkv, *[c.clone() for c in caches], pos, *tables, h)
    assert error(y, reference.attend(qkv, *[c.nan_to_num() for c in caches], pos, *tables, h)) < TOLERANCE


PASSES = {"llama": [(0, 90)], "qwen3": [(0, 33), (33, 97)], "phi3": [(0, 1), (1, 40)], "window": [(0, 100), (100, 150)]}


@pytest.mark.parametrize("name", PASSES)
def test_attend_prompt(name, monkeypatch):
    """Passes over prompts of two sequences, each from where the last one ended."""
    monkeypatch.setattr(prompt, "CONFIG", {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2})
    HQ, HKV, D, R = ATTENTION[name][:4]
    h = attention_case(name)[-1]
    S = PASSES[name][-1][1] + 7
    angles = torch.rand(S, R // 2).repeat(1, 2) * 6
    tables = angles.cos().to(DEVICE, DTYPE), angles.sin().to(DEVICE, DTYPE)
    ours, theirs = ([torch.zeros(2, HKV, S, D, dtype=DTYPE, device=DEVICE) for _ in range(2)] for _ in range(2))
    for start, end in PASSES[name]:
        for cache in ours:
            cache[:, :, start:] = float("nan")  # nothing past the text so far may be read
        qkv = randn(2, end - start, (HQ + 2 * HKV) * D)
        y = prompt.attend_prompt(qkv, *ours, start, *tables, h)
        wanted = reference.attend_prompt(qkv, *theirs, start, *tables, h)
        assert error(y, wanted) < TOLERANCE
        for cache, truth in zip(ours, theirs, strict=True):
            assert error(cache[:, :, :end], truth[:, :, :end]) < TOLERANCE
            assert cache[:, :, end:].isnan().all()


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
        y = reference.attend(qkv[:, t], *caches, pos, cos, sin, h)
        assert error(y, whole[:, t]) < 1e-5


# experts, H, top_k, whether weights sum to 1, whether they are rounded
ROUTERS = [(8, 64, 2, True, False), (128, 200, 8, True, True), (60, 96, 4, False, False), (5, 2500, 3, True, True)]


@pytest.mark.parametrize(("E", "H", "top_k", "normalise", "rounded"), ROUTERS)
def test_route(E, H, top_k, normalise, rounded):
    x, weight = randn(3, H), randn(E, H) / H**0.5
    for _ in range(2):  # twice: the counters that the first launch used must be left at zero
        ids, weights = router.route(x, weight, top_k, normalise, rounded)
    wanted_ids, wanted = reference.route(x, weight, top_k, normalise, rounded)
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(weights, wanted, atol=1e-3 if rounded else 1e-6)
    many = router.route(x.repeat(40, 1), weight, top_k, normalise, rounded)  # so many take a matrix product
    assert torch.equal(many[0][-3:], ids)


def test_route_of_nan_still_names_experts():
    ids, _ = router.route(randn(2, 64) * float("nan"), randn(6, 64), 3, True, False)
    assert 0 <= int(ids.min()) <= int(ids.max()) < 6


def pick(logits, seed=0, temperature=0.0, advance=1, start=7):
    B = logits.shape[0]
    token = torch.full((B,), -1, dtype=torch.int64, device=DEVICE)
    pos = torch.full((B,), start, dtype=torch.int32, device=DEVICE)
    sample.choose(logits, token, pos, torch.tensor([seed], device=DEVICE), temperature, advance)
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


def test_choose_draws_by_seed_and_position(monkeypatch):
    monkeypatch.setattr(sample, "BLOCK_V", 512)
    logits = torch.zeros(1, 700, device=DEVICE)
    draws = {pick(logits, seed, 1.0, start=start)[0] for seed in range(2) for start in range(3)}
    assert len(draws) > 4  # 6 draws among 700
    assert pick(logits, 5, 1.0) == pick(logits, 5, 1.0)


def test_choose_follows_the_probabilities(monkeypatch):
    monkeypatch.setattr(sample, "BLOCK_V", 16)
    n = 4000 if DEVICE == "cuda" else 64  # the interpreter takes 0.1 s per program, most of it Philox
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, 2.5, -30.0], device=DEVICE)
    drawn = torch.tensor(pick(row.expand(n, -1).contiguous(), 3, 0.5))
    wanted = (row.cpu() / 0.5).softmax(-1)
    assert (torch.bincount(drawn, minlength=6) / n - wanted).abs().max() < 2 / n**0.5  # 4 sigma of a share of one half
    assert 5 not in drawn.tolist()
