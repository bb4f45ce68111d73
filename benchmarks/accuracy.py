"""Measure perplexity of quantized models, for docs/accuracy.md: benchmarks/results/accuracy/*.json.

    python benchmarks/accuracy.py free       --models MODELS --data DATA    every data-free method beside the hqq package
    python benchmarks/accuracy.py calibrated --models MODELS --data DATA [--method gptq,awq] [--rotate] [--calib FILE]
    python benchmarks/accuracy.py gptqmodel  --models MODELS --data DATA [--sym]    GPTQModel's rows of calibrated.json
    python benchmarks/accuracy.py bpw        --models MODELS --data DATA    mixed widths and uniform ones
    python benchmarks/accuracy.py tables     --models MODELS --data DATA    values from tables beside grids of as many bits
    python benchmarks/accuracy.py head       --models MODELS --data DATA    the output head alone
    python benchmarks/accuracy.py holes    what the files lack of all this; --missing measures it, --shard 0,4 a quarter of it
    python benchmarks/accuracy.py merge FILE.json ...    rows measured elsewhere, each into the result file of the same name

MODELS holds one folder per model, DATA the texts wikitext2_test.txt and mix_valid_sample.txt; --only base, --bits 4,2 and
--group 64 measure less. A cell measured again replaces its row. Models are read in fp32.

free: every linear layer but lm_head is replaced by its dequantized self. Scales and zeros are fp32, as the hqq package computes
them; the default method is measured again with them in bf16 (`stored`: what a checkpoint holds). The package runs on the CPU
(its GPU solver computes in fp16 and gives other codes).
calibrated: the whole pipeline (bf16 scales and zeros, the bundled calibration text), then the checkpoint's own bytes read back.
gptqmodel: 7.7.0 was measured, in an environment with lowq; its own defaults, asymmetric unless --sym; scales in fp16, zeros
whole; calibrated on the text and windows that lowq takes.
bpw: `expected` is the KL divergence that the plan foretells; `kl` and `unquantized` (perplexity) are of the first text. part
"all" has the embedding take part (these models' head is their embedding), "linears" keeps it (--lm-head keep).
tables: `measure` is the scheme's kind (packers/scheme.py); rtn and lsq as free, others as calibrated; 16-bit scales are bf16.
head: untied from the embedding and quantized by its width's default; linear layers unquantized, or 4 or 2 bits at group 64.
The recipe's default for the head comes from here.
"""

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accuracy_rows import RESULTS, TEXTS, Judge, Row, device, merge, missing, parser, run, words

from lowq_cli import quantizers
from lowq_cli.calibrate import texts
from lowq_cli.calibrate.mixed import Allocation
from lowq_cli.evaluate import perplexity
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.interop.foreign import DecodedSource, open_decoded
from lowq_cli.plan.recipe import Recipe, make_recipe
from lowq_cli.run import pipeline
from lowq_cli.run.events import Event, Finished, LayerDone
from lowq_packers.scheme import BITS, ZERO_KINDS, Scheme

UNIFORM = ((2, 128), (2, 64), (3, 128), (3, 64), (4, 128), (4, 64), (4, 32))
BODIES = (None, Scheme(4, 64), Scheme(2, 64))  # below a quantized head
KINDS = (  # of tables.json: kind, bits, group; at each number of bits per weight a table and a grid or more
    *(("e2m1/e4m3", 4, 16), ("e2m1/e8m0", 4, 32), ("nf4", 4, 64), ("nf4", 4, 32), ("fitted/e4m3", 4, 16)),
    *((kind, bits, group) for bits in (4, 3, 2) for kind in ("fitted", "none") for group in (64, 32)),
    *(("float", bits, group) for bits in (4, 3, 2) for group in (128, 64)),
)
FORMATS = {"e2m1/e4m3": "nvfp4", "e2m1/e8m0": "mxfp4", "nf4": "nf4", "fitted": "table"}  # kind -> --format
MODELS = ("base", "story")  # whose tables are shown
Args = argparse.Namespace


