"""Time many configs of the Triton kernels, each checked against fp32; the registry's short lists come from it.

`python3 benchmarks/once/triton_sweep.py --out FILE.jsonl [--bits 4,2] [--shapes 4096x4096] [--batch 1,16] [--kernels NAME,...]`
A row is {kernel, config, bits, group, N, K, M, us, err}; cuBLAS in fp16 is a row too. All is compiled first, in parallel.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import IO, Any

import torch

from lowq_cli.tuning.benching import parse_shape
from lowq_kernels.dispatch.measure import call_for, copies, random_weight
from lowq_kernels.dispatch.precompile import Work, compile_all
from lowq_kernels.dispatch.registry import Call, Config, kernels
from lowq_kernels.dispatch.timing import graph_time, rotation
from lowq_kernels.dispatch.tuning import Shape
from lowq_packers.layouts import PackedWeight, unpack
from lowq_packers.scheme import Scheme

DEVICE = torch.device("cuda")
DOT = ("BLOCK_M", "BLOCK_N", "ROWS", "SPLIT_K", "TRANSPOSED", "NATURAL", "num_warps", "num_stages")
QUICK = (5, 500.0)  # replays, and us each: a sweep ranks, it does not publish
LOST = ("illegal", "misaligned")  # after these errors the device answers nothing more


def small_m(E: int, M: int) -> Iterator[tuple[int, ...]]:
    """Tiles for up to 16 rows: columns, warps, stages and splits crossed, both operand orders, natural k order."""
    tiles = [(bn, w, st, sk) for bn, w in ((32, 2), (64, 2), (64, 4), (128, 4)) for st in (3, 4) for sk in (2, 4, 8)]
    tiles += [(64, 4, 2, 16), (64, 4, 6, 4), (32, 2, 4, 16), (128, 8, 3, 4), (256, 8, 3, 4)]
    for bn, w, st, sk in tiles:
        for rows in (16, 32) if E == 4 else (16,):
            yield 16, bn, rows, sk, 0, 0, w, st
            if M <= 8:
                yield 8, bn, rows, sk, 1, 0, w, st
    for bn, st, sk in itertools.product((64, 128), (3, 4), (4, 8)):
        yield 16, bn, max(1, 128 // E), sk, 0, 1, 4, st


def large_m(E: int, M: int, split: int) -> Iterator[tuple[int, ...]]:
    """Tiles for more than 16 rows."""
    for k in (64, 128):
        rows = max(1, k // E)
        for bm, bn, transposed, warps, stages in (
            (64, 64, 0, 4, 3), (64, 128, 0, 4, 3), (64, 128, 0, 8, 3), (64, 128, 1, 4, 3),
            (128, 128, 0, 8, 3), (128, 128, 0, 4, 3), (128, 64, 0, 4, 3), (128, 256, 0, 8, 3), (128, 128, 0, 8, 4),
        ):  # fmt: skip
            if bm < 2 * M:
                yield bm, bn, rows, split, transposed, 1, warps, stages
    if E <= 8:
        yield from ((64, 128, 16, split, 1, 0, 4, 3), (64, 128, 16, split, 1, 0, 8, 3), (32, 64, 16, split, 0, 0, 4, 3))
        yield from ((128, 128, 16, split, 1, 0, 8, 3), (32, 128, 16, split, 1, 0, 4, 3))


def candidates(kernel: str, call: Call) -> list[Config]:
    """Legal configs worth a measurement; for the split and data-parallel kernels a superset of what is registered."""
    E, spec = 32 if call.scheme.bits == 3 else 32 // call.scheme.bits, kernels()[kernel]
    if not spec.m_range[0] <= call.M <= spec.m_range[1]:
        return []
    if kernel == "triton/gemm_splitk" and call.M <= 512:
        rows = list(small_m(E, call.M) if call.M <= 16 else large_m(E, call.M, 4))
    elif kernel == "triton/gemm" and call.M > 16:
        rows = list(large_m(E, call.M, 1))
    else:
        return spec.legal_configs(call)
    return [c for r in rows if spec.config_refuse(call, c := dict(zip(DOT, r, strict=True))) is None]


def sweep_cell(
    names: list[str], shape: Shape, M: int, weights: list[PackedWeight], dense: torch.Tensor, out: IO[str]
) -> list[dict[str, Any]]:
    """Rows of one shape and M, written as they come; the process ends where the device is lost."""
    x = torch.randn(M, shape.K, dtype=torch.float16, device=DEVICE)
    ref, call = x.float() @ dense, call_for(shape, M, "strided", DEVICE)
    rows = []
    for name in names:
        for config in candidates(name, call):
            launch = kernels()[name].launch
            try:
                err = ((launch(x, weights[0], None, config).float() - ref).norm() / ref.norm()).item()
                us = graph_time([partial(launch, x, w, None, config) for w in weights], *QUICK)
            except Exception as e:
                print("FAIL", name, config, shape, M, repr(e)[:160], flush=True)
                if any(word in repr(e) for word in LOST):
                    sys.exit(1)
                continue
            place = {"bits": shape.scheme.bits, "group": shape.scheme.group_size, "N": shape.N, "K": shape.K, "M": M}
            rows.append({"kernel": name, "config": config, **place, "us": round(us, 2), "err": err})
            out.write(json.dumps(rows[-1]) + "\n")
            if not err < 2e-3:
                print("WRONG", rows[-1], flush=True)
    return rows


def main() -> None:
    """Parse, compile, time, print the best of each kernel."""
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True)
    ap.add_argument("--bits", default="4,2,1,8,3")
    ap.add_argument("--shapes", default="4096x4096,28672x4096")
    ap.add_argument("--batch", default="1,16,64,256,1024")
    ap.add_argument("--kernels", default="")
    ap.add_argument("--group", type=int, default=128)
    ap.add_argument("--seconds", type=float, default=1e9)
    a = ap.parse_args()
    started = time.monotonic()
    names = a.kernels.split(",") if a.kernels else [n for n in kernels() if n.startswith("triton/")]
    batches = [int(m) for m in a.batch.split(",")]
    sizes = [parse_shape(s) for s in a.shapes.split(",")]
    shapes = [Shape(N, K, Scheme(int(b), a.group), torch.float16) for b in a.bits.split(",") for N, K in sizes]
    work = [
        Work.of(name, config, s.scheme, "strided", s.dtype, M, *sizes[0])
        for s, M, name in itertools.product(shapes, batches, names)
        for config in candidates(name, call_for(s, M, "strided", DEVICE))
    ]
    print(f"compiled {compile_all(work, workers=14)} in {time.monotonic() - started:.0f} s", flush=True)
    with open(a.out, "a") as out:
        for shape in shapes:
            weights = copies(random_weight(shape, "strided", DEVICE))
            dense = unpack(weights[0]).dequantize().t()
            fp16 = [dense.half().t().contiguous() for _ in range(rotation(2 * dense.numel()))]
            for M in batches:
                if time.monotonic() - started > a.seconds:
                    print("out of time", flush=True)
                    return
                x = torch.randn(M, shape.K, dtype=torch.float16, device=DEVICE)
                cublas = graph_time([partial(torch.matmul, x, w.t()) for w in fp16], *QUICK)
                facts = {"kernel": "cublas", "config": {}, "bits": 16, "group": 0, "N": shape.N, "K": shape.K, "M": M}
                out.write(json.dumps({**facts, "us": round(cublas, 2), "err": 0.0}) + "\n")
                best: dict[str, dict[str, Any]] = {}
                for row in sorted(sweep_cell(names, shape, M, weights, dense, out), key=lambda r: r["us"]):
                    best.setdefault(row["kernel"], row)
                out.flush()
                print(f"{shape.N}x{shape.K} {shape.scheme} M={M}: cublas {cublas:.2f}", flush=True)
                for row in list(best.values())[:4]:
                    print(f"  {row['us']:8.2f} us {row['kernel']} {list(row['config'].values())} {row['err']:.1e}", flush=True)


if __name__ == "__main__":
    main()
