"""Measure fp8 and int8 activations on a Hopper GPU: `python3 benchmarks/fp8.py --model DIR --text FILE --out FILE.json`.

    quantizer   block quantizer, 256x256: ours, the tile-per-block baseline, the plan of the GridQuant article, torch.compile's,
                and the plain cast, which moves the same bytes
    gemm        block-scaled products: cuda/fp8_gemm with 128x128 and 256x256 blocks, triton/fp8_gemm, torch's scaled_mm
    codes       8-bit activations times packed codes beside what dispatch takes for 16-bit activations, and cuBLAS fp16
    error       of products on real activations (captured from --model on --text) against fp64
    perplexity  of --model on --text, in every format and activation mode

Compile first, in parallel: `python3 benchmarks/fp8.py --compile I/N`, one process for each I; torch.compile's for each size by
`--inductor N`. Every output is checked against fp32 before it is timed; timing as in lowq_kernels.dispatch.timing.
"""

import argparse
import datetime
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fp8_speed import (
    ACTS,
    CODES,
    DEVICE,
    GEMMS,
    SIZES,
    Row,
    block_pairs,
    codes_rows,
    compile_quantizer,
    gemm_rows,
    quantizer_rows,
)

from lowq_kernels import gpu
from lowq_kernels.activations import rounded
from lowq_kernels.cuda import nvrtc
from lowq_kernels.dispatch.registry import Call, kernels, matmul, named
from lowq_kernels.dispatch.tuning_file import Machine
from lowq_kernels.fp8 import block_quant, gemm_triton, gemm_wgmma
from lowq_kernels.fp8.block_quant import fp8_block_quant
from lowq_kernels.fp8.call import Fp8Call
from lowq_kernels.fp8.matmul import multiply
from lowq_kernels.products.cuda import tile_wgmma8
from lowq_packers import fp8
from lowq_packers.fp8 import FP8, Fp8Matrix
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import BLOCKS, Scheme, scale_shape

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
    from lowq_cli.run.pipeline import quantize

    plain = measure(model, text, device=device, max_tokens=tokens)
    yield {"format": "unquantized", "none": plain.ppl, "tokens": plain.tokens}
    with tempfile.TemporaryDirectory() as folder:
        for name in BLOCKS:
            out = Path(folder) / name
            quantize(model, out, format="fp8", block=name, device=device)
            yield {"format": f"fp8 {name}"} | {mode: r.ppl for mode, r in measure_modes(out, text, device, tokens).items()}
        for bits in WIDTHS:
            out = Path(folder) / str(bits)
            quantize(model, out, bits=bits, lm_head="keep", device=device)
            yield {"format": f"{bits}-bit g64"} | {mode: r.ppl for mode, r in measure_modes(out, text, device, tokens).items()}


def compile_share(index: int, of: int, parts: Sequence[str]) -> None:
    """Compile one share of everything that these parts will time, on dummy inputs."""
    x = torch.randn(512, 512, device=DEVICE, dtype=torch.bfloat16)
    work: list[Callable[[], object]] = [partial(fp8_block_quant, x, b) for b in ((128, 128), (256, 256), (1, 128), (1, 512))]
    if "quantizer" in parts:
        plans = [*block_quant.TILE_PLANS, block_quant.STRIDE_PLANS[0], *(block_quant.plan_for(n, n, (256, 256)) for n in SIZES)]
        work += [partial(fp8_block_quant, x, (256, 256), p) for p in plans]
    if "codes" in parts:
        for N, K, bits, group, Ms in CODES:
            for act, M in ((a, m) for a in ACTS for m in Ms):
                spec = kernels()[f"cuda/tile_{act}"]
                call = Call(M, N, K, Scheme(bits, group, "float"), "tile", torch.float16, "cuda", gpu.HOPPER.capability, act)
                if spec.why_not(call) is None:
                    for c in spec.legal_configs(call):
                        instance = tile_wgmma8.expression(bits, 0, act == "int8", group, True, c)
                        work.append(partial(nvrtc.compiled, "tile_wgmma8.cu", instance, "sm_90a"))
    if "gemm" in parts:
        work += gemm_compilations()
    for thunk in work[index::of]:
        thunk()


