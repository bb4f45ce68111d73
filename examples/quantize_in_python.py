"""Quantize a model, load it, write text with it, and measure what was lost."""

import lowq

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. " * 8


def main() -> None:
    # "demo" is the small model in the package; a folder or a name on huggingface.co stands here as well
    done = lowq.quantize("demo", out="demo-4bit", bits=4, group=64, device="cpu", fresh=True)
    print(f"{done['source_bytes']:,} bytes became {done['bytes']:,}, {done['bpw']:.2f} bits per weight")

    model, tokenizer = lowq.load("demo-4bit", device="cpu")
    text = lowq.stream(model, tokenizer, "Once upon a time", max_new_tokens=24)
    for piece in text:
        print(piece, end="", flush=True)
    print(f"\n{len(text.tokens[0])} tokens, ended by {text.finish_reason}")

    before, after = (lowq.perplexity(folder, TEXT, device="cpu")["ppl"] for folder in ("demo", "demo-4bit"))
    print(f"perplexity {before:.2f} in 16 bits, {after:.2f} in 4")


if __name__ == "__main__":
    main()
