"""`prepare`, then attention without norms, against transformers' attention modules in fp32; each fact is needed."""

import dataclasses

import pytest
import torch
from transformers import (
    Cohere2Config,
    FalconH1Config,
    Glm4Config,
    GPTNeoXConfig,
    HunYuanDenseV1Config,
    Llama4TextConfig,
    Ministral3Config,
    Olmo2Config,
    Qwen3NextConfig,
)
from transformers.models.cohere2.modeling_cohere2 import Cohere2Attention
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Attention
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention
from transformers.models.glm4.modeling_glm4 import Glm4Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1Attention
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.ministral3.modeling_ministral3 import Ministral3Attention
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from emulation import error
from lowq_kernels.decode import activation, norms, prepare, reference
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.prepare import PositionScale, Prepared

HIDDEN, HQ, HKV, D, T, START, S = 64, 4, 2, 16, 13, 20, 40
SIZES = {
    "hidden_size": HIDDEN, "num_attention_heads": HQ, "num_key_value_heads": HKV, "head_dim": D, "attn_implementation": "eager",
    "num_hidden_layers": 4, "max_position_embeddings": 512,
}  # fmt: skip
EPS = 1e-5


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(9)


def redrawn(module):
    for t in module.parameters():
        t.data = torch.randn(t.shape) * (t.shape[-1] ** -0.5 if t.dim() > 1 else 1)
    return module.eval()


def angles(R):
    return torch.rand(S, R // 2).repeat(1, 2) * 6


def embedded(R):
    """What most families' attention is given of positions: cos and sin (1, T, R)."""
    a = angles(R)
    return a, (a[None, START : START + T].cos(), a[None, START : START + T].sin())


def qkv_of(m, x):
    return torch.cat([m.q_proj(x), m.k_proj(x), m.v_proj(x)], -1)


def qwen3_next():
    m = redrawn(Qwen3NextAttention(Qwen3NextConfig(**SIZES, rms_norm_eps=EPS), 3))
    n = [Norm(1 + norm.weight, EPS) for norm in (m.q_norm, m.k_norm)]
    return m, Prepared(HQ, HKV, D, gated=True, q_norm=n[0], k_norm=n[1]), 8, qkv_of, {}


def olmo2():
    m = redrawn(Olmo2Attention(Olmo2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}, rms_norm_eps=EPS), 0))
    n = [Norm(norm.weight, EPS) for norm in (m.q_norm, m.k_norm)]
    return m, Prepared(HQ, HKV, D, q_norm=n[0], k_norm=n[1], over="all"), D, qkv_of, {}


def gpt_neox():
    given = {k: v for k, v in SIZES.items() if k not in ("head_dim", "num_key_value_heads")}
    m = redrawn(GPTNeoXAttention(GPTNeoXConfig(**given), 0))
    return m, Prepared(HQ, HQ, D, order="heads"), 4, lambda m, x: m.query_key_value(x), {}


def hunyuan():
    m = redrawn(HunYuanDenseV1Attention(HunYuanDenseV1Config(**SIZES, rms_norm_eps=EPS), 0))
    n = [Norm(norm.weight, EPS) for norm in (m.query_layernorm, m.key_layernorm)]
    return m, Prepared(HQ, HKV, D, q_norm=n[0], k_norm=n[1], norm_last=True), D, qkv_of, {}


def falcon_h1():
    m = redrawn(FalconH1Attention(FalconH1Config(**SIZES, key_multiplier=0.37), 0))
    return m, Prepared(HQ, HKV, D, key_scale=0.37), D, qkv_of, {}


def glm4():
    m = redrawn(Glm4Attention(Glm4Config(**SIZES), 0))
    return m, Prepared(HQ, HKV, D, pairing="neighbours"), 8, qkv_of, {}


def cohere2():
    m = redrawn(Cohere2Attention(Cohere2Config(**SIZES, layer_types=["sliding_attention"] * 4, sliding_window=64), 0))
    return m, Prepared(HQ, HKV, D, pairing="neighbours"), D, qkv_of, {}


def ministral3():
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 5,
        "llama_4_scaling_beta": 0.3,
    }
    m = redrawn(Ministral3Attention(Ministral3Config(**SIZES, rope_parameters=rope), 0))
    more = {"position_ids": torch.arange(START, START + T)[None]}
    return m, Prepared(HQ, HKV, D, position_scale=PositionScale(0.3, 5)), D, qkv_of, more


