"""Let other tools read lowq's exports and compare the weights: benchmarks/results/accuracy/interop.json.

    python benchmarks/interop.py --model MODELS/base --text DATA/wikitext2_test.txt [--tokens 32768]

The model is quantized, exported, and opened with transformers + compressed-tensors, llama.cpp (llama-cpp-python), MLX, mlx-lm,
hqq, GPTQModel, AutoAWQ, humming-kernels and gguf (a tool that is not installed is left out; interop_judges.py has those that
look at matrices). Perplexities are over windows of 512 tokens; ours is computed in
fp32 with the same weights. llama.cpp rounds activations to 8 bits, so it cannot agree to the last digit.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import interop_judges
import torch
from transformers import AutoModelForCausalLM

import lowq
from lowq_cli.evaluate.perplexity import WINDOW, evaluate, tokenize, windows
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import fetcher, open_foreign
from lowq_cli.models import CausalModel

OUT = Path(__file__).parent / "results" / "accuracy" / "interop.json"
PACKAGES = (
    "lowq", "torch", "transformers", "compressed-tensors", "llama-cpp-python", "gguf", "mlx", "mlx-lm", "hqq", "gptqmodel",
    "autoawq", "humming-kernels",
)  # fmt: skip
Row = dict[str, Any]


def installed(name: str) -> bool:
    """Whether a module can be imported."""
    return importlib.util.find_spec(name) is not None


def dense(folder: Path, model: Path) -> Any:
    """The fp32 model with the weights that a lowq checkpoint stands for."""
    found = open_checkpoint(folder)
    state = {f"{t.name}.weight": found.read_matrix(t).dequantize() for t in found.tensors if t.scheme}
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.load_state_dict(state, strict=False)
    return loaded.eval()


def transformers_rows(model: Path, ids: torch.Tensor, work: Path) -> Iterator[Row]:
    """compressed-tensors, loaded by transformers in fp32: the largest difference of a logit, and perplexities."""
    for bits, group, zero in ((4, 128, "none"), (8, 128, "none"), (2, 64, "none"), (3, 64, "none")):
        name = f"ct-{bits}-{group}-{zero}"
        lowq.quantize(model, out=work / name, bits=bits, group=group, zero=zero)
        export(work / name, "compressed-tensors", work / f"{name}-x")
        theirs = AutoModelForCausalLM.from_pretrained(work / f"{name}-x", dtype=torch.float32).eval()
        ours = dense(work / name, model)
        with torch.inference_mode():
            part = windows(ids, WINDOW)[:2]
            difference = (theirs(part).logits - ours(part).logits).abs().max().item()
        row = {"format": "compressed-tensors", "reader": "transformers", "bits": bits, "group": group, "zero": zero}
        found = evaluate(theirs, ids, ours)
        yield row | {
            "ppl": found.ppl,
            "our_ppl": found.base_ppl,
            "largest_logit_difference": difference,
            "tokens": found.tokens,
        }


def llama_cpp_rows(model: Path, ids: torch.Tensor, work: Path) -> Iterator[Row]:
    """GGUF, run by llama.cpp: perplexities."""
    import llama_cpp

    for kind, bits, group, zero in (("Q4_0", 4, 32, "none"), ("Q4_1", 4, 64, "float"), ("Q8_0", 8, 32, "none")):
        folder, out = work / kind, work / f"{kind}.gguf"
        lowq.quantize(model, out=folder, bits=bits, group=group, zero=zero)
        export(folder, "gguf", out, rounding=zero == "float")
        theirs = llama_cpp.Llama(str(out), n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, verbose=False)
        nll, predicted = 0.0, 0
        for part in windows(ids, WINDOW):
            theirs.reset()
            theirs.eval(part.tolist())
            log_p = torch.log_softmax(torch.from_numpy(theirs.scores[: len(part) - 1].copy()).float(), -1)
            nll -= log_p.gather(1, part[1:, None]).double().sum().item()
            predicted += len(part) - 1
        ours = evaluate(loaded(folder), ids)
        ppl = float(torch.tensor(nll / predicted, dtype=torch.float64).exp())
        row = {"format": "gguf", "reader": "llama.cpp", "type": kind, "bits": bits, "group": group, "zero": zero}
        yield row | {"ppl": ppl, "our_ppl": ours.ppl, "difference_pct": 100 * (ppl / ours.ppl - 1), "tokens": ours.tokens}


def loaded(folder: Path) -> CausalModel:
    """A lowq checkpoint in fp32."""
    return lowq.load(folder, device="cpu", dtype="float32")[0]


def mlx_rows(model: Path, work: Path) -> Iterator[Row]:
    """MLX dequantizes every matrix: how many are equal to ours, all of their weights."""
    import mlx.core as mx

    for bits in (8, 4, 3, 2):
        folder = work / f"mlx-{bits}"
        lowq.quantize(model, out=folder, bits=bits, group=64, zero="none", method="rtn")
        export(folder, "mlx", work / f"mlx-{bits}-x")
        tensors = mx.load(str(work / f"mlx-{bits}-x" / "model.safetensors"))
        found = open_checkpoint(folder)
        equal = 0
        for t in found.tensors:
            if t.scheme:
                w, s, b = (tensors[f"{t.name}.{leaf}"] for leaf in ("weight", "scales", "biases"))
                theirs = mx.dequantize(w, s.astype(mx.float32), b.astype(mx.float32), group_size=64, bits=bits)
                equal += torch.equal(torch.tensor(theirs.tolist()), found.read_matrix(t).dequantize())
        yield {"format": "mlx", "reader": "mlx", "bits": bits, "group": 64, "matrices": len(found.schemes), "equal": equal}


def hqq_rows(model: Path, work: Path) -> Iterator[Row]:
    """hqq loads every matrix: how many have our codes, scales and zeros."""
    from hqq.core.quantize import HQQLinear, Quantizer

    for bits in (8, 4, 3, 2, 1):
        folder = work / f"hqq-{bits}"
        lowq.quantize(model, out=folder, bits=bits, group=64, method="rtn")
        export(folder, "hqq", work / f"hqq-{bits}-x")
        found, equal = open_checkpoint(folder), 0
        with open_foreign(work / f"hqq-{bits}-x") as source:
            fetch = fetcher(source)
            for t in found.tensors:
                if not t.scheme:
                    continue
                state = {n.removeprefix(f"{t.name}."): fetch(n) for n in source.headers if n.startswith(f"{t.name}.")}
                layer = HQQLinear(None, None, compute_dtype=torch.bfloat16, device="cpu")
                layer.load_state_dict(state)
                q = found.read_matrix(t)
                codes = Quantizer.unpack[layer.meta["packing"]](layer.W_q, dtype=torch.uint8)[: q.scales.numel()]
                same = torch.equal(codes.reshape(q.shape), q.W_q) and torch.equal(
                    layer.meta["scale"].reshape(q.scales.shape), q.scales
                )
                assert q.zeros is not None
                equal += same and torch.equal(layer.meta["zero"].reshape(q.scales.shape), q.zeros)
        yield {"format": "hqq", "reader": "hqq", "bits": bits, "group": 64, "matrices": len(found.schemes), "equal": equal}


def main() -> None:
    """Run every judge that is installed and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--only", help="judges to ask (modules, comma between); the others' rows in the file stay")
    args = parser.parse_args()
    rows: list[Row] = []
    asked: set[str] = set()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        _, tokenizer = lowq.load(args.model, device="cpu")
        ids = tokenize(tokenizer, args.text.read_text(encoding="utf-8"))[: args.tokens]
        judges = {
            "gptqmodel": lambda: interop_judges.gptqmodel_rows(args.model, work),
            "awq": lambda: interop_judges.awq_rows(args.model, work),
            "humming": lambda: interop_judges.humming_rows(args.model, work),
            "gguf": lambda: interop_judges.gguf_rows(args.model, work),
            "mlx": lambda: mlx_rows(args.model, work),
            "mlx_lm": lambda: interop_judges.mlx_lm_rows(work),
            "hqq": lambda: hqq_rows(args.model, work),
            "compressed_tensors": lambda: chain(
                interop_judges.compressed_tensors_rows(args.model, work), transformers_rows(args.model, ids, work)
            ),
            "llama_cpp": lambda: llama_cpp_rows(args.model, ids, work),
        }
        for module, judge in judges.items():
            if args.only and module not in args.only.split(","):
                continue
            if not installed(module):
                print(f"{module} is not installed: left out")
                continue
            for row in judge():
                print(json.dumps(row), flush=True)
                rows.append({"judge": module, **row})
            asked.add(module)
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    facts = {"date": datetime.date.today().isoformat(), "model": args.model.name, "text": args.text.name, "versions": versions}
    if args.only and OUT.exists():
        rows = [r for r in json.loads(OUT.read_text())["rows"] if r.get("judge") not in asked] + rows
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
