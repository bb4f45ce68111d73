"""Does the decode engine give the tokens of transformers' greedy decoding of the dequantized model?

    python benchmarks/e2e_same_tokens.py MODEL --out FILE.json [--bits 4] [--group 64] [--new 256] [--dtype bfloat16]

Quantizes MODEL's linear layers in memory, decodes NEW tokens with the engine, then reads the whole text once with the
dequantized model in fp32: at each place, was the engine's token its likeliest, and where not, how far apart were the two
logits (a tie within rounding, or a fault)? Also compares with `model.generate` of the dequantized model token by token.
"""

import argparse
import copy
import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowq_cli.engine import stream
from lowq_cli.engine.choose import choose
from lowq_cli.quantizers import rtn
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.layouts import unpack
from lowq_packers.scheme import Scheme

PROMPTS = ("Once upon a time there was a", "The history of the city begins", "def main():", "In the year 1850 the ship")


def main() -> None:
    """Compare and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    packed = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dense = copy.deepcopy(packed)
    for path, lin in list(packed.named_modules()):
        if isinstance(lin, torch.nn.Linear) and path != "lm_head":
            q = rtn.quantize(lin.weight.data.float(), Scheme(args.bits, args.group))
            layer = QuantLinear.from_quantized(q, lin.bias, dtype=dtype)
            packed.set_submodule(path, layer)
            dense.get_submodule(path).weight.data = unpack(layer.packed).dequantize(dtype)  # with the scales as they are held
    truth = copy.deepcopy(dense).float()
    rows = []
    for prompt in PROMPTS:
        g = stream(packed, tokenizer, prompt, max_new_tokens=args.new, decoder=choose(packed))
        list(g)
        tokens, start = g.tokens[0], g.prompts[0]
        ids = torch.tensor([start], device=args.device)
        mask = torch.ones_like(ids)
        theirs = dense.generate(ids, attention_mask=mask, max_new_tokens=args.new, do_sample=False)[0, len(start) :].tolist()
        with torch.inference_mode():
            logits = truth(torch.tensor([start + tokens], device=args.device)).logits[0, len(start) - 1 : -1].float()
        best = logits.max(-1)
        gaps = best.values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        apart = next((i for i, (a, b) in enumerate(zip(tokens, theirs, strict=False)) if a != b), None)
        places = gaps.nonzero()[:, 0].tolist()
        ties = [{"at": i, "gap": round(float(gaps[i]), 5), "logit": round(float(best.values[i]), 3)} for i in places]
        rows.append({"prompt": prompt, "tokens": len(tokens), "decoder": g.decoder.name, "not_the_argmax_of_fp32": ties})
        rows[-1]["same_as_generate_until"] = len(tokens) if apart is None else apart
        print(rows[-1], flush=True)
    facts = {"model": Path(args.model).name, "bits": args.bits, "group": args.group, "dtype": args.dtype, "device": args.device}
    facts |= {name: version(name) for name in ("torch", "transformers")}
    facts["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
