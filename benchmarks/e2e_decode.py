"""Measure tokens per second of whole models with random weights, all variants in one run.

    python benchmarks/e2e_decode.py --out FOLDER [--run MODEL=VARIANTS[@BATCHES]] ...

Without --run, every table of docs/decode.md in one run: decode_8b.json, decode_1b.json and so on. All kernels are compiled
first, in parallel. A variant is `transformers` (model.generate), `transformers-compile` (the same with a static cache, which
it compiles), `16` (the lowq engine,
weights not quantized), or bits[gGROUP][n][h HEADBITS]: `4`, `4g64`, `4h8`, `2h4`, `4g32n` (no zeros), or `nvfp4`, `mxfp4`,
`nf4`, with a head or not. Layers are built on the device from random codes; of EXPERTS_ONLY only experts, as published, or with
a head all others in its width, as `lowq quantize` makes them.
A row: tokens/s by the host's clock over the new tokens after the first, ms per step, bytes of weights a step reads,
percent of the time that the measured read bandwidth allows, time to first token; with --profile also where a step's
microseconds go.
"""

import argparse
import gc
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pages.decode import widths
from transformers import AutoConfig, AutoModelForCausalLM

from lowq_cli.engine import Generation, explain, precompiling, search, stream
from lowq_cli.engine.hf_eager import HfEagerDecoder
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.profiling import WHOLE, profile_steps
from lowq_cli.engine.sampling import Sampling
from lowq_cli.hf.expert_kinds import DOWN, Kind, kind_of
from lowq_cli.hf.experts import QuantExperts
from lowq_kernels.decode import launch
from lowq_kernels.dispatch import measure as kernel_times_alone
from lowq_kernels.dispatch import registry, timing
from lowq_kernels.dispatch.precompile import launch_all
from lowq_kernels.dispatch.tuning import Shape
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.modules.stack import Stack
from lowq_packers import bitstream
from lowq_packers.layouts import PackedWeight, tile
from lowq_packers.scheme import Scheme
from lowq_packers.tables import to_bytes, values

