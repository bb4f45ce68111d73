"""What quantizing the output head alone costs: benchmarks/results/accuracy/head.json.

    python benchmarks/accuracy_head.py --models MODELS --data DATA [--only base] [--bits 8,4] [--group 64,128]

The head is untied from the embedding, which stays as it is, and quantized by the default method of its width; the linear
layers below are unquantized, or 4 or 2 bits at group 64; fp32 otherwise. Rows without bits are the head as it is. The recipe's
default for the head comes from here.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from accuracy import linears, ours
from accuracy_rows import Judge, Results, Row, parser, run

from lowq_cli.quantizers import default_method
from lowq_packers.scheme import Scheme

BODIES = (None, Scheme(4, 64), Scheme(2, 64))


def measure(folder: Path, args: argparse.Namespace, _: Results) -> Iterator[Row]:
    """One row per body and head."""
    judge = Judge(folder, args)
    head = judge.model.lm_head
    original = head.weight.data.clone()
    head.weight = torch.nn.Parameter(original.clone(), requires_grad=False)
    layers = linears(judge.model)
    kept = {n: m.weight.data.clone() for n, m in layers.items()}
    for body in BODIES:
        if body is not None:
            replace = ours(default_method(body.bits, body.group_size), torch.bfloat16)
            for n, m in layers.items():
                m.weight.data.copy_(replace(kept[n], body))
        name = "body unquantized" if body is None else f"body {body}"
        head.weight.data.copy_(original)
        whole = judge.ppl()
        yield {"model": folder.name, "measure": name, "method": "", "ppl": whole}
        for scheme in (Scheme(bits, group) for bits in args.bits for group in args.group):
            method = default_method(scheme.bits, scheme.group_size)
            head.weight.data.copy_(ours(method, torch.bfloat16)(original, scheme))
            ppl = judge.ppl()
            percent = {text: round(100 * (ppl[text] / whole[text] - 1), 3) for text in ppl}
            own = {"bits": scheme.bits, "group": scheme.group_size, "method": method}
            yield {"model": folder.name, "measure": name, **own, "ppl": ppl, "increase_pct": percent}


def main() -> None:
    """Measure and write the file."""
    run(parser(__doc__, "head.json", (8, 4, 3)).parse_args(), measure)


if __name__ == "__main__":
    main()
