"""Triton's steps and runs of gated delta, Mamba2 and short convolutions against their definitions, states included."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first triton import
pytest.importorskip("triton")

import dataclasses
from contextlib import contextmanager

from mixers import a_delta, a_mamba2, features, state_shapes

from emulation import error
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.recurrent import Rows, Run, Runs, delta, mamba2, runs_triton, short_conv, steps_triton
from lowq_kernels.decode.recurrent.delta import Delta
from lowq_kernels.decode.recurrent.mamba2 import Mamba2
from lowq_kernels.decode.recurrent.short_conv import ShortConv
from lowq_kernels.decode.runs import states_of
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
    "delta, values of a head in blocks": lambda: a_delta(1, 2, 8, 72),
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


# the plain ones in every dtype; what the others have besides is the same in each, and Triton's interpreter is slow
DTYPED = [(name, d) for name in CASES for d in TOLERANCE if DEVICE == "cuda" or d == torch.float32 or "," not in name]


@pytest.mark.parametrize(("name", "dtype"), DTYPED, ids=str)
def test_steps(name, dtype):
    f = moved(CASES[name](), dtype)
    definition, step = KINDS[type(f)]
    slots = torch.tensor([5, 1, 7], device=DEVICE)
    ours = states(f, dtype, slots)
    theirs = {key: t.clone() for key, t in ours.items()}
    for _ in range(3):
        x = (torch.randn(3, features(f)) * 2).to(DEVICE, dtype)
        y, expected = step(x, f, ours, slots, {}), definition.step(x, f, theirs, slots)
        assert y.dtype == dtype
        assert error(y, expected) < TOLERANCE[dtype]
    for key, t in ours.items():
        assert t.isnan().sum() == theirs[key].isnan().sum()
        assert t.shape[-1] == 0 or error(t[slots], theirs[key][slots]) < TOLERANCE[dtype]


@pytest.mark.parametrize(("name", "dtype"), DTYPED, ids=str)
def test_rows_of_one_sequence_with_a_copy_of_the_state_after_each(name, dtype):
    f = moved(CASES[name](), dtype)
    definition, step = KINDS[type(f)]
    for T in (1, 2, 5):
        places = Rows(*(torch.tensor(slots, device=DEVICE, dtype=torch.int64) for slots in ([3], [6, 1, 4, 0][: T - 1])))
        ours = states(f, dtype, places.slot)
        theirs = {key: t.clone() for key, t in ours.items()}
        x = (torch.randn(T, features(f)) * 2).to(DEVICE, dtype)
        y, expected = step(x, f, ours, places, {}), definition.DEFINITION.either(x, f, theirs, places)
        assert error(y, expected) < 2 * TOLERANCE[dtype]  # the interpreter cuts bf16 where the definition rounds
        for key, t in ours.items():
            assert torch.equal(t.isnan(), theirs[key].isnan())
            for slot in (*places.slot.tolist(), *places.copies.tolist()):
                assert t.shape[-1] == 0 or error(t[slot], theirs[key][slot]) < TOLERANCE[dtype]


RUNS = {Delta: runs_triton.delta, Mamba2: runs_triton.mamba2, ShortConv: runs_triton.short_conv}
# lengths of several sequences, and dummy rows before, between and after them
RAGGED = ((0, 1), (3, 2), (0, 130), (5, 64), (4, 0))
SHORT = ((0, 1), (3, 66), (4, 0))  # two of them: what else a case has is the same in the third chunk as in the second


def ragged(lengths=RAGGED):
    """Those runs, each with a slot of its own."""
    each, at = [], 0
    for i, (before, length) in enumerate(lengths):
        at += before
        each += [Run(at, at + length, 7 - i)] if length else []
        at += length
    return Runs(each, at, torch.device(DEVICE))


def run_error(f, x, runs, dtype, run, garbled=lambda held: None):
    """Of a kernel's runs the error of y, and the largest of the states; NaN is in slots of no sequence, and in new memory."""
    ours = states(f, dtype, torch.tensor([run.slot for run in runs.each], device=DEVICE))
    theirs = {key: t.clone() for key, t in ours.items()}
    garbled(ours)
    with poisoned():
        y = run(x, f, ours, runs, {})
    expected = KINDS[type(f)][0].DEFINITION.either(x, f, theirs, runs)
    assert y.dtype == dtype
    assert y.isfinite().all()
    mine, slots = torch.cat([torch.arange(run.first, run.end) for run in runs.each]), [run.slot for run in runs.each]
    assert all(t.isnan().sum() == theirs[key].isnan().sum() for key, t in ours.items())
    return error(y[mine], expected[mine]), max(error(t[slots], theirs[key][slots]) for key, t in ours.items() if t.shape[-1])


