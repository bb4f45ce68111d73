"""Compare other tools' checkpoints with lowq's at equal bits: benchmarks/results/accuracy/peers.json.

    python benchmarks/peers.py autoround --models MODELS --data DATA [--iters 200] [--fp4 nvfp4,mxfp4]     AutoRound
    python benchmarks/peers.py llamacpp  --models MODELS --data DATA --library LIB      K- and i-quants, importance matrix
    python benchmarks/peers.py exl3      --models MODELS --data DATA --wheel FOLDER     exllamav3's trellis, 2 to 4 bits
    python benchmarks/peers.py lowq      --models MODELS --data DATA [--method distill] [--bpw 3.5,2.5] [--format table-e4m3]

All are given the same text: what the model wrote itself (--calib self, the default), the bundled one, or a file. Every linear
layer but lm_head is quantized; files are read back into the fp32 model. A row has perplexity and KL divergence from the
unquantized model (nats a token) on both texts. Flags and files are as in accuracy.py.

autoround: in an environment with lowq and auto-round (0.16.1 was measured; `datasets` need not be the real one); its defaults
but for --iters, asymmetric, windows of 512 tokens. --fp4: these formats instead of grids, of the weights alone.
llamacpp: LIB is ggml's base library (libggml-base.so); its quantizing functions and no other code of it are used. One type for
all matrices: llama.cpp's files mix types by tensor. The importance matrix is what llama-imatrix counts, sums of squared inputs.
Blocks are of 256 weights, IQ4_NL's of 32: columns are padded with zeros to a multiple of it, and padding is counted as bits.
exl3: FOLDER is exllamav3's wheel, unpacked; its quantizer runs as its converter calls it (peers_exl3.py). On a GPU, with nvcc.
"""

import ctypes
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peers_exl3
import torch
from accuracy import Args, Experiment, linears, measure, quantized
from accuracy_rows import Judge, Row, device, words

from lowq_cli.calibrate import texts
from lowq_cli.evaluate import perplexity
from lowq_cli.files.source import open_source
from lowq_cli.interop.foreign import DecodedSource, open_decoded
from lowq_cli.models import CausalModel
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import own_text, own_text_plan
from lowq_packers.scheme import Scheme

TYPES = {  # ggml's number of a type -> its name, width of its codes
    12: ("Q4_K", 4), 20: ("IQ4_NL", 4), 23: ("IQ4_XS", 4), 11: ("Q3_K", 3), 21: ("IQ3_S", 3), 18: ("IQ3_XXS", 3),
    10: ("Q2_K", 2), 22: ("IQ2_S", 2), 17: ("IQ2_XS", 2), 16: ("IQ2_XXS", 2), 29: ("IQ1_M", 1), 19: ("IQ1_S", 1),
}  # fmt: skip
FP4: dict[str, dict[str, Any]] = {
    "nvfp4": {"group_size": 16, "data_type": "nv_fp"},
    "mxfp4": {"group_size": 32, "data_type": "mx_fp"},
}  # its words
BLOCK, SMALL, ROWS = 256, {20: 32}, 32  # weights that a block has, and of some types; rows quantized at a time


def about(args: Args) -> Row:
    """What all rows of a run share: the text."""
    return {"calib": Path(args.calib).name, "calib_tokens": args.calib_tokens}


def windows_of(folder: Path, judge: Judge, args: Args) -> torch.Tensor:
    """(n, window) token ids of the calibration text, as lowq takes them."""
    text = texts.Text.read(args.calib) if args.calib != texts.SELF else None
    if text is None:
        with open_source(str(folder)) as source:
            recipe = make_recipe(method="gptq", calib=texts.SELF, calib_tokens=args.calib_tokens)
            text = own_text.whole(own_text_plan.outlook(str(folder), source, recipe, torch.device(device())), None)
    return text.windows(judge.tokenizer, args.calib_tokens, judge.model)


def judged(judge: Judge, dense: CausalModel) -> Row:
    """Perplexity and KL divergence on each text."""
    found = {name: perplexity.evaluate(judge.model, ids, dense) for name, ids in judge.texts.items()}
    return {"ppl": {n: round(r.ppl, 4) for n, r in found.items()}, "kl": {n: r.kl and round(r.kl, 5) for n, r in found.items()}}


def grid_cells(model: str, args: Args, method: str) -> Iterator[Row]:
    """One per group and bits."""
    for group in args.group:
        for bits in args.bits:
            bpw = Scheme(bits, group).bits_per_weight()
            yield {"model": model, "bits": bits, "group": group, "bpw": bpw, "method": method} | about(args)


def autoround_cells(model: str, args: Args) -> Iterator[Row]:
    """Its own grids: scales in fp16 as lowq's, zeros as whole codes. Or formats of FP4."""
    name = f"auto-round, {args.iters} steps"
    for kind in args.fp4:
        scheme = make_recipe(format=kind).scheme(4, FP4[kind]["group_size"])
        yield {"model": model, "bits": 4, "bpw": scheme.bits_per_weight(), "method": f"{name}, {kind}"} | about(args)
    for cell in () if args.fp4 else grid_cells(model, args, name):
        yield cell | {"bpw": cell["bits"] + (16 + cell["bits"]) / cell["group"]}


