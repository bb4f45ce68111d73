"""The tile kernels against cuBLAS fp16 and the read-only floor, every cell checked before it is timed.

    python benchmarks/cuda_tile.py                         # all cells, the kernel and config that dispatch picks
    python benchmarks/cuda_tile.py --sweep --bits 4 --m 1,8,16   # every legal config of every tile kernel

Protocol: `lowq_kernels.timing.graph_time` (weights rotated past the L2 cache, one CUDA graph, median of replays).
Writes benchmarks/results/<gpu>/cuda_tile.json, or --out.
"""

import argparse
import datetime
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from lowq_kernels import registry
from lowq_kernels.registry import Call
from lowq_kernels.timing import graph_time, rotation
from lowq_packers.layouts import PackedWeight, unpack
from lowq_packers.layouts.tile import expected_shapes
from lowq_packers.scheme import Scheme

SHAPES = "4096x4096,28672x4096,4096x14336,8192x8192,57344x8192"
ROWS = "1,2,4,8,16,32,64,128,256,1024,4096"
LIMIT = 2e-3  # relative Frobenius error, fp16


def random_weight(N: int, K: int, scheme: Scheme, dtype: torch.dtype, seed: int) -> PackedWeight:
    """A packed weight with random codes, scales 0.001 .. 0.01 and zeros 0 .. 2**bits - 1, made on the GPU."""
    g = torch.Generator("cuda").manual_seed(seed)
    words, meta = expected_shapes(scheme, N, K)
    w = torch.randint(-(2**31), 2**31 - 1, words, dtype=torch.int32, device="cuda", generator=g)
    scales = (torch.rand(meta, device="cuda", generator=g) * 0.009 + 0.001).to(dtype)
    zeros = None
    if scheme.zero != "none":
        zeros = (torch.rand(meta, device="cuda", generator=g) * (scheme.levels - 1)).to(dtype)
    return PackedWeight(w, scales, zeros, scheme, N, K, "tile")


def error(y: torch.Tensor, x: torch.Tensor, p: PackedWeight) -> float:
    """||y - ref|| / ||ref||, ref in fp32 on at most 2048 rows of W (spread over all of them by stride)."""
    step = max(1, p.N // 2048)
    q = unpack(p)
    W = type(q)(
        q.W_q[::step].contiguous(), q.scales[::step], None if q.zeros is None else q.zeros[::step], q.bits, q.group_size, q.zero
    )
    ref = x.float() @ W.dequantize().t()
    return float((y[:, ::step].float() - ref).norm() / ref.norm())


def cells(args: argparse.Namespace):
    """(N, K, scheme) of every weight to measure."""
    for shape in args.shapes.split(","):
        N, K = map(int, shape.split("x"))
        for bits in map(int, args.bits.split(",")):
            for group in map(int, args.group.split(",")):
                yield N, K, Scheme(bits, group or K, args.zero)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--bits", default="4,8,3,2,1")
    parser.add_argument("--group", default="128", help="0 is per channel")
    parser.add_argument("--zero", default="float")
    parser.add_argument("--m", default=ROWS)
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--sweep", action="store_true", help="every legal config, not only the chosen one")
    parser.add_argument("--no-cublas", action="store_true")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    gpu = torch.cuda.get_device_name().split()[1].lower()
    out = Path(args.out or Path(__file__).parent / "results" / gpu / "cuda_tile.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict] = []
    anchors: dict[tuple[int, int, int], float] = {}
    for N, K, scheme in cells(args):
        first = random_weight(N, K, scheme, dtype, 0)
        copies = [first] + [random_weight(N, K, scheme, dtype, i) for i in range(1, rotation(first.nbytes))]
        for M in map(int, args.m.split(",")):
            if N * M > 57344 * 1024:
                continue
            x = torch.randn(M, K, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(7)) / 8
            if not args.no_cublas and (N, K, M) not in anchors:
                dense = [torch.randn(N, K, device="cuda", dtype=dtype) for _ in range(rotation(N * K * 2))]
                anchors[N, K, M] = graph_time([lambda w=w, x=x: x @ w.t() for w in dense])
                del dense
            call = Call.of(x, first)
            chosen = registry.select(call)
            candidates = [chosen]
            if args.sweep:
                specs = [s for k, s in registry.kernels().items() if k.startswith("cuda/") and args.kernel in k]
                candidates = [(s, c) for s in specs if s.why_not(call) is None for c in s.legal_configs(call)]
            with ThreadPoolExecutor(16) as pool:  # compiles run side by side
                list(pool.map(lambda kc, x=x, p=first: kc[0].launch(x, p, None, kc[1]), candidates))
            torch.cuda.synchronize()
            best = None
            for spec, config in candidates:
                err = error(spec.launch(x, first, None, config), x, first)
                row = {"N": N, "K": K, "M": M, "bits": scheme.bits, "group": scheme.group_size, "zero": scheme.zero}
                row |= {"dtype": args.dtype, "kernel": spec.name, "config": config, "error": err}
                if not err < LIMIT * (1 if dtype == torch.float16 else 6):
                    print("WRONG", row, flush=True)
                    rows.append(row)
                    continue
                row["us"] = graph_time([lambda p=p: spec.launch(x, p, None, config) for p in copies])  # noqa: B023
                row["gbs"] = first.nbytes / row["us"] / 1e3
                row["tflops"] = 2 * M * N * K / row["us"] / 1e6
                row["cublas_us"] = anchors.get((N, K, M))
                row["chosen"] = (spec.name, config) == (chosen[0].name, chosen[1])
                rows.append(row)
                if best is None or row["us"] < best["us"]:
                    best = row
            if best:
                mine = [r for r in rows[-len(candidates) :] if r.get("chosen")]
                picked = f"{mine[0]['us']:.2f}" if mine else "-"
                cell = f"{scheme.bits}b g{scheme.group_size} {N}x{K} M={M}"
                how = f"{best['kernel']} {list(best['config'].values())} err {best['error']:.1e}"
                print(f"{cell}: chosen {picked} best {best['us']:.2f} us, cublas {best['cublas_us']}; {how}", flush=True)
            stamp = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(datetime.date.today())}
            out.write_text(json.dumps(stamp | {"script": "benchmarks/cuda_tile.py", "rows": rows}, indent=0))


if __name__ == "__main__":
    main()
