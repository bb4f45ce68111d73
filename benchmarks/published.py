"""Measure lowq's checkpoints by exllamav3's protocol (perplexity and KL divergence over bits); plot them.

    python benchmarks/published.py measure MODEL --text wiki.test.raw [--schemes 8:64,4:64,3:64,2:64] [--method learn]
    python benchmarks/published.py measure MODEL --text wiki.test.raw --types Q4_K_M,Q2_K        # GGUF as lowq writes it
    python benchmarks/published.py measure MODEL --text wiki.test.raw --types Q4_K_M --calib self    # on its own text
    python benchmarks/published.py measure MODEL --text wiki.test.raw --checkpoint FILE ...  # others': GGUF, GPTQ, AWQ
    python benchmarks/published.py plot NAME ... [--out F.svg] | plot NAME --beside FILE.json    # docs/img/

MODEL is a folder or hub id: meta-llama/Llama-3.1-8B-Instruct, Qwen/Qwen3-8B. What is measured goes to a
file of the model's name in benchmarks/results/published; a row measured again replaces the old one. --beside takes a list as
exllamav3's eval/compare_q.py prints, whose protocol this is (results/published/exllamav3.json says from where): EXL3, AWQ,
i-quants.

Protocol: WikiText-2 test, raw: lines that are not blank, two newlines between; tokens of the whole text;
20 windows of 2048 (or the model's context), a quarter of that apart; perplexity of every token of a window but the first; KL
divergence from the unquantized model over the first 10 windows. Bits: of the decoder layers' linears with all that belongs to
them; the head's apart; `vram_gb` is both, without the embedding.
"""

import argparse
import datetime
import hashlib
import json
import math
import tempfile
from collections import deque
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from plots import save

from lowq_cli.engine.open_model import ready
from lowq_cli.engine.prompts import context_limit
from lowq_cli.evaluate.logits import logits_of
from lowq_cli.interop.exporter import export
from lowq_cli.interop.inspection import inspect_model
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import pipeline
from lowq_cli.run.mixture import CalibratedMixture

RESULTS = Path(__file__).parent / "results" / "published"
LENGTH, APART, WINDOWS, COMPARED = 2048, 4, 20, 10  # tokens; windows a length; windows; of these for the KL divergence
CLAMP = -200.0  # logits below it, as the protocol has it
MARKS = "osv^Dd*xP"
Row = dict[str, Any]


