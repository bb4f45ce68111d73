"""triton/gemm_wide: its PTX and register layout checked by hand, the kernel on a Hopper GPU: Gluon has no interpreter."""

import os
import re
import struct
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from lowq_kernels.dispatch.registry import Call, kernels
from lowq_kernels.products.triton import pairs
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import ZERO_KINDS, Scheme

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
BITS = (8, 4, 2, 1)
FLOATS = (torch.float16, torch.bfloat16)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
SPEC = kernels()["triton/gemm_wide"]


def floats(word: int, dtype: torch.dtype) -> torch.Tensor:
    """The two 16-bit floats of a register."""
    halves = [word & 0xFFFF, word >> 16]
    return torch.tensor([h - (h >> 15 << 16) for h in halves], dtype=torch.int16).view(dtype).double()


def bits_of(pair: torch.Tensor, dtype: torch.dtype) -> int:
    lo, hi = (v & 0xFFFF for v in pair.to(dtype).view(torch.int16).tolist())
    return lo | hi << 16


def as_f32(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]


def permuted(a: int, b: int, pick: int) -> int:
    source = (a | b << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(source[pick >> 4 * i & 7] for i in range(4)), "little")


def run(ptx: str, word: int, find: int, scale: int, shift: int, dtype: torch.dtype) -> torch.Tensor:
    """The two weights that a piece of PTX makes of a word, executed line by line."""
    r = {"$2": word, "$3": find, "$4": scale, "$5": shift}

    def value(name: str) -> int:
        if name in r:
            return r[name]
        return int(name[2:], 16) if name.startswith("0f") else int(name, 0)

    for text in re.split(r"[;\n]", ptx.strip("{}\n ")):
        op, _, rest = text.strip().partition(" ")
        args = [a.strip() for a in rest.split(",")]
        if op in ("", ".reg"):
            continue
        if op == "mov.b32" and rest.startswith("{$0"):
            return floats(r[args[-1]], dtype)
        out, v = args[0], [value(a) for a in args[1:]]
        kind = op.split(".")[0]
        if kind == "shr":
            r[out] = v[0] >> v[1]
        elif kind == "shl":
            r[out] = v[0] << v[1] & 0xFFFFFFFF
        elif kind == "prmt":
            r[out] = permuted(*v)
        elif kind == "lop3":
            assert v[3] == 0xEA
            r[out] = v[0] & v[1] | v[2]
        elif kind == "mov":
            r[out] = v[0]
        elif kind == "add":
            r[out] = v[0] + v[1]
        elif kind == "sub":
            r[out] = struct.unpack("<I", struct.pack("<f", as_f32(v[0]) - as_f32(v[1])))[0]
        elif kind == "cvt":
            r[out] = bits_of(torch.tensor([as_f32(v[1]), as_f32(v[0])]).double(), dtype)
        elif kind == "fma":
            r[out] = bits_of(floats(v[0], dtype) * floats(v[1], dtype) + floats(v[2], dtype), dtype)
        else:
            raise AssertionError(op)
    raise AssertionError("no result")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_the_ptx_of_a_pair_gives_scaled_codes(bits, dtype):
    ptx, (each, base) = pairs.pair_ptx(bits, dtype), pairs.pick(bits, dtype)
    scale, shift = 0.5, -1.25  # exact, so that the weights are
    s, z = (bits_of(torch.tensor([v, v]).double(), dtype) for v in (scale, shift))
    for seed in range(20):
        word = torch.randint(0, 1 << 32, (), generator=torch.Generator().manual_seed(seed)).item()
        for pair in range(16 // bits):
            codes = [word >> (2 * pair + i) * bits & (1 << bits) - 1 for i in (0, 1)]
            want = torch.tensor([q * scale + shift for q in codes]).to(dtype).double()
            assert torch.equal(run(ptx, word, each * pair + base, s, z, dtype), want), (word, pair)


@pytest.mark.parametrize("bits", BITS)
def test_lanes_hold_the_pairs_that_the_tensor_core_reads_from_them(bits):
    """PTX's fragment A of m16n8k16: rows lane / 4 and + 8, k = 2 * (lane % 4) and + 8; four such blocks of 16 k make a step."""
    layout, C = pairs.pairs_layout(bits), 16 // bits

    def place(lane: int, register: int, warp: int) -> tuple[int, int]:
        bases = [b for n, bs in ((register, layout.reg_bases), (lane, layout.lane_bases), (warp, layout.warp_bases))
                 for i, b in enumerate(bs) if n >> i & 1]  # fmt: skip
        row, word, pair = (sum(b[d] for b in bases) for d in range(3))
        return row, 2 * (word * C + pair)

    for warp in range(4):
        for lane in range(32):
            for register in range(16):
                high_row, high_k, block = register & 1, register >> 1 & 1, register >> 2
                want = (16 * warp + lane // 4 + 8 * high_row, 16 * block + 2 * (lane % 4) + 8 * high_k)
                assert place(lane, register, warp) == want


COMPILE = """
import sys, torch
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

facts = {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}
driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, get_current_stream=lambda d: 0,
    get_active_torch_device=lambda: torch.device("cpu"), utils=SimpleNamespace(get_device_properties=lambda d: facts),
))
from lowq_kernels.dispatch.measure import random_weight
from lowq_kernels.products.triton import gemm_wide
from lowq_kernels.dispatch.tuning import Shape
from lowq_packers.scheme import Scheme

run = gemm_wide._wide_kernel.run
gemm_wide._wide_kernel.run = lambda *a, grid, warmup, **k: print(run(*a, grid=grid, warmup=True, **k).asm["ptx"])
bits, tall, stages, per_sm, splits = map(int, sys.argv[1:])
p = random_weight(Shape(256, 512, Scheme(bits, 64 if bits == 4 else 128), torch.float16), "strided", torch.device("cpu"))
config = {"BLOCK_M": tall, "BLOCK_N": 128, "STAGES": stages, "PER_SM": per_sm, "SPLIT_K": splits}
gemm_wide._launch(torch.zeros(32, 512, dtype=torch.float16), p, None, config)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles through a driver that has no GPU")
@pytest.mark.parametrize("case", [(4, 32, 8, 2, 2), (8, 256, 4, 1, 1)], ids=str)
def test_ptxas_neither_spills_nor_makes_products_wait_for_each_other(case, tmp_path):
    knobs = pytest.importorskip("triton.knobs")
    code = [sys.executable, "-c", COMPILE, *map(str, case)]
    done = subprocess.run(code, capture_output=True, text=True, env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-2000:]
    (tmp_path / "kernel.ptx").write_text(done.stdout)
    assemble = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "cubin")]
    log = subprocess.run(assemble, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores" in log
    assert "serialized" not in log


def test_what_tma_cannot_address_is_refused():
    def why(N=4096, K=4096, group=128, bits=4, capability=(9, 0)):
        return SPEC.why_not(Call(1024, N, K, Scheme(bits, group), "strided", torch.float16, "cuda", capability))

    assert why() is None
    assert why(group=4096) is None
    assert "N=4092" in why(N=4092)
    assert "K=4160" in why(K=4160, group=64)
    assert "group 32" in why(group=32)
    assert "Hopper" in why(capability=(10, 0))
    assert "capability" in why(capability=(8, 9))
    assert "bits" in why(bits=3)


def test_splits_that_have_no_work_or_too_many_sums_are_refused():
    def splits(M=32, N=4096, K=4096):
        call = Call(M, N, K, Scheme(4, 128), "strided", torch.float16, "cuda", (9, 0))
        return {c["SPLIT_K"] for c in SPEC.legal_configs(call)}

    assert splits() == {1, 2, 4, 8}
    assert splits(K=512) == {1, 2, 4}
    assert splits(M=8192, N=28672) == {1}


CASES = [(1, 128, 1024, 64), (300, 208, 1024, 128), (517, 1008, 2048, 2048), (64, 4096, 640, 64), (2100, 1000, 1024, 64)]
TILES = sorted({(c["BLOCK_M"], c["STAGES"], c["PER_SM"]) for c in SPEC.configs})


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("tile", TILES, ids=lambda t: "m{}s{}p{}".format(*t))
@pytest.mark.parametrize("bits", BITS)
def test_products_on_the_gpu(bits, tile):
    """Tails of M and N, groups of a step and longer, every kind of zero, both dtypes, every split, twice the same bits.

    One or two cases a tile and width, for each is another two binaries of 4 s; together they are all cases many times.
    """
    gen = torch.Generator("cuda").manual_seed(bits)
    first = TILES.index(tile) + bits
    for i in {first % len(CASES), (first + 2) % len(CASES)}:
        M, N, K, group = CASES[i]
        zero, dtype = ZERO_KINDS[(i + bits) % 3], FLOATS[i % 2]
        legal = SPEC.legal_configs(Call(M, N, K, Scheme(bits, group, zero), "strided", dtype, "cuda", (9, 0)))
        configs = [c for c in legal if (c["BLOCK_M"], c["STAGES"], c["PER_SM"]) == tile]
        assert configs
        G = K // group
        W_q = torch.randint(0, 1 << bits, (N, K), dtype=torch.uint8, device="cuda", generator=gen)
        scales = (torch.rand(N, G, device="cuda", generator=gen) * 0.9 + 0.1).mul(1e-2).to(dtype)
        drawn = torch.rand(N, G, device="cuda", generator=gen) * ((1 << bits) - 1)
        zeros = None if zero == "none" else (drawn.round() if zero == "int" else drawn).to(dtype)
        q = QuantizedTensor(W_q, scales, zeros, bits, group, zero)
        x = torch.randn(M, K, device="cuda", generator=gen).to(dtype)
        bias = torch.randn(N, device="cuda", generator=gen).to(dtype) if i % 2 else None
        ref = x.float() @ q.dequantize().t() + (0 if bias is None else bias.float())
        p = pack(q, "strided")
        for config in configs:
            y = SPEC.launch(x, p, bias, config)
            assert ((y.float() - ref).norm() / ref.norm()).item() <= TOLERANCE[dtype], (M, N, K, group, zero, dtype, config)
            assert torch.equal(y, SPEC.launch(x, p, bias, config))