def autoround(folder: Path, judge: Judge, wanted: Sequence[Row], args: Args) -> Iterator[Row]:
    """AutoRound's GPTQ files, read back by lowq's reader of the format; of FP4 the weights that it leaves in the model."""
    from auto_round import AutoRound

    dense, ids = Judge(folder, args).model, windows_of(folder, judge, args)
    samples = [{"input_ids": w.unsqueeze(0), "attention_mask": torch.ones_like(w).unsqueeze(0)} for w in ids]
    parameters = dict(judge.model.named_parameters())
    for cell in wanted:
        start, kind = time.monotonic(), cell["method"].split(", ")[-1]
        weights = FP4[kind] | {"act_bits": 16} if kind in FP4 else {"group_size": cell["group"], "sym": False}
        with tempfile.TemporaryDirectory() as out:
            made = AutoRound(
                str(folder), judge.tokenizer, bits=cell["bits"], iters=args.iters, seqlen=ids.shape[1], nsamples=len(samples),
                batch_size=texts.BATCH, dataset=samples, device_map=device(), enable_torch_compile=False, **weights,
            )  # fmt: skip
            if kind in FP4:
                model, _ = made.quantize()
                changed = {f"{n}.weight": m.weight for n, m in linears(model).items()}
            else:
                made.quantize_and_save(output_dir=out, format="auto_gptq")
                with open_decoded(str(next(Path(out).rglob("config.json")).parent)) as source:
                    assert isinstance(source, DecodedSource)
                    changed = {name: source.read(name) for name in source.dense}
            seconds = time.monotonic() - start
            for name, weight in changed.items():
                parameters[name].data.copy_(weight.reshape(parameters[name].shape))
        yield cell | judged(judge, dense) | {"seconds": round(seconds, 1)}


def llamacpp_cells(model: str, args: Args) -> Iterator[Row]:
    """One per type. Its bits per weight are known when it is done: padding counts."""
    for name, bits in TYPES.values():
        if bits in args.bits:
            yield {"model": model, "bits": bits, "method": f"llama.cpp {name}"} | about(args)


def llamacpp(folder: Path, judge: Judge, wanted: Sequence[Row], args: Args) -> Iterator[Row]:
    """Matrices through ggml's quantizing function and back."""
    dense, ids = Judge(folder, args).model, windows_of(folder, judge, args)
    layers = linears(judge.model)
    original = {n: m.weight.data.clone() for n, m in layers.items()}
    squares = importance(judge.model, layers, ids)
    ggml, number = Ggml(args.library), {name: n for n, (name, _) in TYPES.items()}
    for cell in wanted:
        start, held = time.monotonic(), 0
        for n, m in layers.items():
            restored, nbytes = ggml.restored(number[cell["method"].split()[-1]], original[n].cpu(), squares[n])
            held += nbytes
            m.weight.data.copy_(restored)
        seconds = time.monotonic() - start
        bpw = 8 * held / sum(w.numel() for w in original.values())
        yield cell | {"bpw": round(bpw, 4)} | judged(judge, dense) | {"seconds": round(seconds, 1)}


