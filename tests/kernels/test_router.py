"""Routers, norms and activations of any family: their definitions against transformers' modules and plain arithmetic."""

import dataclasses

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, Ernie4_5_MoeConfig, GraniteMoeConfig, Llama4TextConfig
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from emulation import error
from lowq_kernels.decode import activation, elementwise, norms, ops, router
from lowq_kernels.decode.norms import Addition, Norm
from lowq_kernels.decode.route import RouteCall, route_by
from lowq_kernels.decode.router import RouterFacts
from lowq_kernels.dispatch.registry import refusals, select

H, E = 64, 24


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


def redrawn(module):
    for t in (*module.parameters(), *module.buffers()):
        t.data = torch.randn(t.shape) * (t.shape[-1] ** -0.5 if t.dim() > 1 else 1) + (0 if t.dim() > 1 else 0.3)
    return module.eval()


def deepseek_v3(**changed):
    given = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5} | changed
    config = DeepseekV3Config(hidden_size=H, n_routed_experts=E, num_experts_per_tok=5, **given)
    m = redrawn(DeepseekV3TopkRouter(config))
    bias = m.e_score_correction_bias
    groups = (config.n_group, config.topk_group)
    facts = RouterFacts(
        m.weight, 5, "sigmoid", None, bias, groups, "top2", config.norm_topk_prob, 1e-20, config.routed_scaling_factor
    )
    return facts, lambda x: m(x)[1:][::-1]


def deepseek_v2():
    given = {"topk_method": "group_limited_greedy", "n_group": 6, "topk_group": 2, "routed_scaling_factor": 16.0}
    config = DeepseekV2Config(hidden_size=H, n_routed_experts=E, num_experts_per_tok=3, **given)
    m = redrawn(DeepseekV2TopkRouter(config))
    return RouterFacts(m.weight, 3, groups=(6, 2), group_score="max", normalise=False, factor=16.0), lambda x: m(x)[1:][::-1]


def ernie():
    m = redrawn(Ernie4_5_MoeTopKRouter(Ernie4_5_MoeConfig(hidden_size=H, moe_num_experts=E, moe_k=3)))
    bias = m.moe_statics.e_score_correction_bias
    return RouterFacts(m.weight, 3, choice_bias=bias.squeeze(), rounded=True), lambda x: m(x)[1:][::-1]


def granite():
    m = redrawn(GraniteMoeTopKRouter(GraniteMoeConfig(hidden_size=H, num_local_experts=E, num_experts_per_tok=4)))
    return RouterFacts(m.weight, 4), lambda x: m(x)[1:][::-1]  # a softmax over the chosen is a normalised one


def gemma4():
    m = redrawn(Gemma4TextRouter(Gemma4TextConfig(hidden_size=H, num_experts=E, top_k_experts=3, rms_norm_eps=1e-5)))
    facts = RouterFacts(m.proj.weight, 3, norm=Norm(None, 1e-5), scale=m.scale, each=m.per_expert_scale)
    return facts, lambda x: m(x)[1:][::-1]


def llama4():
    m = redrawn(Llama4Router(Llama4TextConfig(hidden_size=H, num_local_experts=E, num_experts_per_tok=2)))

    def chosen(x):
        scores = m(x)[0]
        return scores.topk(2).indices, scores.topk(2).values

    return RouterFacts(m.weight, 2, "sigmoid", normalise=False), chosen


ROUTERS = {
    "deepseek_v3": deepseek_v3,
    "one group": lambda: deepseek_v3(n_group=1, topk_group=1),
    "not normalised": lambda: deepseek_v3(norm_topk_prob=False),
    "deepseek_v2": deepseek_v2,
    "ernie4_5_moe": ernie,
    "granitemoe": granite,
    "gemma4": gemma4,
    "llama4": llama4,
}
TAKEN_OUT = {
    "score": "softmax", "choice_bias": None, "groups": (1, 1), "group_score": "max", "factor": 1.0, "norm": None, "scale": None,
    "each": None,
}  # fmt: skip


def dense(ids, weights):
    ids, weights = (weights, ids) if ids.is_floating_point() else (ids, weights)  # granitemoe's order in transformers 5.17
    return torch.zeros(ids.shape[0], E).scatter(1, ids, weights.float())


