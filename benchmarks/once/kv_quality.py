"""Measure the loss from a KV cache in fp8 and in 4 bits: perplexity, KL divergence and agreement against 16 bits.

    python benchmarks/once/kv_quality.py MODEL [MODEL ...] [--text FILE] [--tokens 16384]   # writes results/accuracy/kv.json

Windows of 512 tokens of the bundled sample unless another text is named; attention reads the cache as it is held. An earlier
run's rows of other models stay.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from lowq_cli.calibrate.texts import tokenize, window_of
from lowq_cli.engine.open_model import ready
from lowq_cli.evaluate.perplexity import evaluate, read_text
from lowq_kernels.decode import kv

OUT = Path(__file__).parents[1] / "results" / "accuracy" / "kv.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    for path in args.models:
        (model, tokenizer), (exact, _) = (ready(path, "auto") for _ in range(2))
        ids, config = tokenize(tokenizer, read_text(args.text)), model.config.get_text_config()
        D = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rows = []
        for kind in kv.KINDS[1:]:
            r = evaluate(model, ids, exact, window_of(model), args.tokens, kv=kind)
            assert r.base_ppl is not None
            ratio = kv.slot_bytes(kind, D, model.dtype) / kv.slot_bytes(kv.PLAIN, D, model.dtype)
            row = {"model": path.name, "head_dim": D, "kv": kind, "bytes_of_16_bits": round(ratio, 4), "tokens": r.tokens}
            row |= {
                "ppl_16": r.base_ppl,
                "ppl": r.ppl,
                "increase_pct": r.ppl_increase_pct,
                "kl": r.kl,
                "top1": r.top1_agreement,
            }
            print(row, flush=True)
            rows.append(row)
        kept = [row for row in found["rows"] if row["model"] != path.name]
        found = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "rows": kept + rows}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
