"""Gated delta, Mamba2 and short convolutions: steps and runs against a loop in fp64 and against transformers' modules."""

import dataclasses
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from mixer_truth import CASES, SLOTS, kind, states, truth
from mixers import EPS, a_delta, a_mamba2, features
from transformers import FalconH1Config, GraniteMoeHybridConfig, Lfm2Config, NemotronHConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, compute_mup_vector
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from emulation import error
from lowq_kernels.decode import recurrent
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.recurrent import Run
from lowq_kernels.decode.recurrent.delta import Delta
from lowq_kernels.decode.recurrent.mamba2 import Mamba2
from lowq_kernels.decode.recurrent.short_conv import ShortConv
from lowq_kernels.dispatch.registry import named, refusals


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(17)


def pieces(x, f, cuts, slot=3):
    """y of runs of x, cut at these places, of a sequence in one slot among others that hold NaN."""
    held = states(f)
    for t in held.values():
        t[torch.arange(SLOTS) != slot] = float("nan")
    places = [0, *cuts, x.shape[0]]
    y = torch.cat([kind(f).run(x[a:b], f, held, slot) for a, b in pairwise(places)])
    assert all(t[torch.arange(SLOTS) != slot].isnan().all() for t in held.values())
    return y, {name: t[slot] for name, t in held.items()}


@pytest.mark.parametrize("name", CASES)
def test_steps_and_runs(name):
    f = CASES[name]()
    T = 70
    x = torch.randn(2, T, features(f))
    expected = torch.stack([truth(one, f) for one in x])
    held, slots = states(f), torch.tensor([4, 1])
    for t in held.values():
        t[[0, 2, 3]] = float("nan")
    y = torch.stack([kind(f).step(x[:, t], f, held, slots) for t in range(T)], 1)
    assert error(y, expected) < 1e-5
    assert all(t[[0, 2, 3]].isnan().all() for t in held.values())
    for cuts in ((), (1,), (2, 3, 4), (64,), (63, 65), (1, 2, 30, 69)):
        for b, slot in enumerate(slots.tolist()):
            run, after = pieces(x[b], f, cuts)
            assert error(run, expected[b]) < 1e-5, cuts
            assert all(error(t, held[n][slot]) < 1e-5 or not t.numel() for n, t in after.items()), cuts


@pytest.mark.parametrize("name", ["delta, grouped", "mamba2", "short_conv"])
def test_runs_of_several_segments_cut_at_random(name):
    f = CASES[name]()
    T = recurrent.SEGMENT + 133
    x = torch.randn(T, features(f))
    whole, after = pieces(x, f, ())
    for _ in range(3):
        y, other = pieces(x, f, sorted(torch.randint(1, T, (4,)).tolist()))
        assert error(y, whole) < 1e-5
        assert all(error(other[n], after[n]) < 1e-5 for n in after)
    held, slots = states(f), torch.tensor([2])
    y = torch.cat([kind(f).step(x[t : t + 1], f, held, slots) for t in range(T)])
    assert error(whole, y) < 1e-5
    forgetful, _ = pieces(x[700:], f, ())
    assert not error(forgetful[:5], whole[700:705]) < 1e-3  # the state matters


def test_decays_that_forget_at_once_and_those_that_never_do():
    f = dataclasses.replace(
        a_delta(), a_log=torch.tensor([-20.0, 4.0, 5.0, 0.0]), dt_bias=torch.tensor([0.0, 8.0, -9.0, -30.0])
    )
    x = torch.randn(200, features(f)) * 2
    assert error(pieces(x, f, ())[0], truth(x, f)) < 1e-5
    m = dataclasses.replace(
        a_mamba2(), a_log=torch.tensor([-20.0, 4.0, 5.0, 0.0]), dt_bias=torch.tensor([0.0, 8.0, -9.0, -30.0])
    )
    x = torch.randn(200, features(m)) * 2
    assert error(pieces(x, m, ())[0], truth(x, m)) < 1e-5


