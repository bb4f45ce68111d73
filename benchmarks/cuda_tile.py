"""Time the tile kernels against cuBLAS fp16 on one GPU; every cell is checked against fp32 before it is timed.

    python benchmarks/cuda_tile.py                                  # PLAN: the tables of docs/cuda.md
    python benchmarks/cuda_tile.py --shapes 4096x4096 --bits 4 --m 1,8,16 --sweep    # every legal config of every kernel
    python benchmarks/cuda_tile.py --tables                         # nvfp4, mxfp4, nf4 and fitted tables compared with grids
    python benchmarks/cuda_tile.py --chain --m 1,8 --out ...        # an 8B model's layers in turn, as a decoder calls them

Without --sweep a cell is the kernel and config that dispatch picks. Protocol: `dispatch.timing.graph_time` (weights
rotated past the L2 cache, one CUDA graph, median of replays). `read_us` is a kernel that reads the same words, scales and
zeros and computes nothing (tile_read.cu). Writes benchmarks/results/<gpu>/cuda_tile.json, or --out.
"""

import argparse
import ctypes
import datetime
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from lowq_kernels.cuda import nvrtc
from lowq_kernels.cuda.driver import Kernel
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.registry import Call, Config, KernelSpec
from lowq_kernels.dispatch.timing import Thunk, graph_time, rotation
from lowq_packers.layouts import PackedWeight, unpack
from lowq_packers.layouts.tile import ROW_STEP, ROWS, expected_shapes
from lowq_packers.scheme import Scheme
from lowq_packers.tables import signed, to_bytes

SMALL = "1,2,4,8,16"
ALL = SMALL + ",32,64,128,256,1024,4096"
LAYERS = "4096x4096,28672x4096,4096x14336,8192x8192,57344x8192"
QWEN_7B = "4608x3584,3584x3584,37888x3584,3584x18944"
MISTRAL_7B = "6144x4096,4096x4096,28672x4096,4096x14336"
GEMMA_27B = "8192x5376,5376x4096,43008x5376,5376x21504"
LLAMA_1B = "3072x2048,2048x2048,16384x2048,2048x8192"
PLAN = (  # shapes, bits, group sizes (0: per channel), rows of x; what matters most first, as --seconds may cut it short
    (LAYERS, "4", "128", ALL),
    (LAYERS, "2,1,3", "128", SMALL + ",64,256"),
    (LAYERS, "8", "128", SMALL),
    ("4096x4096,28672x4096", "2", "128", "4096"),
    ("4096x4096,28672x4096", "4", "32,64,0", "1,8,16,64,256,1024"),
    (QWEN_7B, "4", "128", "1,3,7,16,17,33,100,1000"),
    (MISTRAL_7B, "4", "128", "1,3,7,17,33,100,1000"),
    (LLAMA_1B, "4", "128", "1,3,7,16,17,33,100,1000"),
    (GEMMA_27B, "4", "128", "1,3,7,16,17,33,100,1000"),
    ("4096x4096,28672x4096", "2,1", "64", "1,2"),
    (LAYERS, "8", "128", "32,64,128,256,1024,4096"),
)
TABLES = (  # --tables: kind, bits, group; each table before the grid that reads as many bytes, or the nearest
    *(("e2m1/e4m3", 4, 16), ("e2m1/e8m0", 4, 32), ("none", 4, 32), ("nf4", 4, 64), ("none", 4, 64), ("fitted", 4, 128)),
    *(("none", 4, 128), ("fitted", 3, 64), ("none", 3, 64), ("fitted", 2, 64), ("none", 2, 64)),
)
LIMIT = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # relative Frobenius error
CHECKED = 2048  # rows of W at most that truth is computed for, in blocks spread over all of them
LARGEST = 28672 * 4096  # N * M
# Seconds of quiet before many rows are timed, cuBLAS's as ours. One after another such products reach the board's power limit,
# and then an H100 takes 1.15 to 2 times as long for the same one. A rest of 0.1 s is as good as 0.8, and the timed replays
# must end soon after it (timing.LOAD_US): twelve of five copies at 28672x4096, M = 4096, are 73 ms, of cuBLAS's two 30.
REST, MANY = 0.1, 256


