"""What 8-bit activations and fp8 weights cost: errors of products on a model's own activations, and its perplexity."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from fp8_speed import ACTS, Row

from lowq_kernels.activations import rounded
from lowq_kernels.dispatch.registry import matmul
from lowq_kernels.fp8.matmul import multiply
from lowq_packers import fp8
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor

WIDTHS = (8, 4, 2)  # whose perplexity is measured
LAYERS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")  # whose inputs are captured


def nearest_codes(W: torch.Tensor, bits: int, group: int) -> QuantizedTensor:
    """W (N, K) in the nearest codes between the least and the largest weight of each group."""
    groups = W.float().view(W.shape[0], -1, group)
    least, most = groups.amin(-1), groups.amax(-1)
    scales = ((most - least) / ((1 << bits) - 1)).clamp(min=1e-8).to(W.dtype)
    zeros = (-least / scales.float()).to(W.dtype)
    codes = (groups / scales.float()[..., None] + zeros.float()[..., None]).round().clamp(0, (1 << bits) - 1)
    return QuantizedTensor(codes.view(W.shape).to(torch.uint8), scales, zeros, bits, group)


@torch.inference_mode()
def error_rows(model: str, text: str, device: str) -> Iterator[Row]:
    """Relative error against fp64 of a layer's product on the activations it really gets, per way of rounding.

    Operands are rounded by the definition and multiplied in fp64. On a GPU also by kernels: "kernel" is the first way as
    cuda/fp8_gemm multiplies it; "4 bits, ..." are products with the layer's codes against fp64 products with the same codes.
    """
    from lowq_cli.evaluate.perplexity import tokenize, windows
    from lowq_cli.loading import load

    loaded, tokenizer = load(model, device=device)
    captured: dict[str, torch.Tensor] = {}
    blocks = loaded.model.layers
    layers = {f"{i}.{leaf}": blocks[i].get_submodule(leaf) for i in (0, len(blocks) // 2) for leaf in LAYERS}

    def note(name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        captured[name] = inputs[0].reshape(-1, inputs[0].shape[-1])

    hooks = [m.register_forward_pre_hook(partial(note, name)) for name, m in layers.items()]
    loaded(input_ids=windows(tokenize(tokenizer, text), 512, 2048).to(device))
    for h in hooks:
        h.remove()
    for name, module in layers.items():
        x, W = captured[name].to(torch.bfloat16), module.weight.data.to(torch.bfloat16)
        K = W.shape[1]
        truth = x.double() @ W.double().T
        peak = (x.float().abs().max() / x.float().square().mean().sqrt()).item()
        row: Row = {"layer": name, "N": W.shape[0], "K": K, "M": x.shape[0], "largest_over_rms": peak}
        ways = (
            ("1x128, 128x128", (1, 128), (128, 128)),
            ("256x256", (256, 256), (256, 256)),
            ("per token, channel", (1, K), (1, K)),
        )
        for label, xb, wb in ways:
            y = fp8.quantize(x, xb).dequantize(torch.float64) @ fp8.quantize(W, wb).dequantize(torch.float64).T
            row[label] = ((y - truth).norm() / truth.norm()).item()
        y = rounded(x.float(), "int8").double() @ W.double().T
        row["int8 x alone"] = ((y - truth).norm() / truth.norm()).item()
        if device == "cuda":
            y = multiply(fp8.quantize(x, (1, 128)), fp8.quantize(W, (128, 128)), None, torch.bfloat16)
            row["kernel"] = ((y - truth).norm() / truth.norm()).item()
            q = nearest_codes(W, 4, 128)
            truth, packed = x.double() @ q.dequantize().double().T, pack(q, "tile")
            for act in ("none", *ACTS):
                y = matmul(x, packed, act=act)
                row[f"4 bits, {act}"] = ((y - truth).norm() / truth.norm()).item()
        yield row


def perplexity_rows(model: str, text: str, device: str, tokens: int | None) -> Iterator[Row]:
    """Perplexity per format and activation mode."""
    from lowq_cli.evaluate.perplexity import measure, measure_modes
    from lowq_cli.interop.foreign import open_decoded
    from lowq_cli.run.fp8 import make_plan, write
    from lowq_cli.run.pipeline import quantize

    plain = measure(model, text, device=device, max_tokens=tokens)
    yield {"format": "unquantized", "none": plain.ppl, "tokens": plain.tokens}
    with tempfile.TemporaryDirectory() as folder:
        for name, block in fp8.BLOCKS.items():
            out = Path(folder) / name
            with open_decoded(model) as source:
                write(source, make_plan(source, block), out, torch.device(device))
            yield {"format": f"fp8 {name}"} | {mode: r.ppl for mode, r in measure_modes(out, text, device, tokens).items()}
        for bits in WIDTHS:
            out = Path(folder) / str(bits)
            quantize(model, out, bits=bits, lm_head="keep", device=device)
            yield {"format": f"{bits}-bit g64"} | {mode: r.ppl for mode, r in measure_modes(out, text, device, tokens).items()}