def gemm_compilations() -> list[Callable[[], object]]:
    """Launches and NVRTC's work, one for each binary that `gemm_rows` needs, on matrices of those sizes."""
    launches: dict[str, Callable[[], object]] = {}
    instances = set()

    def quantize(M: int, K: int, block: fp8.Block) -> Fp8Matrix:
        return fp8_block_quant(torch.ones(M, K, device=DEVICE, dtype=torch.bfloat16), block)

    def multiply_once(M: int, N: int, K: int, config: dict[str, int]) -> torch.Tensor:
        w = Fp8Matrix(torch.zeros(N, K, device=DEVICE, dtype=FP8), torch.ones(N // 128, K // 128, device=DEVICE), (128, 128))
        return gemm_triton.fp8_gemm(quantize(M, K, (1, 128)), w, None, torch.bfloat16, config)

    for N, K, Ms in GEMMS:
        for M in Ms:
            config = gemm_triton.config_for(M, N, K)
            launches.setdefault(f"{config} {M == 1}", partial(multiply_once, M, N, K, config))
            for name, x_block, w_block in block_pairs(K):
                a, b = meta_matrix(M, K, x_block), meta_matrix(N, K, w_block)
                plan = f"{name} {block_quant.plan_for(M, K, x_block)} {M == 1} {K // 256 % 16} {min(x_block[1], 4096)}"
                launches.setdefault(plan, partial(quantize, M, K, x_block))
                call = Fp8Call.of(a, b, torch.bfloat16)
                c = gemm_wgmma.config_for(call, named("cuda/fp8_gemm").legal_configs(call))
                modes = (gemm_wgmma.mode_of(a), gemm_wgmma.mode_of(b))
                instances.add(gemm_wgmma.expression(c, 1, modes[::-1] if c["SWAP"] else modes))
    return [*launches.values(), *(partial(nvrtc.compiled, "fp8_gemm.cu", i, "sm_90a") for i in sorted(instances))]


def meta_matrix(M: int, K: int, block: fp8.Block) -> Fp8Matrix:
    """A matrix with a shape and no numbers."""
    q = torch.empty(M, K, dtype=FP8, device="meta")
    return Fp8Matrix(q, torch.empty(scale_shape(q.shape, block), device="meta"), block)


def compile_inductor(n: int) -> None:
    """Compile torch.compile's quantizer for n x n."""
    torch.compile(compile_quantizer, dynamic=False)(torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16))


def about(row: Row) -> tuple[Any, ...]:
    """What a row tells of."""
    return tuple(row.get(name) for name in ("n", "bits", "group", "N", "K", "M", "layer", "format"))


def as_json(report: dict[str, Any]) -> str:
    """JSON with one line a row."""
    parts = []
    for name, value in report.items():
        rows = ",\n".join("  " + json.dumps(r) for r in value) if isinstance(value, list) else ""
        parts.append(f" {json.dumps(name)}: " + (f"[\n{rows}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Run what the flags ask for."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default="demo")
    flags.add_argument("--text")
    flags.add_argument("--out", help="JSON; rows that it holds already are kept, those measured anew replaced")
    flags.add_argument("--parts", help="some of gemm,quantizer,codes,error,perplexity; the last two run on a CPU too")
    flags.add_argument("--max-tokens", type=int, help="of the text, for perplexity")
    flags.add_argument("--compile", metavar="I/N")
    flags.add_argument("--inductor", type=int, metavar="N")
    given = flags.parse_args()
    if given.compile:
        index, of = map(int, given.compile.split("/"))
        return compile_share(index, of, (given.parts or "gemm,codes,quantizer").split(","))
    if given.inductor:
        return compile_inductor(given.inductor)
    torch.manual_seed(0)
    from lowq_cli.evaluate.perplexity import read_text

    text = read_text(given.text)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    here = Machine.here(torch.device(device))
    out = Path(given.out) if given.out else None
    report: dict[str, Any] = json.loads(out.read_text()) if out and out.exists() else {"runs": {}}
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "gemm": partial(gemm_rows, GEMMS),
        "quantizer": quantizer_rows,
        "codes": partial(codes_rows, CODES),
        "error": partial(error_rows, given.model, text, device),
        "perplexity": partial(perplexity_rows, given.model, text, device, given.max_tokens),
    }
    for name in given.parts.split(",") if given.parts else parts:
        began = time.monotonic()
        facts = {"gpu": here.gpu, "torch": here.torch, "triton": here.triton, "date": datetime.date.today().isoformat()}
        facts["model"] = Path(given.model).name if name in ("error", "perplexity") else ""
        report["runs"][name] = facts | {"text": Path(given.text).name if given.text else "bundled sample"}
        for row in parts[name]():
            print(json.dumps(row), flush=True)
            report[name] = [*(r for r in report.get(name, []) if about(r) != about(row)), row]
            if out:
                out.write_text(as_json(report))
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    return None


if __name__ == "__main__":
    main()
