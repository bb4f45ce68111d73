"""The CUDA sources themselves, run on the CPU: compiled by g++ with host versions of the few device functions.

What a machine without a GPU can know of them: every index, every code's place, tails, groups and zeros, and that shared
memory is waited for before it is read and read before it is overwritten (cuda_emulator/host.h). wgmma and TMA are not here.
"""

import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

nvrtc = pytest.importorskip("lowq_kernels.cuda_wnax.nvrtc", reason="NVRTC is not installed")

from lowq_kernels.cuda_wnax import gemv_rows, gemv_warp32, tile_dequant, tile_mma  # noqa: E402
from lowq_kernels.registry import Call  # noqa: E402
from lowq_packers.layouts import pack  # noqa: E402
from lowq_packers.layouts.tile import chunks  # noqa: E402
from lowq_packers.qtensor import QuantizedTensor  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the sources for the CPU")
EMULATOR = Path(__file__).parent / "cuda_emulator"
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}

HOST_BODIES = {  # of the device functions that are inline PTX
    "shared_address": "return (u32)((char*)p - arena);",
    "copy_async": "host_copy(shared, global, BYTES, BYTES);",
    "copy_async_or_zero": "host_copy(shared, global, bytes, 16);",
    "copy16_streaming": "host_copy(shared, global, 16, 16);",
    "copy_commit": "host_commit();",
    "copy_wait": "host_wait(PENDING);",
    "read4": "u32 v; memcpy(&v, arena + shared, 4); return v;",
    "read_chunk": """for (int i = 0; i < Tile<BITS>::REGS / 4; i++) memcpy(&w[4 * i], arena + shared + i * 512 + lane * 16, 16);
        if constexpr (BITS == 3) memcpy(&w[4], arena + shared + 512 + lane * 8, 8);""",
    "load_matrix4": """const int v = threadIdx.x / 32, l = threadIdx.x % 32;
        exchange[v][l][0] = shared;
        __syncwarp();
        for (int i = 0; i < 4; i++) memcpy(&b[i], arena + exchange[v][8 * i + l / 4][0] + l % 4 * 4, 4);
        __syncwarp();""",
    "fma2": """return bits<T>((double)value<T>(a) * value<T>(b) + value<T>(c))
        | bits<T>((double)value<T>(a >> 16) * value<T>(b >> 16) + value<T>(c >> 16)) << 16;""",
    "add2": "return bits<T>(value<T>(a) + value<T>(b)) | bits<T>(value<T>(a >> 16) + value<T>(b >> 16)) << 16;",
    "to_floats": "return make_float2(value<T>(v), value<T>(v >> 16));",
    "from_floats": "return bits<T>(lo) | bits<T>(hi) << 16;",
    "mma": """const int v = threadIdx.x / 32, l = threadIdx.x % 32;
        for (int i = 0; i < 4; i++) exchange[v][l][i] = a[i];
        exchange[v][l][4] = b0, exchange[v][l][5] = b1;
        __syncwarp();
        const float c[4] = {c0, c1, c2, c3};
        float out[4];
        for (int e = 0; e < 4; e++) {
            double sum = c[e];
            for (int k = 0; k < 16; k++)
                sum += (double)value<T>(exchange[v][l / 4 * 4 + k % 8 / 2][e / 2 + k / 8 * 2] >> 16 * (k % 2))
                     * value<T>(exchange[v][(2 * (l % 4) + e % 2) * 4 + k % 8 / 2][4 + k / 8] >> 16 * (k % 2));
            out[e] = (float)sum;
        }
        __syncwarp();
        for (int e = 0; e < 4; e++) d[e] = out[e];""",
    "warp_sum": """const int w = threadIdx.x / 32, l = threadIdx.x % 32;
        for (int step = 16; step; step >>= 1) {
            memcpy(&exchange[w][l][6], &v, 4);
            __syncwarp();
            float other;
            memcpy(&other, &exchange[w][l ^ step][6], 4);
            __syncwarp();
            v += other;
        }
        return v;""",
    "load16": "uint4 v; memcpy(&v, p, 16); return v;",
    "barrier_init": "",
    "barrier_expect": "",
    "barrier_arrive": "",
    "barrier_wait": "",
}
STATEMENTS = (  # inline PTX and declarations inside kernels: pattern -> host code
    (r"extern __shared__ float4 shared\[\];", "float4* shared = (float4*)arena;"),
    (r"__shared__ uint4 constant\[C::PLACES\];", "uint4* constant = (uint4*)(arena + (250 << 10));"),
    (r"__shared__ u32 mask\[C::PLACES\];", "u32* mask = (u32*)(arena + (252 << 10));"),
    (r"__shared__ float sums\[ROWS\]\[P / 32\];", "auto sums = (float (*)[P / 32])arena;"),
    (r'asm volatile\("ld\.shared\.v4[^;]*;"\s*: "=r"\(a\[0\]\).*?\);', "memcpy(a, constant + place, 16);"),
    (r'asm volatile\("ld\.shared\.u32 %0, \[%1\];" : "=r"\(at\[i\]\).*?\);', "at[i] = shared[i];"),
    (
        r'asm\("dp4a[^"]*" : "\+r"\((\w+)\) : "r"\((\w+)\), "r"\((\w+)\)\);',
        r"for (int q = 0; q < 4; q++) \1 += (int)(\2 >> 8 * q & 255) * (int)(signed char)(\3 >> 8 * q);",
    ),
    (r'asm volatile\("" : [^;]*\);', ""),
    (r'asm volatile\("(barrier|mapa|ld\.shared::cluster)(?:[^"]|"[^)]*?")*?\);', ""),  # clusters: SPLIT is 1 here
    (r"#pragma unroll[^\n]*", ""),
)