def changed(f):
    """Facts taken out, one at a time."""
    if isinstance(f, Delta):
        facts = {"grouped": not f.grouped, "dt_bias": f.dt_bias * 0, "a_log": f.a_log * 0, "norm": f.norm._replace(eps=0.5)}
    elif isinstance(f, Mamba2):
        facts = {
            "gate_last": not f.gate_last,
            "dt": (0.0, 0.2),
            "d": f.d * 0,
            "a_log": f.a_log * 0,
            "norm": None,
            "dt_bias": f.dt_bias * 0,
        }
        facts |= {f"scales{i}": tuple(2.0 if i == j else s for j, s in enumerate(f.scales)) for i in range(5)}
        facts["norm groups"] = f.norm._replace(groups=1) if f.norm else None
    else:
        facts = {}
    facts["bias"] = torch.ones(f.weight.shape[0])
    return [(name, dataclasses.replace(f, **{name.split()[0].rstrip("01234"): value})) for name, value in facts.items()]


@pytest.mark.parametrize("name", ["delta", "delta, grouped", "mamba2", "mamba2, gate last", "short_conv"])
def test_each_fact_matters(name):
    f = CASES[name]()
    x = torch.randn(20, features(f))
    expected = truth(x, f)
    for fact, other in changed(f):
        assert error(pieces(x, other, (7,))[0], expected) > 1e-3, fact
        slot = torch.tensor([0])
        held = states(f)
        y = torch.cat([kind(f).step(x[t : t + 1], other, held, slot) for t in range(20)])
        assert error(y, expected) > 1e-3, fact


def test_rounded_once():
    for name in ("delta", "mamba2", "short_conv"):
        f = CASES[name]()
        x = torch.randn(9, features(f)).bfloat16()
        held = states(f)
        held["conv"] = held["conv"].bfloat16()
        y = kind(f).run(x, f, held, 0)
        assert y.dtype == torch.bfloat16
        if name != "short_conv":  # whose products are remembered rounded
            assert torch.equal(y, kind(f).run(x.float(), f, states(f), 0).bfloat16())
        parts = states(f)
        parts["conv"] = parts["conv"].bfloat16()
        again = torch.cat([kind(f).run(x[:4], f, parts, 0), kind(f).run(x[4:], f, parts, 0)])
        assert error(again, y) < 4e-3
        assert torch.equal(parts["conv"], held["conv"])


def redrawn(module):
    for name, t in module.named_parameters():
        t.data = torch.randn(t.shape) * (0.5 if "conv" in name else t.shape[-1] ** -0.5 if t.dim() > 1 else 1)
    return module.eval()


def delta_of(m, grouped):
    conv = m.conv1d.weight[:, 0]
    sizes = (m.num_k_heads, m.num_v_heads, m.head_k_dim, m.head_v_dim)
    return Delta(*sizes, grouped, conv, m.conv1d.bias, m.A_log, m.dt_bias, Norm(m.norm.weight, m.layer_norm_epsilon))


LINEAR = {
    "hidden_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": EPS,
}  # fmt: skip


def qwen3_next():
    m = redrawn(Qwen3NextGatedDeltaNet(Qwen3NextConfig(**LINEAR), 0))
    return m, delta_of(m, True), lambda x: torch.cat((m.in_proj_qkvz(x), m.in_proj_ba(x)), -1), m.out_proj


def qwen3_5():
    m = redrawn(Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**LINEAR), 0))
    return (
        m,
        delta_of(m, False),
        lambda x: torch.cat([p(x) for p in (m.in_proj_qkv, m.in_proj_z, m.in_proj_b, m.in_proj_a)], -1),
        m.out_proj,
    )


def mamba2_of(m, **more):
    c = m.conv1d
    norm = more.pop("norm", None) or Norm(m.norm.weight, m.norm.variance_epsilon, groups=m.n_groups)
    sizes = (m.num_heads, m.head_dim, m.n_groups, m.ssm_state_size)
    return Mamba2(*sizes, c.weight[:, 0], c.bias, m.A_log, m.dt_bias, m.D, None if more.pop("bare", 0) else norm, **more)