LLAMA = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072}
MIXTURE = {"model_type": "qwen3_moe", "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
GPT_OSS = {"model_type": "gpt_oss", "sliding_window": 128}
EXPERTS_ONLY = ("gpt-oss-20b", "tiny-gpt-oss")
SHAPES: dict[str, dict[str, Any]] = {
    "8b": LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "1b": LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64}
    | {"tie_word_embeddings": True},
    "70b": LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "30b-a3b": MIXTURE
    | {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
    | {"vocab_size": 151936, "max_position_embeddings": 40960},
    "gpt-oss-20b": GPT_OSS
    | {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "head_dim": 64}
    | {"num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088}
    | {"max_position_embeddings": 131072},
    "tiny-gpt-oss": GPT_OSS
    | {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64}
    | {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1024},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "head_dim": 32, "vocab_size": 1024},
    "tiny-mixture": MIXTURE
    | {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2}
    | {"vocab_size": 1024},
}
SEARCHED: dict[registry.Call, tuple[str, registry.Config]] = {}  # what --search found: asked before every other table
Run = tuple[str, str, list[int]]  # model, variant, batches
RUNS = (  # the heads of 4, 3 and 2 bits that `lowq quantize` gives, and other ones
    "8b=4h8,2h4@1,4,8,16,32,64",
    "8b=16@1,8,64",
    "8b=8,4,3h8,2h8,2,8g64,4g64h8,3g64h8,2g64h4",
    "1b=16,8,4,2",
    "30b-a3b=4h8@1,4,8",
    "70b=4h8",
    "8b=transformers,transformers-compile",
)
TOKENIZER = SimpleNamespace(eos_token_id=None, decode=lambda ids, **kw: "x" * len(ids))


def skeleton(shape: str, dtype: torch.dtype, layers: int | None = None) -> Any:
    """A model of that shape on the meta device, of as many layers as it has or `layers`."""
    facts = {"model_type": "llama"} | SHAPES[shape] | {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    facts |= {} if layers is None else {"num_hidden_layers": layers}
    config = AutoConfig.for_model(**facts)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def fill(model: Any, device: str) -> Any:
    """The model with everything that is still on the meta device made there: norms 1, biases 0, weights of the spread of
    trained ones. Biases of 1 made all tokens alike, and 16 of gpt-oss asked for 5 to 9 experts of 32 where 28 are usual."""
    torch.manual_seed(0)
    for m in model.modules():
        for name, p in list(m.named_parameters(recurse=False)):
            if p.is_meta:
                new = torch.full(p.shape, float(name != "bias"), dtype=p.dtype, device=device)
                new = new if p.dim() == 1 else new.normal_(0, p.shape[-1] ** -0.5)
                m.register_parameter(name, torch.nn.Parameter(new, requires_grad=False))
    if getattr(model.model, "rotary_emb", None) is not None:
        with torch.device(device):
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers are computed
    model.tie_weights()
    return model


def random_packed(layer: torch.nn.Linear, scheme: Scheme, dtype: torch.dtype, device: str) -> QuantLinear:
    """A layer of random codes whose weights have the spread of a trained layer's, about 1 / sqrt(K); its bias, if any, 0."""
    (N, K), bias = layer.weight.shape, None if layer.bias is None else torch.zeros(layer.out_features, device=device)
    words = random_words(N, bitstream.words_per_row(K, scheme.bits), device=device)
    scales, zeros, table = random_meta((N, scheme.groups(K)), (1,), K, scheme, dtype, device)
    packed = PackedWeight(words, scales, zeros, scheme, N, K, "rowstream", table=table)
    return QuantLinear.from_packed(packed, bias, dtype=dtype)


def random_words(*shape: int, device: str) -> torch.Tensor:
    """Random bits, as int32."""
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * 4), dtype=torch.uint8, device=device).view(torch.int32)