class Experiment(NamedTuple):
    """What a subcommand measures: its file, default widths, packages that its rows name, flags, cells, and a row per cell."""

    out: str
    bits: tuple[int, ...]
    packages: tuple[str, ...]
    flags: dict[str, Row]
    cells: Callable[[str, Args], Iterator[Row]]
    measure: Callable[[Path, Judge, Sequence[Row], Args], Iterator[Row]]


def hqq_package(W: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """W as the hqq package stores it: axis 1, its own defaults, on the CPU."""
    from hqq.core.quantize import Quantizer

    how = {"axis": 1, "round_zero": scheme.bits == 4, "device": "cpu", "bitpack": False}
    codes, meta = Quantizer.quantize(W.cpu(), nbits=scheme.bits, group_size=scheme.group_size, **how)
    return ((codes - meta["zero"]) * meta["scale"]).reshape(W.shape).to(W.device)


def ours(W: torch.Tensor, scheme: Scheme, method: str = "", dtype: torch.dtype | None = torch.bfloat16) -> torch.Tensor:
    """W as a method of lowq's, or its default one, stores it, scales and zeros in `dtype`."""
    method = method or quantizers.default_method(scheme.bits, scheme.group_size)
    return quantizers.get(method)(W, scheme, dtype).dequantize()


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Every linear layer but lm_head, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in n}


def free_cells(model: str, args: Args) -> Iterator[Row]:
    """The unquantized model, then every method at each width and group size."""
    if not args.methods:
        yield {"model": model, "method": "fp32"}
    for bits, group in itertools.product(args.bits, args.group):
        default = quantizers.default_method(bits, group)
        free = [m for m in quantizers.methods() if not quantizers.needs_text(m)]
        names = [("hqq package", "float32"), *((m, "float32") for m in free), (default, "bfloat16")]
        for name, stored in names:
            if not args.methods or name in args.methods:
                bpw = Scheme(bits, group).bits_per_weight()
                yield {"model": model, "bits": bits, "group": group, "bpw": bpw, "method": name, "stored": stored}


def free(folder: Path, judge: Judge, wanted: Sequence[Row], args: Args) -> Iterator[Row]:
    """Weights replaced one by one."""
    layers = linears(judge.model)
    original = {n: m.weight.data.clone() for n, m in layers.items()}
    total = sum(float(w.double().square().sum()) for w in original.values())
    for cell in wanted:
        start = time.perf_counter()
        for n, m in layers.items():
            if "bits" not in cell:
                w = original[n]
            elif "measure" in cell:
                w = ours(original[n], Scheme.of(cell["bits"], cell["group"], cell["measure"]), cell["method"])
            elif cell["method"] == "hqq package":
                w = hqq_package(original[n], Scheme(cell["bits"], cell["group"]))
            else:
                dtype = torch.bfloat16 if cell["stored"] == "bfloat16" else None
                w = ours(original[n], Scheme(cell["bits"], cell["group"]), cell["method"], dtype)
            m.weight.data.copy_(w)
        seconds = round(time.perf_counter() - start, 2)
        squared = sum(float((m.weight.data - original[n]).double().square().sum()) for n, m in layers.items())
        error = {"rel_error": round(math.sqrt(squared / total), 5), "seconds": seconds} if "bits" in cell else {}
        yield cell | error | {"ppl": judge.ppl()}


def tables_cells(model: str, args: Args) -> Iterator[Row]:
    """The unquantized model, then each kind of scheme by each method, the bits of a weight and its scales in all the same."""
    if args.method[0] == "rtn":
        yield {"model": model, "method": "fp32"}
    for method, (kind, bits, group) in itertools.product(args.method, (k for k in KINDS if k[0] in (args.kind or k))):
        bpw = Scheme.of(bits, group, kind).bits_per_weight()
        about = {"model": model, "measure": kind, "bits": bits, "group": group, "bpw": bpw, "method": method}
        if bits in args.bits and not quantizers.needs_text(method):
            yield about
        elif bits in args.bits and (kind in ZERO_KINDS or kind in FORMATS):
            yield about | text_of(args)


def tables(folder: Path, judge: Judge, wanted: Sequence[Row], args: Args) -> Iterator[Row]:
    """The weights' own methods first, from the model as it is."""
    yield from free(folder, judge, [cell for cell in wanted if "calib" not in cell], args)
    yield from calibrated(folder, judge, [cell for cell in wanted if "calib" in cell], args)


