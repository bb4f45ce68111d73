"""The CPU kernels, `reference` and QuantLinear: every registered kernel that runs on a CPU, against the definition."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import emulation
from emulation import error, weight
from lowq_kernels.activations import rounded
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.layouts import best_layout
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.products.cpu import native
from lowq_packers.atomic import alone
from lowq_packers.errors import SchemeError, UnsupportedError
from lowq_packers.home import cache_dir
from lowq_packers.layouts import LAYOUTS, pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import BITS, Scheme

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float32: 1e-5}  # relative Frobenius error
SHAPES = [(1, 33, 64, 32), (7, 80, 128, 64), (16, 64, 256, 256), (33, 95, 96, 96), (3, 48, 192, 48), (2, 17, 30, 30)]  # M N K g
NOT_BUILT = pytest.mark.skipif(native.library() is None, reason=f"own CPU kernels are not built: {native.why_not()}")
CPU_KERNELS = [
    pytest.param(s, id=s.name, marks=[NOT_BUILT] if s.layouts == ("cpu",) else [])
    for s in registry.kernels().values()
    if "cpu" in s.devices and "" in s.tables
]


def truth_of(x, q, bias=None):
    y = x.double() @ q.dequantize().double().t()
    return y if bias is None else y + bias.double()


@NOT_BUILT
@pytest.mark.skipif(bool(native.carried()), reason="the package carries the library, so none is built")
def test_a_library_that_is_there_does_not_wait_for_a_process_that_builds_another():
    """The folder's lock is held through a build, which took 13 minutes of a machine with a load of 15."""
    native.forget()
    with ThreadPoolExecutor(1) as pool, alone(cache_dir() / "cpu"):
        assert pool.submit(native.library).result(timeout=60) is not None


