"""The CUDA kernels' own sources, emulated on the CPU thread by thread, against fp32 truth: right numbers without a GPU.

tests/emulator/simt.h says what is checked besides the numbers (barriers, bounds, alignment, missing cp.async waits). Every
launch runs twice, with the threads in two orders: a race or a read of unwritten shared memory gives two results.
"""

import dataclasses
import itertools
from unittest import mock

import pytest
import torch

import emulation
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.registry import Call
from lowq_packers.layouts import pack
from lowq_packers.scheme import BITS

emulation.require("cuda/tile_mma")
from lowq_kernels.products.cuda import tile_dequant, tile_mma
from papers import PAPERS, gemv_rows, gemv_warp32
from papers.warp32 import WARP32

MODULES = (tile_mma, tile_dequant, gemv_rows, gemv_warp32)
F16, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {F16: 2e-3, BF16: 1.2e-2}
KERNELS = ("cuda/tile_mma", "cuda/tile_dequant", "cuda/gemv_rows", "cuda/gemv_warp32")
GROUPS = (16, 32, 48, 64, 96, 128, 0)  # 0: a row is one group
HALVES = [c for c in tile_mma.CONFIGS if not c["INT8_PLANES"]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One launch. `config`: which of the legal ones (a fraction of the list)."""

    kernel: str
    bits: int
    dtype: torch.dtype
    group: int
    zero: str
    M: int
    N: int = 40
    K: int = 1152
    config: float = 0.0
    bias: bool = False

    def __str__(self):
        kind = "fp16" if self.dtype == F16 else "bf16"
        tail = "-bias" * self.bias
        at = f"b{self.bits}-{kind}-g{self.group}-{self.zero}-{self.M}x{self.N}x{self.K}-c{self.config:.2f}"
        return f"{self.kernel.removeprefix('cuda/')}-{at}{tail}"


@pytest.fixture(autouse=True, scope="module")
def gpu():
    """Launchers see a GPU of capability 9.0 behind CPU tensors."""
    with emulation.hopper(*MODULES):
        yield


def weight(case):
    return emulation.weight(case.N, case.K, case.bits, case.group, case.zero, case.dtype)


def launch(case, q=None):
    """(y, x @ W^T + bias in fp32) of a case; None where the kernel takes no such call."""
    spec = (registry.kernels() | PAPERS)[case.kernel]
    q = weight(case) if q is None else q
    x = torch.randn(case.M, case.K, generator=torch.Generator().manual_seed(case.M)).to(case.dtype)
    bias = torch.linspace(-1, 1, case.N).to(case.dtype) if case.bias else None
    p = WARP32.pack(q) if spec.layouts == ("warp32",) else pack(q, spec.layouts[0])
    call = dataclasses.replace(Call.of(x, p), device="cuda")
    if spec.why_not(call):
        return None
    legal = spec.legal_configs(call)
    config = legal[min(int(case.config * len(legal)), len(legal) - 1)]
    y = spec.launch(x, p, bias, config)
    ref = x.float() @ weight(case).dequantize().t()
    return y, ref if bias is None else ref + bias.float()


def check(case):
    """The relative error of a case, held to the tolerance."""
    y, ref = emulation.twice(lambda: launch(case))
    assert y.shape == (case.M, case.N)
    assert y.dtype == case.dtype
    err = emulation.error(y, ref)
    assert err < TOLERANCE[case.dtype], f"error {err:.2e}"
    return err


def every_width_group_and_zero():
    """Each width with each group, dtypes in turn (fewer of the simple kernels); M, N, zero and config go round."""
    for kernel, step in zip(KERNELS, (4, 8, 7, 6), strict=True):  # every step-th combination
        combinations = list(itertools.product(GROUPS, (F16, BF16), BITS))
        if kernel == "cuda/gemv_rows":
            combinations = [c for c in combinations if c[2] != 3]
        for i, (group, dtype, bits) in list(enumerate(combinations))[::step]:
            yield Case(
                kernel,
                bits,
                dtype,
                group,
                zero=("float", "none", "int")[i % 3],
                M=(1, 3, 8, 9, 17, 40)[(i + i // 7) % 6],
                N=(17, 40, 33, 100)[i % 4],
                K=1152,  # a multiple of every group and of no chunk of 256
                config=(i * 0.382) % 1,
                bias=i % 3 == 0,
            )


def tails():
    """Rows of x and W that end inside a tile, a chunk, a step, a group of 16 bytes."""
    shapes = ((1, 16, 16), (33, 100, 0), (65, 272, 16), (15, 208, 0), (31, 96, 48))
    for kernel in KERNELS:
        for i, (N, K, group) in enumerate(shapes):
            if kernel != "cuda/gemv_rows":
                yield Case(kernel, BITS[i], (F16, BF16)[i % 2], group, "float", M=(3, 9, 1)[i % 3], N=N, K=K, config=i / 5)
    for bits, K in ((8, 272), (4, 416), (2, 320), (1, 384)):  # rows of whole 16 bytes, but not of 32 times as many
        yield Case("cuda/gemv_rows", bits, F16, 16, "float", M=3, N=33, K=K, config=0.6)


def warps():
    """Each config of tile_mma: warps with more steps than they hold in flight, with one, with none."""
    count = len(HALVES)
    for i in range(count):
        bits, dtype = BITS[i % 5], (F16, BF16)[i // 5 % 2]
        M, K = ((1, 2304), (8, 1152), (16, 640), (27, 1280))[i % 4]
        yield Case("cuda/tile_mma", bits, dtype, 64, "float", M, N=72, K=K, config=(i + 0.5) / count)


def rows_of_odd_groups():
    """K of 11 groups of 64, as gpt-oss's 45: no whole steps. Codes of 8 bits in bf16, which no magic number holds."""
    for i, (bits, M) in enumerate(itertools.product(BITS, (1, 16, 33))):
        zero, N, group = ("float", "none", "int")[i // 3 % 3], (17, 40, 72)[(i + i // 3) % 3], (64, 32)[i % 2]
        yield Case("cuda/tile_mma", bits, BF16 if bits == 8 else (F16, BF16)[i % 2], group, zero, M, N, 704, (i * 0.382) % 1)


def many_blocks():
    """More than 264: those ask for two steps at once where two are in flight."""
    i = HALVES.index(tile_mma.config_of(2, 2, 128, 2, 1))
    yield Case("cuda/tile_mma", 4, F16, 128, "float", M=3, N=8512, K=640, config=(i + 0.5) / len(HALVES))


def groups_inside_words():
    """Ten 3-bit codes a word, 32 apart: a group of 128 begins at any pair of them. (One kernel had that wrong.)"""
    for config in (0.1, 0.4, 0.7, 0.9):
        yield Case("cuda/gemv_warp32", 3, F16, 128, "int", M=1, N=17, K=1152, config=config)


NOTICED = Case("cuda/tile_mma", 4, F16, 128, "float", M=8, N=40, K=2304)  # right, and wrong with any of DEFECTS
DEFECTS = {  # what stands in the source of tile_mma, and what is put there
    "late wait": ("copy_wait<STEPS_IN_FLIGHT - 1>();", "copy_wait<STEPS_IN_FLIGHT>();"),
    "x of the step before": ("thread.load_x(x_from, u, next);", "thread.load_x(x_from, u, now);"),
    "wrong rows of x": ("x_row + i * AT_ONCE, rows - 1)", "x_row, rows - 1)"),
    "no barrier": ("    __syncthreads();\n    store<", "    store<"),
    "last column unwritten": ("if (column >= width) continue;", "if (column >= width - 1) continue;"),
}
CASES = [
    *every_width_group_and_zero(),
    *tails(),
    *warps(),
    *rows_of_odd_groups(),
    *many_blocks(),
    *groups_inside_words(),
    NOTICED,
]


@pytest.fixture(scope="module", autouse=True)
def built(gpu, request):
    """Builds every instance that the selected cases launch, those of one source in one go."""
    parameters = [i.callspec.params for i in request.session.items if i.module is request.module and hasattr(i, "callspec")]
    with emulation.built_at_once():
        for given in parameters:
            if "case" in given:
                launch(given["case"])
            elif "dp4a" in given:
                int8_activations(**given)
            elif "defect" in given:
                with emulation.defect(tile_mma, "tile_mma.cu", *DEFECTS[given["defect"]]):
                    launch(NOTICED)
        if any(i.name == "test_dense_rows" for i in request.session.items):
            dense_rows(F16), dense_rows(BF16)


@pytest.mark.parametrize("case", emulation.sampled(CASES), ids=str)
def test_right_numbers(case):
    check(case)


@pytest.mark.parametrize("case", [Case(k, 4, F16, 0, "float", M=4, N=64, K=128) for k in KERNELS], ids=str)
def test_one_flipped_code_shows(case):
    """The test above can fail: one wrong code of 8,192 raises the error over the tolerance."""
    q = weight(case)
    q.W_q[3, 5] ^= 8
    assert emulation.error(*launch(case, q)) > TOLERANCE[F16]


def dense_rows(dtype):
    """(a product by a dense weight, what it is to be)."""
    g = torch.Generator().manual_seed(0)
    x, W = torch.randn(3, 208, generator=g).to(dtype), torch.randn(33, 208, generator=g).to(dtype)
    return gemv_rows.gemv_rows_dense(x, W), x.float() @ W.float().t()


def test_dense_rows():
    for dtype in (F16, BF16):
        assert emulation.error(*dense_rows(dtype)) < TOLERANCE[dtype]


def int8_activations(bits, group, dp4a):
    """(a product by rows of x in int8, what it is to be)."""
    case = Case("cuda/gemv_warp32", bits, F16, group, "float", M=2, N=33, K=384)
    q = weight(case)
    x = torch.randint(-128, 128, (2, 384), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    x[0], q.W_q[0] = -128, (1 << bits) - 1
    return gemv_warp32.gemv_warp32_int8(x, WARP32.pack(q), dp4a), x.float() @ q.dequantize().t()


@pytest.mark.parametrize(
    ("bits", "group", "dp4a"), [(8, 0, True), (8, 16, False), (4, 128, True), (3, 64, False), (2, 32, True), (1, 48, False)]
)
def test_int8_activations(bits, group, dp4a):
    """Exact sums, even where x and the codes are at the ends of their range."""
    assert emulation.error(*int8_activations(bits, group, dp4a)) < 1e-5


def test_dequantised_slabs():
    """More rows than a slab holds: several launches, the last one short."""
    case = Case("cuda/tile_dequant", 4, F16, 64, "float", M=5, N=57, K=128, bias=True)
    with mock.patch.object(tile_dequant, "SLAB_BYTES", 32 * 2 * 128):
        check(case)


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_emulator_notices(defect):
    """Defects put into the source of tile_mma fail, as an error text or as a wrong number."""
    with emulation.defect(tile_mma, "tile_mma.cu", *DEFECTS[defect]), pytest.raises(AssertionError):
        check(NOTICED)
