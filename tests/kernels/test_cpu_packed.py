"""cpu/packed: own C++ products on every instruction set that this CPU has, against the definition in fp64."""

import shlex
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cpu_sets import ROWS, TOLERANCE, isa, pytestmark, rows
from emulation import error, weight
from lowq_cli.engine.open_model import build_kernels
from lowq_kernels.activations import int8_rows
from lowq_kernels.dispatch import registry
from lowq_kernels.modules import joined
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.products.cpu import building, dense, native, packed
from lowq_packers.layouts import pack, repack, unpack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import BITS, ZERO_KINDS

SHAPES = [(33, 64, 32), (80, 384, 128), (64, 256, 256), (95, 96, 96), (17, 30, 30), (1, 100, 100), (48, 320, 64)]  # N K group
__all__ = ["isa", "pytestmark"]


@pytest.mark.parametrize("zero", ZERO_KINDS)
@pytest.mark.parametrize("bits", BITS)
def test_products_against_the_definition(isa, bits, zero):
    assert native.isa()[1] == isa
    for N, K, group in SHAPES:
        for dtype in TOLERANCE:
            q = weight(N, K, bits, group, zero, dtype)
            p, bias = pack(q, "cpu"), rows(1, N, dtype)[0]
            for M in ROWS:
                x = rows(M, K, dtype, M)
                y = packed.packed(x, p, bias, {})
                truth = x.double() @ q.dequantize().double().t() + bias.double()
                assert y.shape == (M, N)
                assert error(y, truth) < TOLERANCE[dtype] / 2, (N, K, group, dtype, M)