@pytest.mark.parametrize("spec", CPU_KERNELS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zero", ["float", "int", "none"])
def test_kernel_against_the_definition(spec, bits, zero):
    ran = 0
    for M, N, K, group in SHAPES:
        for dtype in spec.dtypes:
            q = weight(N, K, bits, group, zero, dtype)
            for layout in spec.layouts:
                if LAYOUTS[layout].why_not(q.scheme, N, K):
                    continue
                x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(dtype)
                bias = torch.randn(N, generator=torch.Generator().manual_seed(N)).to(dtype)
                p = pack(q, layout)
                for config in spec.legal_configs(registry.Call.of(x, p)):
                    y = spec.launch(x, p, bias, config)
                    assert y.shape == (M, N)
                    assert y.dtype == dtype
                    truth = truth_of(rounded(x, spec.acts[0]), q, bias)
                    assert error(y, truth) < TOLERANCE[dtype], (M, N, K, group, dtype, layout)
                    assert torch.equal(y, spec.launch(x, p, bias, config))
                    ran += 1
    assert ran


@pytest.mark.parametrize("spec", CPU_KERNELS)
def test_the_tolerance_sees_one_wrong_code(spec):
    dtype = spec.dtypes[-1]
    q = weight(16, 64, 4, 32, "float", dtype)
    wrong = q.W_q.clone()
    wrong[3, 5] ^= 8
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    p = pack(QuantizedTensor(wrong, q.scales, q.zeros, 4, 32), spec.layouts[0])
    y = spec.launch(x, p, None, spec.configs[0])
    assert error(y[:, 3], truth_of(x, q)[:, 3]) > TOLERANCE[dtype]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_quant_linear(bits, dtype):
    q = weight(50, 128, bits, 64, "float", dtype)
    bias = torch.randn(50)
    lin = QuantLinear.from_quantized(q, bias=bias, dtype=dtype)
    x = torch.randn(2, 3, 128).to(dtype)
    y = lin(x)
    assert y.shape == (2, 3, 50)
    assert y.dtype == dtype
    assert error(y.reshape(6, 50), truth_of(x.reshape(6, 128), q, bias.to(dtype))) < TOLERANCE[dtype]


@pytest.fixture
def no_compiler(monkeypatch):
    """A machine on which own kernels cannot be built."""
    monkeypatch.setenv("LOWQ_CPU_ISA", "off")
    native.forget()
    registry.forget_choices()
    yield
    native.forget()
    registry.forget_choices()


def test_bf16_on_a_cpu_without_a_compiler_takes_torchs_int4_kernel(no_compiler):
    lin = QuantLinear.from_quantized(weight(64, 128, 4, 64, "float", torch.bfloat16), dtype=torch.bfloat16)
    assert lin.layout == "cpu_int4"
    assert registry.select(registry.Call.of(torch.zeros(1, 128, dtype=torch.bfloat16), lin.packed))[0].name == "cpu/int4"


@pytest.mark.parametrize("layout", ["auto", "strided", "rowstream"])
def test_state_dict_is_rowstream_whatever_the_layout(layout):
    q = weight(48, 128, 4, 32, "float", torch.bfloat16)
    lin = QuantLinear.from_quantized(q, bias=torch.ones(48), dtype=torch.bfloat16, layout=layout)
    disk = pack(q)
    state = lin.state_dict()
    assert set(state) == {"weight", "weight_scale", "weight_zero", "bias"}
    assert torch.equal(state["weight"], disk.words)
    assert torch.equal(state["weight_scale"], disk.scales)
    assert torch.equal(state["weight_zero"], disk.zeros)
    other = QuantLinear(48, 128, q.scheme, bias=True, dtype=torch.bfloat16, layout=layout)
    other.load_state_dict(state)
    x = torch.randn(4, 128).bfloat16()
    assert torch.equal(other.prepare()(x), lin(x))
    lin.load_state_dict(state)  # into a layer that is already prepared
    assert lin.layout == other.layout
    assert torch.equal(lin(x), other(x))


def test_zero_kind_none_stores_no_zeros():
    lin = QuantLinear.from_quantized(weight(16, 64, 4, 32, "none", torch.float16))
    assert set(lin.state_dict()) == {"weight", "weight_scale"}


def test_deepcopy_and_dtype_change_keep_the_weight():
    q = weight(32, 64, 4, 32, "float", torch.float32)
    lin = QuantLinear.from_quantized(q, dtype=torch.float32)
    x = torch.randn(3, 64)
    assert torch.equal(copy.deepcopy(lin)(x), lin(x))
    half = copy.deepcopy(lin).to(torch.bfloat16)
    assert half.weight.dtype == lin.weight.dtype
    assert error(half(x.bfloat16()), truth_of(x, q)) < 2 * TOLERANCE[torch.bfloat16]


def test_a_dtype_change_leaves_the_words_of_torchs_kernel(no_compiler):
    q = weight(32, 64, 4, 32, "float", torch.bfloat16)
    lin = QuantLinear.from_quantized(q, dtype=torch.bfloat16)
    x = torch.randn(3, 64).bfloat16()
    y = lin(x)
    assert lin.layout == "cpu_int4"
    assert torch.equal(lin.half()(x), y)


def test_a_bias_with_gaps_is_closed_up():
    lin = QuantLinear.from_quantized(weight(32, 64, 4, 32, "float", torch.float16), torch.arange(64.0).half()[::2])
    assert lin.bias.is_contiguous()  # kernels get its address and no stride
    assert lin.bias.tolist() == list(range(0, 64, 2))


def test_compiled_graph_has_no_break():
    lin = QuantLinear.from_quantized(weight(32, 64, 4, 32, "float", torch.bfloat16), bias=torch.ones(32), dtype=torch.bfloat16)
    x = torch.randn(3, 64).bfloat16()
    compiled = torch.compile(lambda t: torch.nn.functional.silu(lin(t)), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), torch.nn.functional.silu(lin(x)))


