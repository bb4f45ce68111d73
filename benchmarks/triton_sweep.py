"""Time a wide space of configs of the Triton kernels, and check each against fp32: where the registry's short lists come from.

`python3 benchmarks/triton_sweep.py --out FILE.jsonl [--bits 4,2] [--shapes 4096x4096] [--batch 1,16] [--seconds S]`
A row is {kernel, config, bits, group, N, K, M, us, err}. First all configs compile in worker processes (Triton's compiler
holds the interpreter lock for half of its time), then one process times them, best first of a coarse pass twice.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time

import torch

from lowq_kernels.registry import Call, Config, capability, kernels
from lowq_kernels.timing import graph_time, rotation
from lowq_packers.layouts import PackedWeight, pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

DOT = ("BLOCK_M", "BLOCK_N", "ROWS", "SPLIT_K", "TRANSPOSED", "NATURAL", "num_warps", "num_stages")


def candidates(kernel: str, bits: int, M: int) -> list[Config]:
    """Configs worth a measurement for this kernel, width and M; a superset of what is registered."""
    E = 32 if bits == 3 else 32 // bits
    if kernel == "triton/gemm_splitk" and M <= 16:
        rows = []
        for bn, w, st, sk in itertools.product((32, 64, 128), (2, 4), (3, 4), (2, 4, 8)):
            if (bn, w) in ((32, 4), (128, 2)):
                continue
            rows.append((16, bn, 16, sk, 0, 0, w, st))
            if M <= 8:
                rows.append((8, bn, 16, sk, 1, 0, w, st))
        for bn, w, st, sk in itertools.product((64, 128), (4,), (3, 4), (4, 8)):
            rows.append((16, bn, max(1, 128 // E), sk, 0, 1, w, st))
        for bn, w, st, sk in ((64, 4, 2, 16), (64, 4, 6, 4), (32, 2, 4, 16), (128, 8, 3, 4), (256, 8, 3, 4)):
            rows.append((16, bn, 16, sk, 0, 0, w, st))
            if M <= 8:
                rows.append((8, bn, 16, sk, 1, 0, w, st))
        if bits == 8:
            rows += [(r[0], r[1], 32, *r[3:]) for r in rows if r[5] == 0 and r[7] == 3]
        return [dict(zip(DOT, r, strict=True)) for r in rows]
    if kernel in ("triton/gemm_splitk", "triton/gemm") and M > 16:
        rows = []
        splits = (1,) if kernel == "triton/gemm" else (4,)
        if kernel == "triton/gemm_splitk" and M > 512:
            return []
        for sk in splits:
            for k in (64, 128):
                r = max(1, k // E)
                rows += [(64, 64, r, sk, 0, 1, 4, 3), (64, 128, r, sk, 0, 1, 4, 3), (64, 128, r, sk, 0, 1, 8, 3)]
                rows += [(64, 128, r, sk, 1, 1, 4, 3)]
                if M > 64:
                    rows += [(128, 128, r, sk, 0, 1, 8, 3), (128, 128, r, sk, 0, 1, 4, 3), (128, 64, r, sk, 0, 1, 4, 3)]
                    rows += [(128, 256, r, sk, 0, 1, 8, 3), (128, 128, r, sk, 0, 1, 8, 4)]
            if bits in (4, 8):
                rows += [(64, 128, 16, sk, 1, 0, 4, 3), (64, 128, 16, sk, 1, 0, 8, 3), (32, 64, 16, sk, 0, 0, 4, 3)]
                rows += [(128, 128, 16, sk, 1, 0, 8, 3), (32, 128, 16, sk, 1, 0, 4, 3)]
        return [dict(zip(DOT, r, strict=True)) for r in rows if r[0] < 2 * max(M, 16)]
    return list(kernels()[kernel].configs)


def packed(N: int, K: int, scheme: Scheme, dtype: torch.dtype, device: str) -> PackedWeight:
    """A random weight, all codes, scales and zeros random per group."""
    gen = torch.Generator(device).manual_seed(0)
    q = torch.randint(0, scheme.levels, (N, K), dtype=torch.uint8, device=device, generator=gen)
    G = scheme.groups(K)
    scales = (torch.rand(N, G, device=device, generator=gen) * 0.009 + 0.001).to(dtype)
    zeros = None if scheme.zero == "none" else (torch.rand(N, G, device=device, generator=gen) * (scheme.levels - 1)).to(dtype)
    if scheme.zero == "int":
        zeros = zeros.round()
    return pack(QuantizedTensor(q, scales, zeros, scheme.bits, scheme.group_size, scheme.zero), "strided")


def copies(p: PackedWeight) -> list[PackedWeight]:
    """Enough clones of a weight that no cache holds them all."""
    clone = lambda t: None if t is None else t.clone()  # noqa: E731
    fields = (p.scheme, p.N, p.K, p.layout)
    return [p] + [
        PackedWeight(p.words.clone(), p.scales.clone(), clone(p.zeros), *fields) for _ in range(rotation(p.nbytes) - 1)
    ]


def legal(kernel: str, call: Call) -> list[Config]:
    spec = kernels()[kernel]
    return [c for c in candidates(kernel, call.scheme.bits, call.M) if spec.config_refuse(call, c) is None]


def compile_share(share: int, shares: int, work: list[tuple[str, Config, int, int, int, Scheme]]) -> None:
    """Compile every `shares`-th item by launching it once on rubbish."""
    weights: dict[tuple[int, int, Scheme], PackedWeight] = {}
    for kernel, config, M, N, K, scheme in work[share::shares]:
        key = (N, K, scheme)
        if key not in weights:
            weights[key] = packed(N, K, scheme, torch.float16, "cuda")
        x = torch.randn(M, K, dtype=torch.float16, device="cuda")
        try:
            kernels()[kernel].launch(x, weights[key], None, config)
            torch.cuda.synchronize()
        except Exception as e:
            print("COMPILE", kernel, config, scheme, repr(e)[:160], flush=True)


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True)
    ap.add_argument("--bits", default="4,2,1,8,3")
    ap.add_argument("--shapes", default="4096x4096,28672x4096")
    ap.add_argument("--batch", default="1,16,64,256,1024")
    ap.add_argument("--kernels", default="")
    ap.add_argument("--group", type=int, default=128)
    ap.add_argument("--seconds", type=float, default=1e9)
    a = ap.parse_args()
    t0 = time.time()
    shapes = [tuple(map(int, s.split("x"))) for s in a.shapes.split(",")]
    batches = [int(m) for m in a.batch.split(",")]
    names = a.kernels.split(",") if a.kernels else [n for n in kernels() if n.startswith("triton/")]
    schemes = [Scheme(int(b), a.group) for b in a.bits.split(",")]
    work, seen = [], set()
    for scheme, M, kernel in itertools.product(schemes, batches, names):
        N, K = shapes[0]
        call = Call(M, N, K, scheme, "strided", torch.float16, "cuda", (9, 0))
        spec = kernels()[kernel]
        if not spec.m_range[0] <= M <= spec.m_range[1]:
            continue
        for c in legal(kernel, call):
            key = (kernel, scheme, tuple(c.items()))
            if key not in seen:
                seen.add(key)
                work.append((kernel, c, min(M, 16), N, K, scheme))
    shares = min(14, os.cpu_count() or 1)
    ctx = multiprocessing.get_context("spawn")
    procs = [ctx.Process(target=compile_share, args=(i, shares, work)) for i in range(shares)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
    print(f"compiled {len(work)} in {time.time() - t0:.0f} s", flush=True)
    cap = capability(torch.device("cuda"))
    with open(a.out, "a") as out:
        for scheme, (N, K) in itertools.product(schemes, shapes):
            weights = copies(packed(N, K, scheme, torch.float16, "cuda"))
            from lowq_packers.layouts import unpack

            dense = unpack(weights[0]).dequantize(torch.float32).t()
            for M in batches:
                x = torch.randn(M, K, dtype=torch.float16, device="cuda")
                ref = x.float() @ dense
                rows = []
                dense16 = [dense.half().t().contiguous() for _ in range(rotation(2 * N * K))]
                cublas = graph_time([lambda w=w, x=x: x @ w.t() for w in dense16], 5, 500.0)
                del dense16
                out.write(json.dumps(dict(kernel="cublas", config={}, bits=16, group=0, N=N, K=K, M=M, us=round(cublas, 2), err=0.0)) + "\n")
                print(f"{scheme} {N}x{K} M={M} cublas {cublas:.2f}", flush=True)
                for kernel in names:
                    spec = kernels()[kernel]
                    call = Call(M, N, K, scheme, "strided", torch.float16, "cuda", cap)
                    if not spec.m_range[0] <= M <= spec.m_range[1]:
                        continue
                    for c in legal(kernel, call):
                        if time.time() - t0 > a.seconds:
                            print("out of time", flush=True)
                            return
                        try:
                            y = spec.launch(x, weights[0], None, c)
                            err = ((y.float() - ref).norm() / ref.norm()).item()
                            us = graph_time([lambda w=w, spec=spec, c=c: spec.launch(x, w, None, c) for w in weights], 5, 500.0)
                        except Exception as e:
                            print("FAIL", kernel, c, scheme, M, N, K, repr(e)[:200], flush=True)
                            if "illegal" in repr(e) or "misaligned" in repr(e):
                                sys.exit(1)
                            continue
                        row = dict(
                            kernel=kernel, config=c, bits=scheme.bits, group=a.group, N=N, K=K, M=M, us=round(us, 2), err=err
                        )
                        out.write(json.dumps(row) + "\n")
                        rows.append(row)
                        if not err < 2e-3:
                            print("WRONG", row, flush=True)
                out.flush()
                best = {}
                for r in sorted(rows, key=lambda r: r["us"]):
                    best.setdefault(r["kernel"], r)
                for r in list(best.values())[:4]:
                    print(
                        f"{scheme} {N}x{K} M={M} {r['us']:8.2f} us {r['kernel']} {list(r['config'].values())} {r['err']:.1e}",
                        flush=True,
                    )
            del weights, dense
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
