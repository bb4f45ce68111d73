"""Perplexity of calibrated checkpoints, as `lowq quantize` writes them: benchmarks/results/accuracy/calibrated.json.

    python benchmarks/accuracy_calibrated.py --models MODELS --data DATA [--calib FILE] [--only base] [--bits 4,2] [--group 64]
        [--method gptq,awq,lsq] [--rotate]

MODELS and DATA as for accuracy.py, whose texts and windows these are. Each cell runs the whole pipeline (bf16 scales and
zeros, the bundled calibration text unless told otherwise), then reads the checkpoint's own bytes back into an fp32 model. With
--rotate the method's name in the rows is "gptq --rotate".
"""

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from accuracy_rows import Judge, Results, Row, parser, run
from accuracy_rows import device as pick_device

from lowq_cli.files.quant_config import expand
from lowq_cli.files.source import open_source
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import pipeline
from lowq_cli.run.events import LayerDone
from lowq_packers.layouts import PackedWeight, unpack
from lowq_packers.scheme import BITS, Scheme

LEAVES = (".weight", ".weight_scale", ".weight_zero")


def dequantized(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Parameter name -> the fp32 values that a lowq checkpoint's bytes stand for; norms, embedding and head too."""
    found = {}
    with open_source(checkpoint) as source:
        stems = [n.removesuffix(".weight_scale") for n in source.headers if n.endswith(".weight_scale")]
        schemes = expand(source.config["quantization_config"], stems)
        for stem in stems:
            parts = [
                source.read(n).reshape(source.headers[n].shape) if (n := stem + leaf) in source.headers else None
                for leaf in LEAVES
            ]
            words, scales, zeros = parts
            K = scales.shape[1] * schemes[stem].group_size
            found[f"{stem}.weight"] = unpack(
                PackedWeight(words, scales, zeros, schemes[stem], words.shape[0], K, "rowstream")
            ).dequantize()
        kept = [n for n in source.headers if not n.endswith(LEAVES[1:]) and n not in found]
        found |= {n: source.read(n).reshape(source.headers[n].shape).float() for n in kept}
    return found


def fill(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Give a model the values of a checkpoint; its head is the embedding where the checkpoint has none."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.empty_like(table.weight)) if "lm_head.weight" in values else table.weight
    parameters = dict(model.named_parameters())
    for name, value in values.items():
        parameters[name].data.copy_(value)


def cells(model: str, args: argparse.Namespace) -> Iterator[Row]:
    """What each row is about: one per method, group and bits."""
    calib = {"calib": Path(args.calib).name if args.calib else "bundled", "calib_tokens": args.calib_tokens}
    for method, group, bits in itertools.product(args.method, args.group, args.bits):
        yield {
            "model": model, "bits": bits, "group": group, "bpw": Scheme(bits, group).bits_per_weight(),
            "method": method + " --rotate" * args.rotate, "stored": "bfloat16", **calib,
        }  # fmt: skip


def measure(folder: Path, args: argparse.Namespace, results: Results) -> Iterator[Row]:
    """One row per cell asked for."""
    wanted = results.wanted(cells(folder.name, args), args)
    judge = Judge(folder, args) if wanted else None
    for cell in wanted:
        assert judge
        with tempfile.TemporaryDirectory() as out:
            recipe = make_recipe(
                bits=cell["bits"], group=cell["group"], method=cell["method"].removesuffix(" --rotate"), rotate=args.rotate,
                calib=args.calib, calib_tokens=args.calib_tokens, lm_head="keep",
            )  # fmt: skip
            *events, finished = pipeline.run(folder, recipe, Path(out) / "q", device=pick_device())
            fill(judge.model, dequantized(Path(out) / "q"))
        layers = [e for e in events if isinstance(e, LayerDone)]
        yield cell | {
            "ppl": judge.ppl(), "seconds": round(finished.result.seconds, 1),
            "output_error": round(sum(e.error for e in layers) / max(len(layers), 1), 5),
        }  # fmt: skip


def flags() -> argparse.ArgumentParser:
    """The command line."""
    made = parser(__doc__, "calibrated.json", BITS)
    made.add_argument("--method", type=lambda text: text.split(","), default=["gptq", "awq"])
    made.add_argument("--rotate", action="store_true", help="rotate first")
    made.add_argument("--calib", help="calibration text instead of the bundled one")
    made.add_argument("--calib-tokens", type=int, default=65536)
    return made


def main() -> None:
    """Measure and write the file."""
    run(flags().parse_args(), measure)


if __name__ == "__main__":
    main()
