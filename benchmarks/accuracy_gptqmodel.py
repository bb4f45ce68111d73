"""Perplexity of GPTQModel's checkpoints, calibrated on the text and windows that lowq takes: adds rows to calibrated.json.

    python benchmarks/accuracy_gptqmodel.py --models MODELS --data DATA [--only base] [--bits 4,2] [--group 64] [--sym]

Needs an environment with gptqmodel (7.7.0 was measured) beside lowq. Its own defaults, asymmetric as lowq's float zeros are
unless --sym; scales in fp16, zeros whole. The checkpoint's bytes are read back by lowq's reader of the format.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from accuracy_rows import Judge, Results, Row, parser, run
from accuracy_rows import device as pick_device

from lowq_cli.calibrate import texts
from lowq_cli.interop.foreign import open_decoded
from lowq_packers.scheme import Scheme


def cells(model: str, args: argparse.Namespace) -> Iterator[Row]:
    """What each row is about: one per group and bits."""
    for group, bits in itertools.product(args.group, args.bits):
        yield {
            "model": model, "bits": bits, "group": group, "bpw": Scheme(bits, group).bits_per_weight(),
            "method": "gptqmodel sym" if args.sym else "gptqmodel", "stored": "float16",
            "calib": Path(args.calib).name if args.calib else "bundled", "calib_tokens": args.calib_tokens,
        }  # fmt: skip


def measure(folder: Path, args: argparse.Namespace, results: Results) -> Iterator[Row]:
    """One row per cell asked for."""
    wanted = results.wanted(cells(folder.name, args), args)
    if not wanted:
        return
    from gptqmodel import GPTQModel, QuantizeConfig

    judge = Judge(folder, args)
    parameters = dict(judge.model.named_parameters())
    ids = texts.choose_windows(judge.tokenizer, texts.read_text(args.calib), args.calib_tokens, texts.WINDOW)
    samples = [{"input_ids": w.unsqueeze(0), "attention_mask": w.new_ones(1, len(w))} for w in ids]
    for cell in wanted:
        with tempfile.TemporaryDirectory() as out:
            start = time.monotonic()
            config = QuantizeConfig(bits=cell["bits"], group_size=cell["group"], sym=args.sym, device=pick_device())
            model = GPTQModel.load(str(folder), config)
            model.quantize(samples, batch_size=texts.BATCH)
            model.save(out)
            seconds = time.monotonic() - start
            with open_decoded(out) as source:
                for name in source.dense:
                    parameters[name].data.copy_(source.read(name).reshape(parameters[name].shape))
        yield cell | {"ppl": judge.ppl(), "seconds": round(seconds, 1)}


def flags() -> argparse.ArgumentParser:
    """The command line."""
    made = parser(__doc__, "calibrated.json", (8, 4, 3, 2), ("gptqmodel",))
    made.add_argument("--calib", help="calibration text instead of the bundled one")
    made.add_argument("--calib-tokens", type=int, default=65536)
    made.add_argument("--sym", action="store_true", help="symmetric codes, which is its default")
    return made


def main() -> None:
    """Measure and add to the file."""
    run(flags().parse_args(), measure)


if __name__ == "__main__":
    main()