def windows_of(tokenizer: Any, text: str, length: int, count: int) -> torch.Tensor:
    """(count, length) token ids of the text."""
    joined = "\n\n".join(line for line in text.splitlines(keepends=True) if line.strip())
    ids = torch.tensor(tokenizer(joined)["input_ids"])
    starts = range(0, min(len(ids) - length, count * (length // APART)), length // APART)
    return torch.stack([ids[a : a + length] for a in starts])


@torch.inference_mode()
def judged(model: Any, windows: torch.Tensor, wanted: list[torch.Tensor]) -> tuple[float, float | None]:
    """(perplexity, KL divergence from `wanted` logits). An empty list is filled with this model's own; None then."""
    own = not wanted
    nll, kl = 0.0, []
    for i, ids in enumerate(windows):
        logits = logits_of(model, ids[None])[0].float().clamp(min=CLAMP)
        log_p = torch.log_softmax(logits, -1)
        nll -= float(log_p[:-1].gather(1, ids[1:, None].to(log_p.device)).double().sum())
        if own and i < COMPARED:
            wanted.append(log_p.cpu())
        elif i < COMPARED:
            ref = wanted[i].to(log_p.device)
            kl.append(float((ref.exp() * (ref - log_p)).sum(-1).double().mean()))
    return math.exp(nll / (windows.shape[0] * (windows.shape[1] - 1))), None if own else sum(kl) / len(kl)


def bits_of(checkpoint: str) -> Row:
    """Bits per weight of the layers' linears and of the head (a tied embedding is the head), and both in GiB."""
    rows = [r for r in inspect_model(checkpoint).rows if len(r.shape) > 1]
    layers = [r for r in rows if r.kind in ("attention", "mlp", "expert")]
    head = [r for r in rows if r.kind == "head"] or [r for r in rows if r.kind == "embedding"]
    layer_bpw, head_bpw = (8 * sum(r.bytes for r in some) / sum(r.params for r in some) for some in (layers, head))
    held = sum(r.bytes for r in (*layers, *head)) / 2**30
    return {"layer_bpw": round(layer_bpw, 4), "head_bpw": round(head_bpw, 4), "vram_gb": round(held, 6)}


def checkpoints(args: argparse.Namespace, device: str) -> Iterator[tuple[str, str]]:
    """(label, folder) of what is measured, each there while it is."""
    if args.checkpoint:
        yield from ((Path(c).name, c) for c in args.checkpoint)
        return
    for kind in filter(None, args.types.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            if not args.calib:
                yield f"lowq GGUF {kind}", export(args.model, "gguf", Path(folder) / "q.gguf", kind=kind).out
                continue
            text = make_recipe(method="gptq", group="channel", dtype="float32", lm_head="keep", calib=args.calib)
            mixture = CalibratedMixture(args.model, kind, text, str(Path(folder) / "q.gguf"), device)
            deque(mixture.text(), maxlen=0)
            mixture.start()
            deque(mixture.improve(), maxlen=0)
            yield f"lowq GGUF {kind}, calibrated", mixture.export().exported.out
    for spelled in () if args.types else args.schemes.split(","):
        bits, _, group = spelled.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            recipe = make_recipe(bits=int(bits), group=group or None, method=args.method)
            for _ in pipeline.run(args.model, recipe, Path(folder) / "q", device=device):
                pass
            yield f"lowq {args.method or 'without data'} {bits} bits g{group or 64}", str(Path(folder) / "q")


def measure(args: argparse.Namespace) -> None:
    """The unquantized model, then each checkpoint."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = ready(args.model, device)
    length = min(LENGTH, context_limit(model) or LENGTH)
    text = args.text.read_text(encoding="utf-8")
    windows = windows_of(tokenizer, text, length, args.windows)
    reference: list[torch.Tensor] = []
    about = {
        "model": Path(args.model).name, "text": args.text.name, "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "window": length, "windows": len(windows), "compared": min(len(windows), COMPARED),
    }  # fmt: skip
    run = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        **{p: version(p) for p in ("lowq", "torch")},
    }
    ppl, _ = judged(model, windows, reference)
    add(about, {"label": "unquantized", **bits_of(args.model), "ppl": ppl, "kld": None, **run})
    del model
    for label, folder in checkpoints(args, device):
        model, _ = ready(folder, device)
        ppl, kld = judged(model, windows, reference)
        add(about, {"label": label, **bits_of(folder), "ppl": ppl, "kld": kld, **run})
        del model


def add(about: Row, row: Row) -> None:
    """A row into its model's file; rows of another text or other windows leave it."""
    path = RESULTS / f"{about['model']}.json"
    old = json.loads(path.read_text()) if path.is_file() else {}
    kept = old.get("rows", []) if {k: old.get(k) for k in about} == about else []
    rows = [*(r for r in kept if r["label"] != row["label"]), row]
    path.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    print(json.dumps(row), flush=True)


def plot(args: argparse.Namespace) -> None:
    """A line of panels per model: perplexity, KL divergence; a series per tool and method, as labels begin."""
    figure = Figure(figsize=(9.6, 3.8 * len(args.names)))
    panels = figure.subplots(len(args.names), 2, squeeze=False)
    beside = [row for file in args.beside for row in json.loads(file.read_text())]
    for line, name in zip(panels, args.names, strict=True):
        found = json.loads((RESULTS / f"{name}.json").read_text())
        floor = next(r["ppl"] for r in found["rows"] if r["label"] == "unquantized")
        series: dict[str, list[Row]] = {}
        for row in (*found["rows"], *beside):
            if row.get("kld"):
                series.setdefault(tool_of(row["label"]), []).append(row)
        for mark, (tool, rows) in zip(MARKS * len(series), series.items(), strict=False):
            rows.sort(key=lambda r: r["layer_bpw"])
            for axis, value in zip(line, ("ppl", "kld"), strict=True):
                axis.plot([r["layer_bpw"] for r in rows], [r[value] for r in rows], f"{mark}-", markersize=5, label=tool)
        line[0].axhline(floor, color="grey", linewidth=1, linestyle=":", label="unquantized")
        for axis, what in zip(line, ("perplexity", "KL divergence, nats a token"), strict=True):
            axis.set(title=f"{name}, {found['windows']} windows of {found['window']}", ylabel=what, yscale="log")
            axis.set_xlabel("bits per weight of the layers")
            axis.grid(alpha=0.2, which="both")
            axis.legend(frameon=False, fontsize=8)
        line[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        line[0].yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
    save(figure, args.out)


def tool_of(label: str) -> str:
    """ "lowq gptq 4 bits g64" -> "lowq gptq", "EXL3 4.0bpw" -> "EXL3": what stands before the first number."""
    words = label.split()
    return " ".join(words[: next((i for i, w in enumerate(words) if w[0].isdigit()), len(words))]) or label


def main() -> None:
    """Do what the command line says."""
    made = argparse.ArgumentParser()
    verbs = made.add_subparsers(required=True)
    one = verbs.add_parser("measure")
    one.set_defaults(do=measure)
    one.add_argument("model")
    one.add_argument("--text", type=Path, required=True)
    one.add_argument("--schemes", default="8:64,4:64,3:64,2:64", help="BITS:GROUP, quantized here one after the other")
    one.add_argument("--types", default="", help="instead of schemes: llama.cpp's mixtures, such as Q4_K_M,Q2_K")
    one.add_argument("--calib", help="with --types: calibrated on this text, self or a file")
    one.add_argument("--method", help="of `lowq quantize`; left out: what it takes without a text")
    one.add_argument("--checkpoint", nargs="*", help="folders to measure instead, any format that lowq reads")
    one.add_argument("--windows", type=int, default=WINDOWS)
    other = verbs.add_parser("plot")
    other.set_defaults(do=plot)
    other.add_argument("names", nargs="+")
    other.add_argument("--beside", type=Path, nargs="*", default=[])
    other.add_argument("--out", default="published.svg")
    args = made.parse_args()
    if args.do is plot and args.beside and len(args.names) > 1:
        made.error("--beside is of one model; name it alone")
    args.do(args)


if __name__ == "__main__":
    main()
