"""Perplexity of every data-free method beside the hqq package: benchmarks/results/accuracy/data_free.json.

    python benchmarks/accuracy.py --models MODELS --data DATA [--only base] [--bits 4,2] [--group 64] [--methods lsq]

MODELS holds one folder per model, DATA the texts wikitext2_test.txt and mix_valid_sample.txt. Every linear layer but
lm_head is replaced by its dequantized self, in fp32 with TF32 off, and the model read in windows of 512 tokens; scales and
zeros are fp32, as the package's own, except in the rows `stored: bfloat16`. The package runs on the CPU (its GPU solver
computes in fp16 and gives other codes). `render.py` draws docs/accuracy.md from the file.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowq_cli import perplexity, quantizers
from lowq_packers.scheme import BITS, Scheme

RESULTS = Path(__file__).parent / "results" / "accuracy"
TEXTS = {"wikitext2_test": 131072, "mix_valid_sample": None}  # file -> tokens read
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


def texts(folder: Path, tokenizer: object, tokens: int | None) -> dict[str, torch.Tensor]:
    """Text name -> token ids, cut to what TEXTS (or `tokens`) says."""
    ids = {name: perplexity.tokenize(tokenizer, (folder / f"{name}.txt").read_text()) for name in TEXTS}
    return {name: t[: tokens or TEXTS[name]] for name, t in ids.items()}


def measure(folder: Path, args: argparse.Namespace, device: str) -> Iterator[dict]:
    """One row per bits, group and method, and one for the unquantized model unless only some methods are asked for."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    data = texts(args.data, AutoTokenizer.from_pretrained(folder), args.tokens)
    layers = linears(model)
    original = {n: m.weight.data.clone() for n, m in layers.items()}

    def scored(**facts: object) -> dict:
        ppl = {name: perplexity.evaluate(model, ids).ppl for name, ids in data.items()}
        row = {"model": folder.name, **facts, "ppl": {k: round(v, 4) for k, v in ppl.items()}}
        print(json.dumps(row), flush=True)
        return row

    if not args.methods:
        yield scored(method="fp32")
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
                facts = {"bits": bits, "group": group, "bpw": scheme.bits_per_weight(), "method": name, "stored": stored}
                yield scored(**facts, rel_error=round(math.sqrt(squared / total), 5), seconds=round(seconds, 2))


def main() -> None:
    """Measure and write the file."""
    ints = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", help="one model's folder name")
    parser.add_argument("--methods", type=lambda text: text.split(","), help='only these ("hqq package", rtn, hqq, lsq)')
    parser.add_argument("--bits", type=ints, default=list(BITS))
    parser.add_argument("--group", type=ints, default=[32, 64, 128])
    parser.add_argument("--tokens", type=int, help="read fewer tokens of each text")
    parser.add_argument("--out", type=Path, default=RESULTS / "data_free.json")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    folders = [f for f in sorted(args.models.iterdir()) if (f / "config.json").is_file() and args.only in (None, f.name)]
    run = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": {p: importlib.metadata.version(p) for p in ("lowq", "torch", "transformers", "hqq")},
        "window": perplexity.WINDOW,
        "tokens": args.tokens or TEXTS,
    }
    report = json.loads(args.out.read_text()) if args.out.is_file() else {"runs": [], "rows": []}
    if run not in report["runs"]:
        report["runs"].append(run)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        for row in measure(folder, args, device):
            report["rows"] = [r for r in report["rows"] if key(r) != key(row)]  # a cell measured again replaces the old one
            report["rows"].append(row | {"run": report["runs"].index(run)})
            report["rows"].sort(key=key)
            args.out.write_text(json.dumps(report, indent=1) + "\n")


def key(row: dict) -> tuple:
    """What a row is about, in the order of the file."""
    return (row["model"], -row.get("bits", 99), row.get("group", 0), row.get("stored", ""), row["method"])


if __name__ == "__main__":
    main()
