"""Latent attention: steps, prompts and packed prompts against a loop in fp64 and against transformers' modules in fp32."""

import dataclasses

import pytest
import torch
from latents import truth
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from emulation import error
from lowq_kernels.decode import kv, latent, ops
from lowq_kernels.decode.latent import Latent, LatentCall
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.prepare import PositionScale
from lowq_kernels.decode.reference import Packed, Places
from lowq_kernels.dispatch.registry import select

S, BLOCK, EPS = 96, 16, 1e-5
# heads, nope, rotated, v_dim, rank
SHAPES = {"as published, in small": (4, 16, 8, 16, 32), "odd": (3, 5, 2, 7, 9), "one head": (1, 8, 4, 4, 6)}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(21)


def facts(shape, **more):
    heads, nope, _, v_dim, rank = shape
    return Latent(
        *shape, 0.3, torch.randn(heads, nope, rank) / rank**0.5, torch.randn(heads, v_dim, rank) / rank**0.5,
        Norm(torch.randn(rank), EPS), **({"pairing": "neighbours"} | more),
    )  # fmt: skip


def tables(f):
    angles = torch.rand(S, f.rotated // 2).repeat(1, 2) * 6
    return angles.cos(), angles.sin()


def operands(f, *rows):
    return torch.randn(*rows, f.heads * (f.nope + f.rotated)), torch.randn(*rows, f.rank + f.rotated)


def blocks(rows, spare=3):
    """A pool of blocks of nothing but NaN, and a table of `rows` rows in mixed order."""
    n = S // BLOCK
    return torch.randperm(rows * n + spare)[: rows * n].reshape(rows, n).to(torch.int32), rows * n + spare


CASES = {
    "neighbours": {}, "halves": {"pairing": "halves"}, "scale of positions": {"position_scale": PositionScale(0.4, 7.0, 1)},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_steps_and_prompts_in_any_cut(name, shape):
    f = facts(SHAPES[shape], **CASES[name])
    T, start, turned, width = 40, 33, tables(f), f.rank + f.rotated
    q, rows = operands(f, 2, T)
    expected = torch.stack([truth(q[b], rows[b], 0, turned, f) for b in range(2)])
    cache = torch.full((3, 1, S, width), float("nan"))
    parts = [latent.prompt(q[:, a:b], rows[:, a:b], cache[:2], a, *turned, f) for a, b in ((0, 1), (1, 20), (20, start))]
    assert error(torch.cat(parts, 1), expected[:, :start]) < 1e-6
    for t in range(start, T):
        pos = torch.tensor([t, t], dtype=torch.int32)
        assert error(latent.step(q[:, t], rows[:, t], cache[:2], Places(pos, *turned), f), expected[:, t]) < 1e-6
    assert cache[2].isnan().all()
    assert cache[:2, :, T:].isnan().all()

    table, n = blocks(2)
    pool = torch.full((n, 1, BLOCK, width), float("nan"))
    tiles = torch.tensor([[0, 10], [10, 21], [21, 21], [21, 50], [50, 21 + start]], dtype=torch.int32)
    first = torch.cat((torch.arange(21), torch.arange(start)))  # 21 tokens of row 1, and `start` of row 0
    p = Packed(table, torch.tensor([1] * 21 + [0] * start, dtype=torch.int32), first.to(torch.int32), tiles)
    assert latent.runs(p) == [(0, 21), (21, 21 + start)]
    given = [torch.cat((x[1, :21], x[0, :start])) for x in (q, rows)]
    y = latent.packed(*given, pool, p, *turned, f)
    assert error(y[:21], expected[1, :21]) < 1e-6
    assert error(y[21:], expected[0, :start]) < 1e-6
    pos = torch.tensor([start, 21], dtype=torch.int32)  # texts of other lengths
    token = [torch.stack((x[0, start], x[1, 21])) for x in (q, rows)]
    y = latent.dispatched(*token, pool, Places(pos, *turned, table), f)
    assert error(y, torch.stack((expected[0, start], expected[1, 21]))) < 1e-6


@pytest.mark.parametrize("name", CASES)
def test_each_fact_matters(name):
    f = facts(SHAPES["as published, in small"], **CASES[name])
    q, rows = operands(f, 12)
    turned = tables(f)
    expected = truth(q, rows, 0, turned, f)

    def by(f):
        return latent.prompt(q[None], rows[None], torch.empty(1, 1, S, f.rank + f.rotated), 0, *turned, f)[0]

    assert error(by(f), expected) < 1e-6
    other = {"halves": "neighbours", "neighbours": "halves"}[f.pairing]
    changed = {
        "pairing": other, "norm": Norm(None, EPS), "scale": 0.2, "k_up": f.k_up.flip(0), "v_up": f.v_up.flip(0),
        "position_scale": None if f.position_scale else PositionScale(0.1, 2.0),
    }  # fmt: skip
    for fact, value in changed.items():
        assert error(by(dataclasses.replace(f, **{fact: value})), expected) > 1e-3, fact


@pytest.mark.half_of("piece", "at_once")
@pytest.mark.parametrize(("piece", "absorbs"), [(31, False), (3, True)])
@pytest.mark.parametrize("at_once", [latent.AT_ONCE, 4000, 700], ids=["whole", "heads in parts", "tokens in parts"])
def test_the_form_of_less_work_is_taken_and_both_are_the_same(piece, absorbs, at_once):
    """A prompt in pieces: of many tokens keys and values are computed, few over many slots are projected to the latents."""
    f = facts((4, 16, 8, 16, 64))
    (q, rows), turned, cache, y = operands(f, 1, 93), tables(f), torch.empty(1, 1, S, 72), []
    for at in range(0, 93, piece):
        now = slice(at, at + piece)
        assert latent.absorbs(piece, at + piece, f) == (absorbs and at > 0)
        y.append(latent.prompt(q[:, now], rows[:, now], cache, at, *turned, f, at_once)[0])
    assert error(torch.cat(y), truth(q[0], rows[0], 0, turned, f)) < 1e-6


def test_a_graph_records_the_step():
    """The form whose shapes do not depend on positions: slots not yet written hold NaN."""
    f = facts(SHAPES["odd"])
    turned, (q, rows), pos = tables(f), operands(f, 3), torch.tensor([5, 70, 40], dtype=torch.int32)
    cache = torch.full((3, 1, S, f.rank + f.rotated), float("nan"))
    for b, p in enumerate(pos.tolist()):
        cache[b, :, :p] = torch.randn(1, p, f.rank + f.rotated)
    ours = cache.clone()
    expected = latent.step(q, rows, cache, Places(pos, *turned), f)
    assert error(latent.step_fixed(q, rows, ours, Places(pos, *turned), f), expected) < 1e-6
    assert not expected.isnan().any()
    assert torch.equal(ours.nan_to_num(7.0), cache.nan_to_num(7.0))


@pytest.mark.parametrize("kind", ["fp8", "4"])
def test_a_cache_in_few_bits(kind):
    f = facts(SHAPES["as published, in small"])
    turned, (q, rows) = tables(f), operands(f, 1, 30)
    expected = truth(q[0], rows[0], 0, turned, f)
    cache = kv.zeros(kind, (1, 1, S, 40), torch.float32, torch.device("cpu"))
    y = latent.prompt(q[:, :20], rows[:, :20], cache, 0, *turned, f)[0]
    y = torch.cat((y, *[latent.step(q[:, t], rows[:, t], cache, Places(torch.tensor([t]), *turned), f) for t in range(20, 30)]))
    assert 1e-3 < error(y, expected) < (0.08 if kind == "fp8" else 0.4)


def test_rounded_once():
    f = facts(SHAPES["as published, in small"])
    turned, (q, rows) = tables(f), [x.bfloat16() for x in operands(f, 1, 30)]
    cache, wide = torch.zeros(1, 1, S, 40, dtype=torch.bfloat16), torch.zeros(1, 1, S, 40)
    y = latent.prompt(q, rows, cache, 0, *turned, f)
    latent.prompt(q.float(), rows.float(), wide, 0, *turned, f)
    assert torch.equal(cache, wide.bfloat16())
    assert y.dtype == torch.bfloat16
    at = torch.tensor([30])
    one = latent.step(q[:, 0], rows[:, 0], cache, Places(at, *turned), f)
    held = cache.float()
    assert error(one, latent.step(q[:, 0].float(), rows[:, 0].float(), held, Places(at, *turned), f)) < 4e-3


def redrawn(module):
    for t in module.parameters():
        t.data = torch.randn(t.shape) * (t.shape[-1] ** -0.5 if t.dim() > 1 else 1)
    return module.eval()


SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "attn_implementation": "eager", "num_hidden_layers": 2,
}  # fmt: skip


def deepseek_v3(interleave, q_rank):
    config = DeepseekV3Config(**SIZES, q_lora_rank=q_rank, rope_interleave=interleave)
    return redrawn(DeepseekV3Attention(config, 0)), "neighbours" if interleave else "halves"


def deepseek_v2(interleave, q_rank):
    return redrawn(DeepseekV2Attention(DeepseekV2Config(**SIZES, q_lora_rank=q_rank), 0)), "neighbours"


@pytest.mark.parametrize("family", [deepseek_v2, deepseek_v3])
@pytest.mark.parametrize(("interleave", "q_rank"), [(True, None), (False, 20)])
@torch.no_grad()
def test_attention_is_that_of_transformers(family, interleave, q_rank):
    m, pairing = family(interleave, q_rank)
    T, R = 21, 8
    x, a = torch.randn(1, T, 64), torch.rand(S, R // 2).repeat(1, 2) * 6
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
    given = (a[None, :T].cos(), a[None, :T].sin())
    if family is deepseek_v2:
        given = torch.polar(torch.ones(1, T, R // 2), a[None, :T, : R // 2])
    expected = m(x, position_embeddings=given, attention_mask=mask)[0][0]
    up = m.kv_b_proj.weight.reshape(4, 28, 24)
    norm = Norm(m.kv_a_layernorm.weight, m.kv_a_layernorm.variance_epsilon)
    f = Latent(4, 16, R, 12, 24, m.scaling, up[:, :16], up[:, 16:], norm, pairing)
    q = m.q_proj(x) if q_rank is None else m.q_b_proj(m.q_a_layernorm(m.q_a_proj(x)))
    rows, turned, forms = m.kv_a_proj_with_mqa(x), (a.cos(), a.sin()), ops("cpu").latent
    cache = torch.full((1, 1, S, 32), float("nan"))
    y = forms.prompt(q[:, :15], rows[:, :15], cache, 0, *turned, f)[0]
    y = torch.cat((y, *[forms.step(q[:, t], rows[:, t], cache, Places(torch.tensor([t]), *turned), f) for t in range(15, T)]))
    assert error(m.o_proj(y), expected) < 1e-6


def test_kernels_are_asked_by_the_call():
    call = LatentCall(4, 512, 128, 128, 64, 128, 512, "neighbours", False, torch.bfloat16, "cuda", (9, 0))
    assert select(call)[0].name == "triton/latent"
    assert select(dataclasses.replace(call, device="cpu"))[0].name == "torch/latent"