@pytest.mark.parametrize("name", ROUTERS)
@torch.no_grad()
def test_routers_are_those_of_transformers(name):
    facts, module = ROUTERS[name]()
    x = torch.randn(33, H) * 2 + 0.5
    wanted = dense(*module(x))
    assert error(dense(*router.route_by(x, facts)), wanted) < 1e-6
    assert error(dense(*route_by(x, facts)), wanted) < 1e-6  # by dispatch
    for fact, plain in TAKEN_OUT.items():
        if getattr(facts, fact) != plain and not (fact == "group_score" and facts.groups == (1, 1)):
            less = dataclasses.replace(facts, **{fact: plain})
            assert error(dense(*router.route_by(x, less)), wanted) > 1e-3, fact
    without = dataclasses.replace(facts, normalise=not facts.normalise)
    assert error(dense(*router.route_by(x, without)), wanted) > 1e-3


def test_bias_of_logits_rounding_and_sum_eps():
    weight, bias, x = torch.randn(E, H) / 8, torch.randn(E), torch.randn(5, H).bfloat16()
    f = RouterFacts(weight, 3, "sigmoid", logits_bias=bias, sum_eps=0.5, rounded=True)
    scores = torch.sigmoid(x.float() @ weight.T + bias)
    top = scores.topk(3)
    wanted = (top.values / (top.values.sum(-1, keepdim=True) + 0.5)).bfloat16().float()
    ids, weights = router.route_by(x, f)
    assert torch.equal(ids, top.indices)
    assert torch.equal(weights, wanted)
    assert weights.dtype == torch.float32
    for fact, plain in {"logits_bias": None, "sum_eps": 0.0, "rounded": False}.items():
        assert not torch.equal(router.route_by(x, dataclasses.replace(f, **{fact: plain}))[1], wanted)


def test_kernels_refuse_facts_that_they_do_not_know():
    weight, v = torch.randn(E, H), torch.randn(E)
    plain = RouterFacts(weight, 2, normalise=False, rounded=True, logits_bias=v)
    assert plain.beyond == ()
    changed = [
        {"score": "sigmoid"}, {"choice_bias": v}, {"groups": (4, 2)}, {"factor": 2.0}, {"norm": Norm(None, 1e-6)},
        {"scale": torch.randn(H)}, {"each": v}, {"normalise": True, "sum_eps": 1e-6},
    ]  # fmt: skip
    call = RouteCall(1, E, H, 2, torch.bfloat16, "cuda", (9, 0))
    assert select(call)[0].name in ("cuda/route", "triton/route")
    for one in changed:
        beyond = dataclasses.replace(plain, **one).beyond
        assert len(beyond) == 1
        it = dataclasses.replace(call, beyond=beyond)
        if beyond[0] in ("groups", "scale"):  # a scale alone is no family's
            assert select(it)[0].name == "triton/route"
            assert select(dataclasses.replace(it, M=129))[0].name == "triton/route_many"
            assert beyond[0] in refusals(it)["cuda/route"]
        else:
            assert select(it)[0].name == select(call)[0].name


def test_a_router_without_further_facts_is_the_usual_one():
    x, weight = torch.randn(6, H).bfloat16(), torch.randn(E, H).bfloat16()
    logits = (x @ weight.mT).float()
    chosen = logits.softmax(-1).topk(3)
    usual = chosen.indices, (chosen.values / chosen.values.sum(-1, keepdim=True)).bfloat16().float()
    for one in (router.route_by, route_by, ops("cpu").route_by):
        assert all(map(torch.equal, one(x, RouterFacts(weight, 3, rounded=True)), usual))


