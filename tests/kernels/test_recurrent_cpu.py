"""Steps of recurrent mixers in C++ against loops in fp64: every dtype and instruction set, threads, rows of drafts."""

from dataclasses import fields, replace

import pytest
import torch
from mixer_truth import CASES, kind, states, truth
from mixers import features

from cpu_sets import isa, pytestmark
from emulation import error
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.recurrent import Rows, Run, Runs, dispatched
from lowq_kernels.dispatch.registry import select

__all__ = ["isa", "pytestmark"]
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # relative Frobenius error

T, SLOTS = 12, torch.tensor([4, 1])


def in_dtype(f, dtype):
    """A mixer whose convolution and norm have another dtype, as a model in it does."""
    norm = getattr(f, "norm", None)
    changed = {"weight": f.weight.to(dtype), "bias": None if f.bias is None else f.bias.to(dtype)}
    changed |= {} if norm is None else {"norm": norm._replace(weight=norm.weight.to(dtype))}
    return replace(f, **changed)


def drawn(name, dtype):
    """A mixer, two sequences' inputs (2, T, features), and states of which only two slots are no NaN."""
    torch.manual_seed(5)
    f = in_dtype(CASES[name](), dtype)
    held = states(f)
    held |= {"conv": held["conv"].to(dtype)}
    for t in held.values():
        t[[0, 2, 3]] = float("nan")
    return f, torch.randn(2, T, features(f)).to(dtype), held


def steps(f, x, held, slots=SLOTS):
    return torch.stack([dispatched(x[:, t].contiguous(), f, held, slots) for t in range(x.shape[1])], 1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_truth_and_touch_no_other_slot(isa, name, dtype):
    f, x, held = drawn(name, dtype)
    assert select(f.call(x[:, 0], False))[0].name.startswith("cpu/")
    y = steps(f, x, held)
    assert y.dtype == dtype
    assert error(y, torch.stack([truth(one, f) for one in x])) < TOLERANCE[dtype]
    assert all(t[[0, 2, 3]].isnan().all() for t in held.values())
    assert not any(t[[1, 4]].isnan().any() for t in held.values())


@pytest.mark.parametrize("name", CASES)
def test_the_bits_depend_on_no_thread_and_no_other_sequence(name):
    f, x, held = drawn(name, torch.bfloat16)
    y, before = steps(f, x, held), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        _, _, again = drawn(name, torch.bfloat16)
        assert torch.equal(steps(f, x, again), y)
    finally:
        torch.set_num_threads(before)
    _, _, alone = drawn(name, torch.bfloat16)
    assert torch.equal(steps(f, x[1:], alone, SLOTS[1:]), y[1:])
    assert torch.equal(alone["conv"][1], held["conv"][1])


@pytest.mark.parametrize("name", ["delta", "mamba2", "short_conv"])
def test_rows_of_one_sequence_leave_the_state_after_each(name):
    """As drafts need it: the state after row i is copied into a slot of its own."""
    f, x, held = drawn(name, torch.float32)
    expected = [(steps(f, x[:1, : i + 1], one := drawn(name, torch.float32)[2], SLOTS[:1]), one) for i in range(3)]
    y = dispatched(x[0, :3].contiguous(), f, held, Rows(SLOTS[:1], torch.tensor([0, 3])))
    assert torch.equal(y, expected[2][0][0])
    for slot, (_, one) in zip((0, 3, 4), expected, strict=True):
        assert all(torch.equal(held[key][slot], one[key][4]) for key in held)


@pytest.mark.parametrize("name", ["delta", "mamba2", "short_conv"])
def test_runs_stay_the_definitions(name):
    f, x, held = drawn(name, torch.float32)
    call = f.call(x[0], True)
    assert select(call)[0].name.startswith("torch/")
    y = dispatched(x[0], f, held, Runs([Run(0, T, 4, 0)], T, x.device))
    assert error(y, truth(x[0], f)) < 1e-5


def other(name):
    """Mixers and states that the C++ does not take."""
    f, x, held = drawn(name, torch.float32)
    if name == "delta":
        yield replace(f, norm=Norm(f.norm.weight, f.norm.eps, "layer")), x, held
        yield f, x, held | {"S": held["S"].bfloat16()}
    yield f, x, held | {"conv": held["conv"].transpose(1, 2).contiguous().transpose(1, 2)}
    yield replace(f, weight=f.weight.double()), x, held


@pytest.mark.parametrize("name", ["delta", "mamba2", "short_conv"])
def test_unsupported_calls_are_computed_by_the_definition(name):
    for f, x, held in other(name):
        theirs = {key: t.clone() for key, t in held.items()}
        y = dispatched(x[:, 0].contiguous(), f, held, SLOTS)
        assert torch.equal(y, kind(f).step(x[:, 0].contiguous(), f, theirs, SLOTS))


def test_every_fact_of_a_mixer_reaches_the_kernel():
    """A field that steps_cpu.py forgets would not show with one value: every number and weight is changed, alone."""
    for name in ("delta", "mamba2, limits of dt", "mamba2, constants", "short_conv"):
        f, x, held = drawn(name, torch.float32)
        y = steps(f, x, {key: t.clone() for key, t in held.items()})
        for field in fields(f):
            value = getattr(f, field.name)
            if isinstance(value, torch.Tensor):
                changed = replace(f, **{field.name: value + 0.5})
                assert error(steps(changed, x, {k: t.clone() for k, t in held.items()}), y) > 1e-3, (name, field.name)