def random_weight(N: int, K: int, scheme: Scheme, dtype: torch.dtype, seed: int) -> PackedWeight:
    """A packed weight with random codes and zeros, made on the GPU: weights of one size at all widths, scales at 4 bits are
    0.001 .. 0.01. (8-bit scales of real weights are under 0.004, where tile_wgmma is 2 to 5% faster at large M.)"""
    g = torch.Generator("cuda").manual_seed(seed)
    words, meta = expected_shapes(scheme, N, K)
    w = torch.randint(-(2**31), 2**31 - 1, words, dtype=torch.int32, device="cuda", generator=g)
    scales = (torch.rand(meta, device="cuda", generator=g) * 0.009 + 0.001) * (15 / (scheme.levels - 1))
    if signed(scheme):
        scales[..., ::2] *= -1
    scales = scales.to(dtype) if scheme.scale == "float" else to_bytes(scales, scheme.scale)
    table = torch.rand(1, scheme.table_width, device="cuda", generator=g) + 0.1 if scheme.table_width else None
    zeros = None
    if scheme.zero != "none":
        zeros = (torch.rand(meta, device="cuda", generator=g) * (scheme.levels - 1)).to(dtype)
    return PackedWeight(w, scales, zeros, scheme, N, K, "tile", table=table)


def sample(p: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, W): indices of some rows of W, and those rows in fp32, transposed; whole blocks of rows are unpacked."""
    blocks = p.N // ROW_STEP
    chosen = torch.arange(0, blocks, max(1, -(-blocks * ROW_STEP // CHECKED)), device="cuda")
    tiles = (chosen[:, None] * (ROW_STEP // ROWS) + torch.arange(ROW_STEP // ROWS, device="cuda")).flatten()
    rows = (tiles[:, None] * ROWS + torch.arange(ROWS, device="cuda")).flatten()
    zeros = None if p.zeros is None else p.zeros[tiles]
    part = PackedWeight(p.words[tiles], p.scales[tiles], zeros, p.scheme, len(rows), p.K, "tile", table=p.table)
    return rows, unpack(part).dequantize().t()


def timed(M: int, calls: list[Thunk]) -> float:
    """`graph_time` of calls with M rows, after a rest where M is large."""
    return graph_time(calls, rest=REST if M >= MANY else 0.0)


def read_time(copies: list[PackedWeight]) -> float:
    """Microseconds of the kernel that only reads the words, scales and zeros, by its best shape: the floor at small M."""
    nvrtc.sources()["tile_read.cu"] = Path(__file__).with_name("tile_read.cu").read_text()
    y, times = torch.zeros(8, dtype=torch.float16, device="cuda"), []
    for warps, unroll, tiles in ((16, 2, 1), (16, 4, 1), (8, 4, 1), (8, 4, 2), (8, 2, 1)):
        types = (*(ctypes.c_void_p,) * 4, *(ctypes.c_int32,) * 2)
        kernel = Kernel("tile_read.cu", f"tile_read<{warps}, {unroll}>", 0, 32 * warps, types, serialize=True)

        def read(kernel: Kernel, tiles: int, p: PackedWeight) -> None:
            n, zeros = p.words.shape[0], 0 if p.zeros is None else p.zeros.data_ptr()
            sizes = (p.words.nbytes // n * tiles, p.scales.nbytes // n * tiles)
            kernel(n // tiles, 1, 0, p.words.data_ptr(), p.scales.data_ptr(), zeros, y.data_ptr(), *sizes)

        times.append(graph_time([partial(read, kernel, tiles, p) for p in copies]))
    return min(times)


CHAIN = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # Llama 3 8B, in the order of a decoder's calls


def chain(M: int, scheme: Scheme, dtype: torch.dtype, kernel: str | None) -> dict:
    """The row of 32 decoder layers' linear layers one after another, each with its own weights: us for all 128 of them."""
    weights = [random_weight(N, K, scheme, dtype, i) for i in range(32) for N, K in CHAIN]
    xs = {K: torch.randn(M, K, device="cuda", dtype=dtype) / 8 for _, K in CHAIN}
    choices = {(p.N, p.K): registry.select(Call.of(xs[p.K], p), kernel) for p in weights[: len(CHAIN)]}

    def product(p: PackedWeight) -> None:
        spec, config = choices[p.N, p.K]
        spec.launch(xs[p.K], p, None, config)

    us = graph_time([partial(product, p) for p in weights]) * len(weights)
    row = {"chain": "llama 3 8b", "M": M, "bits": scheme.bits}
    row |= {"group": scheme.group_size, "zero": scheme.kind, "us": us}
    used = {f"{N}x{K}": [spec.name, *config.values()] for (N, K), (spec, config) in choices.items()}
    return row | {"gbs": sum(p.nbytes for p in weights) / us / 1e3, "used": used}


