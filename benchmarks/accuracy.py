"""Perplexity of every data-free method beside the hqq package: benchmarks/results/accuracy/data_free.json.

    python benchmarks/accuracy.py --models MODELS --data DATA [--only base] [--bits 4,2] [--group 64] [--methods lsq]

MODELS holds one folder per model, DATA the texts wikitext2_test.txt and mix_valid_sample.txt. Every linear layer but
lm_head is replaced by its dequantized self and the model read in fp32. Scales and zeros are fp32, as the package computes
them; the default method is measured again with them in bf16 (`stored`: what a checkpoint holds). The package runs on the CPU
(its GPU solver computes in fp16 and gives other codes). `render.py` draws docs/accuracy.md from the file.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accuracy_rows import Judge, Results, Row, parser, run

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


def cells(model: str, args: argparse.Namespace) -> Iterator[Row]:
    """What each row is about: the unquantized model, then every method at each width and group size."""
    if not args.methods:
        yield {"model": model, "method": "fp32"}
    for bits, group in itertools.product(args.bits, args.group):
        default = quantizers.default_method(bits, group)
        names = [("hqq package", "float32"), *((m, "float32") for m in quantizers.data_free()), (default, "bfloat16")]
        for name, stored in names:
            if not args.methods or name in args.methods:
                bpw = Scheme(bits, group).bits_per_weight()
                yield {"model": model, "bits": bits, "group": group, "bpw": bpw, "method": name, "stored": stored}


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Every linear layer but lm_head, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in n}


def measure(folder: Path, args: argparse.Namespace, results: Results) -> Iterator[Row]:
    """One row per cell asked for."""
    wanted = results.wanted(cells(folder.name, args), args)
    if not wanted:
        return
    judge = Judge(folder, args)
    layers = linears(judge.model)
    original = {n: m.weight.data.clone() for n, m in layers.items()}
    for cell in wanted:
        if "bits" not in cell:
            for n, m in layers.items():
                m.weight.data.copy_(original[n])
            yield cell | {"ppl": judge.ppl()}
            continue
        dtype = torch.bfloat16 if cell["stored"] == "bfloat16" else None
        replace = hqq_package if cell["method"] == "hqq package" else ours(cell["method"], dtype)
        start, squared, total = time.perf_counter(), 0.0, 0.0
        for n, m in layers.items():
            m.weight.data.copy_(replace(original[n], Scheme(cell["bits"], cell["group"])))
        seconds = time.perf_counter() - start
        for n, m in layers.items():
            squared += float((m.weight.data - original[n]).double().square().sum())
            total += float(original[n].double().square().sum())
        error = round(math.sqrt(squared / total), 5)
        yield cell | {"rel_error": error, "seconds": round(seconds, 2), "ppl": judge.ppl()}


def flags() -> argparse.ArgumentParser:
    """The command line."""
    made = parser(__doc__, "data_free.json", BITS, ("hqq",))
    made.add_argument("--methods", type=lambda text: text.split(","), help='only these ("hqq package", rtn, hqq, lsq)')
    return made


def main() -> None:
    """Measure and write the file."""
    run(flags().parse_args(), measure)


if __name__ == "__main__":
    main()