def falcon_h1(**facts):
    scales = [1.3, 0.7, 0.6, 1.2, 0.9]
    given = {
        "hidden_size": 32, "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 10,
        "mamba_d_conv": 4, "rms_norm_eps": EPS, "ssm_multipliers": scales, "num_attention_heads": 4, "num_key_value_heads": 2,
        "ssm_in_multiplier": 1.0, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "num_hidden_layers": 2,
    } | facts  # fmt: skip
    config = FalconH1Config(**given)
    m = redrawn(FalconH1Mixer(config, 0))
    m.register_buffer("mup_vector", compute_mup_vector(config))
    bare = not config.mamba_rms_norm
    f = mamba2_of(
        m, scales=tuple(scales), gate_last=config.mamba_norm_before_gate, bare=bare, norm=Norm(None, EPS) if bare else None
    )
    return m, f, m.in_proj, m.out_proj


def granite():
    given = {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 10,
        "mamba_expand": 2,
        "rms_norm_eps": EPS,
    }
    m = redrawn(GraniteMoeHybridMambaLayer(GraniteMoeHybridConfig(hidden_size=32, num_attention_heads=4, **given), 0))
    return m, mamba2_of(m, norm=Norm(m.norm.weight, EPS)), m.in_proj, m.out_proj


def nemotron_h():
    given = {
        "mamba_num_heads": 6,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 10,
        "conv_kernel": 4,
        "time_step_min": 0.3,
    }
    m = redrawn(NemotronHMamba2Mixer(NemotronHConfig(hidden_size=32, **given, layer_norm_epsilon=EPS), 0))
    return m, mamba2_of(m, dt=m.time_step_limit), m.in_proj, m.out_proj


def lfm2():
    m = redrawn(Lfm2ShortConv(Lfm2Config(hidden_size=32, conv_L_cache=3, conv_bias=True, num_attention_heads=4), 0))
    return m, ShortConv(m.conv.weight[:, 0], m.conv.bias), m.in_proj, m.out_proj


MODULES = {
    "qwen3_next": qwen3_next, "qwen3_5": qwen3_5, "granitemoehybrid": granite, "nemotron_h": nemotron_h, "lfm2": lfm2,
    "falcon_h1": falcon_h1, "falcon_h1, gate last": lambda: falcon_h1(mamba_norm_before_gate=True),
    "falcon_h1, no norm": lambda: falcon_h1(mamba_rms_norm=False),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_mixers_are_those_of_transformers(name):
    m, f, given, out = MODULES[name]()
    x = torch.randn(1, 77, 32)
    expected = m(x)[0]
    rows = given(x[0])
    assert rows.shape[1] == features(f)
    assert error(out(pieces(rows, f, (11, 12))[0]), expected) < 2e-6
    assert error(out(pieces(rows, f, ())[0]), expected) < 2e-6
    held = states(f)
    y = torch.cat([recurrent.dispatched(rows[t : t + 1], f, held, torch.tensor([0])) for t in range(77)])
    assert error(out(y), expected) < 5e-6


@pytest.mark.parametrize("name", ["delta", "mamba2", "short_conv"])
def test_by_dispatch(name):
    f = CASES[name]()
    x = torch.randn(6, features(f))
    slots, runs = torch.tensor([2, 0, 3, 1, 4]), recurrent.Runs([Run(0, 2, 2), Run(3, 6, 4)], 6, x.device)
    for given, where in ((x, runs), (x[:5], slots)):
        assert f"torch/{name}" not in refusals(f.call(given, where is runs))
        ours, theirs = states(f), states(f)
        y = named(f"torch/{name}").launch(given, f, ours, where, {})
        if where is runs:
            expected = torch.zeros_like(y)
            for run in runs.each:
                expected[run.first : run.end] = kind(f).run(x[run.first : run.end], f, theirs, run.slot)
        else:
            expected = kind(f).step(given, f, theirs, slots)
        assert torch.equal(y, expected)
        assert all(torch.equal(ours[n], theirs[n]) for n in ours)
        assert any(t.any() for t in ours.values())
    assert f.call(x, True) != f.call(x, False)
    assert SimpleNamespace(**dataclasses.asdict(f.call(x, True))).M == 6