@contextmanager
def poisoned():
    """New tensors hold NaN (torch's own switch)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "dtype"), DTYPED, ids=str)
def test_runs(name, dtype):
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bf16")
    f, runs = moved(CASES[name](), dtype), ragged(SHORT if DEVICE == "cpu" and "," in name else RAGGED)
    if isinstance(f, ShortConv) and f.weight.shape[1] == 1:
        f = dataclasses.replace(f, weight=f.weight.repeat(1, 2))
    x = (torch.randn(runs.M, features(f)) * 2).to(DEVICE, dtype)
    of_y, of_states = run_error(f, x, runs, dtype, RUNS[type(f)])
    assert of_y < TOLERANCE[dtype]
    assert of_states < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["delta", "mamba2", "short_conv"])
def test_a_fault_in_a_run_shows(name):
    f, device = moved(CASES[name](), torch.float32), torch.device(DEVICE)
    x, runs = torch.randn(70, features(f)).to(DEVICE), Runs([Run(0, 66, 5), Run(66, 70, 2)], 70, device)

    def garbled(held):
        held["conv"][2] += 0.1

    of_y, _ = run_error(f, x, runs, torch.float32, RUNS[type(f)], garbled)
    assert of_y > 100 * TOLERANCE[torch.float32]
    one = Runs([Run(0, 70, 5)], 70, device)  # another cut
    of_y, _ = run_error(f, x, runs, torch.float32, lambda x, f, held, runs, config: RUNS[type(f)](x, f, held, one, config))
    assert not of_y < 100 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("f", ["delta", "mamba2"])
def test_decays_that_forget_at_once_and_those_that_never_do(f):
    odd = {"a_log": torch.tensor([-20.0, 4.0, 5.0, 0.0]), "dt_bias": torch.tensor([0.0, 8.0, -9.0, -30.0])}
    f, runs = moved(dataclasses.replace(CASES[f](), **odd), torch.float32), Runs([Run(0, 200, 1)], 200, torch.device(DEVICE))
    x = (torch.randn(200, features(f)) * 2).to(DEVICE)
    assert max(run_error(f, x, runs, torch.float32, RUNS[type(f)])) < 2e-5


def test_keys_that_are_all_the_same():
    f, runs = moved(CASES["delta"](), torch.float32), Runs([Run(0, 150, 1)], 150, torch.device(DEVICE))
    x = torch.randn(1, features(f)).repeat(150, 1).to(DEVICE)
    x[:, -2 * f.v_heads :] += torch.tensor([9.0] * f.v_heads + [-9.0] * f.v_heads, device=DEVICE)  # all is written, none decays
    assert max(run_error(f, x, runs, torch.float32, RUNS[type(f)])) < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_unsupported_calls_are_refused(name):
    f = CASES[name]()
    call = dataclasses.replace(
        f.call(torch.zeros(2, features(f), dtype=torch.bfloat16), False), device="cuda", capability=(9, 0)
    )
    assert select(call)[0].name == f"triton/{call.op}"
    run = dataclasses.replace(call, run=True)
    assert "not a run" in refusals(run)[f"triton/{call.op}"]
    assert "takes runs" in refusals(call)[f"triton/{call.op}_runs"]
    keys = {"delta": "k_dim", "mamba2": "N"}.get(call.op)
    for capability in ((8, 0), (8, 6), (9, 0), (12, 0)):
        for dtype in TOLERANCE:
            most = 64 if dtype == torch.float32 else 128  # more do not fit on every GPU
            for n in {min(getattr(call, keys), most), most} if keys else {0}:
                there = dataclasses.replace(run, capability=capability, dtype=dtype, **({keys: n} if keys else {}))
                assert select(there)[0].name == f"triton/{call.op}_runs"
    if keys:
        assert select(dataclasses.replace(run, **{keys: runs_triton.MOST_KEYS}))[0].name == f"triton/{call.op}_runs"
        assert select(dataclasses.replace(run, **{keys: 2 * runs_triton.MOST_KEYS}))[0].name == f"torch/{call.op}"
    if call.op == "delta":
        assert select(dataclasses.replace(call, k_dim=256, v_dim=256))[0].name == "torch/delta"


@pytest.mark.parametrize("name", ["delta", "mamba2", "short_conv"])
def test_runs_that_only_the_device_knows_padded(name):
    f, runs = moved(CASES[name](), torch.float32), ragged()
    x = torch.randn(runs.M, features(f)).to(DEVICE)
    table, tiles = (torch.tensor(rows, dtype=torch.int32) for rows in states_of(runs.each))
    nothing = torch.zeros(3, 4, dtype=torch.int32)
    given = torch.cat((table, nothing, tiles, nothing)).to(DEVICE)
    padded = Runs((), runs.M, runs.device, given, len(table) + 3)
    run = RUNS[type(f)]
    of_y, of_states = run_error(f, x, runs, torch.float32, lambda x, f, held, _, config: run(x, f, held, padded, config))
    assert max(of_y, of_states) < TOLERANCE[torch.float32]
    with pytest.raises(RuntimeError, match="only on the device"):
        KINDS[type(f)][0].DEFINITION.either(x, f, states(f, torch.float32, [1]), padded)
