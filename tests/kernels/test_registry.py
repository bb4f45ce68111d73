"""Dispatch: every kernel is well formed, refusals say why, and forcing one by name works or fails aloud."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import emulation
from lowq_kernels.dispatch import layouts, measure, registry
from lowq_kernels.dispatch.layouts import best_layout
from lowq_kernels.dispatch.registry import Call, kernels, refusals, select
from lowq_kernels.dispatch.tuning import Shape
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.products.cpu import native
from lowq_packers.errors import UnsupportedError
from lowq_packers.layouts import LAYOUTS
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import BITS, ZERO_KINDS, Scheme

CPU = Call(1, 64, 128, Scheme(4, 32), "rowstream", torch.bfloat16, "cpu")
H100 = Call(1, 4096, 4096, Scheme(4, 128), "strided", torch.float16, "cuda", (9, 0))


@pytest.mark.parametrize("name", sorted(kernels()))
def test_a_kernel_is_well_formed(name):
    spec = kernels()[name]
    assert spec.name == name
    assert set(spec.layouts) <= set(LAYOUTS)
    assert set(spec.bits) <= set(BITS)
    assert set(spec.zeros) <= set(ZERO_KINDS)
    assert spec.devices
    assert spec.m_range[0] <= spec.m_range[1]
    described = [tuple(sorted(c.items())) for c in spec.configs]
    assert len(set(described)) == len(described), "a config is listed twice"
    assert spec.launch.__doc__, "a launcher says what it returns"


@pytest.mark.parametrize(("bits", "group", "zero"), list(itertools.product(BITS, (16, 48, 128, 3072), ZERO_KINDS)))
@pytest.mark.parametrize("M", [1, 3, 16, 100, 5000])
def test_every_legal_strided_weight_has_a_fused_kernel_on_a_gpu(bits, group, zero, M):
    pytest.importorskip("triton")
    for dtype, cap in itertools.product((torch.float16, torch.bfloat16), ((8, 0), (8, 9), (9, 0))):
        spec, config = select(Call(M, 1001, 3072, Scheme(bits, group, zero), "strided", dtype, "cuda", cap))
        assert spec.name.startswith("triton/")
        assert config in spec.configs


def test_refusals_name_the_value_and_the_allowed_ones():
    why = refusals(CPU)
    assert why["cpu/int4"] == "reads layout cpu_int4, the weight has layout rowstream"
    assert why["cpu/table"] == "reads layout cpu, the weight has layout rowstream"
    on_cpu = replace(CPU, layout="cpu")
    assert refusals(on_cpu)["cpu/table"] == "takes zeros of kind none, not float"
    symmetric = replace(on_cpu, scheme=Scheme(4, 32, "none"))
    assert refusals(symmetric)["cpu/table"].endswith(", not evenly spaced values")
    pytest.importorskip("triton")
    assert why["triton/gemm"] == "runs on cuda, not on cpu"
    many_rows = Call(64, 4096, 4096, Scheme(4, 128), "strided", torch.float16, "cuda", (9, 0))
    assert refusals(many_rows)["triton/gemv_splitk"] == "takes M 1 .. 4, not 64"


def test_a_kernel_can_be_forced_and_a_wrong_name_lists_the_right_ones(monkeypatch):
    assert select(CPU, "reference")[0].name == "reference"
    monkeypatch.setenv("LOWQ_KERNEL", "reference")
    assert select(CPU)[0].name == "reference"
    with pytest.raises(UnsupportedError, match=r"unknown kernel 'fast'.*reference"):
        select(CPU, "fast")
    with pytest.raises(UnsupportedError, match="requested but reads layout"):
        select(CPU, "cpu/int4")


OWN_CPU = ("cpu/packed", "cpu/packed_int8", "cpu/table")


@pytest.mark.parametrize("by_environment", [False, True])
@pytest.mark.parametrize("name", sorted(kernels()))
def test_a_weight_is_packed_for_the_kernel_that_is_asked_for_by_name(name, by_environment, monkeypatch):
    """On the device that the kernel runs on, every width that it takes. Layouts of old: what the rule ranks first."""
    spec = kernels()[name]
    device, dtype = torch.device(spec.devices[-1]), spec.dtypes[0]
    kernel = None if by_environment else name
    if by_environment:
        monkeypatch.setenv("LOWQ_KERNEL", name)
    for bits in spec.bits:
        scheme = Scheme(bits, 128, spec.zeros[0], "" if "" in spec.tables else spec.tables[-1])
        layout = best_layout(scheme, 4096, 4096, dtype, device, kernel=kernel)
        call = Call(max(1, spec.m_range[0]), 4096, 4096, scheme, layout, dtype, device.type, (9, 0), spec.acts[0])
        if name in OWN_CPU and native.library() is None:
            with pytest.raises(UnsupportedError, match="lowq's CPU kernels are not in use"):
                select(call, kernel)
        else:
            assert select(call, kernel)[0].name == name


@pytest.mark.skipif("cuda/tile_mma" not in kernels(), reason="NVRTC is not installed")
def test_tuning_on_a_gpu_races_one_layout(monkeypatch):
    monkeypatch.setattr(layouts, "capability", lambda device: (9, 0))
    assert measure.layouts_for(Shape(4096, 4096, Scheme(4, 128), torch.float16), torch.device("cuda")) == ["tile"]


def test_no_layout_for_a_forced_kernel_is_one_line():
    scheme = Scheme(4, 24)
    with pytest.raises(UnsupportedError, match=r"cpu/int4 was requested, but none of its layouts .* layout cpu_int4: "):
        best_layout(scheme, 64, 48, torch.bfloat16, torch.device("cpu"), kernel="cpu/int4")
    with pytest.raises(UnsupportedError, match="unknown kernel 'fast'"):
        best_layout(scheme, 64, 48, torch.bfloat16, torch.device("cpu"), kernel="fast")


def test_a_kernel_of_another_device_is_refused_when_it_is_called_and_not_before():
    pytest.importorskip("triton")
    q = QuantizedTensor(torch.ones(64, 128, dtype=torch.uint8), torch.ones(64, 4), None, 4, 32, "none")
    lin = QuantLinear.from_quantized(q, kernel="triton/gemm", dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="triton/gemm was requested but runs on cuda, not on cpu"):
        lin(torch.ones(1, 128))


@pytest.fixture
def own():
    """Kernels that a test registers."""
    with emulation.changed_kernels():
        yield


def launch(x, p, bias, config):
    """No test of dispatch launches it."""
    raise AssertionError


@pytest.mark.usefixtures("own")
def test_several_names_force_an_operation_each(monkeypatch):
    registry.register("torch/other", op="attend")(launch)
    monkeypatch.setenv("LOWQ_KERNEL", "torch/other, dequant")
    assert registry.forced().name == "dequant"
    assert registry.forced(op="attend").name == "torch/other"
    assert registry.forced(op="experts") is None
    assert select(CPU)[0].name == "dequant"
    monkeypatch.setenv("LOWQ_KERNEL", "torch/other")
    assert registry.forced() is None
    with pytest.raises(UnsupportedError, match="torch/other was requested but computes attend, not product"):
        select(CPU, "torch/other")


def test_no_kernel_gives_every_reason():
    nobody = Call(1, 64, 128, Scheme(4, 32), "rowstream", torch.float64, "cpu")
    with pytest.raises(UnsupportedError, match=r"dequant, reference: takes .*not torch.float64"):
        select(nobody)


def test_tables_are_asked_before_the_rule_and_an_illegal_answer_is_passed_over():
    pytest.importorskip("triton")
    with registry.asking(lambda call: ("triton/gemm", {"BLOCK_M": 3}), lambda call: ("reference", {})):
        assert select(H100)[0].name == "reference"


@pytest.mark.usefixtures("own")
def test_a_kernel_out_of_its_preferred_range_still_comes_before_the_reference():
    """The reference's rank is that of a last resort; here both are of a layout that no other kernel reads."""
    for name, rank, preferred in (("picky", 100, (64, 128)), ("last", registry.LAST_RESORT, registry.ANY_M)):
        registry.register(name, layouts=("another",), devices=("cpu",), rank=rank, preferred_m=preferred)(launch)
    assert kernels()["reference"].rank == registry.LAST_RESORT
    assert select(registry.Call(1, 16, 64, Scheme(4, 32), "another", torch.bfloat16, "cpu"))[0].name == "picky"


