"""Check the decode engine's tokens and its time to the first token, for docs/decode.md.

    python benchmarks/decode_checks.py tokens MODEL --out FILE.json [--bits 4] [--group 64] [--new 256] [--dtype bfloat16]
    python benchmarks/decode_checks.py first --out FILE.json [--model 8b] [--variant 4h8] [--folder FOLDER] [--runs 3]

tokens: does the engine give the tokens of transformers' greedy decoding of the dequantized model? Quantizes MODEL's linears in
memory, decodes NEW tokens with the engine, then reads the whole text once with the dequantized model in fp32: at each place,
was the engine's token its likeliest, and where not, how far apart were the two logits (a tie within rounding, or a fault)?
Also compares with `model.generate` of the dequantized model token by token. On a CPU or a GPU.
first: from nothing to the first token, seconds of a fresh process that loads a checkpoint of random weights, reads a prompt of
128 tokens and writes 64. The checkpoint is written first (and removed unless --folder keeps it), so that its files are in the
page cache. The first run compiles the kernels, where no earlier run did; the others find them on disk. then_s: seconds
to the first token of other batches and lengths of prompt in the same process, met for the first time and again. On a GPU.
"""

import argparse
import copy
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PROMPTS = ("Once upon a time there was a", "The history of the city begins", "def main():", "In the year 1850 the ship")
PROMPT, NEW = 128, 64
SHARD_BYTES = 1_200_000_000
THEN = ((4, 128), (16, 128), (64, 128), (1, 300), (1, 1000), (1, 3000), (1, 777))  # (batch, tokens) after the first text


