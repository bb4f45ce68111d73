"""tile_wgmma's own source, emulated on the CPU against fp32 truth: wgmma, tensor maps, mbarriers, clusters.

Every launch runs twice, with the threads in two orders and wgmma as early and as late as it may read its operands: a stage
that is handed back too early, or registers overwritten under a product, give two results, or NaN.
"""

import dataclasses
import random

import pytest
import torch

import emulation
from emulation import Case
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.registry import Call
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import BITS, Scheme

emulation.require("cuda/tile_wgmma")
from lowq_kernels.products.cuda import tile_wgmma

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def drawn():
    """Every other config (g++ takes 3 s for one), the rest drawn with a seed: widths, groups of every kind, tails. Then tiles
    whose steps are shared out, so that one meets up to seven blocks; then 8-bit codes with and without their magic."""
    rng = random.Random(7)
    for i in range(0, len(tile_wgmma.CONFIGS), 2):
        K = rng.choice((1152, 2304, 1024, 272))
        group = rng.choice([g for g in (16, 32, 48, 64, 96, 128, K) if K % g == 0])
        M, N = rng.choice((9, 17, 33, 40, 70, 130)), rng.choice((65, 200, 136, 264, 321))
        dtype, zero = rng.choice(tuple(TOLERANCE)), rng.choice(("float", "none", "int"))
        yield Case(i, BITS[i // 2 % len(BITS)], dtype, group, zero, M, N, K, rng.choice((1, 2, 132)), rng.random() < 0.3)
    shapes = ((70, 321, 1024, 5), (130, 264, 2048, 7), (33, 65, 2048, 7), (300, 130, 1024, 4))
    for i, c in enumerate(tile_wgmma.CONFIGS):
        if c["SPLIT_K"] == tile_wgmma.STREAM_K:
            dtype, group = rng.choice(tuple(TOLERANCE)), rng.choice((32, 128))
            for bits, (M, N, K, sms) in rng.sample([(b, s) for b in BITS for s in shapes], 20):
                call = Call(M, N, K, Scheme(bits, group), "tile", dtype, "cuda", (9, 0))
                with emulation.sms(sms):
                    if registry.named("cuda/tile_wgmma").config_refuse(call, c) is None:
                        yield Case(i, bits, dtype, group, "float", M, N, K, sms, i % 2 == 0)
                        break
    for i, c in enumerate(tile_wgmma.CONFIGS):
        if c["BLOCK_M"] >= 128 and c["SPLIT_K"] == 1:
            yield Case(i, 8, torch.float16, 128, ("float", "int", "none")[i % 3], 140, 201, 1280, 2, False)
            yield Case(i, 8, torch.bfloat16, (64, 256, 1280)[i % 3], "float", 40, 201, 1280, 132, False)
    for i, c in enumerate(tile_wgmma.CONFIGS):
        if c["BLOCK_M"] <= 64 and i % 4 == 1:  # K of 11 groups of 64, as gpt-oss's 45: the last step is half past the end
            group, zero = ((64, "float"), (32, "none"))[i % 8 // 4]
            yield Case(i, 8, torch.bfloat16, group, zero, c["BLOCK_M"] - 3, 201, 704, 3, i % 8 > 4)


CASES = list(drawn())
DEFECTS = [  # columns, what stands in the source, what is put there
    (256, "products_wait<1>()", "products_wait<2>()"),
    (16, "products_wait<1>()", "products_wait<2>()"),
    (256, "barrier_init(empty + 8 * i, 4 * WARPGROUPS_N)", "barrier_init(empty + 8 * i, 1)"),
    (256, "m >= m_end || column >= N) continue;", "m >= m_end || column >= N - 1) continue;"),
    (16, "c * BLOCK_K + p * 64, m0,", "c * BLOCK_K, m0,"),
    (256, "other < team; other++", "other + 1 < team; other++"),
    (16, "if (EXACT && at * 16 % SPAN == 0)", "if (EXACT && at == 0)"),
    (16, "if (EXACT) add_group(acc, sum[which], scales.both[which]);", ""),
    (256, "C::small(of) && C::small(of >> 16)", "true"),
]


@pytest.fixture(autouse=True, scope="module")
def gpu(request):
    """The launcher sees a GPU of capability 9.0 behind CPU tensors; one run of g++ builds the instances of all cases."""
    with emulation.hopper(tile_wgmma):
        with emulation.built_at_once():
            for case in emulation.selected(request, "case"):
                launched(case)
            for defect in DEFECTS:
                with emulation.defect(tile_wgmma, "tile_wgmma.cu", *defect[1:]):
                    launched(case_of(*defect))
        yield


def case_of(columns, good, bad):
    """The case by which a defect shows."""
    split = tile_wgmma.STREAM_K if "other" in good else 1
    config = next(i for i, c in enumerate(tile_wgmma.CONFIGS) if c["BLOCK_M"] == columns and c["SPLIT_K"] == split)
    bits, sms = 8 if bad == "true" else 4, 3 if split != 1 else 1
    return Case(config, bits, torch.float16, 128, "float", 40, 201, 4096, sms, False)


def launched(case):
    """(y of both launches of a case, or None where its config does not take it; x, the weight, the bias)."""
    g = torch.Generator().manual_seed(case.bits)
    W_q = torch.randint(0, 1 << case.bits, (case.N, case.K), dtype=torch.uint8, generator=g)
    shape = (case.N, case.K // case.group)
    scales = torch.rand(shape, generator=g) * 0.009 + 0.001
    scales[:, 1::2] *= 0.25  # 8 bits: under the limit of codes without magic (tile.cuh); the others are over it
    scales = (2 * scales).to(case.dtype)
    zeros = (torch.rand(shape, generator=g) * ((1 << case.bits) - 1)).to(case.dtype)
    zeros = None if case.zero == "none" else zeros.round() if case.zero == "int" else zeros
    q = QuantizedTensor(W_q, scales, zeros, case.bits, case.group, case.zero)
    x = torch.randn(case.M, case.K, generator=g).to(case.dtype)
    bias = torch.linspace(-1, 1, case.N).to(case.dtype) if case.bias else None
    p, spec, config = pack(q, "tile"), registry.kernels()["cuda/tile_wgmma"], tile_wgmma.CONFIGS[case.config]
    call = dataclasses.replace(Call.of(x, p), device="cuda")
    with emulation.sms(case.sms):
        legal = config in spec.legal_configs(call)
        return emulation.twice(lambda: spec.launch(x, p, bias, config)) if legal else None, x, q, bias


def check(case):
    """Both launches of a case against truth."""
    y, x, q, bias = launched(case)
    if y is None:
        pytest.skip(f"the config does not take {case}")
    ref = x.float() @ q.dequantize().t() + (0 if bias is None else bias.float())
    error = emulation.error(y, ref)
    assert error < TOLERANCE[case.dtype], f"error {error:.2e}"


@pytest.mark.parametrize("case", emulation.sampled(CASES), ids=str)
def test_right_numbers(case):
    check(case)


@pytest.mark.parametrize(
    ("columns", "good", "bad"),
    DEFECTS,
    ids=[
        "registers overwritten under a product",
        "registers overwritten under a product of the step",
        "stage handed back early",
        "last column unwritten",
        "x of another panel",
        "a block's share of a sum left out",
        "a group's sum begun with another's",
        "a group's sum left out",
        "a scale that has no place",
    ],
)
def test_the_emulator_notices(columns, good, bad):
    """Defects put into the source fail, as an error text or as a wrong number."""
    with emulation.defect(tile_wgmma, "tile_wgmma.cu", good, bad), pytest.raises(AssertionError):
        check(case_of(columns, good, bad))
