"""NVFP4 and MXFP4 with inputs rotated block by block (Hadamard matrices, as MR-GPTQ has them), against no rotation.

    python benchmarks/once/rotated_blocks.py MODEL --data DATA [--calib-tokens 16384] [--tokens 16384] [--out FILE.json]

W becomes W R, R of Hadamard blocks along a row, and its inputs x R: the product is the same, and the runtime would have to
rotate activations. Each linear alone, from the moments of the original model's inputs (no drift), by lsq and gptq. A row:
format, method, size of the block (0: none), KL divergence and perplexity on both texts.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scripts of benchmarks/
from accuracy import linears
from accuracy_rows import Judge
from peers import judged

from lowq_cli import quantizers
from lowq_cli.calibrate import texts
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.quantizers.gptq import Moments

FORMATS, BLOCKS = {"nvfp4": 16, "mxfp4": 32}, (0, 16, 32, 128)


def rotation(size: int, K: int, device: torch.device) -> torch.Tensor:
    """(K, K): Hadamard matrices along the diagonal, the identity for size 0."""
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < size:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return torch.block_diag(*[H / len(H) ** 0.5] * (K // len(H))).to(device, torch.float32)


@torch.inference_mode()
def moments_of(judge: Judge, tokens: int) -> dict[str, torch.Tensor]:
    """Linear's name -> sum over the bundled text of x x^T."""
    layers, sums = linears(judge.model), dict[str, torch.Tensor]()

    def count(name: str, x: torch.Tensor) -> None:
        rows = x.flatten(0, -2)
        sums[name] = sums.get(name, 0) + rows.T @ rows

    hooks = [m.register_forward_pre_hook(lambda _, x, n=n: count(n, x[0])) for n, m in layers.items()]
    for batch in texts.Text.read(texts.BUNDLED).windows(judge.tokenizer, tokens, judge.model).split(texts.BATCH):
        judge.model(batch.to(judge.model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return sums


def main() -> None:
    """Every format, block and method."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", type=Path)
    made.add_argument("--data", type=Path, required=True)
    made.add_argument("--calib-tokens", type=int, default=65536)
    made.add_argument("--tokens", type=int, default=16384)
    made.add_argument("--out", type=Path)
    args = made.parse_args()
    judge, dense = Judge(args.model, args), Judge(args.model, args).model
    sums, layers = moments_of(judge, args.calib_tokens), linears(judge.model)
    original = {n: m.weight.data.clone() for n, m in layers.items()}
    rows: list[dict[str, Any]] = []
    for kind, group in FORMATS.items():
        scheme = make_recipe(format=kind).scheme(4, group)
        for size in BLOCKS:
            for method in ("lsq", "gptq"):
                for n, m in layers.items():
                    R = rotation(size, original[n].shape[1], original[n].device)
                    W, H = original[n] @ R, R.T @ sums[n] @ R
                    given: dict[str, Any] = {"moments": Moments(H, None, args.calib_tokens)} if method == "gptq" else {}
                    m.weight.data.copy_(quantizers.get(method)(W, scheme, torch.float32, **given).dequantize() @ R.T)
                rows.append({"model": args.model.name, "format": kind, "method": method, "block": size} | judged(judge, dense))
                print(json.dumps(rows[-1]), flush=True)
                if args.out:
                    args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
