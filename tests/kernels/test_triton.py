"""Every Triton kernel against the definition, x @ dequantize(W)^T in fp32: a sample interpreted here, all of it on a GPU."""

import itertools
import zlib

import pytest
import torch

pytest.importorskip("triton")

import emulation
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.layouts import best_layout
from lowq_kernels.dispatch.registry import Call, Config, KernelSpec, capability, kernels, select
from lowq_packers.layouts import PackedWeight, pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import BITS, ZERO_KINDS, Scheme
from papers import PAPERS

SPECS = kernels() | PAPERS
TRITON = sorted(n for n, s in SPECS.items() if n.startswith("triton/") and "none" in s.acts)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# (K, group): groups that are powers of two and not, that straddle words, per channel, and a K that no block tiles
GROUPS = [(768, 16), (768, 48), (512, 32), (768, 96), (4096, 128), (768, 192), (1536, 64), (100, 100), (2048, 2048), (768, 256)]
SMALL_GROUPS = [(96, 16), (96, 48), (128, 32), (192, 96), (256, 128), (100, 100), (128, 128)]
ROWS = [1, 2, 3, 5, 8, 15, 16, 17, 33, 64, 65, 130, 250]
COLUMNS = [1, 33, 64, 200, 250, 1000]


@pytest.fixture(autouse=True)
def poisoned():
    """torch.empty gives NaN, so an element that no kernel writes is seen."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def weight(N: int, K: int, group: int, bits: int, zero: str, dtype: torch.dtype) -> QuantizedTensor:
    """All codes, scales and zeros drawn per group, independent of each other."""
    G = K // group
    W_q = torch.randint(0, 2**bits, (N, K), dtype=torch.uint8)
    scales = (torch.rand(N, G) * 0.9 + 0.1).mul(1e-2).to(dtype)
    zeros = {
        "none": None,
        "int": torch.randint(0, 2**bits, (N, G)).to(dtype),
        "float": (torch.rand(N, G) * (2**bits - 1)).to(dtype),
    }[zero]
    return QuantizedTensor(W_q, scales, zeros, bits, group, zero)  # type: ignore[arg-type]


def error(y: torch.Tensor, ref: torch.Tensor, scale: float = 0.0) -> float:
    """Relative Frobenius error; `scale` is the least to divide by, where few outputs may all have cancelled to near zero."""
    return ((y.float() - ref).norm() / max(ref.norm().item(), scale)).item()


def legal(spec: KernelSpec, M: int, p: PackedWeight, dtype: torch.dtype) -> list[Config]:
    """Configs for a call as a CUDA device would ask it, also where the interpreter stands in for one."""
    cap = capability(torch.device("cuda")) if GPU else (9, 0)
    call = Call(M, p.N, p.K, p.scheme, p.layout, dtype, "cuda", cap)
    return [] if spec.why_not(call) else spec.legal_configs(call)


def check(spec: KernelSpec, config: Config, q: QuantizedTensor, M: int, dtype: torch.dtype, biased: bool) -> None:
    N, K = q.shape
    q = q.to(DEVICE)
    x = torch.randn(M, K).to(DEVICE, dtype)
    bias = torch.randn(N).to(DEVICE, dtype) if biased else None
    dense = q.dequantize()
    ref = x.float() @ dense.t()
    usual = (x.float().square() @ dense.square().t()).sum().sqrt().item()  # the norm of sums of terms of random sign
    if bias is not None:
        ref += bias.float()
    p = pack(q, "strided")
    y = spec.launch(x, p, bias, config)
    assert y.shape == (M, N)
    assert y.dtype == dtype
    assert error(y, ref, usual) <= TOLERANCE[dtype], f"{spec.name} {config} M={M} N={N} K={K} {q.scheme} {dtype}"
    # the interpreter runs programs in one order, but those that meet may leave counters behind
    if GPU or config.get("SPLIT_K", 1) > 1 or "PROGRAMS" in config:
        assert torch.equal(y, spec.launch(x, p, bias, config)), "two runs differ"


def pick(items: list, seed: int, n: int) -> list:  # type: ignore[type-arg]
    """n of the items, spread, another choice for another seed."""
    return [items[(seed + i * len(items) // n) % len(items)] for i in range(n)]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", TRITON)
def test_interpreted(name, bits):
    if GPU:
        pytest.skip("the GPU runs every config instead")
    spec, seed = SPECS[name], zlib.crc32(f"{name}{bits}".encode())
    done = 0
    for i, (K, group) in enumerate(pick(SMALL_GROUPS, seed, 2)):
        zero, dtype = ZERO_KINDS[(seed + i) % 3], (torch.float16, torch.bfloat16)[(seed // 3 + i) % 2]
        M, N = (1, 3, 2)[(seed + i) % 3], (16, 33, 20)[(seed // 5 + i) % 3]
        q = weight(N, K, group, bits, zero, dtype)
        for config in pick(legal(spec, M, pack(q, "strided"), dtype), seed, 1)[:1] if _any(spec, M, q, dtype) else []:
            check(spec, config, q, M, dtype, biased=i == 0)
            done += 1
    if not done:
        pytest.skip("no config of it takes so small a shape")


TABLES = [
    Scheme(4, 16, "none", "e2m1", "e4m3"),
    Scheme(4, 32, "none", "e2m1", "e8m0"),
    Scheme(4, 96, "none", "nf4"),
    Scheme(3, 16, "none", "fitted", "e4m3"),
    Scheme(2, 96, "none", "fitted"),
]


@pytest.mark.parametrize("s", TABLES, ids=str)
def test_values_from_a_table(s):
    """Three tables or factors that differ, one for eleven rows each; every dtype and M takes the same way."""
    N, K, g = 33, 96, torch.Generator().manual_seed(s.bits)
    for name in (n for n in TRITON if s.table in SPECS[n].tables):
        for dtype in TOLERANCE:
            q = emulation.weight(N, K, s.bits, s.group_size, s.kind, dtype, g, tables=3)
            for config in pick(legal(SPECS[name], 2, pack(q, "strided"), dtype), s.bits, 1 if not GPU else 5):
                check(SPECS[name], config, q, 2, dtype, biased=True)


def test_kernels_that_know_no_tables_are_not_asked():
    call = Call(1, 64, 96, TABLES[0], "strided", torch.float16, "cuda", (9, 0))
    taken = {s.name for s in kernels().values() if s.why_not(call) is None}
    assert taken == {"triton/dequant_matmul", "dequant", "reference"}


def _any(spec: KernelSpec, M: int, q: QuantizedTensor, dtype: torch.dtype) -> bool:
    return bool(legal(spec, M, pack(q, "strided"), dtype))


def takes(spec: KernelSpec, config: Config, bits: int) -> list[tuple[int, int]]:
    """Those of GROUPS that a config takes at this width, whatever the rows and columns."""
    cap = capability(torch.device("cuda")) if GPU else (9, 0)
    calls = {(K, g): [Call(M, 200, K, Scheme(bits, g), "strided", torch.float16, "cuda", cap) for M in ROWS] for K, g in GROUPS}
    return [g for g, some in calls.items() if any(not spec.why_not(c) and config in spec.legal_configs(c) for c in some)]


CASES = [
    pytest.param(n, i, b, id=f"{n.removeprefix('triton/')}-b{b}-cfg{i}")
    for n in TRITON
    for i, config in enumerate(SPECS[n].configs)
    for b in BITS
    if GPU and takes(SPECS[n], config, b)
]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "i", "bits"), CASES)
def test_every_config_on_the_gpu(name, i, bits):
    spec = SPECS[name]
    config = spec.configs[i]
    seed = zlib.crc32(f"{name}{i}{bits}".encode())
    done = 0  # each weight below is another binary: 742 in all (597 took 80 s on 16 cores); configs share out the groups
    for j, (K, group) in enumerate(pick(takes(spec, config, bits), seed, 2)):
        zero, dtype = ZERO_KINDS[(seed + j) % 3], (torch.float16, torch.bfloat16)[(seed // 3 + j) % 2]
        rows = [m for m in ROWS if spec.m_range[0] <= m <= spec.m_range[1]]
        q = weight(COLUMNS[(seed // 7 + j) % len(COLUMNS)], K, group, bits, zero, dtype)
        for M in pick(rows, seed // 11 + j, 5):  # no binary depends on M
            if config in legal(spec, M, pack(q, "strided"), dtype):
                check(spec, config, q, M, dtype, biased=(seed + j) % 2 == 0)
                done += 1
    assert done


def test_a_flipped_code_is_seen():
    """The check can fail: one wrong code in a row moves the error over the tolerance."""
    spec = kernels()["triton/gemm_splitk"]
    q = weight(4, 128, 32, 4, "float", torch.float16)
    W_q = q.W_q.clone()
    W_q[1, 77] ^= 15
    flipped = QuantizedTensor(W_q, q.scales, q.zeros, 4, 32, "float").to(DEVICE)
    x = torch.randn(3, 128).to(DEVICE, torch.float16)
    ref = x.float() @ q.to(DEVICE).dequantize().t()
    p = pack(flipped, "strided")
    config = legal(spec, 3, p, torch.float16)[0]
    assert error(spec.launch(x, p, None, config), ref) > TOLERANCE[torch.float16]


def test_shared_memory_of_odd_columns_is_counted():
    """Rows of words that begin anywhere cost this tile 240 KiB, which the compiler found and the estimate did not."""
    spec = kernels()["triton/gemm"]
    config = next(c for c in spec.configs if (c["BLOCK_M"], c["BLOCK_N"], c["NATURAL"]) == (32, 128, 0))
    odd, even = (Call(5, N, 1536, Scheme(3, 64, "int"), "strided", torch.float16, "cuda", (9, 0)) for N in (1, 64))
    assert "shared memory" in (spec.config_refuse(odd, config) or "")
    assert spec.config_refuse(even, config) is None


def test_every_scheme_has_a_kernel_with_a_config():
    """No legal weight is left without a Triton kernel, on the largest and the smallest shared memory."""
    for bits, (K, group), M, cap in itertools.product(BITS, GROUPS, (1, 7, 64, 1000), ((8, 0), (8, 9), (9, 0))):
        p = pack(weight(8, K, group, bits, "float", torch.float16), "strided")
        call = Call(M, 8, K, p.scheme, "strided", torch.float16, "cuda", cap)
        takers = [n for n in TRITON if SPECS[n].why_not(call) is None]
        assert any("gemm" in n for n in takers), (bits, K, group, M, cap)


@pytest.fixture(params=["NVIDIA without NVRTC", "AMD"])
def portable(request, monkeypatch):
    """A GPU without the CUDA kernels, and its compute capability: a Hopper, or an MI300, which calls itself 9.4."""
    amd = request.param == "AMD"
    monkeypatch.setattr(torch.version, "hip", "6.4" if amd else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4) if amd else (9, 0))
    capability.cache_clear()
    with emulation.changed_kernels() as registered, registry.asking():
        for name in [n for n in registered if n.startswith("cuda/")]:
            del registered[name]
        yield capability(torch.device("cuda"))
    capability.cache_clear()


@pytest.mark.parametrize("bits", BITS)
def test_calls_without_cuda_kernels_are_dispatched(portable, bits):
    """Weights are packed for Triton's kernels, and for any rows one of them is taken."""
    device = torch.device("cuda")
    for (N, K), group, zero in itertools.product([(4096, 4096), (1001, 3072), (57344, 8192)], (32, 128), ZERO_KINDS):
        for dtype, M in itertools.product((torch.float16, torch.bfloat16), (1, 2, 4, 5, 64, 65, 191, 192, 1000, 8192)):
            scheme = Scheme(bits, group, zero)
            layout = best_layout(scheme, N, K, dtype, device)
            assert layout == "strided"
            spec, config = select(Call(M, N, K, scheme, layout, dtype, "cuda", portable))
            assert spec.name.startswith("triton/")
            assert config in spec.legal_configs(Call(M, N, K, scheme, layout, dtype, "cuda", portable))


