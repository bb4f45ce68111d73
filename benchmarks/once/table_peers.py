"""Time NVFP4, MXFP4 and NF4 against other tools' kernels in one run on one GPU: benchmarks/results/<gpu>/table_peers.json.

    python benchmarks/once/table_peers.py [--m 1,2,4,8,16,1024] [--peers lowq,cublas,marlin,bitsandbytes,humming] [--out FILE]

A row is {peer, format, N, K, M, us, error}. Peers are what can be imported: vLLM's Marlin (0.24), bitsandbytes, Humming, and
cuBLAS of dense fp16; lowq's rows are what dispatch picks, with grids of as many bytes beside. All by `cuda_tile.timed`,
weights rotated past the L2 cache. error: relative, against fp32 with the weights that the peer says it has; none where it does
not say. Marlin takes x of MXFP4 in bf16. Each peer's first calls compile; that is not timed.
"""

import argparse
import copy
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scripts of benchmarks/
from cuda_tile import LAYERS, SMALL, random_weight, sample, timed
from pages import results_of

from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.registry import Call
from lowq_kernels.dispatch.timing import rotation
from lowq_packers.scheme import Scheme

Layer = tuple[list[Any], Callable[[Any, torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor] | None]
# (copies of a weight, product of one and x, x times the first one's weight in fp32 or None)
OURS = (("e2m1/e4m3", 16), ("e2m1/e8m0", 32), ("none", 32), ("nf4", 64), ("none", 64))
NAMES = {"e2m1/e4m3": "nvfp4", "e2m1/e8m0": "mxfp4"}
HALF = torch.float16


def inputs(M: int, K: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(M, K, device="cuda", generator=torch.Generator("cuda").manual_seed(7)).to(dtype) / 8


def lowq(N: int, K: int, kind: str, group: int) -> Layer:
    """What dispatch picks."""
    weights = [random_weight(N, K, Scheme.of(4, group, kind), HALF, 0)]
    weights += [random_weight(N, K, Scheme.of(4, group, kind), HALF, i) for i in range(1, rotation(weights[0].nbytes))]
    rows, truth = sample(weights[0])

    def product(p: Any, x: torch.Tensor) -> torch.Tensor:
        spec, config = registry.select(Call.of(x, p))
        return spec.launch(x, p, None, config)

    return weights, product, lambda x: torch.zeros(len(x), N, device="cuda").index_copy_(1, rows, x.float() @ truth)


def cublas(N: int, K: int) -> Layer:
    weights = [torch.randn(N, K, device="cuda", dtype=HALF) / K**0.5 for _ in range(rotation(2 * N * K))]
    return weights, lambda w, x: x @ w.t(), None


def marlin(N: int, K: int, name: str, dtype: torch.dtype) -> Layer:
    """vLLM's, for a GPU without FP4 of its own."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as fp4
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new

    make = fp4.rand_marlin_weight_nvfp4_like if name == "nvfp4" else fp4.rand_marlin_weight_mxfp4_like
    dense = torch.randn(N, K, device="cuda", dtype=dtype) / K**0.5
    space, group = marlin_make_workspace_new(dense.device), 16 if name == "nvfp4" else 32
    first, *held = make(dense, group)
    weights = [(*held, None)[:3], *((*make(dense, group)[1:], None)[:3] for _ in range(rotation(N * K // 2) - 1))]
    return weights, lambda w, x: fp4.apply_fp4_marlin_linear(x, *w, space, N, K), lambda x: x.float() @ first.float()


def bitsandbytes(N: int, K: int) -> Layer:
    import bitsandbytes as bnb

    dense = torch.randn(N, K, device="cuda", dtype=HALF) / K**0.5
    made = [bnb.functional.quantize_4bit(dense, blocksize=64, quant_type="nf4") for _ in range(rotation(N * K // 2))]
    truth = bnb.functional.dequantize_4bit(*made[0]).float()
    return made, lambda w, x: bnb.matmul_4bit(x, w[0].t(), quant_state=w[1]), lambda x: x.float() @ truth.t()


def humming(N: int, K: int, name: str) -> Layer:
    from humming.layer import HummingLayer

    config = {"dtype": "float4e2m1", "scale_dtype": "float8e4m3", "group_size": 16, "scale_2_type": "tensor"}
    if name == "mxfp4":
        config = {"dtype": "float4e2m1", "scale_dtype": "float8e8m0", "group_size": 32}
    layer = HummingLayer(shape_n=N, shape_k=K, weight_config=config, torch_dtype=HALF).cuda()
    layer.load_from_unquantized(torch.randn(N, K, device="cuda", dtype=HALF) / K**0.5)
    layer.transform()
    return [layer, *(copy.deepcopy(layer) for _ in range(rotation(N * K // 2) - 1))], lambda w, x: w(x), None


def series(peers: list[str]) -> Iterator[tuple[str, str, torch.dtype, Callable[[int, int], Layer]]]:
    """(peer, format, type of x, its maker) of everything to time."""
    for kind, group in OURS if "lowq" in peers else ():
        name = NAMES.get(kind, f"{kind} g{group}".replace("none", "int4"))
        yield "lowq", name, HALF, partial(lowq, kind=kind, group=group)
    if "cublas" in peers:
        yield "cublas", "fp16", HALF, cublas
    for name in ("nvfp4", "mxfp4"):
        if "marlin" in peers:
            dtype = HALF if name == "nvfp4" else torch.bfloat16
            yield "marlin", name, dtype, partial(marlin, name=name, dtype=dtype)
    if "bitsandbytes" in peers:
        yield "bitsandbytes", "nf4 g64", HALF, bitsandbytes
    for name in ("nvfp4", "mxfp4"):
        if "humming" in peers:
            yield "humming", name, HALF, partial(humming, name=name)


def main() -> None:
    """Measure; print a line a row, write all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=LAYERS)
    parser.add_argument("--m", default=SMALL + ",1024")
    parser.add_argument("--peers", default="lowq,cublas,marlin,bitsandbytes,humming")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing more when so many have passed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start, device = time.monotonic(), torch.cuda.get_device_name()
    out = args.out or results_of(device) / "table_peers.json"
    shapes, Ms = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")], [int(m) for m in args.m.split(",")]
    stamp = {
        "gpu": device,
        "torch": torch.__version__,
        "date": str(datetime.date.today()),
        "script": "benchmarks/once/table_peers.py",
    }
    rows: list[dict[str, Any]] = []
    if "lowq" in args.peers:
        todo = [(random_weight(N, K, Scheme.of(4, g, k), HALF, 0), M) for N, K in shapes for k, g in OURS for M in Ms]
        chosen = [(registry.select(Call.of(inputs(M, p.K), p)), p, M) for p, M in todo]
        with ThreadPoolExecutor(16) as pool:  # everything is compiled before anything is timed
            list(pool.map(lambda c: c[0][0].launch(inputs(c[2], c[1].K), c[1], None, c[0][1]), chosen))
        del todo, chosen
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    for peer, name, dtype, make in series(args.peers.split(",")):
        for N, K in shapes:
            if time.monotonic() - start > args.seconds:
                print(f"no time left for {peer} {name} {N}x{K}", flush=True)
                continue
            try:
                weights, product, truth = layer = make(N, K)
                for M in Ms:
                    x = inputs(M, K, dtype)
                    y, wanted = product(weights[0], x), None if truth is None else truth(x)
                    row: dict[str, Any] = {
                        "peer": peer,
                        "format": name,
                        "N": N,
                        "K": K,
                        "M": M,
                        "x": str(dtype)[6:],
                        "error": None,
                    }
                    if wanted is not None:
                        some = wanted.abs().sum(0) > 0  # of lowq's, blocks of rows
                        row["error"] = float((y.float() - wanted)[:, some].norm() / wanted.norm())
                    row["us"] = round(timed(M, [partial(product, w, x) for w in weights]), 3)
                    rows.append(row)
                    print(row, flush=True)
                del layer, weights, product, truth
            except Exception as e:  # the others are still worth having
                print(f"{peer} {name} {N}x{K} failed: {type(e).__name__}: {e}"[:400], flush=True)
            torch.cuda.empty_cache()
            out.write_text(json.dumps(stamp | {"rows": rows}, indent=0))
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
