"""Triton's steps of gated delta, Mamba2 and short convolutions against their definitions, states included."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first triton import
pytest.importorskip("triton")

import dataclasses

from mixers import a_delta, a_mamba2, features, state_shapes

from emulation import error
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.recurrent import delta, mamba2, short_conv, steps_triton
from lowq_kernels.decode.recurrent.delta import Delta
from lowq_kernels.decode.recurrent.mamba2 import Mamba2
from lowq_kernels.decode.recurrent.short_conv import ShortConv
from lowq_kernels.dispatch.registry import refusals, select

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1.2e-2, torch.float32: 2e-6}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(31)


CASES = {
    "delta": a_delta,
    "delta, grouped": lambda: a_delta(grouped=True),
    "delta, odd sizes": lambda: a_delta(3, 9, 5, 7, 3, True, True),
    "delta, a key head each": lambda: a_delta(4, 4, 8, 8, 2, kind="layer"),
    "mamba2": a_mamba2,
    "mamba2, gate last": lambda: a_mamba2(gate_last=True),
    "mamba2, no norm": lambda: a_mamba2(norm=False, bias=False),
    "mamba2, rows of a head in blocks": lambda: a_mamba2(2, 40, 1, 200),
    "mamba2, constants": lambda: a_mamba2(6, 5, 3, 7, 3, scales=(0.5, 1.7, 0.6, 1.3, 0.8)),
    "mamba2, limits of dt": lambda: a_mamba2(dt=(0.4, 0.9), norm=False),
    "short_conv": lambda: ShortConv(torch.randn(20, 3), torch.randn(20)),
    "short_conv, wide": lambda: ShortConv(torch.randn(300, 5), None),
    "short_conv of two tokens": lambda: ShortConv(torch.randn(9, 2), None),
    "short_conv of one token": lambda: ShortConv(torch.randn(9, 1), None),
}
KINDS = {
    Delta: (delta, steps_triton.delta), Mamba2: (mamba2, steps_triton.mamba2), ShortConv: (short_conv, steps_triton.short_conv),
}  # fmt: skip


def moved(f, dtype):
    """Its tensors where kernels run; weights of products and convolutions in the model's dtype, the rest in fp32."""
    changed = {}
    for field in dataclasses.fields(f):
        value = getattr(f, field.name)
        if isinstance(value, torch.Tensor):
            changed[field.name] = value.to(DEVICE, dtype if field.name in ("weight", "bias") else torch.float32)
        elif isinstance(value, Norm):
            changed[field.name] = Norm(*(t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in value))
    return dataclasses.replace(f, **changed)


def states(f, dtype, slots):
    """Of sequences under way; NaN in the slots that none of them has."""
    made = {}
    for name, shape in state_shapes(f).items():
        made[name] = torch.full((8, *shape), float("nan"), dtype=torch.float32 if name == "S" else dtype, device=DEVICE)
        made[name][slots] = torch.randn(len(slots), *shape).to(DEVICE, made[name].dtype)
    return made


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_steps(name, dtype):
    f = moved(CASES[name](), dtype)
    definition, step = KINDS[type(f)]
    slots = torch.tensor([5, 1, 7], device=DEVICE)
    ours = states(f, dtype, slots)
    theirs = {key: t.clone() for key, t in ours.items()}
    for _ in range(3):
        x = (torch.randn(3, features(f)) * 2).to(DEVICE, dtype)
        y, wanted = step(x, f, ours, slots, {}), definition.step(x, f, theirs, slots)
        assert y.dtype == dtype
        assert error(y, wanted) < TOLERANCE[dtype]
    for key, t in ours.items():
        assert t.isnan().sum() == theirs[key].isnan().sum()
        assert t.shape[-1] == 0 or error(t[slots], theirs[key][slots]) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", CASES)
def test_runs_and_large_states_are_left_to_the_definition(name):
    f = CASES[name]()
    call = dataclasses.replace(f.call(torch.zeros(2, features(f)), False), device="cuda", capability=(9, 0))
    assert select(call)[0].name == f"triton/{call.op}"
    run = dataclasses.replace(call, run=True)
    assert select(run)[0].name == f"torch/{call.op}"
    assert "not a run" in refusals(run)[f"triton/{call.op}"]
    if call.op == "delta":
        assert select(dataclasses.replace(call, k_dim=256, v_dim=256))[0].name == "torch/delta"