def host_source(text: str) -> str:
    """A device source with its inline PTX replaced by HOST_BODIES and STATEMENTS."""
    for name, body in HOST_BODIES.items():
        match = re.search(rf"\b{name}\([^;{{]*\)\s*\{{", text)
        if match:
            end, depth = match.end(), 1
            while depth:
                depth += (text[end] == "{") - (text[end] == "}")
                end += 1
            text = text[: match.end()] + body + text[end - 1 :]
    for pattern, host in STATEMENTS:
        text = re.sub(pattern, host, text, flags=re.DOTALL)
    return text


def emulate(folder, file, instance, arguments, threads, grid, y_bytes, integers, tensors, orders=((0, 0), (1, 1))):
    """Outputs (bytes) of the kernel over `tensors` (w, s, z, b, x), one for each (lazy, backwards) of `orders`."""
    for name, text in nvrtc.sources().items():
        if name != "wgmma.cuh" and "wgmma" not in name:
            (folder / name).write_text(host_source(text))
    (folder / "tile.cuh").write_text('#include <string>\n#include "host.h"\n' + (folder / "tile.cuh").read_text())
    macros = {"SOURCE": f'"{file}"', "KERNEL": instance, "ARGUMENTS": arguments, "THREADS": threads}
    flags = [f"-D{k}={v}" for k, v in macros.items()]
    command = [
        "g++",
        "-std=c++17",
        "-O1",
        "-w",
        *flags,
        f"-I{folder}",
        f"-I{EMULATOR}",
        str(EMULATOR / "main.cpp"),
        "-o",
        str(folder / "run"),
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[:3000]
    for name, t in zip("wszbx", tensors, strict=True):
        (folder / name).write_bytes(t.contiguous().view(torch.uint8).numpy().tobytes())
    outputs = []
    for lazy, backwards in orders:
        numbers = [lazy, backwards, *grid, y_bytes, *integers]
        ran = subprocess.run([folder / "run", folder, *map(str, numbers)], capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        outputs.append(bytearray((folder / "y").read_bytes()))
    return outputs


def weight(bits, dtype, N, K, group, zero):
    g = torch.Generator().manual_seed(N + K + bits)
    zeros = None if zero == "none" else (torch.rand(N, K // group, generator=g) * ((1 << bits) - 1)).to(dtype)
    scales = (torch.rand(N, K // group, generator=g) * 0.009 + 0.001).to(dtype)
    codes = torch.randint(0, 1 << bits, (N, K), dtype=torch.uint8, generator=g)
    return QuantizedTensor(codes, scales, zeros.round() if zero == "int" else zeros, bits, group, zero), g


def relative(y, ref):
    return float((y.float() - ref).norm() / ref.norm())


F16, BF16 = torch.float16, torch.bfloat16
MMA = [  # bits, dtype, N, K, group, zero, M, (WARPS, NT, STAGES)
    (8, BF16, 130, 1000, 1000, "float", 16, (8, 1, 3)),
    (4, F16, 200, 1152, 128, "float", 7, (8, 2, 3)),
    (4, BF16, 72, 1152, 48, "none", 33, (4, 1, 2)),
    (3, F16, 200, 1152, 96, "float", 3, (8, 2, 3)),
    (2, BF16, 130, 272, 16, "int", 5, (8, 4, 2)),
    (1, F16, 130, 4112, 16, "float", 12, (4, 1, 2)),
]


@pytest.mark.parametrize(("bits", "dtype", "N", "K", "group", "zero", "M", "shape"), MMA)
def test_tile_mma(tmp_path, monkeypatch, bits, dtype, N, K, group, zero, M, shape):
    """Two SMs, so that runs begin and end within units; copies early and late, warps in both orders."""
    monkeypatch.setattr(tile_mma, "multiprocessors", lambda: 2)
    q, g = weight(bits, dtype, N, K, group, zero)
    p, x, bias = pack(q, "tile"), torch.randn(M, K, generator=g).to(dtype), torch.randn(N, generator=g).to(dtype)
    config = dict(zip(("WARPS", "NT", "STAGES"), shape, strict=True)) | {"SPLIT": 1, "BLOCKS": 1}
    cut = tile_mma.plan(replace(Call.of(x, p), capability=(9, 0)), config)
    G, T = p.scales.shape[1], int(dtype == BF16)
    instance = tile_mma.expression(bits, T, 0 if G == 1 else group, zero != "none", config, cut.MT)
    padded = torch.nn.functional.pad(x, (0, -K % 8))
    integers = (M, N, padded.shape[1], chunks(K, bits), G, p.words.shape[0] // config["NT"], cut.rows)
    arguments = "words(),halves(S),halves(Z),halves(B),halves(X),y(),P[0],P[1],P[2],P[3],P[4],P[5],P[6]"
    tensors = (p.words, p.scales, p.scales if p.zeros is None else p.zeros, bias, padded)
    outputs = emulate(
        tmp_path, "tile_mma.cu", instance, arguments, 32 * config["WARPS"], cut.grid, 2 * M * N, integers, tensors
    )
    ref = x.float() @ q.dequantize().t() + bias.float()
    assert outputs[0] == outputs[1], "a race: early and late copies give different bits"
    assert relative(torch.frombuffer(outputs[0], dtype=dtype).reshape(M, N), ref) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("bits", "dtype", "group", "zero"), [(8, F16, 96, "float"), (3, BF16, 48, "none"), (1, F16, 192, "int")]
)
def test_tile_dequant(tmp_path, bits, dtype, group, zero):
    N, K = 70, 576
    q, _ = weight(bits, dtype, N, K, group, zero)
    p, C = pack(q, "tile"), chunks(K, bits)
    instance = tile_dequant.expression(bits, int(dtype == BF16), group, zero != "none")
    arguments = "words(),halves(S),halves(Z),y(),0,P[0],P[1],P[2],P[3]"
    tensors = (p.words, p.scales, p.scales if p.zeros is None else p.zeros, p.scales, p.scales)
    grid = (math.ceil(C / 8), math.ceil(N / 16))
    (out,) = emulate(
        tmp_path, "tile_dequant.cu", instance, arguments, 256, grid, 2 * N * K, (N, K, C, p.scales.shape[1]), tensors, ((0, 0),)
    )
    assert torch.equal(torch.frombuffer(out, dtype=dtype).reshape(N, K), q.dequantize(dtype))


@pytest.mark.parametrize(
    ("bits", "dtype", "group", "SUM"),
    [(8, BF16, 16, 0), (4, F16, 96, 1), (3, F16, 64, 2), (2, F16, 96, 3), (4, F16, 192, 4), (1, F16, 48, 4)],
)
def test_gemv_warp32(tmp_path, bits, dtype, group, SUM):
    M, N, K = 2, 37, 576
    q, g = weight(bits, dtype, N, K, group, "int" if SUM > 2 else "float")
    p, bias = pack(q, "warp32"), torch.randn(N, generator=g).to(dtype)
    integer = SUM >= gemv_warp32.INT32
    x = torch.randint(-128, 128, (M, K), generator=g, dtype=torch.int8) if integer else torch.randn(M, K, generator=g).to(dtype)
    instance = gemv_warp32.expression(bits, int(dtype == BF16), group, True, SUM, 8)
    arguments = f"words(),halves(S),halves(Z),{'nullptr' if integer else 'halves(B)'},X.data(),Y.data(),P[0],P[1],P[2],P[3]"
    integers = (N, K, p.words.shape[1], p.scales.shape[1])
    size = M * N * (4 if integer else 2)
    tensors = (p.words, p.scales, p.zeros, bias, x)
    (out,) = emulate(
        tmp_path, "gemv_warp32.cu", instance, arguments, 256, (math.ceil(N / 8), M), size, integers, tensors, ((0, 0),)
    )
    y = torch.frombuffer(out, dtype=torch.float32 if integer else dtype).reshape(M, N)
    ref = x.float() @ q.dequantize().t() + (0 if integer else bias.float())
    assert relative(y, ref) < (1e-5 if integer else TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("bits", "dtype", "group", "P", "ROWS"),
    [(8, BF16, 48, 32, 8), (4, F16, 128, 64, 4), (1, F16, 96, 256, 1), (16, F16, 0, 128, 2)],
)
def test_gemv_rows(tmp_path, bits, dtype, group, P, ROWS):
    M, N, K = 2, 37, 1152
    g = torch.Generator().manual_seed(bits)
    x, bias = torch.randn(M, K, generator=g).to(dtype), torch.randn(N, generator=g).to(dtype)
    if bits == gemv_rows.DENSE:
        words = torch.randn(N, K, generator=g).to(dtype)
        W, scales, zeros, row_words = words.float(), bias, bias, K // 2
    else:
        q, _ = weight(bits, dtype, N, K, group, "float")
        p = pack(q, "rowstream")
        W, words, scales, zeros, row_words = q.dequantize(), p.words, p.scales, p.zeros, p.words.shape[1]
    config = {"P": P, "ROWS": ROWS}
    instance = gemv_rows.expression(bits, int(dtype == BF16), group, bits != gemv_rows.DENSE, config)
    arguments = "words(),halves(S),halves(Z),halves(B),halves(X),y(),P[0],P[1],P[2],P[3]"
    integers = (N, K, row_words, K // group if group else 1)
    grid = (math.ceil(N / ROWS), M)
    tensors = (words, scales, zeros, bias, x)
    (out,) = emulate(tmp_path, "gemv_rows.cu", instance, arguments, P * ROWS, grid, 2 * M * N, integers, tensors, ((0, 0),))
    ref = x.float() @ W.t() + bias.float()
    assert relative(torch.frombuffer(out, dtype=dtype).reshape(M, N), ref) < TOLERANCE[dtype]


def test_a_missing_wait_shows(tmp_path, monkeypatch):
    """The emulator can fail: without copy_wait, late copies have not arrived and NaN poison comes out."""
    broken = dict(nvrtc.sources())
    broken["tile_mma.cu"] = broken["tile_mma.cu"].replace("copy_wait<STAGES - 1>();", "")
    monkeypatch.setattr(nvrtc, "sources", lambda: broken)
    with pytest.raises(AssertionError):
        test_tile_mma(tmp_path, monkeypatch, *MMA[1])
