"""Values from a table by the CUDA kernels' own sources, emulated: every table and kind of scale against the definition."""

import dataclasses

import pytest
import torch

import emulation
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.registry import Call
from lowq_packers import tables
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

emulation.require("cuda/tile_mma")
from lowq_kernels.products.cuda import tile_dequant, tile_mma, tile_wgmma

MODULES = (tile_mma, tile_dequant, tile_wgmma)
F16, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {F16: 2e-3, BF16: 1.2e-2}
NVFP4, MXFP4 = Scheme(4, 16, "none", "e2m1", "e4m3"), Scheme(4, 32, "none", "e2m1", "e8m0")


@dataclasses.dataclass(frozen=True)
class Case:
    """A product. tables: how many the rows of W share evenly; config: a fraction of the legal ones."""

    scheme: Scheme
    dtype: torch.dtype
    M: int
    N: int
    K: int
    config: float = 0.0
    tables: int = 1
    kernel: str = "cuda/tile_mma"

    def __str__(self):
        kind = "fp16" if self.dtype == F16 else "bf16"
        name = self.kernel.removeprefix("cuda/")
        return f"{name}-{self.scheme}-{kind}-{self.M}x{self.N}x{self.K}-t{self.tables}-c{self.config}".replace(" ", "-")


CASES = [
    Case(NVFP4, F16, 1, 64, 512),
    Case(NVFP4, BF16, 3, 40, 272, 0.4),
    Case(NVFP4, F16, 9, 192, 256, 0.6, tables=3),
    Case(NVFP4, F16, 40, 33, 128, 0.9),
    Case(MXFP4, F16, 1, 64, 384, 0.3),
    Case(MXFP4, BF16, 8, 100, 416),
    Case(MXFP4, BF16, 17, 17, 96, 0.7),
    Case(Scheme(4, 64, "none", "nf4"), F16, 1, 72, 640, 0.5),
    Case(Scheme(4, 64, "none", "nf4"), BF16, 5, 48, 192),
    Case(Scheme(4, 32, "none", "iq4_nl"), F16, 2, 40, 160, 0.2),
    Case(Scheme(4, 128, "none", "fitted"), BF16, 8, 128, 256, 0.8, tables=2),
    Case(Scheme(4, 16, "none", "fitted", "e4m3"), F16, 1, 40, 208, 0.35),
    Case(Scheme(3, 16, "none", "fitted", "e4m3"), BF16, 2, 40, 240, 0.6),
    Case(Scheme(4, 16, "none", "nf4", "e4m3"), F16, 3, 96, 208, 0.35, tables=2),
    Case(Scheme(3, 64, "none", "fitted"), F16, 1, 64, 576, 0.1, tables=2),
    Case(Scheme(3, 16, "none", "fitted"), BF16, 4, 36, 144),
    Case(Scheme(2, 64, "none", "fitted"), F16, 8, 40, 448, 0.6),
    Case(Scheme(2, 48, "none", "fitted", "e8m0"), BF16, 1, 40, 432),
    Case(Scheme(2, 256, "none", "fitted"), F16, 3, 40, 256),
    *(Case(Scheme.of(b, g, kind), d, M, N, K, c, t, "cuda/tile_wgmma") for b, g, kind, d, M, N, K, c, t in (
        (4, 16, "e2m1/e4m3", F16, 17, 100, 272, 0.0, 1), (4, 16, "e2m1/e4m3", F16, 140, 192, 512, 0.99, 3),
        (4, 16, "e2m1/e4m3", BF16, 40, 264, 256, 0.5, 1), (4, 32, "e2m1/e8m0", F16, 33, 200, 288, 0.3, 1),
        (4, 32, "e2m1/e8m0", BF16, 130, 65, 256, 0.9, 1), (4, 32, "e2m1/e8m0", F16, 70, 321, 1024, 0.7, 1),
        (4, 64, "e2m1", F16, 20, 136, 320, 0.2, 1), (4, 64, "nf4", F16, 64, 200, 576, 0.4, 1),
        (4, 128, "nf4", BF16, 16, 80, 512, 0.1, 1), (4, 32, "iq4_nl", BF16, 300, 136, 160, 0.95, 1),
        (4, 128, "fitted", F16, 32, 256, 1024, 0.45, 4), (4, 16, "nf4/e4m3", BF16, 9, 64, 144, 0.0, 2),
        (3, 64, "fitted", F16, 150, 192, 640, 0.97, 2), (3, 128, "fitted", BF16, 32, 72, 512, 0.3, 1),
        (2, 64, "fitted", BF16, 65, 128, 448, 0.8, 1), (3, 16, "fitted/e4m3", F16, 70, 72, 320, 0.6, 1),
        (2, 32, "fitted/e4m3", BF16, 20, 96, 256, 0.2, 2), (2, 256, "fitted/e8m0", F16, 24, 96, 512, 0.35, 2),
    )),
    *(Case(s, d, 5, 100, 272 if s.group_size == 16 else 288, kernel="cuda/tile_dequant", tables=t) for s, d, t in (
        (NVFP4, F16, 1), (NVFP4, BF16, 2), (MXFP4, F16, 1), (Scheme(4, 96, "none", "nf4"), BF16, 1),
        (Scheme(3, 32, "none", "fitted"), F16, 4), (Scheme(2, 288, "none", "fitted", "e4m3"), F16, 1),
    )),
]  # fmt: skip