@pytest.fixture
def by_address():
    """A kernel that autograd does not see into, as on a GPU: dispatch's own choice, of x without its history."""
    with emulation.changed_kernels():
        register = registry.register("test/by_address", layouts=tuple(LAYOUTS), devices=("cpu",), rank=2 * registry.LAST_RESORT)
        register(lambda x, p, bias, config: registry.matmul(x.detach(), p, bias))
        yield "test/by_address"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_flows_through_every_layout(layout, compiled, by_address):
    """Kernels are handed addresses: what autograd does not know of would count as a constant, silently."""
    q = weight(33, 64, 4, 32, "float", torch.bfloat16)
    lin = QuantLinear.from_quantized(q, torch.ones(33), dtype=torch.bfloat16, layout=layout, kernel=by_address)
    x = torch.randn(2, 3, 64).bfloat16().requires_grad_()
    torch.compiler.reset()
    y = torch.compile(lin, fullgraph=True, backend="aot_eager")(x) if compiled else lin(x)
    assert error(y.detach().reshape(6, 33), truth_of(x.detach().reshape(6, 64), q, torch.ones(33))) < TOLERANCE[torch.bfloat16]
    weights = torch.randn(2, 3, 33)
    (y * weights).sum().backward()
    assert error(x.grad, weights.bfloat16().double() @ q.dequantize().double()) < TOLERANCE[torch.bfloat16]


def test_custom_op_passes_torchs_own_check():
    p = pack(weight(32, 64, 4, 32, "float", torch.bfloat16), "cpu_int4")
    args = (torch.randn(3, 64).bfloat16(), p.words, p.scales, p.zeros, p.aux, None, p.facts, None)
    torch.library.opcheck(torch.ops.lowq.linear.default, args)


def test_a_meta_layer_says_that_it_is_empty():
    with pytest.raises(SchemeError, match="holds no weight"):
        QuantLinear(16, 64, Scheme(4, 32), device="meta").prepare()


def test_a_state_dict_taken_on_meta_does_not_go_stale():
    q = weight(16, 64, 4, 32, "float", torch.bfloat16)
    lin = QuantLinear(16, 64, q.scheme, dtype=torch.bfloat16, device="meta")
    lin.state_dict()
    p = pack(q)
    lin.weight, lin.weight_scale, lin.weight_zero = (
        torch.nn.Parameter(t, requires_grad=False) for t in (p.words, p.scales, p.zeros)
    )
    x = torch.randn(2, 64).bfloat16()
    assert error(lin.prepare()(x), truth_of(x, q)) < TOLERANCE[torch.bfloat16]


def test_the_wrong_number_of_features_is_refused():
    lin = QuantLinear.from_quantized(weight(16, 64, 4, 32, "float", torch.float16))
    with pytest.raises(SchemeError, match=r"x has 32 features, the layer takes K=64"):
        lin(torch.zeros(2, 32, dtype=torch.float16))


def test_forced_kernel_fails_aloud(monkeypatch):
    p = pack(weight(16, 64, 4, 32, "float", torch.float16), "rowstream")
    x = torch.zeros(1, 64, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match="unknown kernel 'fast'; the kernels are"):
        registry.matmul(x, p, kernel="fast")
    monkeypatch.setenv("LOWQ_KERNEL", "cpu/int4")
    with pytest.raises(UnsupportedError, match="requested but reads layout cpu_int4"):
        registry.matmul(x, p)


def test_no_kernel_lists_every_reason():
    call = registry.Call(1, 16, 64, Scheme(4, 32), "strided", torch.int8, "cpu")
    with pytest.raises(UnsupportedError, match=r"dequant, reference: takes .* not torch.int8"):
        registry.select(call)


def test_best_layout_prefers_disk_order_only_when_nothing_reads_better(no_compiler):
    cpu = torch.device("cpu")
    assert best_layout(Scheme(4, 64), 64, 128, torch.bfloat16, cpu) == "cpu_int4"
    assert best_layout(Scheme(4, 16), 64, 128, torch.bfloat16, cpu) == "rowstream"
    assert best_layout(Scheme(4, 64), 64, 128, torch.float16, cpu) == "rowstream"
