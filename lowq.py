"""lowq: quantize a Hugging Face model, run it with fused kernels. The public Python API.

    qt  = lowq.quantize_tensor(W, bits=4, group_size=128, method="hqq", zero="float")
    lin = lowq.QuantLinear.from_quantized(qt, device="cuda")
    lowq.quantize("model-or-path", out="dir", bits=4, group=128)
    model, tokenizer = lowq.load("dir")
    for piece in lowq.stream(model, tokenizer, "prompt", max_new_tokens=64): ...
    lowq.perplexity("dir", text)

Importing it makes `transformers.AutoModelForCausalLM.from_pretrained(lowq_dir)` work.
"""