def gemma4(**changed):
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": HKV,
        "global_head_dim": D,
        "num_kv_shared_layers": 0,
    } | changed
    m = redrawn(Gemma4TextAttention(Gemma4TextConfig(**SIZES, layer_types=kinds, rms_norm_eps=EPS, **sizes), 1))
    n = [Norm(norm.weight, EPS) for norm in (m.q_norm, m.k_norm)]
    p = Prepared(HQ, HKV, D, v_is_k=True, q_norm=n[0], k_norm=n[1], v_norm=Norm(None, EPS))
    return m, p, D, lambda m, x: torch.cat([m.q_proj(x), m.k_proj(x)], -1), {"shared_kv_states": {}}


def llama4():
    m = redrawn(Llama4TextAttention(Llama4TextConfig(**SIZES, no_rope_layers=[1, 1, 1, 0], rms_norm_eps=EPS), 0))
    unit = Norm(None, EPS)
    return m, Prepared(HQ, HKV, D, q_norm=unit, k_norm=unit, norm_last=True, pairing="neighbours"), D, qkv_of, {}


FAMILIES = [qwen3_next, olmo2, gpt_neox, hunyuan, falcon_h1, glm4, cohere2, ministral3, gemma4, llama4]
TAKEN_OUT = {
    "order": "parts", "q_norm": None, "k_norm": None, "v_norm": None, "over": "head", "norm_last": False, "pairing": "halves",
    "key_scale": 1.0, "position_scale": None,
}  # fmt: skip