@pytest.mark.parametrize(
    ("M", "N", "name"),
    [(16, 4096, "mma"), (32, 4096, "mma"), (33, 4096, "wgmma"), (8, 28672, "mma"), (9, 28672, "wgmma"), (32, 28672, "wgmma")],
)
def test_the_rule_gives_up_to_32_rows_of_a_narrow_layer_to_mma(M, N, name):
    """As measured on an H100: 4096 x 4096, M = 32 takes 7.4 us by mma and 9.3 by wgmma; 28672 x 4096 41.6 and 24.1."""
    call = registry.Call(M, N, 4096, Scheme(4, 128), "tile", torch.float16, "cuda", (9, 0))
    with registry.asking():
        assert registry.select(call)[0].name == f"cuda/tile_{name}"


def not_emulated(modules):
    """Those of the modules, by their last name, that no test file names which runs emulated sources."""
    files = [path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    emulated = "\n".join(text for text in files if "emulation.twice(" in text)
    return {name for module in modules if not re.search(rf"\b{(name := module.rpartition('.')[2])}\b", emulated)}


def test_every_cuda_kernel_has_an_emulated_test():
    """Without a GPU no other test checks its numbers: docs/kernels.md, "Adding one"."""
    registry.load_kernels()
    cuda = {spec.launch.__module__ for name, spec in registry.KERNELS.items() if name.startswith("cuda/")}
    assert not_emulated(cuda) == set()
    assert not_emulated({*cuda, "lowq_kernels.products.cuda.tile_new"}) == {"tile_new"}
