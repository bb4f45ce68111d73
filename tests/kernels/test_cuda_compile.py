"""CUDA instances compiled here, without a GPU, for every architecture: no spills, no local memory; and the cubin cache.

A sample of the shipped instances, chosen so that every kernel, width, dtype and config is met for some architecture; the
record of unchanged sources makes that take a second (tests/emulator/machine_code.py).
"""

import ctypes
import ctypes.util
import itertools
import os
import resource
import subprocess
import sys

import pytest
import torch

nvrtc = pytest.importorskip("lowq_kernels.cuda.nvrtc", reason="NVRTC is not installed")

from machine_code import measured, used, without_spills

from lowq_kernels import gpu
from lowq_kernels.cuda import driver, operands
from lowq_kernels.decode import attend_cuda, experts, prompt_cuda
from lowq_kernels.decode.kv_triton import NUMBERS
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.registry import Call
from lowq_kernels.products.cuda import int8_planes, tile_dequant, tile_mma, tile_wgmma, tile_wgmma_grouped
from lowq_packers.scheme import BITS, Scheme
from papers import gemv_rows, gemv_warp32

DTYPES = (torch.float16, torch.bfloat16)
ARCHS = ("sm_80", "sm_89", "sm_90a")


def shared_out(configs, bits):
    """(number, config) of a width's share: each third of the configs is one width's, or two widths' in turn."""
    return [(p, c) for p, c in enumerate(configs[bits % 3 :: 3]) if bits == 3 or p // 2 % 2 == (bits < 3)]


def mma_instances(bits):
    """Each config at one width or another, with a number of rows that it takes; the rest of an instance in turn."""
    for number, config in shared_out(tile_mma.CONFIGS, bits):
        i = 3 * number + bits % 3
        group, zero, dtype = (128, 4096, 32)[i // 3 % 3], ("float", "none")[i % 2], DTYPES[i // 2 % 2]
        for M in ((32, 24, 16, 8, 1), (8, 16, 1), (1, 3, 8))[i // 3 % 3]:
            call = Call(M, 4096, 4096, Scheme(bits, group, zero), "tile", dtype, "cuda", (9, 0))
            if registry.named("cuda/tile_mma").config_refuse(call, config) is None:
                cut = tile_mma.plan(call, config)
                facts = (call.scheme, 4096, dtype, config, cut.M_TILES, cut.copies, gpu.HOPPER.sms)
                yield tile_mma.expression(*facts), ARCHS[(i // 3 + bits) % 3]
                break


@pytest.mark.parametrize("bits", BITS)
def test_tile_mma(bits):
    for expression, arch in mma_instances(bits):
        without_spills("tile_mma.cu", expression, arch)


TABLES = [(4, 16, "e2m1/e4m3"), (4, 32, "e2m1/e8m0"), (4, 64, "nf4"), (3, 64, "fitted"), (2, 128, "fitted")]


@pytest.mark.parametrize("scheme", TABLES)
def test_tile_mma_of_tables(scheme):
    """Every third config, of one row or two, or some: planes are what spilled with one table in registers a row tile."""
    s, taken = Scheme.of(*scheme), 0
    for i, config in enumerate(tile_mma.CONFIGS[TABLES.index(scheme) % 3 :: 3]):
        dtype = DTYPES[i // 2 % 2]
        for M in (1 + i % 2, 8, 16):
            call = Call(M, 4096, 4096, s, "tile", dtype, "cuda", (9, 0))
            if registry.named("cuda/tile_mma").config_refuse(call, config) is None:
                cut = tile_mma.plan(call, config)
                facts = (s, 4096, dtype, config, cut.M_TILES, cut.copies, gpu.HOPPER.sms)
                without_spills("tile_mma.cu", tile_mma.expression(*facts), (*ARCHS, "sm_100a")[i % 4])
                taken += 1
                break
    assert taken >= 8


@pytest.mark.parametrize("bits", BITS)
def test_tile_wgmma(bits):
    """Each config at one width or another, groups regular, irregular, a row; no more registers than the entry allows."""
    for i, c in shared_out(tile_wgmma.CONFIGS, bits):
        group = (128, 48, 0)[i % 3]
        if tile_wgmma.plan(bits, group, "1", c)[0] >= 2:
            used = without_spills(
                "tile_wgmma.cu", tile_wgmma.expression(bits, (bits + i) % 2, group, str((i + 1) % 2), c), "sm_90a"
            )
            assert used["registers"] <= 65536 // (tile_wgmma.threads(c) * c["BLOCKS_PER_SM"])


@pytest.mark.parametrize("scheme", TABLES)
def test_tile_wgmma_of_tables(scheme):
    """A config with one table each, and with all of them the widest tiles, whose sums leave the fewest registers."""
    s = Scheme.of(*scheme)
    for i, c in enumerate(tile_wgmma.CONFIGS):
        if (i % len(TABLES) == TABLES.index(scheme) or c["BLOCK_M"] == 256) and tile_wgmma.plan(
            s.bits, s.group_size, operands.form(s), c
        )[0] >= 2:
            expression = tile_wgmma.expression(s.bits, i % 2, s.group_size, operands.form(s), c)
            assert without_spills("tile_wgmma.cu", expression, "sm_90a")["registers"] <= 65536 // (
                tile_wgmma.threads(c) * c["BLOCKS_PER_SM"]
            )


def test_experts_of_tables():
    """gpt-oss's gate over MXFP4, NVFP4 and the widest look-up; and a tile of x per expert."""
    for scheme, T, mode, arch in (
        ((4, 32, "e2m1/e8m0"), 1, 3, "sm_90a"),
        ((4, 16, "e2m1/e4m3"), 0, 0, "sm_90a"),
        ((4, 64, "nf4"), 0, 2, "sm_80"),
    ):
        cut = experts.Cut.of(2880, Scheme.of(*scheme), 4 if mode == experts.DOWN else None)
        without_spills("experts.cu", experts.expression(Scheme.of(*scheme), T, mode, cut), arch)
    s, (_, config, *_) = Scheme.of(4, 32, "e2m1/e8m0"), tile_wgmma_grouped.CONFIGS.values()
    without_spills("tile_wgmma.cu", tile_wgmma.expression(4, 1, 32, operands.form(s), config, grouped=True), "sm_90a")


def test_shared_experts_and_routers():
    """Instances with a shared expert; of routers beyond a softmax those that hold the most of it in registers."""
    for scheme, K, top_k in ((Scheme(4, 128, "float"), 2048, 8), (Scheme(8, 64, "none"), 512, 4)):
        for mode, down_of in ((0, None), (experts.DOWN, top_k)):
            cut = experts.Cut.of(K if mode == 0 else 512, scheme, down_of)
            without_spills("experts.cu", experts.expression(scheme, 0, mode, cut, True, True), "sm_90a")
    s = Scheme(4, 64, "float")
    for cut, mode in ((experts.Cut.of(4096, s), 0), (experts.Cut.of(1408, s, 8, True), experts.DOWN)):  # of long rows
        without_spills("experts.cu", experts.expression(s, 1, mode, cut), "sm_90a")
    for shape in ("0, 1, 1, 6, 2", "1, 1, 1, 8, 1", "0, 2, 1, 4, 1", "1, 1, 8, 2, 2"):
        without_spills("route.cu", f"route<{shape}>", "sm_90a")


@pytest.mark.parametrize("kv", [0, 8, 4])
def test_attend(kv):
    # dtype, D, R, queries, norm; warps, blocks of a cluster, tiles on their way; slots of a block
    for *one, cut, page in (
        (0, 128, 128, 4, 0, (4, 8, 2), 0),
        (1, 128, 64, 8, 1, (8, 1, 4), 64),
        (1, 128, 128, 8, 0, (8, 1, 1), 64),
        (0, 64, 64, 7, 2, (4, 1, 3), 0),
    ):
        without_spills("attend.cu", attend_cuda.expression(*one, attend_cuda.Shape(*cut, 1, 1, 0), page, kv), "sm_90a")


@pytest.mark.parametrize(("D", "G", "warps", "cluster", "stages"), [(256, 8, 4, 8, 2), (256, 6, 8, 1, 1), (512, 4, 4, 1, 1)])
def test_attend_of_wide_heads(D, G, warps, cluster, stages):
    cut = attend_cuda.Shape(warps, cluster, stages, 1, 1, 0)
    for T, R, page, writes, layout in ((0, D, 0, True, 0), (1, 64, 64, True, 1), (1, D, 64, False, 0), (0, 128, 0, True, 6)):
        without_spills("attend.cu", attend_cuda.expression(T, D, R, G, T, cut, page, 0, 2, writes, layout), "sm_90a")


@pytest.mark.parametrize(("D", "R", "G", "norm"), [(128, 128, 4, 0), (128, 64, 8, 1), (64, 64, 2, 2), (256, 64, 6, 2)])
def test_attention_of_rows(D, R, G, norm):
    for M, S in ((2, 512), (16, 512), (16, 8192)):
        rows = attend_cuda.rows_of_block(M, G)
        cut = attend_cuda.rows_shape(M // rows * 8, S, D, rows * G, gpu.HOPPER)
        instance = attend_cuda.expression(0, D, R, G, norm, cut, layout=attend_cuda.GATED * (D > 128), rows=rows)
        used = without_spills("attend.cu", instance, "sm_90a")
        assert used["smem"] + cut.shared <= gpu.HOPPER.smem_block


@pytest.mark.parametrize(("D", "stages"), prompt_cuda.STAGES.items())
def test_prompt(D, stages):
    for T, page in itertools.product((0, 1), (0, 64, 128)):
        without_spills("prompt.cu", f"attend_prompt<{T}, {D}, {page}, {stages}>", "sm_90a")


@pytest.mark.parametrize("bits", BITS)
def test_the_others(bits):
    arch = ARCHS[bits % 3]
    without_spills("tile_dequant.cu", tile_dequant.expression(bits, bits % 2, 128, True), arch)
    for SUM in (gemv_warp32.FP32X4, gemv_warp32.HALF2, gemv_warp32.INT32 if bits == 3 else gemv_warp32.DP4A):
        without_spills("gemv_warp32.cu", gemv_warp32.expression(bits, 0, (128, 48)[SUM % 2], True, SUM, 8), arch)
    if bits != 3:
        without_spills("gemv_rows.cu", gemv_rows.expression(bits, 1, 128, True, gemv_rows.CONFIGS[bits % 6]), arch)


def test_dense_rows():
    without_spills("gemv_rows.cu", gemv_rows.expression(gemv_rows.DENSE, 0, 0, False, gemv_rows.CONFIGS[2]), "sm_80")


def test_a_spill_would_show():
    """The log is really read: an array indexed at run time lies in local memory, and the parser says so."""
    body = "int a[64]; for (int i = 0; i < n; i++) a[p[i] & 63] = i; p[0] = a[p[1] & 63];"
    source = f'extern "C" __global__ void f(int* p, int n) {{ {body} }}'
    nvrtc.sources()["_probe.cu"] = source
    try:
        assert nvrtc.compiled("_probe.cu", "f", "sm_80").resources["stack"] >= 256
    finally:
        del nvrtc.sources()["_probe.cu"]


def test_the_record_is_what_the_compiler_says():
    """machine_code.json: three instances of it; without an entry, as after a change of a source, `used` compiles."""
    for asked in (
        PROBE,
        ("attend.cu", attend_cuda.expression(0, 64, 64, 7, 2, attend_cuda.Shape(4, 1, 3, 1, 1, 0), 0, 0), "sm_90a"),
        ("int8_planes.cu", "int8_planes<0, 4>", "sm_80"),
    ):
        assert measured(*asked) == list(used(*asked).values())


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nvrtc.compiled.cache_clear()
    yield tmp_path / "lowq" / "cubin"
    nvrtc.compiled.cache_clear()


PROBE = ("tile_dequant.cu", "tile_dequant<4, 0, 0, false>", "sm_80")


def test_cache_is_read_back_and_damage_is_noticed(fresh_cache):
    first = nvrtc.compiled(*PROBE)
    (file,) = fresh_cache.iterdir()
    written, content = file.stat().st_mtime_ns, file.read_bytes()
    nvrtc.compiled.cache_clear()
    assert nvrtc.compiled(*PROBE) == first
    assert file.stat().st_mtime_ns == written  # what is compiled again is written again
    file.write_bytes(content[:-7])
    damaged = file.stat().st_mtime_ns
    nvrtc.compiled.cache_clear()
    assert nvrtc.compiled(*PROBE).image == first.image
    assert file.stat().st_mtime_ns != damaged


def test_an_unwritable_cache_is_not_an_error(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    nvrtc.compiled.cache_clear()
    assert nvrtc.compiled(*PROBE).image
    nvrtc.compiled.cache_clear()


def test_a_user_of_no_home_only_compiles_anew(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(nvrtc.Path, "home", home)
    nvrtc.compiled.cache_clear()
    assert nvrtc.compiled(*PROBE).image
    nvrtc.compiled.cache_clear()


def test_a_write_that_fails_leaves_nothing_behind(fresh_cache):
    """As on a full disk: files may have 1,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        image = nvrtc.compiled(*PROBE).image
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(image) > 1000
    assert not list(fresh_cache.iterdir())


def test_two_processes_may_start_at_once(tmp_path):
    code = f"from lowq_kernels.cuda import nvrtc; print(len(nvrtc.compiled{PROBE!r}.image))"
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sizes = {p.communicate()[0].strip() for p in both}
    assert len(sizes) == 1
    assert sizes != {""}
    assert len(list((tmp_path / "lowq" / "cubin").iterdir())) == 1


def test_a_source_that_does_not_compile_says_so():
    with pytest.raises(nvrtc.CompileError, match="tile_dequant<4>"):
        nvrtc.compiled("tile_dequant.cu", "tile_dequant<4>", "sm_80")


def test_without_a_driver_the_launcher_raises_an_error():
    from lowq_packers.errors import UnsupportedError

    if ctypes.util.find_library("cuda"):
        pytest.skip("a CUDA driver is installed")
    with pytest.raises(UnsupportedError, match="no CUDA driver"):
        driver.Kernel(*PROBE[:2], 0, 32, ())


def test_every_call_on_the_tile_layout_finds_a_kernel():
    """Whatever the width, dtype, group, zero and M: a CUDA GPU from 8.0 up never falls back to `reference`."""
    import torch

    from lowq_kernels.dispatch.registry import Call, select
    from lowq_packers.scheme import Scheme

    calls = itertools.product(((8, 0), (8, 9), (9, 0), (12, 0)), BITS, (16, 48, 3840), (1, 16, 33, 5000))
    for i, (capability, bits, group, M) in enumerate(calls):
        scheme = Scheme(bits, group, ("float", "none")[i % 2])
        call = Call(M, 1000, 3840, scheme, "tile", (torch.float16, torch.bfloat16)[i // 2 % 2], "cuda", capability)
        assert select(call)[0].name.startswith("cuda/tile_"), call


def test_parameters_lie_where_a_launch_looks_for_them():
    """Each address holds its parameter, aligned to its size, after one `fill`; twice, so that nothing sticks."""
    import ctypes

    from lowq_kernels.cuda.driver import Parameters, TensorMap

    types = (ctypes.c_void_p, ctypes.c_int32, TensorMap, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)
    parameters = Parameters(types)
    for shift in (0, 1):
        values = (0x7F12345678 + shift, -5 + shift, bytes(range(shift, 128 + shift)), 7 + shift, 1 << 63, 2**31 - 1)
        parameters.fill(*values)
        for address, kind, value in zip(parameters.addresses, types, values, strict=True):
            held = kind.from_address(address)
            assert (bytes(held) if kind is TensorMap else held.value) == value
            assert kind is TensorMap or address % ctypes.sizeof(kind) == 0


def test_every_kernels_parameters_fit():
    """What tile_wgmma passes (four tensor maps, 540 bytes) outgrew a buffer of a fixed size once."""
    import ctypes

    from lowq_kernels.cuda.driver import Parameters

    for module in (tile_mma, tile_wgmma, tile_dequant, gemv_rows, gemv_warp32):
        parameters = Parameters(module.PARAMETERS)
        parameters.fill(*(bytes(ctypes.sizeof(t)) if issubclass(t, ctypes.Array) else 0 for t in module.PARAMETERS))


@pytest.mark.parametrize("bits", BITS)
def test_tile_wgmma_grouped(bits):
    """Every third config; they differ from tile_wgmma's own by a few instructions."""
    for i, c in list(enumerate(tile_wgmma_grouped.CONFIGS.values()))[bits % 3 :: 3]:
        instance = tile_wgmma.expression(bits, (bits + i) % 2, 128, str((i + 1) % 2), c, grouped=True)
        used = without_spills("tile_wgmma.cu", instance, "sm_90a")
        assert used["registers"] <= 65536 // (tile_wgmma.threads(c) * c["BLOCKS_PER_SM"])


def attention(heads, kv, S=131072, ordered=False):
    """(resources, threads, bytes of shared memory) of attend.cu for so many key heads."""
    cut = attend_cuda.shape(heads, S, 128, 4, kv, gpu.HOPPER, ordered)
    expression = attend_cuda.expression(0, 128, 128, 4, 0, cut, 64, NUMBERS[kv])
    return used("attend.cu", expression, gpu.HOPPER.arch), 32 * cut.warps, cut.shared


def test_one_split_of_l1_is_for_kernels_that_lose_no_block_by_it():
    assert driver.keeps_split(gpu.HOPPER, *attention(512, "16"))  # one block fits an SM, of 148 KB
    assert driver.keeps_split(gpu.HOPPER, *attention(512, "16", ordered=True))  # two of 70 KB
    assert not driver.keeps_split(gpu.HOPPER, *attention(512, "fp8"))  # four fit, two with the split
    assert not driver.keeps_split(gpu.HOPPER, *attention(8, "fp8", 512))
    assert driver.keeps_split(gpu.HOPPER, *attention(8, "fp8", 512), 2)  # more are never asked for
    used = {"registers": 63, "smem": 0}
    assert driver.keeps_split(gpu.HOPPER, used, 256, 40 << 10)  # four, by registers: 164 KB with the system's
    assert not driver.keeps_split(gpu.HOPPER, used, 256, 41 << 10)
    assert driver.keeps_split(gpu.HOPPER, used, 512, gpu.HOPPER.smem_block)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_driver_has_heard_of_the_split():
    on, percent = gpu.here(0), ctypes.c_int()
    kernel = driver.Kernel("int8_planes.cu", "int8_planes<0, 4>", 0, 128, int8_planes.PARAMETERS, serialize=on.dependent_launch)
    driver._check(
        driver._driver().cuFuncGetAttribute(ctypes.byref(percent), driver._CARVEOUT, kernel._function), "reading it back"
    )
    assert percent.value == (100 * on.split // on.smem_sm if on.split else -1)