@pytest.mark.parametrize("groups", [1, 2, 5])
@torch.no_grad()
def test_norms(groups):
    x, weight, bias = torch.randn(7, 3, 40) + 1, torch.randn(40), torch.randn(40)
    truth = x.double().reshape(7, 3, groups, -1)
    rms = (truth / (truth.square().mean(-1, keepdim=True) + 1e-5).sqrt()).reshape(x.shape)
    assert error(norms.normed(x, Norm(None, 1e-5, groups=groups)), rms) < 1e-6
    assert error(norms.normed(x, Norm(weight, 1e-5, "rms", bias, groups)), rms * weight + bias) < 1e-6
    middle = truth - truth.mean(-1, keepdim=True)
    layer = (middle / (middle.square().mean(-1, keepdim=True) + 1e-5).sqrt()).reshape(x.shape)
    assert error(norms.normed(x, Norm(weight, 1e-5, "layer", bias, groups)), layer * weight + bias) < 1e-6
    assert error(norms.normed(x, Norm(weight, 1e-5, "layer", bias, 10)), layer * weight + bias) > 1e-2
    rounded = Norm(weight.bfloat16(), 1e-5, groups=groups)
    y = norms.normed(x.bfloat16(), rounded)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, norms.normed(x.bfloat16().float(), rounded).bfloat16())  # rounded once
    if groups == 1:
        ours = nn.LayerNorm(40, 1e-5)
        ours.weight.data, ours.bias.data = weight, bias
        assert error(norms.normed(x, Norm(weight, 1e-5, "layer", bias)), ours(x)) < 1e-6
        cohere = CohereLayerNorm((3, 40), eps=1e-5)  # a weight of its own for each head
        cohere.weight.data = torch.randn(3, 40)
        assert error(norms.normed(x, Norm(cohere.weight, 1e-5, "layer")), cohere(x)) < 1e-6
    zamba = Zamba2RMSNormGated(40, 40 // groups, 1e-5)
    falcon = FalconH1RMSNormGated(40, 1e-5, groups)
    zamba.weight.data = falcon.weight.data = weight
    for module in (zamba, falcon):
        assert error(norms.normed(x, Norm(weight, 1e-5, groups=groups)), module(x)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_of_the_residual_stream(dtype):
    x, delta, weight = torch.randn(3, 5, 40).to(dtype), torch.randn(3, 5, 40).to(dtype), torch.randn(40)
    after = torch.tensor([0.3]).to(dtype)
    post = Norm(weight, 1e-6)

    def updated(**facts):
        y = x.clone()
        assert norms.add(y, delta, Addition(**facts)) is None
        return y

    def exact(d, scale=1.0, by=1.0):
        return ((x.double() + scale * d.double()) * by).to(dtype)

    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    assert error(updated(), exact(delta)) < tolerance
    assert error(updated(scale=0.22), exact(delta, 0.22)) < tolerance
    whole = updated(post=post, scale=0.22, after=after)
    wanted = exact(norms.in_fp32(delta, post), 0.22, after.double())
    assert error(whole, wanted) < tolerance
    for facts in ({"post": post, "scale": 0.22}, {"post": post, "after": after}, {"scale": 0.22, "after": after}):
        assert error(updated(**facts), wanted) > 0.1


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"])
def test_activations(name):
    ours = {"gelu_pytorch_tanh": "gelu_tanh"}.get(name, name)
    gate_up = torch.randn(5, 2 * 33) * 3
    gate, up = gate_up.chunk(2, -1)
    assert error(activation.activated(gate, ours), ACT2FN[name](gate)) < 1e-6
    device = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton is not interpreted
    for scale in (1.0, 0.4):
        wanted = ACT2FN[name](gate * scale) * up
        assert error(activation.gated(gate_up, ours, scale), wanted) < 1e-6
        for kernel in (elementwise.gated, ops("cpu").gated):  # none of them ignores an activation or a scale
            if kernel is not elementwise.gated or ours not in elementwise.ACTS or scale != 1.0:
                at = device if kernel is elementwise.gated else "cpu"
                assert error(kernel(gate_up.to(at), ours, scale).cpu(), wanted) < 1e-5
    assert error(activation.gated(gate_up, ours, 0.4), ACT2FN[name](gate) * up) > 0.1
    others = [activation.gated(gate_up, act) for act in activation.ACTIVATIONS if act != ours]
    assert all(error(activation.gated(gate_up, ours), other) > 1e-5 for other in others)


def test_gpt_oss_gate_on_a_cpu_is_not_taken_for_another():
    gate_up = torch.randn(5, 2 * 32) * 6
    wanted = activation.gated(gate_up, "clamped_swiglu")
    assert error(ops("cpu").gated(gate_up, "clamped_swiglu"), wanted) < 1e-6
    assert error(ops("cpu").gated(gate_up, "silu"), wanted) > 0.1


def test_gates_of_outputs():
    y, gate = torch.randn(4, 10), torch.randn(4, 10)
    assert error(activation.opened(y, gate), y.double() / (1 + (-gate.double()).exp())) < 1e-6
    assert error(activation.opened(y, gate[:, :1]), y.double() / (1 + (-gate.double()[:, :1]).exp())) < 1e-6
