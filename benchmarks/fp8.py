"""fp8 and int8 activations on a Hopper GPU: `python3 benchmarks/fp8.py --model DIR --text FILE --out FILE.json`.

    quantizer   block quantizer, 256x256: ours, the tile-per-block baseline, the plan of the GridQuant article, torch.compile's,
                and the plain cast, which moves the same bytes
    gemm        block-scaled products: cuda/fp8_gemm with 128x128 and 256x256 blocks, triton/fp8_gemm, torch's scaled_mm
    codes       8-bit activations times packed codes beside what dispatch takes for 16-bit activations, and cuBLAS fp16
    error       of products on real activations (captured from --model on --text) against fp64
    perplexity  of --model on --text, in every format and activation mode

Compile first, in parallel: `python3 benchmarks/fp8.py --compile I/N`, one process for each I; torch.compile's for each size by
`--inductor N`. Every output is checked against fp32 before it is timed; timing as in lowq_kernels.timing.
"""

import argparse
import datetime
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import ScalingType, scaled_mm

from lowq_kernels.activations import rounded
from lowq_kernels.cuda_wnax import nvrtc, tile_wgmma8
from lowq_kernels.fp8 import block_quant, gemm_triton, gemm_wgmma
from lowq_kernels.fp8.block_quant import fp8_block_quant
from lowq_kernels.fp8.matmul import multiply
from lowq_kernels.registry import Call, kernels, matmul, select
from lowq_kernels.timing import graph_time, rotation
from lowq_kernels.tuning import Machine
from lowq_packers import fp8
from lowq_packers.fp8 import FP8, Fp8Matrix
from lowq_packers.layouts import PackedWeight, pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Act, Scheme

DEVICE = torch.device("cuda")
SIZES = (1024, 2048, 4096, 8192, 16384)
COMPILED = (1024, 4096, 16384)  # sizes that torch.compile's is timed at: tracing takes seconds a size
GEMMS = (  # N, K, M's
    (8192, 8192, (1, 16, 32, 64, 256, 1024, 2048, 4096, 8192)),
    (28672, 4096, (1, 64, 1024, 4096)),
    (4096, 14336, (1, 64, 1024)),
    (4096, 4096, (1, 64, 256, 1024)),
)
ACTS: tuple[Act, ...] = ("int8", "fp8")
CODES = (  # N, K, bits, group, M's
    *((8192, 8192, bits, 128, (64, 128, 256, 1024, 4096)) for bits in (8, 4, 3, 2)),
    (8192, 8192, 4, 64, (64, 256, 1024, 4096)),
    *((N, K, 4, 128, (64, 256, 1024)) for N, K, _ in GEMMS[1:]),
)
WIDTHS = (8, 4, 2)  # whose perplexity is measured
TOLERANCE = 5e-3
REST = 0.02  # seconds between two products' timings
LAYERS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")  # whose inputs are captured
Row = dict[str, Any]