def computed(m, p, qkv, a, scale):
    pos = torch.arange(START, START + T)
    rows, gate = prepare.prepare(qkv, p, pos, *(() if a is None else (a.cos(), a.sin())))
    h = reference.Heads(p.HQ, p.HKV, p.D, scale)
    caches = [torch.zeros(1, p.HKV, S, p.D) for _ in range(2)]
    y = reference.attend_prompt(rows[None], *caches, 0, *prepare.unrotated(S, p.D, rows), h)[0]
    y = y if gate is None else activation.opened(y, gate)
    return (m.o_proj if hasattr(m, "o_proj") else m.dense)(y)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_attention_is_that_of_transformers(family):
    m, p, R, qkv_of, more = family()
    a, tables = embedded(R)
    x = torch.randn(1, T, HIDDEN)
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
    given = tables
    if family is llama4:
        given = torch.polar(torch.ones(1, T, R // 2), a[None, START : START + T, : R // 2])
    if family is cohere2:
        given = [t[..., : R // 2].repeat_interleave(2, -1) for t in tables]
    expected = m(x, position_embeddings=given, attention_mask=mask, **more)[0][0]
    qkv = qkv_of(m, x[0])
    assert error(computed(m, p, qkv, a, m.scaling), expected) < 1e-6
    facts = [(f, plain) for f, plain in TAKEN_OUT.items() if getattr(p, f) not in (None, plain)]
    for fact, plain in facts:
        if fact == "over" or (fact == "norm_last" and family is llama4):
            continue  # weights of all heads do not fit one head; a norm without a weight may come before or after
        less = dataclasses.replace(p, **{fact: plain})
        assert error(computed(m, less, qkv, a, m.scaling), expected) > 1e-3, fact
    assert error(computed(m, p, qkv, angles(R), m.scaling), expected) > 1e-3  # other positions


@torch.no_grad()
def test_a_layer_without_rotation_and_with_a_scale_of_positions():
    config = Llama4TextConfig(**SIZES, no_rope_layers=[1, 1, 1, 0], attn_temperature_tuning=True, floor_scale=4, attn_scale=0.2)
    m = redrawn(Llama4TextAttention(config, 3))
    x, mask = torch.randn(1, T, HIDDEN), torch.full((T, T), -torch.inf).triu(1)[None, None]
    expected = m(x, position_embeddings=torch.ones(1, T, D // 2), attention_mask=mask)[0][0]
    p = Prepared(HQ, HKV, D, position_scale=PositionScale(0.2, 4, 1))
    rows, gate = prepare.prepare(qkv_of(m, x[0]), p, torch.arange(T))
    assert gate is None
    h, caches = reference.Heads(HQ, HKV, D, m.scaling), [torch.zeros(1, HKV, S, D) for _ in range(2)]

    def attended(rows):
        return m.o_proj(reference.attend_prompt(rows[None], *caches, 0, *prepare.unrotated(S, D, rows), h)[0])

    assert error(attended(rows), expected) < 1e-6
    for scale in (None, PositionScale(0.2, 4), PositionScale(0.2, 5, 1), PositionScale(0.1, 4, 1)):
        other = prepare.prepare(qkv_of(m, x[0]), dataclasses.replace(p, position_scale=scale), torch.arange(T))[0]
        assert error(attended(other), expected) > 1e-4


@torch.no_grad()
def test_queries_alone_attend_to_the_keys_of_another_layer():
    """Gemma 4's small models: layers that share."""
    own, p, _, _, more = gemma4(attention_k_eq_v=False, num_kv_shared_layers=2)
    p = dataclasses.replace(p, v_is_k=False)
    config = own.config
    sharing = redrawn(Gemma4TextAttention(config, 3))
    assert own.store_full_length_kv
    assert sharing.is_kv_shared_layer
    a, tables = embedded(D)
    x, mask = torch.randn(2, 1, T, HIDDEN), torch.full((T, T), -torch.inf).triu(1)[None, None]
    own(x[0], tables, mask, **more)
    expected = sharing(x[1], tables, mask, **more)[0][0]
    pos = torch.arange(START, START + T)
    caches = [torch.zeros(1, HKV, S, D) for _ in range(2)]
    nothing = prepare.unrotated(S, D, x)
    rows = prepare.prepare(qkv_of(own, x[0, 0]), p, pos, a.cos(), a.sin())[0]
    reference.attend_prompt(rows[None], *caches, 0, *nothing, reference.Heads(HQ, HKV, D, 1.0))
    before = [c.clone() for c in caches]
    alone = Prepared(HQ, HKV, D, writes=False, q_norm=Norm(sharing.q_norm.weight, EPS))
    q = prepare.prepare(sharing.q_proj(x[1, 0]), alone, pos, a.cos(), a.sin())[0]
    assert q.shape == (T, HQ * D)
    h = reference.Heads(HQ, HKV, D, 1.0, writes=False)
    y = reference.attend_prompt(q[None], *caches, 0, *nothing, h)[0]
    assert error(sharing.o_proj(y), expected) < 1e-6
    assert all(map(torch.equal, caches, before))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_once(dtype):
    n = [Norm(torch.randn(D).to(dtype), EPS) for _ in range(2)]
    p = Prepared(HQ, HKV, D, gated=True, q_norm=n[0], k_norm=n[1], v_norm=Norm(None, EPS), key_scale=0.7, pairing="neighbours")
    qkv, a, pos = torch.randn(T, (2 * HQ + 2 * HKV) * D).to(dtype), angles(8).to(dtype), torch.arange(T)
    y, gate = prepare.prepare(qkv, p, pos, a.cos(), a.sin())
    wide = prepare.prepare(qkv.float(), p, pos, a.cos(), a.sin())
    assert torch.equal(y, wide[0].to(dtype))
    assert torch.equal(gate, wide[1].to(dtype))
    assert y.dtype == gate.dtype == dtype


def test_the_definition_agrees_with_split_heads():
    """Of Qwen3's facts `split_heads` makes the same of the same rows."""
    w = [torch.randn(D) for _ in range(2)]
    qkv, a, pos = torch.randn(T, (HQ + 2 * HKV) * D), angles(D), torch.arange(T)
    y = prepare.prepare(qkv, Prepared(HQ, HKV, D, q_norm=Norm(w[0], EPS), k_norm=Norm(w[1], EPS)), pos, a.cos(), a.sin())[0]
    h = reference.Heads(HQ, HKV, D, 1.0, 0, EPS, *w)
    theirs = torch.cat([t.flatten(1) for t in reference.split_heads(qkv, a[pos].cos(), a[pos].sin(), h)], 1)
    assert error(y, theirs) < 1e-6
    assert norms.normed(qkv, Norm(None, EPS)).shape == qkv.shape