@pytest.mark.skipif(GPU, reason="the interpreter takes the place of a GPU")
@pytest.mark.parametrize("M", [1, 3, 70, 200])
@pytest.mark.parametrize("bits", BITS)
def test_calls_without_cuda_kernels_are_right(portable, bits, M):
    q = weight(33, 256, 64, bits, ZERO_KINDS[(bits + M) % 3], torch.float16)
    spec, config = select(Call(M, 33, 256, q.scheme, "strided", torch.float16, "cuda", portable))
    check(spec, config, q, M, torch.float16, biased=True)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_compiled_graph_and_captured_graph_agree_with_eager():
    """torch.compile finds no graph break, a CUDA graph replays with new inputs, and both give eager's bits."""
    from lowq_kernels.modules.linear import QuantLinear

    q = weight(256, 512, 128, 4, "float", torch.float16)
    lin = QuantLinear.from_quantized(q, torch.randn(256).half(), "cuda", torch.float16, layout="strided")
    x = torch.randn(4, 512, device="cuda", dtype=torch.float16)
    y = lin(x)
    assert torch.equal(torch.compile(lin, fullgraph=True)(x), y)
    static, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = lin(static)
    for _ in range(3):
        static.copy_(torch.randn_like(static))
        graph.replay()
        assert torch.equal(out, lin(static))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_split_kernels_on_two_streams_do_not_meet():
    """Graphs captured apart may be replayed at once: each has counters of its own."""
    spec = kernels()["triton/gemm_splitk"]
    config = next(c for c in spec.configs if c["SPLIT_K"] == 4 and c["BLOCK_M"] == 16)
    jobs = []
    for _ in range(2):
        q = weight(4096, 4096, 128, 4, "float", torch.float16).to("cuda")
        p, x = pack(q, "strided"), torch.randn(1, 4096, device="cuda", dtype=torch.float16)
        want = spec.launch(x, p, None, config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                y = spec.launch(x, p, None, config)
        jobs.append((graph, y, want, torch.cuda.Stream(), (p, x)))  # p and x must outlive the graph, which reads them
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, _, _, stream, _ in jobs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, y, want, _, _ in jobs:
        assert torch.equal(y, want)
