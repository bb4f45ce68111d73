"""Quantize for vLLM, measure the loss against the original, export, and read the export back as transformers would."""

import torch
from transformers import AutoModelForCausalLM

import lowq

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. " * 8


def main() -> None:
    # zero="none" is the symmetric scheme that compressed-tensors, and so vLLM, has kernels for; it holds no packed embedding
    lowq.quantize("demo", out="demo-4bit", bits=4, group=64, zero="none", embedding="keep", device="cpu", fresh=True)
    scores = {name: lowq.perplexity(name, TEXT, device="cpu")["ppl"] for name in ("demo", "demo-4bit")}
    print("perplexity:", ", ".join(f"{name} {ppl:.2f}" for name, ppl in scores.items()))

    lowq.export("demo-4bit", "compressed-tensors", out="demo-4bit-vllm")
    # an export holds the same weights bit for bit, or it is refused
    ours, theirs = (lowq.load(folder, device="cpu", dtype=torch.float32)[0] for folder in ("demo-4bit", "demo-4bit-vllm"))
    ids = torch.arange(1, 20)[None]
    with torch.inference_mode():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    print("the export computes the same logits; serve it with: vllm serve demo-4bit-vllm")

    dense = AutoModelForCausalLM.from_pretrained("demo-4bit", dtype=torch.float32).dequantize()  # an ordinary model again
    dense.save_pretrained("demo-dense")
    print(f"dequantized: {sum(p.numel() for p in dense.parameters()):,} parameters in demo-dense")


if __name__ == "__main__":
    main()