Cell = tuple[int, int, Scheme]


def cells(args: argparse.Namespace) -> Iterator[tuple[Cell, list[int]]]:
    """((N, K, scheme), rows of x) of every weight to measure, in the plan's order; what several lines ask for comes once."""
    if args.tables:
        sizes = [tuple(map(int, shape.split("x"))) for shape in (args.shapes or LAYERS).split(",")]
        for kind, bits, group in TABLES:
            for N, K in sizes:
                yield (N, K, Scheme.of(bits, group, kind)), [m for m in map(int, args.m.split(",")) if N * m <= LARGEST]
        return
    plan = [(args.shapes, args.bits, args.group, args.m)] if args.shapes else PLAN
    done: set[tuple[Cell, int]] = set()
    for shapes, widths, groups, rows in plan:
        for shape in shapes.split(","):
            N, K = map(int, shape.split("x"))
            for bits in map(int, widths.split(",")):
                for group in map(int, groups.split(",")):
                    cell = (N, K, Scheme.of(bits, group or K, args.zero))
                    some = [m for m in map(int, rows.split(",")) if N * m <= LARGEST and (cell, m) not in done]
                    done.update((cell, m) for m in some)
                    if some:
                        yield cell, some


def candidates(call: Call, args: argparse.Namespace) -> list[tuple[KernelSpec, Config]]:
    """What to time in one cell, the choice of dispatch first."""
    chosen = registry.select(call)
    if not args.sweep:
        return [chosen]
    specs = [s for k, s in registry.kernels().items() if k.startswith("cuda/") and args.kernel in k and s.why_not(call) is None]
    every = [(s, c) for s in specs for c in s.legal_configs(call) if not args.having or c.get(args.having)]
    return [chosen, *(e for e in every if (e[0].name, e[1]) != (chosen[0].name, chosen[1]))]