def random_meta(
    shape: tuple[int, ...], tables: tuple[int, ...], K: int, scheme: Scheme, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Scales, zeros and, as (*tables, width), factors that give random codes that spread."""
    scales = torch.rand(shape, device=device) + 0.5
    if not scheme.table:
        if (
            scheme.zero == "none"
        ):  # of either sign: the codes' mean is -1/2, which would make all tokens alike within a few layers
            zeros, scales = None, scales * (torch.randint(0, 2, shape, device=device) * 2 - 1)
        else:
            zeros = (scheme.levels - 1) / 2 + torch.rand(shape, device=device) - 0.5
        return (scales * (3.4 / scheme.levels / K**0.5)).to(dtype), None if zeros is None else zeros.to(dtype), None
    unit = 1 / float(values(scheme, None).square().mean().sqrt()) / K**0.5
    if scheme.table_width:  # NVFP4's scales are about 1, apart from their factor
        return to_bytes(scales, scheme.scale), None, torch.full((*tables, 1), unit, device=device)
    return (scales * unit).to(dtype) if scheme.scale == "float" else to_bytes(scales * unit, scheme.scale), None, None


def random_experts(module: torch.nn.Module, scheme: Scheme, dtype: torch.dtype, device: str) -> QuantExperts:
    """Packed experts in the place of transformers' (on the meta device); on a GPU in the layout of its kernels at once."""
    kind = kind_of(module)
    assert isinstance(kind, Kind), kind
    experts = QuantExperts(module, dict.fromkeys(kind.stacks, scheme), dtype)
    meta: tuple[int, ...]  # of scales
    for name, (E, N, K) in experts.shapes.items():
        if device == "cpu":
            meta, layout = (E, N, scheme.groups(K)), "rowstream"
            packed = random_words(E, N, bitstream.words_per_row(K, scheme.bits), device=device)
        else:
            tiles, layout = tile.padded_rows(N) // tile.ROWS, "tile"
            packed = random_words(E, tiles, tile.chunks(K, scheme.bits) * tile.WORDS[scheme.bits], device=device)
            meta = (E, tiles, scheme.groups(K), tile.ROWS)
        scales, zeros, table = random_meta(meta, (E, 1), K, scheme, dtype, device)
        experts.set_stack(name, Stack(packed, scales, zeros, None, scheme, N, K, layout, table))
    return experts


def quantized_model(model: Any, variant: str, dtype: torch.dtype, device: str, experts_only: bool = False) -> Any:
    """The model on the meta device, packed as `variant` says."""
    bits, group, kind, head = widths(variant)
    scheme = Scheme.of(bits, group, kind)
    for path, m in list(model.named_modules()):
        if isinstance(kind_of(m), Kind) and isinstance(getattr(m, DOWN, None), torch.nn.Parameter):
            model.set_submodule(path, random_experts(m, scheme, dtype, device))
        elif isinstance(m, torch.nn.Linear) and (head if path == "lm_head" or experts_only else True):
            own = scheme
            if path == "lm_head" or experts_only:
                own = Scheme(head, group if kind == "float" else 64 if experts_only else 128)
            model.set_submodule(path, random_packed(m, own, dtype, device))
    return fill(model, device)


def decoder_for(variant: str, shape: str, dtype: torch.dtype, device: str, layers: int | None = None) -> tuple[Any, Any]:
    """(model, decoder) of a variant, of all its layers or so many."""
    model = skeleton(shape, dtype, layers)
    if variant.startswith("transformers") or variant == "16":
        fill(model, device)
        if variant == "16":
            return model, NativeDecoder(model)
        return model, HfEagerDecoder(model)
    quantized_model(model, variant, dtype, device, shape in EXPERTS_ONLY)
    return model, NativeDecoder(model)


def generate_tps(model: Any, ids: torch.Tensor, new: int, **how: Any) -> tuple[float, float]:
    """Tokens per second of transformers' own generate, its time to the first token taken off, and CPU seconds per step."""
    seconds, cpu = [], []
    for n in (1, new):
        start, cpu_start = time.perf_counter(), time.process_time()
        mask = torch.ones_like(ids)
        fixed = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "pad_token_id": 0}
        model.generate(ids, attention_mask=mask, **fixed, **how)
        if ids.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return ids.shape[0] * (new - 1) / (seconds[1] - seconds[0]), (cpu[1] - cpu[0]) / (new - 1)