def tokens(args: argparse.Namespace) -> None:
    """Compare and write the results."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lowq_cli.engine import stream
    from lowq_cli.engine.decoders import decoder_of
    from lowq_cli.quantizers import rtn
    from lowq_kernels.modules.linear import QuantLinear
    from lowq_packers.layouts import unpack
    from lowq_packers.scheme import Scheme

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
        g = stream(packed, tokenizer, prompt, max_new_tokens=args.new, decoder=decoder_of(packed))
        list(g)
        new, start = g.tokens[0], g.prompts[0]
        ids = torch.tensor([start], device=args.device)
        mask = torch.ones_like(ids)
        theirs = dense.generate(ids, attention_mask=mask, max_new_tokens=args.new, do_sample=False)[0, len(start) :].tolist()
        with torch.inference_mode():
            logits = truth(torch.tensor([start + new], device=args.device)).logits[0, len(start) - 1 : -1].float()
        best = logits.max(-1)
        gaps = best.values - logits[torch.arange(len(new)), torch.tensor(new)]
        apart = next((i for i, (a, b) in enumerate(zip(new, theirs, strict=False)) if a != b), None)
        places = gaps.nonzero()[:, 0].tolist()
        ties = [{"at": i, "gap": round(float(gaps[i]), 5), "logit": round(float(best.values[i]), 3)} for i in places]
        rows.append({"prompt": prompt, "tokens": len(new), "decoder": g.decoder.name, "not_the_argmax_of_fp32": ties})
        rows[-1]["same_as_generate_until"] = len(new) if apart is None else apart
        print(rows[-1], flush=True)
    facts = {"model": Path(args.model).name, "bits": args.bits, "group": args.group, "dtype": args.dtype, "device": args.device}
    write_report(args.out, facts, "rows", rows)


def first(args: argparse.Namespace) -> None:
    """Write the checkpoint, run the processes, write the results."""
    if args.child:
        print(json.dumps(run(args.child, args.device)))
        return
    folder = args.folder or Path(tempfile.mkdtemp(prefix="lowq-first-token-"))
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors")) or write(folder, args.model, args.variant, args.device)
    facts = {"model": args.model, "variant": args.variant, "checkpoint_gb": round(size / 1e9, 2), "prompt": PROMPT}
    facts["device"] = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    rows = []
    try:
        for _ in range(args.runs):
            start = time.perf_counter()
            command = [sys.executable, __file__, "first", "--child", str(folder), "--device", args.device]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            row = json.loads(done.stdout.splitlines()[-1]) | {"process_s": round(time.perf_counter() - start, 2)}
            rows.append(row)
            print(row, flush=True)
            if args.out:
                write_report(args.out, facts, "runs", rows)
    finally:
        if not args.folder:
            shutil.rmtree(folder)


def run(folder: Path, device: str) -> dict[str, Any]:
    """Seconds of each stage, in a process that has done nothing else; what `lowq generate` does, in its order."""
    stages = {}

    def stage(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        done = work()
        if device == "cuda":
            torch.cuda.synchronize()
        stages[name] = round(time.perf_counter() - start, 3)
        return done

    stage("context_s", lambda: torch.zeros(1, device=device))
    stage("import_s", imports)
    from lowq_cli.engine import stream
    from lowq_cli.engine.open_model import ready
    from lowq_cli.engine.precompiling import warm

    model, tokenizer = stage("load_s", lambda: ready(str(folder), device, print))
    g = stage("join_s", lambda: stream(model, tokenizer, list(range(10, 10 + PROMPT)), max_new_tokens=NEW))
    stage("compile_s", lambda: warm(model, g.decoder, g.prompts, g.sampling))
    pieces = g.pieces()
    stage("prompt_s", lambda: next(pieces))
    for _ in pieces:
        pass
    first = sum(stages[name] for name in ("load_s", "join_s", "compile_s", "prompt_s"))
    found = {"load_to_first_token_s": round(first, 2), "tokens_per_s": round(g.decode_tps, 1), "decoder": g.decoder.name}
    found["then_s"] = {f"{B}x{T}": _ttft(model, tokenizer, B, T) for B, T in THEN} if device == "cuda" else {}
    found["model"] = type(model).__name__  # NativeModel where no transformers was needed
    return stages | found | {"peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device == "cuda" else None}


def _ttft(model: Any, tokenizer: Any, batch: int, length: int) -> tuple[float, float]:
    """Seconds to the first token at a batch and length of prompt that are new to the process, and again with other prompts."""
    from lowq_cli.engine import stream

    seconds = []
    for first in (10, 11):
        g = stream(model, tokenizer, [list(range(first, first + length)) for _ in range(batch)], max_new_tokens=8)
        for _ in g.pieces():
            pass
        seconds.append(round(g.ttft_s, 3))
    return seconds[0], seconds[1]


def imports() -> None:
    """What loading and decoding import."""
    import lowq_cli.engine.decoders
    import lowq_cli.engine.native_loader
    from lowq_kernels.dispatch import registry

    registry.load_kernels()
    assert lowq_cli


def write(folder: Path, shape: str, variant: str, device: str) -> int:
    """A checkpoint of random codes, in shards, with the demo's tokenizer; its bytes."""
    import e2e_decode
    from pages.decode import widths
    from safetensors.torch import save_file

    from lowq_cli import demo
    from lowq_cli.files.quant_config import compact
    from lowq_packers import bitstream
    from lowq_packers.scheme import Scheme

    dtype = torch.float16
    bits, group, kind, head = widths(variant)
    model, schemes, kept = e2e_decode.skeleton(shape, dtype), {}, []
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, p in model.named_parameters():
        stem = name.removesuffix(".weight")
        own = head if stem == "lm_head" else 0 if p.dim() == 1 or "embed" in name else bits
        if own:
            N, K = p.shape
            schemes[stem] = s = Scheme.of(own, group, kind) if own == bits else Scheme(own, group)
            meta = e2e_decode.random_meta((N, s.groups(K)), (1,), K, s, dtype, device)
            words = e2e_decode.random_words(N, bitstream.words_per_row(K, own), device=device)
            beside = zip(("scale", "zero", "table"), meta, strict=True)
            found = {name: words} | {f"{stem}.weight_{leaf}": t for leaf, t in beside if t is not None}
        else:
            kept.append(stem)
            new = torch.ones(p.shape, dtype=dtype, device=device)
            found = {name: new if p.dim() == 1 else new.normal_(0, p.shape[-1] ** -0.5)}
        if sum(t.nbytes for t in shards[-1].values()) > SHARD_BYTES:
            shards.append({})
        shards[-1] |= {n: t.cpu() for n, t in found.items()}
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = model.config.to_dict() | {"quantization_config": compact(schemes, kept)}
    config |= {"architectures": [type(model).__name__], "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo.__path__[0]) / file, folder / file)
    return sum(f.stat().st_size for f in folder.iterdir())


def write_report(out: Path, facts: dict[str, Any], name: str, rows: list[dict[str, Any]]) -> None:
    """The rows so far, with versions and time."""
    facts = facts | {package: version(package) for package in ("torch", "transformers")}
    facts["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**facts, name: rows}, indent=1) + "\n")


def main() -> None:
    """Parse, and do what the first word says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checks = parser.add_subparsers(required=True)
    one, two = checks.add_parser("tokens"), checks.add_parser("first")
    one.set_defaults(check=tokens)
    one.add_argument("model")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--bits", type=int, default=4)
    one.add_argument("--group", type=int, default=64)
    one.add_argument("--new", type=int, default=256)
    one.add_argument("--dtype", default="bfloat16")
    two.set_defaults(check=first)
    two.add_argument("--out", type=Path)
    two.add_argument("--model", default="8b")
    two.add_argument("--variant", default="4h8", help="as e2e_decode.py has them: bits, g and a group size, h and the head's")
    two.add_argument("--folder", type=Path)
    two.add_argument("--runs", type=int, default=3)
    two.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    for check in (one, two):
        check.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.check(args)


if __name__ == "__main__":
    main()