@pytest.mark.parametrize("bits", BITS)
def test_rows_rounded_to_8_bits_against_the_definition(isa, bits):
    for N, K, group in SHAPES:
        q = weight(N, K, bits, group)
        p, bias = pack(q, "cpu"), rows(1, N)[0]
        for M in ROWS:
            x = rows(M, K, seed=M)
            x[M // 2] = 0
            digits, scales = int8_rows(x)
            truth = digits.double() * scales.double() @ q.dequantize().double().t() + bias.double()
            assert error(packed.packed_int8(x, p, bias, {}), truth) < 6e-3, (N, K, group, M)


def test_a_layer_that_is_not_quantized_against_the_definition(isa):
    dtypes = [*((dtype, dense.MOST, e / 2) for dtype, e in TOLERANCE.items()), (torch.float32, dense.MOST_FP32, 1e-6)]
    for N, K in ((33, 64), (5, 200), (70, 45)):
        for dtype, most, tolerance in dtypes:
            layer, x = torch.nn.Linear(K, N, dtype=dtype).requires_grad_(False), rows(most, K, dtype)
            truth = x.double() @ layer.weight.double().t() + layer.bias.double()
            whole = dense.product(x, layer.weight, layer.bias)
            for M in range(1, most + 1):
                with Products() as torchs:
                    y = dense.product(x[:M], layer.weight, layer.bias)
                assert not torchs.dtypes
                assert error(y, truth[:M]) < tolerance
                assert torch.equal(y, whole[:M])


def test_layers_that_are_trained_keep_their_gradients(isa):
    for dtype in (torch.bfloat16, torch.float32):
        layer = torch.nn.Linear(64, 8, dtype=dtype)
        dense.product(rows(1, 64, dtype), layer.weight, layer.bias).sum().backward()
        assert layer.weight.grad is not None


def test_many_rows_of_16_bits_are_not_left_to_slow_loops(monkeypatch):
    """fp32 sums, rounded once, over slabs that do not divide N; 512 rows of 2048 x 2048 in bf16 by torch: 6 times as long."""
    monkeypatch.setattr(dense, "has_products", lambda dtype: False)
    K, N = 1024, 1030
    assert N % (dense.SLAB_BYTES // (4 * K)) == 6
    for dtype in TOLERANCE:
        layer, x = torch.nn.Linear(K, N, dtype=dtype).requires_grad_(False), rows(dense.MOST + 3, K, dtype)
        truth = x.double() @ layer.weight.double().t() + layer.bias.double()
        with Products() as torchs:
            y = dense.product(x, layer.weight, layer.bias)
        assert torchs.dtypes == [torch.float32] * 2
        assert y.dtype == dtype
        assert error(y, truth) < TOLERANCE[dtype] / 2
        made = joined.dense(layer.weight, layer.bias)
        assert torch.equal(made(x[None]), y[None])


class Products(TorchDispatchMode):
    """The dtypes of the products that torch computes."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm"):
            self.dtypes.append(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bits", BITS)
def test_a_row_does_not_depend_on_its_batch_or_on_threads(isa, bits):
    p, x = pack(weight(80, 384, bits, 128), "cpu"), rows(19, 384)
    whole, threads = packed.packed(x, p, None, {}), torch.get_num_threads()
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            assert torch.equal(packed.packed(x, p, None, {}), whole)
            for M in ROWS:
                assert torch.equal(packed.packed(x[:M], p, None, {}), whole[:M])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bits", BITS)
def test_activations_of_every_size_keep_their_digits(isa, bits):
    """Only a block's own largest value sets its scale: tiny blocks next to huge ones, and one outlier of 64 times the rest."""
    q = weight(40, 256, bits, 32)
    x = rows(3, 256)
    x[:, :64] *= 1e30
    x[:, 64:128] *= 1e-25
    p, truth = pack(q, "cpu"), x.double() @ q.dequantize().double().t()
    assert error(packed.packed(x, p, None, {}), truth) < 4e-3
    x[:, :64] = 0
    x[:, 130] = 64
    truth = x.double() @ q.dequantize().double().t()
    assert error(packed.packed(x, p, None, {}), truth) < 4e-3


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_codes_and_digits_do_not_overflow(isa, bits):
    """Sums that an instruction set keeps in 16 bits hold them: every code and both digits of x as large as they get."""
    codes = torch.full((16, 128), 2**bits - 1, dtype=torch.uint8)
    q = QuantizedTensor(codes, torch.full((16, 4), 2.0**-bits).half(), torch.zeros(16, 4).half(), bits, 32)
    for sign in (1, -1):
        for M in (1, 3):
            x = torch.full((M, 128), sign * (1 - 2**-11)).half()
            truth = x.double() @ q.dequantize().double().t()
            assert error(packed.packed(x, pack(q, "cpu"), None, {}), truth) < 1e-3


def test_values_that_are_not_finite_stay_so_and_stay_in_their_row(isa):
    q = weight(40, 256, 4, 32)
    p, x = pack(q, "cpu"), rows(4, 256)
    clean = packed.packed(x, p, None, {})
    x[1, 7], x[2, 200] = float("inf"), float("nan")
    y = packed.packed(x, p, None, {})
    assert y[1:3].isnan().all()
    assert torch.equal(y[[0, 3]], clean[[0, 3]])
    assert (packed.packed(torch.zeros_like(x), p, None, {}) == 0).all()
    assert packed.packed(x[:0], p, None, {}).shape == (0, 40)


@pytest.mark.parametrize("bits", BITS)
def test_one_wrong_code_is_seen(isa, bits):
    q = weight(32, 64, bits, 32)
    wrong = q.W_q.clone()
    wrong[3, 5] ^= 1 << (bits - 1)
    p = pack(QuantizedTensor(wrong, q.scales, q.zeros, bits, 32), "cpu")
    x = torch.zeros(1, 64).bfloat16()
    x[0, 5] = 1
    y, truth = packed.packed(x, p, None, {}), x.double() @ q.dequantize().double().t()
    half_of_it = q.scales[:, 0].double() * 2 ** (bits - 2)
    assert [n for n in range(32) if abs(y[0, n] - truth[0, n]) > half_of_it[n]] == [3]


@pytest.mark.parametrize("bits", BITS)
def test_the_layout_is_lossless(bits):
    for N, K, group in SHAPES:
        q = weight(N, K, bits, group)
        p = pack(q, "cpu")
        back, moved = unpack(p), repack(pack(q), "cpu")
        assert all(torch.equal(getattr(back, name), getattr(q, name)) for name in ("W_q", "scales", "zeros"))
        assert all(torch.equal(getattr(moved, name), getattr(p, name)) for name in ("words", "scales", "zeros"))


def test_it_is_chosen_wherever_it_can_be():
    for dtype in TOLERANCE:
        lin = QuantLinear.from_quantized(weight(64, 128, 3, 64, dtype=dtype), dtype=dtype)
        assert lin.layout == "cpu"
        assert registry.select(registry.Call.of(rows(5, 128, dtype), lin.packed))[0].name == "cpu/packed"
    lin.set_act("int8")
    assert registry.select(registry.Call.of(rows(5, 128, dtype), lin.packed, "int8"))[0].name == "cpu/packed_int8"
    assert QuantLinear.from_quantized(weight(64, 96, 4, 48), dtype=torch.bfloat16).layout != "cpu"


def test_where_no_compiler_is_the_reason_says_so(monkeypatch):
    p, x = pack(weight(32, 64, 4, 32), "cpu"), rows(1, 64)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    native.forget()
    try:
        refusal = registry.refusals(registry.Call.of(x, p))["cpu/packed"]
        assert refusal == "lowq's CPU kernels are not in use: no C++ compiler is here; install g++ or clang"
    finally:
        native.forget()


def test_a_compiler_that_fails_is_named_with_its_first_line(tmp_path, monkeypatch):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'cannot find omp.h' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.forget()
    try:
        assert native.why_not() == f"{broken} does not build them: cannot find omp.h"
    finally:
        native.forget()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cxx", "units", "how"),
    [
        ("aarch64-linux-gnu-g++", building.ARM, "-fsyntax-only"),  # test_cpu_emulated.py translates them for NEON
        ("g++-11", building.X86, "-fsyntax-only"),  # of Ubuntu 22.04, as clang 14: they lack _Float16, and g++ 11 shufflevector
        ("clang++", building.X86, "-fsyntax-only"),
    ],
)
def test_other_compilers_take_the_sources(tmp_path, cxx, units, how):
    if not shutil.which(cxx):
        pytest.skip(f"{cxx} is not installed")
    for name, flags in units.items():
        every = [f for f in building.FLAGS if f != "-fopenmp"]  # whose header clang has in a package of its own
        command = [cxx, *every, *flags, how, "-c", str(building.HERE / name), "-o", str(tmp_path / name)]
        subprocess.run(command, check=True)


def test_waiting_for_the_compiler_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if (cxx := building.compiler()) is not None:
        quick = tmp_path / "c++"
        quick.write_text(f'#!/bin/sh\nexec {shlex.quote(cxx)} "$@" -O0\n')  # a third of the time
        quick.chmod(0o755)
        monkeypatch.setenv("CXX", str(quick))
    monkeypatch.delenv("LOWQ_CPU_ISA", raising=False)
    native.forget()
    expected = building.compiler() is not None and building.units_here() is not None
    assert (native.why_built() != "") == expected
    if expected:
        assert native.library()
        native.forget()
        assert not native.why_built()  # it is there
    native.forget()


# (cores, seconds of the first unit, of the whole build): as g++ 12 took them; those of NEON, without such a unit, are assumed
BUILDS = [(2, 0.6, 18), (2, 0.88, 31.2), (2, 0.74, 29.5), (2, 1.04, 62.7), (1, 0.74, 59.7), (2, None, 24), (1, None, 50)]


@pytest.mark.parametrize(("cores", "first", "whole"), BUILDS)
def test_what_a_build_says_of_its_end_is_about_right_from_the_beginning(cores, first, whole, tmp_path, monkeypatch):
    """And where it takes longer it says so, instead of half a second from then on."""
    now, told = 0.0, []

    def wait(started, tell):
        nonlocal now
        until = first or 0.03 if {*started} <= {"api.cpp", "bf16.cpp"} else whole
        while now < until:
            now += 0.1
            tell()

    monkeypatch.setattr(building, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(building, "_wait", wait)
    monkeypatch.setattr(building, "_start", lambda cxx, name, flags, folder: name)
    monkeypatch.setattr(building, "_version", lambda cxx: "of a test")
    monkeypatch.setattr(building, "subprocess", SimpleNamespace(run=lambda *line, **how: None))
    monkeypatch.setattr(building.os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    units = building.ARM if first is None else building.X86
    building.build("c++", units, tmp_path, lambda share: told.append((now, share)))
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    ends = [spent / share for spent, share in told]
    assert 0.4 * whole < ends[0] < 2.1 * whole
    assert all(end - spent > spent / 10 for (spent, _), end in zip(told, ends, strict=True))
    assert shares[-1] > 0.45


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_a_build_is_announced_with_the_time_that_it_takes(cores, monkeypatch, capsys):
    monkeypatch.setattr(building.os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    monkeypatch.setattr(native, "why_built", lambda: native.NONE)
    monkeypatch.setattr(native, "built", lambda advance: None)
    build_kernels()
    said = " ".join(capsys.readouterr().err.split())
    assert f"once on this machine; it usually takes {'about a minute' if cores == 1 else '20 to 50 s'}, longer where" in said