def search_in_place(decoder: Any, batch: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Let the best kernels of each shape race within whole steps, as `lowq tune` does. Fills SEARCHED."""
    now = search.calls_of(decoder, batch, dtype)
    options = {}
    for call in now:
        shape = Shape(call.N, call.K, call.scheme, dtype)
        weights = kernel_times_alone.copies(kernel_times_alone.random_weight(shape, call.layout, device))
        if e := kernel_times_alone.best(shape, batch, weights, device):
            options[call] = [(e.kernel, e.config), *((r["kernel"], r["config"]) for r in e.runners_up)]
    chosen, before, after = search.search(decoder, now, options)
    SEARCHED.update(chosen)
    if SEARCHED.get not in registry.TABLES:
        registry.TABLES.insert(0, SEARCHED.get)
    registry.forget_choices()
    decoder.captured.clear()
    named = {f"{c.N}x{c.K}": chosen[c] for c in chosen}
    return {"step_us_default": round(before, 1), "step_us_searched": round(after, 1), "searched": named}


def memory(model: Any, decoder: Any) -> dict[str, float]:
    """GB of the model's tensors, of its cache, and at the peak since the last reset."""
    tensors = (t for m in (model, decoder.linears) for t in (*m.parameters(), *m.buffers()))  # joined layers are the decoder's
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    cache = sum(t.nbytes for pair in getattr(decoder, "caches", ()) for t in pair)
    found = {"weights_gb": sum(held.values()), "cache_gb": cache, "peak_gb": torch.cuda.max_memory_allocated()}
    return {k: round(v / 1e9, 3) for k, v in found.items()}


def parts(model: Any, decoder: Any, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """What a step consists of, as `lowq generate --profile` shows it: microseconds, launches, bytes of weights read."""
    products = [r.layers for r in explain.kernels_of(explain.called(model, decoder), len(prompts), model.dtype)]
    read = explain.bytes_by_layer(model, decoder) | {WHOLE: explain.bytes_per_token(model, decoder, len(prompts))}
    with tempfile.TemporaryDirectory() as folder:
        found = profile_steps(decoder, prompts, Sampling(), Path(folder) / "steps.json", list(dict.fromkeys(products)))
    return [{"what": r.what[:90], "us": round(r.us, 1), "calls": r.calls, "bytes": round(read.get(r.what, 0))} for r in found]


def measure(variant: str, shape: str, batches: list[int], args: argparse.Namespace, gbs: float) -> list[dict[str, Any]]:
    """The rows of one variant, one per batch size."""
    dtype, device, rows = getattr(torch, args.dtype), args.device, []
    model, decoder = decoder_for(variant, shape, dtype, device)
    generator = torch.Generator().manual_seed(1)
    for batch in batches:
        ids = torch.randint(2, model.config.vocab_size, (batch, args.prompt), generator=generator)
        nbytes = explain.bytes_per_token(model, decoder, batch)
        row = {"variant": variant, "model": shape, "batch": batch, "dtype": args.dtype, "bytes_per_step": nbytes}
        if variant in ("transformers", "transformers-compile"):
            static: dict[str, Any] = {"cache_implementation": "static"} if variant.endswith("compile") else {}
            new = args.new if static else min(args.new, args.generate_new)
            start = time.perf_counter()
            with torch.no_grad():  # not inference_mode: torch.compile would compile for it anew
                generate_tps(model, ids.to(device), new if static else 4, **static)
                row["warm_up_s"] = round(time.perf_counter() - start, 1)
                tps, cpu_s = generate_tps(model, ids.to(device), new, **static)
            row |= {"decoder": f"transformers generate{', static cache, its own torch.compile' if static else ''}"}
        else:
            new = args.new if batch == 1 else min(args.new, args.new_batched)

            def decode(n: int, ids: torch.Tensor = ids, batch: int = batch) -> tuple[Generation, float]:
                if isinstance(decoder, NativeDecoder):
                    decoder.held = []  # the prompt is read anew, as a stranger's is
                g = stream(model, TOKENIZER, ids[0].tolist(), max_new_tokens=n, decoder=decoder, batch=batch)
                pieces, first = g.pieces(), 0.0
                for _ in pieces:
                    first = first or time.process_time()
                return g, (time.process_time() - first) / max(g.steps, 1)

            decode(8)  # compiles and records
            if args.search and isinstance(decoder, NativeDecoder) and decoder.graphs:
                row |= search_in_place(decoder, batch, dtype, torch.device(device))
            decode(min(new, 64))  # clocks up
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            g, cpu_s = decode(new)
            tps = g.decode_tps
            row |= {"decoder": decoder.name, "reason": decoder.reason, "ttft_s": round(g.ttft_s, 4)}
            kernels = explain.kernels_of(explain.called(model, decoder), batch, dtype)
            row["kernels"] = {k.layers: f"{k.scheme} {k.kernel}" for k in kernels}
        if device == "cuda" and isinstance(decoder, NativeDecoder):
            row |= memory(model, decoder)
            row["memory_as_promised"] = row["peak_gb"] <= 1.1 * (row["weights_gb"] + row["cache_gb"]) + 1
        row |= {"tokens_per_s": round(tps, 2), "ms_per_step": round(1e3 * batch / tps, 4)}
        if device == "cpu":
            row["cpu_ms_per_step"] = round(1e3 * cpu_s, 2)  # of all threads together: what a busy machine leaves unchanged
        row["roofline_pct"] = round(100 * nbytes * tps / batch / (gbs * 1e9), 1)
        if args.profile and device == "cuda" and not variant.startswith("transformers"):
            row["parts"] = parts(model, decoder, ids.tolist())
        rows.append(row)
        print({k: v for k, v in row.items() if k not in ("parts", "kernels")}, flush=True)
        for part in row.get("parts", ()):
            print(f"    {part['us']:9.1f} us {part['calls']:7.1f} x  {part['what']}", flush=True)
    return rows


def compile_first(runs: list[Run], args: argparse.Namespace) -> float:
    """Seconds it takes to compile every kernel of these runs, all processors at it, on models of one layer."""
    start, work, models = time.perf_counter(), list[Callable[[], object]](), []
    for model_name, variant, batches in runs:
        if not variant.startswith("transformers"):
            model, decoder = decoder_for(variant, model_name, getattr(torch, args.dtype), args.device, layers=1)
            models.append(model)
            for batch in batches:
                work += precompiling.launches(model, decoder, batch, args.prompt, Sampling())
    launch_all(work, lambda n, of: None, os.cpu_count() or 1)
    return time.perf_counter() - start


def parsed(text: str) -> list[Run]:
    """MODEL=VARIANT,...[@BATCH,...] as (model, variant, batches) each."""
    model, _, rest = text.partition("=")
    variants, _, batches = rest.partition("@")
    if model not in SHAPES or not variants:
        raise SystemExit(f"--run {text}: give MODEL=VARIANTS[@BATCHES], a model of {', '.join(SHAPES)}")
    return [(model, variant, [int(b) for b in batches.split(",") if b] or [1]) for variant in variants.split(",")]


def main() -> None:
    """Measure what was asked for and write the results, one file a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for decode_MODEL.json")
    parser.add_argument(
        "--run", action="append", metavar="MODEL=VARIANTS[@BATCHES]", help="may be repeated; default: all tables"
    )
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--new-batched", type=int, default=128, help="new tokens at batches above 1")
    parser.add_argument("--search", action="store_true", help="first let kernels race within whole steps, as lowq tune does")
    parser.add_argument("--generate-new", type=int, default=64, help="new tokens for transformers' own generate")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further variant after this")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-pdl", action="store_true", help="decode kernels without programmatic dependent launch")
    args = parser.parse_args()
    launch.enabled = not args.no_pdl
    start, ceiling = time.time(), timing.roofline(torch.device(args.device))
    versions = {name: version(name) for name in ("torch", "transformers", "lowq")}
    facts = {"device": ceiling.device, "read_gbs": round(ceiling.read_gbs, 1), "threads": torch.get_num_threads()}
    facts |= {"prompt": args.prompt, "new": args.new, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    facts |= {"host": platform.machine(), "versions": versions}
    results: dict[str, dict[str, Any]] = {}
    runs = [run for text in args.run or RUNS for run in parsed(text)]
    if args.device == "cuda":
        print(f"compiled in {compile_first(runs, args):.1f} s", flush=True)
    for model, variant, batches in runs:
        free(args.device)
        if time.time() - start > args.seconds:
            print(f"out of time before {model} {variant}", flush=True)
            break
        rows = results.setdefault(model, {**facts, "rows": []})["rows"]
        try:
            rows += measure(variant, model, batches, args, ceiling.read_gbs)
        except Exception as e:  # one variant must not cost the others their place in the run
            print(f"{variant} failed: {type(e).__name__}: {e}", flush=True)
            rows.append({"variant": variant, "error": f"{type(e).__name__}: {e}"[:500]})
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"decode_{model}.json").write_text(json.dumps(results[model], indent=1) + "\n")
    broken = [
        f"{model} {r['variant']} batch {r['batch']}"
        for model, found in results.items()
        for r in found["rows"]
        if not r.get("memory_as_promised", True)
    ]
    if broken:
        raise SystemExit(f"more memory than weights + cache, a tenth of it and 1 GB: {', '.join(broken)}")


def free(device: str) -> None:
    """Give back the memory of the last model."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
