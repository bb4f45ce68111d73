"""From nothing to the first token: seconds of a fresh process that loads a checkpoint of random weights and reads a prompt.

    python benchmarks/first_token.py --out FILE.json [--model 8b] [--variant 4h8] [--folder FOLDER] [--runs 3]

The checkpoint is written first (and removed unless --folder keeps it), so that its files are in the page cache. The first run
compiles the kernels, where no earlier run did; the others find them on disk. A prompt of 128 tokens, then 64 new ones.
"""

import argparse
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

PROMPT, NEW = 128, 64
SHARD_BYTES = 1_200_000_000


def main() -> None:
    """Write the checkpoint, run the processes, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="8b")
    parser.add_argument(
        "--variant", default="4h8", help="as e2e_decode.py has them: bits, g and a group size, h and the head's"
    )
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run(args.child, args.device)))
        return
    folder = args.folder or Path(tempfile.mkdtemp(prefix="lowq-first-token-"))
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors")) or write(folder, args.model, args.variant, args.device)
    facts = {"model": args.model, "variant": args.variant, "checkpoint_gb": round(size / 1e9, 2), "prompt": PROMPT}
    facts["device"] = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    facts |= {name: version(name) for name in ("torch", "transformers")}
    facts["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    rows = []
    try:
        for _ in range(args.runs):
            start = time.perf_counter()
            command = [sys.executable, __file__, "--child", str(folder), "--device", args.device]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            row = json.loads(done.stdout.splitlines()[-1]) | {"process_s": round(time.perf_counter() - start, 2)}
            rows.append(row)
            print(row, flush=True)
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps({**facts, "runs": rows}, indent=1) + "\n")
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
    from lowq_cli.engine.ready import ready
    from lowq_cli.engine.warm import warm

    model, tokenizer = stage("load_s", lambda: ready(str(folder), device, print))
    g = stage("join_s", lambda: stream(model, tokenizer, list(range(10, 10 + PROMPT)), max_new_tokens=NEW))
    stage("compile_s", lambda: warm(model, g.decoder, g.prompts, g.sampling, lambda n, of: None))
    pieces = g.pieces()
    stage("prompt_s", lambda: next(pieces))
    for _ in pieces:
        pass
    first = sum(stages[name] for name in ("load_s", "join_s", "compile_s", "prompt_s"))
    found = {"load_to_first_token_s": round(first, 2), "tokens_per_s": round(g.decode_tps, 1), "decoder": g.decoder.name}
    return stages | found | {"peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device == "cuda" else None}


def imports() -> None:
    """What loading and decoding import: transformers, most of all."""
    import transformers.models.auto.modeling_auto
    import transformers.models.auto.tokenization_auto
    import transformers.models.llama.modeling_llama

    import lowq_cli.engine.choose
    import lowq_cli.hf.load
    from lowq_kernels.dispatch import registry

    registry.load_kernels()
    assert transformers
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
    bits, group, head = widths(variant)
    model, schemes, kept = e2e_decode.skeleton(shape, dtype), {}, []
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, p in model.named_parameters():
        stem = name.removesuffix(".weight")
        own = head if stem == "lm_head" else 0 if p.dim() == 1 or "embed" in name else bits
        if own:
            N, K = p.shape
            schemes[stem] = s = Scheme(own, group)
            scales, zeros = e2e_decode.random_meta((N, s.groups(K)), K, s, dtype, device)
            words = e2e_decode.random_words(N, bitstream.words_per_row(K, own), device=device)
            found = {name: words, f"{stem}.weight_scale": scales, f"{stem}.weight_zero": zeros}
        else:
            kept.append(stem)
            new = torch.ones(p.shape, dtype=dtype, device=device)
            found = {name: new if p.dim() == 1 else new.normal_(0, p.shape[-1] ** -0.5)}
        if sum(t.nbytes for t in shards[-1].values()) > SHARD_BYTES:
            shards.append({})
        shards[-1] |= {n: t.cpu() for n, t in found.items()}
    folder.mkdir(parents=True, exist_ok=True)
    index = {}
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


if __name__ == "__main__":
    main()