def compile_quantizer(x: torch.Tensor, B: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantizer as one would write it in torch: for torch.compile."""
    n = x.shape[0] // B
    v = x.view(n, B, n, B)
    s = v.abs().amax((1, 3), keepdim=True).float() / 448
    return (v / s).to(FP8).view(x.shape), s


def check(name: str, y: torch.Tensor, ref: torch.Tensor) -> float:
    """The relative error; raises if it is above TOLERANCE."""
    error = ((y.float() - ref).norm() / ref.norm()).item()
    if not error < TOLERANCE:
        raise AssertionError(f"{name}: error {error}")
    return error


def same_bits(a: Fp8Matrix, b: Fp8Matrix) -> bool:
    """Whether two quantizers agree to the last bit."""
    return torch.equal(a.q.view(torch.uint8), b.q.view(torch.uint8)) and torch.equal(a.scales, b.scales)


def quantizer_rows() -> Iterator[Row]:
    """us per size and plan."""
    for n in SIZES:
        xs = [torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(rotation(2 * n * n))]
        plans = {f"tile, {p['num_warps']} warps": p for p in block_quant.TILE_PLANS}
        plans |= {"walk, 32x32": block_quant.STRIDE_PLANS[0], "ours": block_quant.plan_for(n, n, (256, 256))}
        wanted = fp8.quantize(xs[0], (256, 256)) if n <= 4096 else None
        row: Row = {"n": n, "plan": plans["ours"]}
        for name, plan in plans.items():
            got = fp8_block_quant(xs[0], (256, 256), plan)
            if wanted and not same_bits(got, wanted):
                raise AssertionError(f"{name} at {n}: other bits than the definition")
            row[name] = graph_time([partial(fp8_block_quant, x, (256, 256), plan) for x in xs], 8)
        for name, block in (("128x128", (128, 128)), ("1x128", (1, 128))):
            row[name] = graph_time([partial(fp8_block_quant, x, block) for x in xs], 8)
        row["cast"] = graph_time([lambda x=x: x.to(FP8) for x in xs], 8)  # type: ignore[misc]
        if n in COMPILED:
            torch._dynamo.reset()
            compiled = torch.compile(compile_quantizer, dynamic=False)
            row["compile"] = graph_time([partial(compiled, x) for x in xs], 8)
        yield row
        del xs


def fp8_weights(N: int, K: int) -> tuple[list[Fp8Matrix], list[Fp8Matrix], list[Fp8Matrix]]:
    """Copies of one weight that outgrow the cache, in blocks of 128, of 256, and per channel."""
    n = max(2, min(6, math.ceil(256e6 / (N * K))))
    W = torch.randn(N, K, device=DEVICE)
    found = []
    for block in ((128, 128), (256, 256), (1, K)):
        w = fp8.quantize(W, block)
        found.append([Fp8Matrix(w.q.clone(), w.scales.clone(), block) for _ in range(n)])
    return found[0], found[1], found[2]


def gemm_rows(cells: Sequence[tuple[int, int, tuple[int, ...]]]) -> Iterator[Row]:
    """us per shape, M and kernel, and the error of each against fp32. cells: (N, K, M's)."""
    for N, K, Ms in cells:
        w128, w256, rowwise = fp8_weights(N, K)
        for M in Ms:
            x0 = torch.randn(M, K, device=DEVICE, dtype=torch.bfloat16)
            row: Row = {"N": N, "K": K, "M": M, "error": {}}
            calls: dict[str, list[Callable[[], object]]] = {}

            def timed(
                name: str,
                call: Callable[[Fp8Matrix], torch.Tensor],
                ws: list[Fp8Matrix],
                x: Fp8Matrix,
                row: Row = row,
                calls: dict[str, list[Callable[[], object]]] = calls,
            ) -> None:
                row["error"][name] = check(f"{name} {row}", call(ws[0]), x.dequantize() @ ws[0].dequantize().T)
                calls[name] = [partial(call, w) for w in ws]

            xs = [fp8_block_quant(x0, x_block) for _, x_block, _ in block_pairs(K)]
            x128, xrow = xs[0], xs[2]
            for (name, _, _), x, ws in zip(block_pairs(K), xs, (w128, w256, rowwise), strict=True):
                config = gemm_wgmma.config_for(x, ws[0])
                row.setdefault("config", {})[name] = config
                timed(name, lambda w, x=x, c=config: gemm_wgmma.fp8_gemm(x, w, None, torch.bfloat16, c), ws, x)  # type: ignore[misc]
            c = gemm_triton.config_for(M, N, K)
            timed("triton", lambda w, c=c: gemm_triton.fp8_gemm(x128, w, None, torch.bfloat16, c), w128, x128)  # type: ignore[misc]  # noqa: B023
            channel = rowwise[0].scales.t()
            timed(
                "torch, per channel",
                lambda w: torch._scaled_mm(xrow.q, w.q.t(), scale_a=xrow.scales, scale_b=channel, out_dtype=torch.bfloat16),  # noqa: B023
                rowwise,
                xrow,
            )
            if M > 1:  # cuBLASLt refuses one row
                scales = x128.scales.t().contiguous().t()
                how = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
                timed(
                    "torch, 128x128",
                    lambda w: scaled_mm(x128.q, w.q.t(), scales, how[0], w.scales.t(), how[1], output_dtype=torch.bfloat16),  # noqa: B023
                    w128,
                    x128,
                )
            row["us"] = in_turn(calls)
            yield row


def block_pairs(K: int) -> list[tuple[str, fp8.Block, fp8.Block]]:
    """The ways to scale a product: name, blocks of x, blocks of W."""
    return [("128x128", (1, 128), (128, 128)), ("256x256", (256, 256), (256, 256)), ("per channel", (1, K), (1, K))]


def meta_matrix(M: int, K: int, block: fp8.Block) -> Fp8Matrix:
    """A matrix with a shape and no numbers."""
    q = torch.empty(M, K, dtype=FP8, device="meta")
    return Fp8Matrix(q, torch.empty(fp8.scale_shape(q.shape, block), device="meta"), block)


def in_turn(calls: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
    """us of each name, the median of three: forwards, backwards and forwards again, with rests. Without them the clock falls
    from 1.98 to 1.5 GHz, by how much depends on what ran just before."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for names in (list(calls), list(calls)[::-1], list(calls)):
        for name in names:
            time.sleep(REST)
            found[name].append(graph_time(calls[name], 4))
    return {name: round(statistics.median(times), 2) for name, times in found.items()}


def codes_rows(cells: Sequence[tuple[int, int, int, int, tuple[int, ...]]]) -> Iterator[Row]:
    """us over the `tile` layout: 8-bit activations (x's rounding included; the config that dispatch takes, and the best one),
    what dispatch takes for 16-bit activations, the rounding of x alone, and cuBLAS fp16. cells: (N, K, bits, group, M's)."""
    for N, K, bits, group, Ms in cells:
        dense = [torch.randn(N, K, device=DEVICE).half() for _ in range(max(2, min(4, math.ceil(256e6 / (2 * N * K)))))]
        gen = torch.Generator(DEVICE).manual_seed(bits)
        W_q = torch.randint(0, 1 << bits, (N, K), device=DEVICE, dtype=torch.uint8, generator=gen)
        scales, zeros = (torch.rand(2, N, K // group, device=DEVICE, generator=gen) * 0.009 + 0.001).half()
        qt = QuantizedTensor(W_q, scales, (zeros * 100 * ((1 << bits) - 1)).half(), bits, group)
        W, copies = qt.dequantize(), repeated(pack(qt, "tile"), rotation(N * K * bits // 8))
        for M in Ms:
            x = torch.randn(M, K, device=DEVICE).half()
            row: Row = {"bits": bits, "group": group, "N": N, "K": K, "M": M, "error": {}, "config": {}}
            spec, config = select(Call.of(x, copies[0]))
            check(spec.name, spec.launch(x, copies[0], None, config), x.float() @ W.T)
            row["a16"] = graph_time([lambda p=p: spec.launch(x, p, None, config) for p in copies], 6)  # type: ignore[misc]  # noqa: B023
            row["a16_kernel"] = spec.name
            row["rounding"] = {act: graph_time([partial(rounded, x, act)] * 4, 6) for act in ACTS}
            row["cublas"] = graph_time([lambda w=w: x @ w.T for w in dense], 6)  # type: ignore[misc]  # noqa: B023
            for act in ACTS:
                spec8, call = kernels()[f"cuda/tile_{act}"], Call.of(x, copies[0], act)
                if spec8.why_not(call):
                    continue
                ref, times = rounded(x.float(), act) @ W.T, {}
                legal = spec8.legal_configs(call)
                for c in legal:
                    row["error"][act] = check(f"{act} {c}", spec8.launch(x, copies[0], None, c), ref)
                    times[json.dumps(c)] = graph_time([partial(spec8.launch, x, p, None, c) for p in copies], 3)
                row[act] = times[json.dumps(spec8.default_config(call, legal))]
                row["config"][act] = min(times, key=lambda c: times[c])
                row[f"{act}_best"] = times[row["config"][act]]
            yield row


def repeated(p: PackedWeight, n: int) -> list[PackedWeight]:
    """p and n - 1 copies of its words."""
    return [p, *(replace(p, words=p.words.clone()) for _ in range(n - 1))]


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
    from lowq_cli.accuracy.perplexity import tokenize, windows
    from lowq_cli.hf.load import load

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
    from lowq_cli.accuracy.perplexity import measure, measure_modes
    from lowq_cli.interop import fp8_checkpoint
    from lowq_cli.interop.foreign import open_decoded
    from lowq_cli.run.pipeline import quantize

    plain = measure(model, text, device=device, max_tokens=tokens)
    yield {"format": "unquantized", "none": plain.ppl, "tokens": plain.tokens}
    with tempfile.TemporaryDirectory() as folder:
        for name, block in fp8_checkpoint.BLOCKS.items():
            out = Path(folder) / name
            with open_decoded(model) as source:
                fp8_checkpoint.write(source, fp8_checkpoint.make_plan(source, block), out, torch.device(device))
            yield {"format": f"fp8 {name}"} | {mode: r.ppl for mode, r in measure_modes(out, text, device, tokens).items()}
        for bits in WIDTHS:
            out = Path(folder) / str(bits)
            quantize(model, out, bits=bits, lm_head="keep", device=device)
            yield {"format": f"{bits}-bit g64"} | {mode: r.ppl for mode, r in measure_modes(out, text, device, tokens).items()}


def compile_share(index: int, of: int, parts: Sequence[str]) -> None:
    """Compile one share of everything that these parts will time, on rubbish."""
    x = torch.randn(512, 512, device=DEVICE, dtype=torch.bfloat16)
    work: list[Callable[[], object]] = [partial(fp8_block_quant, x, b) for b in ((128, 128), (256, 256), (1, 128), (1, 512))]
    if "quantizer" in parts:
        plans = [*block_quant.TILE_PLANS, block_quant.STRIDE_PLANS[0], *(block_quant.plan_for(n, n, (256, 256)) for n in SIZES)]
        work += [partial(fp8_block_quant, x, (256, 256), p) for p in plans]
    if "codes" in parts:
        for N, K, bits, group, Ms in CODES:
            for act, M in ((a, m) for a in ACTS for m in Ms):
                spec = kernels()[f"cuda/tile_{act}"]
                call = Call(M, N, K, Scheme(bits, group, "float"), "tile", torch.float16, "cuda", (9, 0), act)
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
                c = gemm_wgmma.config_for(a, b)
                modes = (gemm_wgmma.mode_of(a), gemm_wgmma.mode_of(b))
                instances.add(gemm_wgmma.expression(c, 1, modes[::-1] if c["SWAP"] else modes))
    return [*launches.values(), *(partial(nvrtc.compiled, "fp8_gemm.cu", i, "sm_90a") for i in sorted(instances))]


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
        torch.compile(compile_quantizer, dynamic=False)(
            torch.randn(given.inductor, given.inductor, device=DEVICE, dtype=torch.bfloat16)
        )
        return None
    torch.manual_seed(0)
    from lowq_cli.accuracy.perplexity import read_text

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
        report["runs"][name] = {
            "gpu": here.gpu,
            "torch": here.torch,
            "triton": here.triton,
            "date": datetime.date.today().isoformat(),
            "model": Path(given.model).name if name in ("error", "perplexity") else "",
            "text": Path(given.text).name if given.text else "bundled sample",
        }
        for row in parts[name]():
            print(json.dumps(row), flush=True)
            report[name] = [*(r for r in report.get(name, []) if about(r) != about(row)), row]
            if out:
                out.write_text(as_json(report))
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    return None


if __name__ == "__main__":
    main()
