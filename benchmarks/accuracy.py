"""Perplexity of every data-free method beside the hqq package: benchmarks/results/accuracy/data_free.json.

    python benchmarks/accuracy.py --models MODELS --data DATA [--only base] [--bits 4,2] [--group 64] [--methods lsq]

MODELS holds one folder per model, DATA the texts wikitext2_test.txt and mix_valid_sample.txt. Every linear layer but
lm_head is replaced by its dequantized self and the model read in fp32. Scales and zeros are fp32, as the package computes
them; the default method is measured again with them in bf16 (`stored`: what a checkpoint holds). The package runs on the CPU
(its GPU solver computes in fp16 and gives other codes). `render.py` draws docs/accuracy.md from the file.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accuracy_rows import Judge, Results, Row, folders, parser

from lowq_cli import quantizers
from lowq_packers.scheme import BITS, Scheme

Replace = Callable[[torch.Tensor, Scheme], torch.Tensor]


def hqq_package(W: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """W as the hqq package stores it: axis 1, its own defaults, on the CPU."""
    from hqq.core.quantize import Quantizer

    codes, meta = Quantizer.quantize(
        W.cpu(),
        nbits=scheme.bits,
        group_size=scheme.group_size,
        axis=1,
        round_zero=scheme.bits == 4,
        device="cpu",
        bitpack=False,
    )
    return ((codes - meta["zero"]) * meta["scale"]).reshape(W.shape).to(W.device)


def ours(method: str, dtype: torch.dtype | None = None) -> Replace:
    """W as one of lowq's methods stores it, companions in `dtype`."""
    return lambda W, scheme: quantizers.get(method)(W, scheme, dtype).dequantize()


def methods(bits: int, group: int) -> Iterator[tuple[str, str, Replace]]:
    """(name, dtype of the companions, replacement) of what is compared at a width and group size."""
    yield "hqq package", "float32", hqq_package
    for name in quantizers.data_free():
        yield name, "float32", ours(name)
    default = quantizers.default_method(bits, group)
    yield default, "bfloat16", ours(default, torch.bfloat16)


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Every linear layer but lm_head, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in n}


def measure(folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    """One row per bits, group and method, and one for the unquantized model unless only some methods are asked for."""
    judge = Judge(folder, args)
    layers = linears(judge.model)
    original = {n: m.weight.data.clone() for n, m in layers.items()}
    if not args.methods:
        yield {"model": folder.name, "method": "fp32", "ppl": judge.ppl()}
    for bits in args.bits:
        for group in args.group:
            scheme = Scheme(bits, group)
            for name, stored, replace in methods(bits, group):
                if args.methods and name not in args.methods:
                    continue
                start, squared, total = time.perf_counter(), 0.0, 0.0
                for n, m in layers.items():
                    m.weight.data.copy_(replace(original[n], scheme))
                seconds = time.perf_counter() - start
                for n, m in layers.items():
                    squared += float((m.weight.data - original[n]).double().square().sum())
                    total += float(original[n].double().square().sum())
                yield {
                    "model": folder.name, "bits": bits, "group": group, "bpw": scheme.bits_per_weight(), "method": name,
                    "stored": stored, "rel_error": round(math.sqrt(squared / total), 5), "seconds": round(seconds, 2),
                    "ppl": judge.ppl(),
                }  # fmt: skip


def main() -> None:
    """Measure and write the file."""
    flags = parser(__doc__, "data_free.json", BITS, ("hqq",))
    flags.add_argument("--methods", type=lambda text: text.split(","), help='only these ("hqq package", rtn, hqq, lsq)')
    args = flags.parse_args()
    results = Results(args)
    for folder in folders(args):
        results.take(measure(folder, args))


if __name__ == "__main__":
    main()