def text_of(args: Args) -> Row:
    """The calibration text, as a row names it."""
    return {"calib": Path(args.calib).name if args.calib else "bundled", "calib_tokens": args.calib_tokens}


def calibrated_cells(model: str, args: Args) -> Iterator[Row]:
    """One per method, group and bits."""
    for method, group, bits in itertools.product(args.method, args.group, args.bits):
        about = {"model": model, "bits": bits, "group": group, "bpw": Scheme(bits, group).bits_per_weight()}
        yield about | {"method": method + " --rotate" * args.rotate, "stored": "bfloat16"} | text_of(args)


def calibrated(folder: Path, judge: Judge, wanted: Sequence[Row], args: Args) -> Iterator[Row]:
    """Checkpoints as `lowq quantize` writes them."""
    for cell in wanted:
        kind = cell.get("measure", "float")
        how = {"format": FORMATS[kind]} if kind in FORMATS else {"zero": kind}
        recipe = make_recipe(
            bits=cell["bits"], group=cell["group"], method=cell["method"].removesuffix(" --rotate"), rotate=args.rotate,
            calib=args.calib or "bundled", calib_tokens=args.calib_tokens, lm_head="keep", **how,
        )  # fmt: skip
        made = quantized(folder, recipe, judge)
        errors = [e.error for e in made.events if isinstance(e, LayerDone)]
        error = round(sum(errors) / max(len(errors), 1), 5)
        yield cell | {"ppl": judge.ppl(), "seconds": made.seconds, "output_error": error}


class Made(NamedTuple):
    """A checkpoint that was made: what happened, in how many seconds, and how a budget of bits was spent."""

    events: list[Event]
    seconds: float
    mixed: Allocation | None

    @property
    def schemes(self) -> dict[str, str] | None:
        """Group of weights -> its scheme, of a budget."""
        return {s.group: str(s.scheme or "kept") for s in self.mixed.shares} if self.mixed else None


def quantized(folder: Path, recipe: Recipe, judge: Judge) -> Made:
    """What `lowq quantize` makes of the model in `folder`; the judge's model has its values from then on. An embedding that is
    also the head stays in 16 bits unless the recipe says otherwise: the tables compare the linear layers."""
    if recipe.embedding == "auto":
        recipe = replace(recipe, embedding="keep")
    with tempfile.TemporaryDirectory() as out:
        checkpoint = Path(out) / "q"
        with pipeline.prepare(folder, recipe, checkpoint, device=device()) as prepared:
            *events, finished = pipeline.execute(prepared)
        assert isinstance(finished, Finished)
        fill(judge.model, dequantized(checkpoint))
    return Made(events, round(finished.result.seconds, 1), prepared.mixed)