def main() -> None:
    """Measure; print a line a cell, write all rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="", help="NxK,...; without it the plan of this file")
    parser.add_argument("--bits", default="4")
    parser.add_argument("--group", default="128", help="0 is per channel")
    parser.add_argument("--zero", default="float", help="or a table and its scales, such as e2m1/e4m3")
    parser.add_argument("--tables", action="store_true", help="the kinds of TABLES")
    parser.add_argument("--m", default=ALL)
    parser.add_argument("--kernel", default="", help="with --sweep: only kernels whose name contains this")
    parser.add_argument("--having", default="", help="with --sweep: only configs where this is not 0, e.g. INT8_PLANES")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--sweep", action="store_true", help="every legal config, not only the chosen one")
    parser.add_argument("--chain", action="store_true", help="an 8B model's layers in turn; with --kernel: by it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop when so many have passed")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    dtype, start = getattr(torch, args.dtype), time.monotonic()
    gpu = torch.cuda.get_device_name().split()[1].lower()
    out = Path(args.out or Path(__file__).parent / "results" / gpu / "cuda_tile.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict] = []
    anchors: dict[tuple[int, int, int], float] = {}
    stamp = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(datetime.date.today())}
    stamp["script"] = "benchmarks/cuda_tile.py"
    if args.chain:
        asked = [(args.zero, bits, int(args.group)) for bits in map(int, args.bits.split(","))]
        for kind, bits, group in TABLES if args.tables else asked:
            for M in map(int, args.m.split(",")):
                rows.append(chain(M, Scheme.of(bits, group, kind), dtype, args.kernel or None))
                print(rows[-1], flush=True)
                out.write_text(json.dumps(stamp | {"rows": rows}, indent=0))
        return
    visits = list(cells(args))
    weights = {cell: random_weight(*cell, dtype, 0) for cell, _ in visits}

    def inputs(M: int, K: int) -> torch.Tensor:
        return torch.randn(M, K, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(7)) / 8

    todo = {(cell, M): candidates(Call.of(inputs(M, cell[1]), weights[cell]), args) for cell, Ms in visits for M in Ms}
    flat = [(cell, M, *choice) for (cell, M), choices in todo.items() for choice in choices]
    with ThreadPoolExecutor(16) as pool:  # everything is compiled before anything is timed, side by side
        list(pool.map(lambda w: w[2].launch(inputs(w[1], w[0][1]), weights[w[0]], None, w[3]), flat))
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    for cell, Ms in visits:
        (N, K, scheme), first = cell, weights[cell]
        copies = [first] + [random_weight(N, K, scheme, dtype, i) for i in range(1, rotation(first.nbytes))]
        some, truth = sample(first)
        read_us = read_time(copies)
        xs = {M: inputs(M, K) for M in Ms}
        for M in Ms:
            if (N, K, M) not in anchors:
                dense = [torch.randn(N, K, device="cuda", dtype=dtype) for _ in range(rotation(N * K * 2))]
                anchors[N, K, M] = timed(M, [partial(torch.matmul, xs[M], w.t()) for w in dense])
                del dense
            ref, best = xs[M].float() @ truth, None
            for i, (spec, config) in enumerate(todo[cell, M]):
                y = spec.launch(xs[M], first, None, config)
                err = float((y[:, some].float() - ref).norm() / ref.norm())
                row: dict = {"N": N, "K": K, "M": M, "bits": scheme.bits, "group": scheme.group_size, "zero": scheme.kind}
                row |= {"dtype": args.dtype, "kernel": spec.name, "config": config, "error": err, "chosen": i == 0}
                rows.append(row)
                if not err < LIMIT[dtype]:
                    print("WRONG", row, flush=True)
                    continue
                row["us"] = timed(M, [partial(spec.launch, xs[M], p, None, config) for p in copies])
                row |= {"gbs": first.nbytes / row["us"] / 1e3, "tflops": 2 * M * N * K / row["us"] / 1e6}
                row |= {"cublas_us": anchors[N, K, M], "read_us": read_us}
                best = row if best is None or row["us"] < best["us"] else best
            if best:
                picked = next((f"{r['us']:.2f}" for r in rows[::-1] if r["chosen"] and "us" in r), "-")
                what = f"{scheme.bits}b g{scheme.group_size} {scheme.kind} {N}x{K} M={M}"
                how = f"{best['kernel']} {list(best['config'].values())} err {best['error']:.1e}"
                floor = f"read {read_us:.2f}, cublas {best['cublas_us']:.2f}"
                print(f"{what}: chosen {picked} best {best['us']:.2f} us, {floor}; {how}", flush=True)
        out.write_text(json.dumps(stamp | {"rows": rows}, indent=0))
        if time.monotonic() - start > args.seconds:
            print(f"stopped after {args.seconds:.0f} s")
            break


if __name__ == "__main__":
    main()
