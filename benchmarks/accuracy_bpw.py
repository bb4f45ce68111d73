"""Mixed widths against uniform ones at the same bits per weight: benchmarks/results/accuracy/mixed.json.

    python benchmarks/accuracy_bpw.py --models MODELS --data DATA [--only base] [--method auto,gptq] [--part all,linears]

Each cell runs `lowq quantize --bpw` (or one scheme for all weights) and reads the checkpoint's bytes back into an fp32 model.
part: "all" has the embedding take part (these models' head is their embedding), "linears" keeps it (--lm-head keep).
`expected` is the KL divergence that the plan foretells; `kl` and `unquantized` (perplexity) are measured on the first text.
"""

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from accuracy_calibrated import dequantized, fill
from accuracy_rows import TEXTS, Judge, Results, Row, parser, run
from accuracy_rows import device as pick_device
from transformers import AutoModelForCausalLM

from lowq_cli.evaluate import perplexity
from lowq_cli.plan.recipe import Recipe, make_recipe
from lowq_cli.run import pipeline
from lowq_cli.run.writer import SENSITIVITY
from lowq_packers.scheme import Scheme

UNIFORM = ((2, 128), (2, 64), (3, 128), (3, 64), (4, 128), (4, 64), (4, 32))


def cells(model: str, args: argparse.Namespace) -> Iterator[Row]:
    """What each row is about: one per part, method and target, and per uniform scheme."""
    for part, method in itertools.product(args.part, args.method):
        targets = [{"target": t} for t in args.targets]
        uniform = [{"bits": b, "group": g} for b, g in UNIFORM if b in args.bits]
        for what in targets + uniform:
            yield {"model": model, **what, "method": method, "stored": "bfloat16", "part": part}


def measure(folder: Path, args: argparse.Namespace, results: Results) -> Iterator[Row]:
    """One row per cell asked for."""
    wanted = results.wanted(cells(folder.name, args), args)
    if not wanted:
        return
    judge = Judge(folder, args)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(pick_device())
    ids = judge.texts[next(iter(TEXTS))]
    known: dict[tuple[str, str], bytes] = {}  # (part, method) -> sensitivities, which are measured once
    for cell in wanted:
        asked = cell["part"], cell["method"]
        with tempfile.TemporaryDirectory() as out:
            made = Path(out) / "q"
            recipe = _recipe(cell)
            if "target" in cell and asked in known:
                made.mkdir()
                (made / SENSITIVITY).write_bytes(known[asked])
            planned, *_, finished = pipeline.run(folder, recipe, made, device=pick_device())
            fill(judge.model, dequantized(made))
        mixed = planned.mixed
        if mixed:
            known[asked] = mixed.cache
        bpw = mixed.bpw if mixed else Scheme(cell["bits"], cell["group"]).bits_per_weight()
        report = perplexity.evaluate(judge.model, ids, dense)
        yield cell | {
            "bpw": round(bpw, 4), "ppl": judge.ppl(), "unquantized": round(report.base_ppl, 4), "kl": round(report.kl, 5),
            "expected": mixed and round(mixed.error, 5), "seconds": round(finished.result.seconds, 1),
            "schemes": mixed and {s.group: str(s.scheme or "kept") for s in mixed.shares},
        }  # fmt: skip


def _recipe(cell: Row) -> Recipe:
    """What `lowq quantize` is asked for."""
    if "target" in cell:
        return make_recipe(
            bpw=cell["target"], method=cell["method"], **({"lm_head": "keep"} if cell["part"] == "linears" else {})
        )
    table = [] if cell["part"] == "linears" else [f"embed_tokens={cell['bits']}:{cell['group']}"]
    return make_recipe(bits=cell["bits"], group=cell["group"], method=cell["method"], overrides=table)


def flags() -> argparse.ArgumentParser:
    """The command line."""
    made = parser(__doc__, "mixed.json", (4, 3, 2))
    made.add_argument("--method", type=lambda text: text.split(","), default=["auto", "gptq"])
    made.add_argument("--part", type=lambda text: text.split(","), default=["all", "linears"])
    made.add_argument(
        "--targets", type=lambda text: [float(t) for t in text.split(",") if t], default=[2.5, 3.0, 3.5, 4.0, 4.5]
    )
    return made


def main() -> None:
    """Measure and write the file."""
    run(flags().parse_args(), measure)


if __name__ == "__main__":
    main()