def dequantized(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Parameter name -> the fp32 values that a lowq checkpoint's bytes stand for; norms, embedding and head too."""
    found = open_checkpoint(checkpoint)
    return {
        f"{t.name}.weight" if t.scheme else t.name: (
            found.read_matrix(t).dequantize() if t.scheme else found.read_plain(t).float()
        )
        for t in found.tensors
    }


def fill(model: Any, values: dict[str, torch.Tensor]) -> None:
    """Give a model the values of a checkpoint; its head is the embedding where the checkpoint has none."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.empty_like(table.weight)) if "lm_head.weight" in values else table.weight
    parameters = dict(model.named_parameters())
    for name, value in values.items():
        parameters[name].data.copy_(value)


def gptqmodel_cells(model: str, args: Args) -> Iterator[Row]:
    """One per group and bits."""
    for group, bits in itertools.product(args.group, args.bits):
        about = {"model": model, "bits": bits, "group": group, "bpw": Scheme(bits, group).bits_per_weight()}
        yield about | {"method": "gptqmodel sym" if args.sym else "gptqmodel", "stored": "float16"} | text_of(args)


def gptqmodel(folder: Path, judge: Judge, wanted: Sequence[Row], args: Args) -> Iterator[Row]:
    """GPTQModel's checkpoints, read back by lowq's reader of the format."""
    from gptqmodel import GPTQModel, QuantizeConfig

    parameters = dict(judge.model.named_parameters())
    ids = texts.Text.read(args.calib).windows(judge.tokenizer, args.calib_tokens, judge.model)
    samples = [{"input_ids": w.unsqueeze(0), "attention_mask": w.new_ones(1, len(w))} for w in ids]
    for cell in wanted:
        with tempfile.TemporaryDirectory() as out:
            start = time.monotonic()
            config = QuantizeConfig(bits=cell["bits"], group_size=cell["group"], sym=args.sym, device=device())
            model = GPTQModel.load(str(folder), config)
            model.quantize(samples, batch_size=texts.BATCH)
            model.save(out)
            seconds = time.monotonic() - start
            with open_decoded(out) as source:
                assert isinstance(source, DecodedSource)
                for name in source.dense:
                    parameters[name].data.copy_(source.read(name).reshape(parameters[name].shape))
        yield cell | {"ppl": judge.ppl(), "seconds": round(seconds, 1)}


def bpw_cells(model: str, args: Args) -> Iterator[Row]:
    """One per part, method and target, and per uniform scheme."""
    for part, method in itertools.product(args.part, args.method):
        uniform = [{"bits": b, "group": g} for b, g in UNIFORM if b in args.bits]
        for what in [{"target": t} for t in args.targets] + uniform:
            yield {"model": model, **what, "method": method, "stored": "bfloat16", "part": part}


def bpw(folder: Path, judge: Judge, wanted: Sequence[Row], args: Args) -> Iterator[Row]:
    """`lowq quantize --bpw`, or one scheme for all weights."""
    dense, ids = Judge(folder, args).model, judge.texts[next(iter(TEXTS))]
    for cell in wanted:
        linears_alone = cell["part"] == "linears"
        if "target" in cell:
            kept = {"lm_head": "keep"} if linears_alone else {}
            recipe = make_recipe(bpw=cell["target"], method=cell["method"], **kept)
        else:
            table = [] if linears_alone else [f"embed_tokens={cell['bits']}:{cell['group']}"]
            recipe = make_recipe(bits=cell["bits"], group=cell["group"], method=cell["method"], overrides=table)
        made = quantized(folder, recipe, judge)
        mixed = made.mixed
        bits = mixed.bpw if mixed else Scheme(cell["bits"], cell["group"]).bits_per_weight()
        report = perplexity.evaluate(judge.model, ids, dense)
        yield cell | {
            "bpw": round(bits, 4), "ppl": judge.ppl(), "unquantized": report.base_ppl and round(report.base_ppl, 4),
            "kl": report.kl and round(report.kl, 5),
            "expected": mixed and round(mixed.error, 5), "seconds": made.seconds, "schemes": made.schemes,
        }  # fmt: skip


def _below(body: Scheme | None) -> str:
    return "body unquantized" if body is None else f"body {body}"


def head_cells(model: str, args: Args) -> Iterator[Row]:
    """One per body and head; without bits the head as it is."""
    for body in BODIES:
        about = {"model": model, "measure": _below(body)}
        yield about | {"method": ""}
        for bits, group in itertools.product(args.bits, args.group):
            yield about | {"bits": bits, "group": group, "method": quantizers.default_method(bits, group)}


def head(folder: Path, judge: Judge, wanted: Sequence[Row], args: Args) -> Iterator[Row]:
    """Bodies in turn; a head's rows come with its increase over the same body's unquantized head."""
    lm_head, layers = judge.model.lm_head, linears(judge.model)
    original, kept = lm_head.weight.data.clone(), {n: m.weight.data.clone() for n, m in layers.items()}
    lm_head.weight = torch.nn.Parameter(original.clone(), requires_grad=False)
    bodies = {
        cell["measure"]: body
        for cell, body in zip(head_cells(folder.name, argparse.Namespace(bits=[], group=[])), BODIES, strict=True)
    }
    for name, cells in itertools.groupby(wanted, key=lambda cell: cell["measure"]):
        body = bodies[name]
        for n, m in layers.items():
            m.weight.data.copy_(kept[n] if body is None else ours(kept[n], body))
        lm_head.weight.data.copy_(original)
        whole = judge.ppl()
        for cell in cells:
            if "bits" not in cell:
                yield cell | {"ppl": whole}
                continue
            lm_head.weight.data.copy_(ours(original, Scheme(cell["bits"], cell["group"])))
            ppl = judge.ppl()
            yield cell | {"ppl": ppl, "increase_pct": {text: round(100 * (ppl[text] / whole[text] - 1), 3) for text in ppl}}


CALIB: dict[str, Row] = {
    "--calib": {"help": "calibration text instead of the bundled one"},
    "--calib-tokens": {"type": int, "default": 65536},
}
ROTATE: Row = {"action": "store_true", "help": "rotate first"}
SYM: Row = {"action": "store_true", "help": "symmetric codes, which is its default"}
TARGETS: Row = {"type": lambda text: [float(t) for t in text.split(",") if t], "default": [2.5, 3.0, 3.5, 4.0, 4.5]}
MIXED: dict[str, Row] = {
    "--method": {"type": words, "default": ["auto", "gptq"]},
    "--part": {"type": words, "default": ["all", "linears"]},
    "--targets": TARGETS,
}
EXPERIMENTS = {
    "free": Experiment("data_free.json", BITS, ("hqq",), {"--methods": {"type": words}}, free_cells, free),
    "calibrated": Experiment(
        "calibrated.json", BITS, (), CALIB | {"--method": {"type": words, "default": ["gptq", "awq"]}, "--rotate": ROTATE},
        calibrated_cells, calibrated,
    ),
    "gptqmodel": Experiment(
        "calibrated.json", (8, 4, 3, 2), ("gptqmodel",), CALIB | {"--sym": SYM}, gptqmodel_cells, gptqmodel
    ),
    "bpw": Experiment("mixed.json", (4, 3, 2), (), MIXED, bpw_cells, bpw),
    "tables": Experiment(
        "tables.json", (4, 3, 2), (),
        CALIB | {"--method": {"type": words, "default": ["rtn", "lsq", "gptq"]}, "--rotate": ROTATE, "--kind": {"type": words}},
        tables_cells, tables,
    ),
    "head": Experiment("head.json", (8, 4, 3), (), {}, head_cells, head),
}  # fmt: skip
SHOWN = (  # the cells of the tables
    "free", "calibrated", "calibrated --method learn --bits 3,2,1", "calibrated --rotate --method gptq --bits 4,3,2",
    "calibrated --calib self --method gptq,awq,learn,distill --bits 4,3,2 --group 64",
    "gptqmodel", "bpw",
)  # fmt: skip


def flags(asked: Experiment) -> argparse.ArgumentParser:
    """The command line of an experiment."""
    made = parser(asked.out, asked.bits, asked.packages)
    for flag, how in asked.flags.items():
        made.add_argument(flag, **how)
    return made


def measure(asked: Experiment, line: Sequence[str]) -> None:
    """An experiment by its command line."""
    run(flags(asked).parse_args(line), asked.cells, asked.measure)


def holes() -> None:
    """Print a line per cell that a file lacks."""
    for line in SHOWN:
        name, *chosen = line.split()
        args = flags(EXPERIMENTS[name]).parse_args(["--models", ".", "--data", ".", *chosen])
        cells = [cell for model in MODELS for cell in EXPERIMENTS[name].cells(model, args)]
        lacking = missing(cells, args.out)
        print(f"{line}: {len(lacking)} of {len(cells)} cells missing")
        for cell in lacking:
            print("  " + ", ".join(f"{k} {v}" for k, v in cell.items() if k not in ("bpw", "calib", "calib_tokens")))


def merge_files(names: Sequence[str]) -> None:
    """Rows of each file into the result file of its name, in the order given."""
    for path in map(Path, names):
        report = json.loads(path.read_text())
        for row in report["rows"]:
            merge(RESULTS / path.name, report["runs"][row["run"]], row)
        print(f"{path}: {len(report['rows'])} rows")


def main() -> None:
    """Do what the first word says."""
    name, *rest = sys.argv[1:] or [""]
    if name == "holes":
        holes()
    elif name == "merge":
        merge_files(rest)
    elif name in EXPERIMENTS:
        measure(EXPERIMENTS[name], rest)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
