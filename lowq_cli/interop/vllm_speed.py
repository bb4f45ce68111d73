"""Measure how fast vLLM serves a folder: a separate process runs one engine and writes tokens per second as a JSON object.

    python -m lowq_cli.interop.vllm_speed FOLDER OUT.json --batches 1,16,64

Prompts are random token ids; answers are greedy and of fixed length, so that engines do the same work. Times include prefill.
vLLM uses its own kernels for an export and lowq's kernels for a lowq checkpoint.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowq_cli import console
from lowq_packers.errors import UnsupportedError

BATCHES, PROMPT, NEW = (1, 16, 64, 256), 128, 256
REPEATS = 3
ENGINE = {  # an engine's environment: in this process, no downloads, no telemetry
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def start(folder: Path | str, **more: Any) -> tuple[Any, dict[str, Any]]:
    """A vLLM engine, its start-up time in seconds, and GB of all ranks' weights: as vLLM reports, and by its tensors."""
    for key, value in ENGINE.items():
        os.environ.setdefault(key, value)
    began = time.perf_counter()
    from vllm import LLM  # type: ignore[import-not-found]

    imported = time.perf_counter()
    llm = LLM(str(folder), skip_tokenizer_init=True, enable_prefix_caching=False, seed=0, **more)
    ready = time.perf_counter()
    ranks = llm.collective_rpc(_weights)
    facts = {key: sum(rank[key] for rank in ranks) for key in ranks[0]}
    return llm, {"import_s": imported - began, "start_s": ready - imported, "vllm": version("vllm"), **facts}


def _weights(worker: Any) -> dict[str, float]:
    runner = worker.model_runner
    model = getattr(runner, "model", None) or worker.get_model()
    seen = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    return {"weights_gb": sum(seen.values()) / 1e9, "loaded_gb": getattr(runner, "model_memory_usage", 0) / 1e9}


def prompts(llm: Any, count: int, tokens: int, rng: random.Random) -> list[dict[str, list[int]]]:
    """Random token ids."""
    last = llm.llm_engine.model_config.get_vocab_size() - 1
    return [{"prompt_token_ids": [rng.randrange(3, last) for _ in range(tokens)]} for _ in range(count)]


def timed(llm: Any, count: int, tokens: int, new: int, repeats: int = REPEATS) -> list[float]:
    """Sorted seconds for `count` prompts with answers of `new` tokens, without the first run, which warms up."""
    from vllm import SamplingParams  # type: ignore[import-not-found]

    greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    rng, seconds = random.Random(0), []
    for _ in range(repeats + 1):
        batch = prompts(llm, count, tokens, rng)
        began = time.perf_counter()
        answers = llm.generate(batch, greedy, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        assert sum(len(a.outputs[0].token_ids) for a in answers) == count * new
    return sorted(seconds[1:])


def measure(llm: Any, batches: Sequence[int] = BATCHES, prompt: int = PROMPT, new: int = NEW) -> list[dict[str, Any]]:
    """One row per batch size: tokens per second over all its sequences, from the median of `REPEATS` runs."""
    rows = []
    for batch in batches:
        times = timed(llm, batch, prompt, new)
        rows.append({"what": "decode", "batch": batch, "prompt": prompt, "new": new, "seconds": times})
        rows[-1]["tokens_per_s"] = batch * new / statistics.median(times)
    return rows


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run this module for a folder in a separate process and return its output. Raises UnsupportedError if vLLM fails."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "rows.json")
        line = [sys.executable, "-m", __name__, str(folder), str(out), *arguments]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode or not out.is_file():
            why = next((text for text in reversed(done.stderr.splitlines()) if text.strip()), f"exit code {done.returncode}")
            raise UnsupportedError(f"vLLM did not serve {folder}: {why.strip()}")
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def compare(model: str, batches: Sequence[int] = BATCHES, ranks: int = 1) -> list[dict[str, Any]]:
    """One row per batch size: a checkpoint's tokens per second with vLLM's kernels (None if it has none), and with lowq's."""
    from lowq_cli.interop.serving import NATIVE, prepare
    from lowq_cli.state import user_path

    if find_spec("vllm") is None:
        raise UnsupportedError("vLLM is not installed here: pip install vllm (Linux with a GPU)")
    arguments = ("--batches", ",".join(map(str, batches)), "--tp", str(ranks))
    speeds: dict[str, dict[int, float]] = {}
    for whose, native in (("vllm", False), (NATIVE, True)):
        try:
            folder = prepare(user_path(model), ranks, native)[0]
        except UnsupportedError as e:
            if native:
                raise
            console.warn(str(e))
            continue
        with console.status(
            f"vLLM with {'lowq' if native else 'its own'} kernels: a minute to start, then {len(batches)} batches"
        ):
            speeds[whose] = {row["batch"]: row["tokens_per_s"] for row in run(folder, *arguments)["rows"]}
    of_vllm = speeds.get("vllm", {})
    return [{"batch": b, "vllm": of_vllm.get(b), "lowq": tps} for b, tps in speeds[NATIVE].items()]


def main() -> None:
    """Start the engine, measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    batches = [int(b) for b in args.batches.split(",")]
    length = args.prompt + args.new
    llm, facts = start(args.folder, max_model_len=length, max_num_seqs=max(batches), tensor_parallel_size=args.tp)
    args.out.write_text(json.dumps({**facts, "rows": measure(llm, batches, args.prompt, args.new)}))


if __name__ == "__main__":
    main()
