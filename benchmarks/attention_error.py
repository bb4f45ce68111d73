"""What attention of prompts in e4m3 (prompt8.cu) changes in a model's predictions, beside products in fp8. Runs on a CPU.

    python benchmarks/attention_error.py ../shared/models/base ../shared/data/wikitext2_test.txt [--windows 16] [--out x.json]

The model in fp32 over windows of its longest context: perplexity, and the mean KL divergence from it in nats per token, of
attention by the kernel's rounding (of queries, keys and values as `reference.in_e4m3`, and of the weights of values), of the
inputs of linear layers rounded to e4m3 by token, and of both.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from pages import results_of
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowq_kernels.activations import rounded
from lowq_kernels.decode.reference import in_e4m3

SHIFT = 6  # prompt8.cu's
Tensor = torch.Tensor


def attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **rest: Any
) -> tuple[Tensor, None]:
    q8, k8, v8 = in_e4m3(q, k, v)
    most = torch.cat([x.abs().amax((-2, -1)).expand(x.shape[-2], *x.shape[:2]) for x in v.split(128, -2)]).permute(1, 2, 0)
    lv = torch.floor(torch.log2(most.clamp(min=1e-18) / 448)) + 1  # (B, HKV, S)
    groups, T = q.shape[1] // k.shape[1], q.shape[2]
    k8, v8, lv = (x.repeat_interleave(groups, 1) for x in (k8, v8, lv))
    t = q8 @ k8.transpose(-1, -2) * scaling * math.log2(math.e) + lv[:, :, None]
    t = t.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    p = torch.exp2(t - t.amax(-1, keepdim=True) + SHIFT)
    total = (p * torch.exp2(-lv)[:, :, None]).sum(-1, keepdim=True)
    y = p.to(torch.float8_e4m3fn).float() @ (v8 * torch.exp2(-lv)[..., None]) / total
    return y.transpose(1, 2).to(q.dtype), None


def perplexity(predicted: list[Tensor], windows: Tensor) -> float:
    losses = [-x[:-1].gather(1, w[1:, None]).mean() for x, w in zip(predicted, windows, strict=True)]
    return round(float(torch.stack(losses).mean().exp()), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ALL_ATTENTION_FUNCTIONS.register("e4m3", attend)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(args.model)(args.text.read_text())["input_ids"]
    T = min(model.config.max_position_embeddings, len(ids) // args.windows)
    windows = torch.tensor(ids[: args.windows * T]).view(args.windows, T)
    products = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in n]

    def predictions(attention: str, act: bool) -> list[Tensor]:
        model.set_attn_implementation("e4m3" if attention == "fp8" else "sdpa")
        hooks = [
            m.register_forward_pre_hook(lambda m, x: (rounded(x[0].flatten(0, -2), "fp8").view_as(x[0]),))
            for m in (products if act else ())
        ]
        with torch.inference_mode():
            logits = [model(w[None]).logits[0].log_softmax(-1) for w in windows]
        for hook in hooks:
            hook.remove()
        return logits

    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "model": args.model.name,
        "text": args.text.name,
        "windows": args.windows,
        "tokens": T,
        "rows": [],
    }
    exact = predictions("16", False)
    found["ppl"] = perplexity(exact, windows)
    for attention, act in (("fp8", False), ("16", True), ("fp8", True)):
        got = predictions(attention, act)
        kl = torch.stack([(e.exp() * (e - x)).sum(-1).mean() for e, x in zip(exact, got, strict=True)]).mean()
        row = {"attention": attention, "act": "fp8" if act else "none"}
        found["rows"].append(row | {"ppl": perplexity(got, windows), "kl": round(float(kl), 6)})
        print(found["rows"][-1], flush=True)
    out = args.out or results_of("cpu") / f"attention_error_{args.model.name}.json"
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
