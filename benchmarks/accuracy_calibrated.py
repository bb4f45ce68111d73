"""Perplexity of calibrated checkpoints, as `lowq quantize` writes them: benchmarks/results/accuracy/calibrated.json.

    python benchmarks/accuracy_calibrated.py --models MODELS --data DATA [--calib FILE] [--only base] [--bits 4,2] [--group 64]

MODELS and DATA as for accuracy.py, whose texts and windows these are. Each cell runs the whole pipeline (bf16 scales and
zeros, the bundled calibration text unless told otherwise), then reads the checkpoint's own bytes back into an fp32 model.
"""

import argparse
import datetime
import importlib.metadata
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowq_cli import perplexity, pipeline
from lowq_cli.quant_config import expand
from lowq_cli.recipe import make_recipe
from lowq_cli.source import open_source
from lowq_packers.layouts import PackedWeight, unpack
from lowq_packers.scheme import Scheme

RESULTS = Path(__file__).parent / "results" / "accuracy"
TEXTS = {"wikitext2_test": 131072, "mix_valid_sample": None}  # as in accuracy.py
LEAVES = (".weight", ".weight_scale", ".weight_zero")


def dequantized(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Parameter name -> the fp32 weight that a lowq checkpoint's bytes stand for."""
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
    return found


def measure(folder: Path, args: argparse.Namespace, device: str) -> Iterator[dict]:
    """One row per method, group and bits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = {name: perplexity.tokenize(tokenizer, (args.data / f"{name}.txt").read_text())[:n] for name, n in TEXTS.items()}
    parameters = dict(model.named_parameters())
    for method in args.method:
        for group in args.group:
            for bits in args.bits:
                with tempfile.TemporaryDirectory() as out:
                    recipe = make_recipe(
                        bits=bits, group=group, method=method, calib=args.calib, calib_tokens=args.calib_tokens
                    )
                    *events, finished = pipeline.run(folder, recipe, Path(out) / "q", device=device)
                    for name, W in dequantized(Path(out) / "q").items():
                        parameters[name].data.copy_(W)
                layers = [e for e in events if isinstance(e, pipeline.LayerDone)]
                ppl = {name: round(perplexity.evaluate(model, ids[: args.tokens]).ppl, 4) for name, ids in data.items()}
                row = {
                    "model": folder.name, "bits": bits, "group": group, "bpw": Scheme(bits, group).bits_per_weight(),
                    "method": method, "stored": "bfloat16", "ppl": ppl, "seconds": round(finished.result.seconds, 1),
                    "output_error": round(sum(e.error for e in layers) / max(len(layers), 1), 5),
                }  # fmt: skip
                print(json.dumps(row), flush=True)
                yield row


def main() -> None:
    """Measure and write the file."""
    ints = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", help="one model's folder name")
    parser.add_argument("--method", type=lambda text: text.split(","), default=["gptq"])
    parser.add_argument("--calib", help="calibration text instead of the bundled one")
    parser.add_argument("--calib-tokens", type=int, default=65536)
    parser.add_argument("--bits", type=ints, default=[4, 3, 2, 1])
    parser.add_argument("--group", type=ints, default=[32, 64, 128])
    parser.add_argument("--tokens", type=int, help="read fewer tokens of each text")
    parser.add_argument("--out", type=Path, default=RESULTS / "calibrated.json")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    run = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": {p: importlib.metadata.version(p) for p in ("lowq", "torch", "transformers")},
        "window": perplexity.WINDOW,
        "tokens": args.tokens or TEXTS,
    }
    calibration = {"text": Path(args.calib).name if args.calib else "bundled", "tokens": args.calib_tokens}
    report = json.loads(args.out.read_text()) if args.out.is_file() else {"calibration": calibration, "runs": [], "rows": []}
    if report["calibration"] != calibration:
        raise SystemExit(f"{args.out} holds results of {report['calibration']}; use another --out")
    if run not in report["runs"]:
        report["runs"].append(run)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for folder in sorted(args.models.iterdir()):
        if (folder / "config.json").is_file() and args.only in (None, folder.name):
            for row in measure(folder, args, device):
                report["rows"] = [r for r in report["rows"] if key(r) != key(row)]  # a cell measured again replaces the old one
                report["rows"].append(row | {"run": report["runs"].index(run)})
                report["rows"].sort(key=key)
                args.out.write_text(json.dumps(report, indent=1) + "\n")


def key(row: dict) -> tuple:
    """What a row is about, in the order of the file."""
    return (row["model"], -row["bits"], row["group"], row["method"])


if __name__ == "__main__":
    main()