def weight(case):
    """All codes, scales over three orders of magnitude, tables of small numbers."""
    s, g = case.scheme, torch.Generator().manual_seed(case.N + case.K)
    W_q = torch.randint(0, s.levels, (case.N, case.K), generator=g).to(torch.uint8)
    scales = 10 ** (torch.rand(case.N, s.groups(case.K), generator=g) * 3 - 2)
    if tables.signed(s):
        scales[:, ::2] *= -1
    scales = scales.to(case.dtype) if s.scale == "float" else tables.to_bytes(scales, s.scale)
    table = torch.rand(case.tables, s.table_width, generator=g) * 2e-4 + 1e-5 if s.table_width else None
    if table is not None and s.table == "fitted":
        table -= 1e-4
    return QuantizedTensor.of(s, W_q, scales, None, table)


def launch(case, q=None):
    """(y, what it is to be in fp32)."""
    q, g = q or weight(case), torch.Generator().manual_seed(case.M)
    x, bias = torch.randn(case.M, case.K, generator=g).to(case.dtype), torch.linspace(-1, 1, case.N).to(case.dtype) * 1e-3
    p, spec = pack(q, "tile"), registry.kernels()[case.kernel]
    call = dataclasses.replace(Call.of(x, p), device="cuda")
    assert spec.why_not(call) is None
    legal = spec.legal_configs(call)
    y = spec.launch(x, p, bias, legal[int(case.config * len(legal))])
    return y, x.float() @ weight(case).dequantize().t() + bias.float()


@pytest.fixture(autouse=True, scope="module")
def built(request):
    """Builds every instance that the selected cases launch, those of one source in one go."""
    with emulation.hopper(*MODULES):
        result = [i.callspec.params for i in request.session.items if i.module is request.module and hasattr(i, "callspec")]
        with emulation.built_at_once():
            for params in result:
                if "case" in params:
                    launch(params["case"])
        yield


@pytest.mark.parametrize("case", emulation.sampled(CASES), ids=str)
def test_right_numbers(case):
    y, expected = emulation.twice(lambda: launch(case))
    assert emulation.error(y, expected) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", [CASES[0], CASES[7], CASES[12]], ids=str)
def test_one_wrong_code_shows(case):
    q = weight(case)
    q.W_q[:, 3] ^= 1
    assert emulation.error(*launch(case, q)) > TOLERANCE[case.dtype]


def test_row_tiles_of_two_tables_go_the_whole_way():
    case = Case(NVFP4, F16, 2, 48, 64, tables=6)  # tables of 8 rows
    y, expected = launch(case)
    assert emulation.error(y, expected) < TOLERANCE[F16]


def test_schemes_without_a_tile_kernel_say_so():
    call = Call(4, 128, 256, NVFP4, "tile", F16, "cuda", (9, 0))
    taken = [s.name for s in registry.kernels().values() if s.why_not(call) is None]
    assert set(taken) == {"cuda/tile_mma", "cuda/tile_wgmma", "cuda/tile_dequant", "reference"}
    assert "takes evenly spaced values, not e2m1" in registry.refusals(call)["cuda/tile_int8x2"]
