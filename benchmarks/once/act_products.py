"""Time products of 8-bit activations with packed codes against cuBLAS, with the rows of prompts and an 8B's shapes.

    python benchmarks/once/act_products.py --out FILE.json [--bits 4,8,2] [--rows 256,1024,4096]

us of one product, the rounding of x included: int8 and e4m3 x, what dispatch takes for 16 bits, cuBLAS fp16, and cuBLAS fp8 of
operands that are rounded already, a scale for each row. Timed in turn with rests (fp8_speed.in_turn).
"""

import argparse
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scripts of benchmarks/
from fp8_speed import ACTS, DEVICE, in_turn, repeated

from lowq_kernels.activations import rounded
from lowq_kernels.dispatch.precompile import launch_all
from lowq_kernels.dispatch.registry import Call, kernels, select
from lowq_kernels.dispatch.timing import rotation
from lowq_kernels.fp8.block_quant import fp8_block_quant
from lowq_packers import fp8
from lowq_packers.layouts import PackedWeight, pack
from lowq_packers.qtensor import QuantizedTensor

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
Calls = dict[str, list[Callable[[], object]]]


def packed(N: int, K: int, bits: int) -> PackedWeight:
    """Random codes in groups of 128 with float zeros."""
    g = torch.Generator(DEVICE).manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (N, K), device=DEVICE, dtype=torch.uint8, generator=g)
    scales, zeros = (torch.rand(2, N, K // 128, device=DEVICE, generator=g) * 0.009 + 0.001).half()
    return pack(QuantizedTensor(codes, scales, (zeros * 100 * ((1 << bits) - 1)).half(), bits, 128), "tile")


def ours(x: torch.Tensor, copies: list[PackedWeight]) -> Calls:
    """What multiplies x, by how x is rounded."""
    found: Calls = {}
    for act in ("none", *ACTS):
        call = Call.of(x, copies[0], act)
        spec = select(call)[0] if act == "none" else kernels()[f"cuda/tile_{act}"]
        if spec.why_not(call) is None:
            config = select(call)[1] if act == "none" else spec.default_config(call, spec.legal_configs(call))
            found[act] = [partial(spec.launch, x, p, None, config) for p in copies]
    return found


def cublas(x: torch.Tensor, N: int) -> Calls:
    """cuBLAS of 16 bits and of fp8."""
    w = torch.randn(N, x.shape[1], device=DEVICE).half()
    w8, x8 = fp8.quantize(w.float(), (1, w.shape[1])), fp8_block_quant(x.bfloat16(), (1, w.shape[1]))
    how: dict[str, Any] = {"scale_a": x8.scales, "scale_b": w8.scales.t(), "out_dtype": torch.bfloat16}
    return {"cublas fp16": [lambda: x @ w.T] * 3, "cublas fp8": [lambda: torch._scaled_mm(x8.q, w8.q.t(), **how)] * 3}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: Callable[[str], tuple[int, ...]] = lambda s: tuple(map(int, s.split(",")))  # noqa: E731
    ask.add_argument("--bits", type=numbers, default=(4, 8, 2))
    ask.add_argument("--rows", type=numbers, default=(256, 1024, 4096))
    ask.add_argument("--out", type=Path, required=True)
    args = ask.parse_args()
    rows: list[dict[str, Any]] = []
    cells = [(bits, N, K, M) for bits in args.bits for N, K in SHAPES for M in args.rows]
    weights = {(bits, N, K): packed(N, K, bits) for bits in args.bits for N, K in SHAPES}
    inputs = {(M, K): torch.randn(M, K, device=DEVICE).half() for _, _, K, M in cells}
    work = [c[0] for bits, N, K, M in cells for c in ours(inputs[M, K], [weights[bits, N, K]]).values()]
    launch_all(work, lambda n, of: None)
    for bits, N, K, M in cells:
        x = inputs[M, K]
        calls = ours(x, repeated(weights[bits, N, K], min(3, rotation(N * K * bits // 8)))) | cublas(x, N)
        calls |= {f"rounding {act}": [partial(rounded, x, act)] * 3 for act in ACTS}
        rows.append({"bits": bits, "N": N, "K": K, "M": M, "us": in_turn(calls)})
        print(json.dumps(rows[-1]), flush=True)
        found = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": datetime.now(UTC).date().isoformat(),
        }
        args.out.write_text(json.dumps(found | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