@torch.inference_mode()
def importance(model: torch.nn.Module, layers: dict[str, torch.nn.Linear], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Linear's name -> (K,) mean squared input over the text."""
    sums = {n: torch.zeros(m.in_features) for n, m in layers.items()}

    def count(name: str, x: torch.Tensor) -> None:
        sums[name] += x.float().square().flatten(0, -2).sum(0).cpu()

    hooks = [m.register_forward_pre_hook(lambda _, x, n=n: count(n, x[0])) for n, m in layers.items()]
    for batch in ids.split(texts.BATCH):
        model(batch.to(model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return {n: s / ids.numel() for n, s in sums.items()}


class Ggml:
    """ggml's base library, for quantizing rows and reading them back."""

    def __init__(self, library: Path) -> None:
        lib = ctypes.CDLL(str(library))
        lib.ggml_quantize_chunk.restype = lib.ggml_row_size.restype = ctypes.c_size_t
        lib.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
        floats = ctypes.POINTER(ctypes.c_float)
        lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, floats, ctypes.c_void_p, *[ctypes.c_int64] * 3, floats]
        self.lib, self.floats = lib, floats

    def restored(self, kind: int, W: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, int]:
        """A matrix (N, K) as its type holds it, in fp32, and the type's bytes. importance: (K,) of its columns."""
        N, K = W.shape
        block = SMALL.get(kind, BLOCK)
        width = -(-K // block) * block
        padded, weights = torch.zeros(N, width), torch.zeros(width)
        padded[:, :K], weights[:K] = W, importance
        held = ctypes.create_string_buffer(N * self.lib.ggml_row_size(kind, width))
        at = lambda t: ctypes.cast(t.data_ptr(), self.floats)  # noqa: E731
        self.lib.ggml_quantize_init(kind)
        with ThreadPoolExecutor() as pool:  # i-quants of 2 bits search long
            some = lambda n: (kind, at(padded), held, n * width, min(ROWS, N - n), width, at(weights))  # noqa: E731
            list(pool.map(lambda n: self.lib.ggml_quantize_chunk(*some(n)), range(0, N, ROWS)))
        back = torch.empty(N, width)
        read = getattr(self.lib, f"dequantize_row_{TYPES[kind][0].lower().replace('k', 'K')}")
        read.argtypes = [ctypes.c_void_p, self.floats, ctypes.c_int64]
        read(held, at(back), N * width)
        return back[:, :K].contiguous(), len(held)


def exl3_cells(model: str, args: Args) -> Iterator[Row]:
    """One per rate. Its bits per weight are known when the shapes are."""
    for rate in args.rates:
        yield {"model": model, "bits": int(rate), "method": f"exllamav3 EXL3 {rate:g}"} | about(args)


def exl3(folder: Path, judge: Judge, wanted: Sequence[Row], args: Args) -> Iterator[Row]:
    """exllamav3's quantizer on the model's layers in turn."""
    dense, ids = Judge(folder, args).model, windows_of(folder, judge, args)
    original = {n: m.weight.data.clone() for n, m in linears(judge.model).items()}
    with tempfile.TemporaryDirectory() as built:
        found = peers_exl3.quantizer(args.wheel, args.library or peers_exl3.build(args.wheel, Path(built)))
        for cell in wanted:
            for n, m in linears(judge.model).items():
                m.weight.data.copy_(original[n])
            rate, start = float(cell["method"].split()[-1]), time.monotonic()
            peers_exl3.quantize(judge.model, ids, rate, found)
            torch.cuda.synchronize()
            seconds = time.monotonic() - start
            bpw = peers_exl3.bits_per_weight(rate, [w.shape for w in original.values()])
            yield cell | {"bpw": round(bpw, 4)} | judged(judge, dense) | {"seconds": round(seconds, 1)}


def lowq_cells(model: str, args: Args) -> Iterator[Row]:
    """One per method, group and bits, or budget of bits per weight; `method` also names another seed or format."""
    more = f" --calib-seed {args.calib_seed}" * bool(args.calib_seed) + f" --format {args.format}" * (args.format != "lowq")
    for method in args.method:
        for bpw in args.bpw:
            yield {"model": model, "bits": int(bpw), "target": bpw, "method": f"lowq {method}{more}"} | about(args)
        for cell in () if args.bpw else grid_cells(model, args, f"lowq {method}{more}"):
            scheme = make_recipe(bits=cell["bits"], format=args.format).scheme(cell["bits"], cell["group"])
            yield cell | {"bpw": scheme.bits_per_weight()}


def lowq(folder: Path, judge: Judge, wanted: Sequence[Row], args: Args) -> Iterator[Row]:
    """Checkpoints as `lowq quantize` writes them."""
    dense = Judge(folder, args).model
    how = {"calib": args.calib, "calib_tokens": args.calib_tokens, "calib_seed": args.calib_seed, "format": args.format}
    for cell in wanted:
        width = {"bpw": cell["target"]} if "target" in cell else {"bits": cell["bits"], "group": cell["group"]}
        made = quantized(folder, make_recipe(method=cell["method"].split()[1], lm_head="keep", **width, **how), judge)
        spent: Row = {"bpw": round(made.mixed.bpw, 4), "schemes": made.schemes} if made.mixed else {}
        yield cell | spent | judged(judge, dense) | {"seconds": made.seconds}


FLAGS: dict[str, Row] = {"--calib": {"default": texts.SELF}, "--calib-tokens": {"type": int, "default": 65536}}
RATES: Row = {"type": lambda text: [float(x) for x in text.split(",")], "default": [2.0, 2.5, 3.0, 3.5, 4.0]}
OURS: dict[str, Row] = {
    "--method": {"type": words, "default": ["distill"]}, "--bpw": RATES | {"default": []},
    "--format": {"default": "lowq"}, "--calib-seed": {"type": int, "default": 0},
}  # fmt: skip
EXPERIMENTS = {
    "autoround": Experiment(
        "peers.json", (4, 3, 2), ("auto-round",),
        FLAGS | {"--iters": {"type": int, "default": 200}, "--fp4": {"type": words, "default": []}}, autoround_cells, autoround,
    ),
    "llamacpp": Experiment(
        "peers.json", (4, 3, 2), (), FLAGS | {"--library": {"type": Path, "required": True}}, llamacpp_cells, llamacpp
    ),
    "exl3": Experiment(
        "peers.json", (4, 3, 2), ("triton",),
        FLAGS | {"--wheel": {"type": Path, "required": True}, "--library": {"type": Path}, "--rates": RATES}, exl3_cells, exl3,
    ),
    "lowq": Experiment(
        "peers.json", (4, 3, 2), (),
        FLAGS | OURS, lowq_cells, lowq,
    ),
}  # fmt: skip

if __name__ == "__main__":
    name, *rest = sys.argv[1:] or [""]
    if name not in EXPERIMENTS:
        raise SystemExit(__doc__)
    measure(EXPERIMENTS[name], rest)
