"""Time vLLM with its own kernels and with lowq's, on one model of random weights. benchmarks/results/<gpu>/vllm_SHAPE.json.

    python benchmarks/vllm_speed.py --work /dev/shm/x [--shape 8b] [--runs 4:export,4:lowq,8:export,8:lowq,2:lowq] [--full 4]
    python benchmarks/vllm_speed.py --work /dev/shm/x --shape a3b --layers 24 --runs 4:export,4:lowq --no-users

A run is bits:kernels; "export" is compressed-tensors, which vLLM has kernels for, of the same checkpoint. Every run is an
engine in a process of its own; all start side by side and measure one after another, each holding the GPU alone meanwhile.
Runs of --full bits also read 8 x 4,400 tokens, take steps apart by torch's profiler and serve users in a closed loop. Both
kernels score the same prompts: "agreement" tells how far apart their log-probabilities are.
"""

import argparse
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import results_of
from safetensors.numpy import save_file
from serve_load import LONGEST_NEW, LONGEST_PROMPT, Asked, closed_loop, plain, requests

from lowq_cli import demo
from lowq_cli.files.quant_config import compact
from lowq_cli.interop import vllm_speed
from lowq_cli.interop.exporter import export
from lowq_packers.scheme import Scheme

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5,
         "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 500000.0}  # fmt: skip
MIXTURE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True, "mlp_only_layers": [],
           "decoder_sparse_step": 1, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {  # Llama 3.1's, and Qwen3-30B-A3B
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072},
    # a tenth of its layers and of its vocabulary, so that the head has the share of a step that it has in the whole
    "70b-tenth": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 8, "num_attention_heads": 64,
                  "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 12800, "max_position_embeddings": 131072},
    "a3b": MIXTURE | {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
            "intermediate_size": 6144, "max_position_embeddings": 40960},
    # for grown.py on a CPU: wide enough for a model of 512 channels
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
              "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 12288, "max_position_embeddings": 8192},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 8192, "max_position_embeddings": 8192},
    "tiny-moe": MIXTURE | {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2,
                 "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 8192,
                 "intermediate_size": 512, "max_position_embeddings": 8192},
}  # fmt: skip
USERS = {1: 6, 16: 48, 64: 160, 128: 256}  # -> requests that are answered
SIZES = (1, 2, 4, *range(8, 257, 8), 320, 384, 448, 512)  # batches that are captured: vLLM's own, thinned above 256
PROFILED = (1, 64)
STEPS = 24
LONG = (8, 4400)  # prompts that are read at once, tokens of each
Row = dict[str, Any]


def linears(c: Row) -> dict[str, tuple[int, int]]:
    """What is packed of a layer: name -> (N, K)."""
    H, q, kv = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    found = {f"self_attn.{leaf}": shape for leaf, shape in
             {"q_proj": (q, H), "k_proj": (kv, H), "v_proj": (kv, H), "o_proj": (H, q)}.items()}  # fmt: skip
    experts = [f"mlp.experts.{e}." for e in range(c.get("num_experts", 0))]
    inner = c["moe_intermediate_size"] if experts else c["intermediate_size"]
    for at in experts or ["mlp."]:
        found |= {f"{at}gate_proj": (inner, H), f"{at}up_proj": (inner, H), f"{at}down_proj": (H, inner)}
    return found


def make(folder: Path, shape: str, bits: int, device: str, layers: int | None = None) -> None:
    """A checkpoint of random codes, groups of 128 without zeros, 16-bit embedding and head; a file a layer.

    A layer's codes are drawn at once, straight in packed form: a mixture's 384 matrices one by one would take minutes.
    """
    folder.mkdir(parents=True)
    c = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    H, scheme, parts = c["hidden_size"], Scheme(bits, 128, "none"), linears(c)
    g = torch.Generator(device).manual_seed(bits)
    half: dict[str, Any] = {"dtype": torch.float16, "device": device}
    spread = (scheme.levels**2 / 12) ** 0.5  # of codes
    sizes = [N * K for N, K in parts.values()]
    index, schemes = {}, {}

    def write(name: str, tensors: dict[str, np.ndarray]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    def normal(*shape: int) -> np.ndarray:
        return torch.empty(shape, **half).normal_(0, H**-0.5, generator=g).cpu().numpy()

    norms = {"input_layernorm": H, "post_attention_layernorm": H}
    if "num_experts" in c:
        norms |= {"self_attn.q_norm": c["head_dim"], "self_attn.k_norm": c["head_dim"]}
    for at in (f"model.layers.{i}." for i in range(c["num_hidden_layers"])):
        words = torch.randint(-(1 << 31), 1 << 31, (sum(sizes) * bits // 32,), device=device, generator=g, dtype=torch.int32)
        # of either sign: the codes' mean is -1/2, which of 2 bits would grow to inf within a few layers
        signs = torch.randint(0, 2, (sum(sizes) // 128,), device=device, generator=g, dtype=torch.int8) * 2 - 1
        ends = np.cumsum(sizes)[:-1]
        cut = zip(np.split(words.cpu().numpy(), ends * bits // 32), np.split(signs.cpu().numpy(), ends // 128), strict=True)
        tensors = {f"{at}{leaf}.weight": np.ones(n, np.float16) for leaf, n in norms.items()}
        for (leaf, (N, K)), (own, sign) in zip(parts.items(), cut, strict=True):
            tensors[f"{at}{leaf}.weight"] = own.reshape(N, -1)
            tensors[f"{at}{leaf}.weight_scale"] = sign.reshape(N, -1) * np.float16(K**-0.5 / spread)
            schemes[at + leaf] = scheme
        if "num_experts" in c:
            tensors[f"{at}mlp.gate.weight"] = normal(c["num_experts"], H)
        write(f"{at}safetensors", tensors)
    dense = {f"{n}.weight": normal(c["vocab_size"], H) for n in ("model.embed_tokens", "lm_head")}
    write("dense.safetensors", dense | {"model.norm.weight": np.ones(H, np.float16)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    routers = [n[: -len(".weight")] for n in index if n.endswith("mlp.gate.weight")]
    config = LLAMA | c | {"dtype": "float16"}
    config["quantization_config"] = compact(schemes, ["model.embed_tokens", "lm_head", *routers])
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo.__path__[0]) / file, folder / file)


def scored(llm: Any) -> Row:
    """Log-probabilities of four random prompts' tokens, 64 each."""
    from vllm import SamplingParams

    draw = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    answers = llm.generate(vllm_speed.prompts(llm, 4, 64, random.Random(1)), draw, use_tqdm=False)
    pairs = [p for a in answers for p in zip(a.prompt_token_ids[1:], a.prompt_logprobs[1:], strict=True)]
    return {"what": "scored", "logprobs": [found[token].logprob for token, found in pairs]}


def agreement(runs: list[Row]) -> list[Row]:
    """Of two kernels on the same weights: how far log-probabilities are apart, and their spread over tokens."""
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for run in runs:
        for row in run["rows"]:
            if row["what"] == "scored":
                found[run["bits"]][run["kernels"]] = row["logprobs"]
    lines = []
    for bits, by in found.items():
        if len(by) == 2:
            a, b = (np.array(by[k]) for k in ("export", "lowq"))
            apart = {"rms": float(((a - b) ** 2).mean() ** 0.5), "largest": float(abs(a - b).max()), "spread": float(a.std())}
            lines.append({"bits": bits, "tokens": len(a), **apart, "perplexity_change": float(np.exp(a.mean() - b.mean()) - 1)})
    return lines


def read_long(llm: Any) -> Row:
    """Tokens of long prompts read per second."""
    (count, tokens), times = LONG, vllm_speed.timed(llm, *LONG, 1, 2)
    return {"what": "prefill", "batch": count, "prompt": tokens, "seconds": times, "tokens_per_s": count * tokens / times[0]}


def profiled(llm: Any, batch: int) -> Row:
    """What the GPU does in a decode step: us and calls a kernel, and how long it waits."""
    from torch.profiler import ProfilerActivity, profile

    vllm_speed.timed(llm, batch, 32, STEPS, 1)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        (seconds,) = vllm_speed.timed(llm, batch, 32, STEPS, 1)[:1]
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for e in prof.key_averages():
        us = e.self_device_time_total
        if us:
            found = kernels[e.key[:110]]
            found[0], found[1] = found[0] + us, found[1] + e.count
    runs = 2 * STEPS  # timed() warms up once; the first step of each reads the prompts
    rows: list[Row] = [{"kernel": k, "us": us / runs, "calls": n / runs} for k, (us, n) in kernels.items()]
    rows.sort(key=lambda r: -r["us"])
    busy = sum(r["us"] for r in rows)
    for r in rows[:22]:
        print(f"   {r['us']:8.1f} us {r['calls']:7.2f} x  {r['kernel'][:100]}", flush=True)
    print(
        f"   batch {batch}: busy {busy:.0f} us a step, {seconds / STEPS * 1e6:.0f} us on the clock under the profiler",
        flush=True,
    )
    return {"what": "step", "batch": batch, "busy_us": busy, "kernels": rows[:40]}


def served(llm: Any, users: int, count: int) -> Row:
    """The closed loop in vLLM's engine."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine

    def send(asked: Asked) -> None:
        draw = SamplingParams(temperature=0, max_tokens=asked.new, ignore_eos=True, detokenize=False,
                              output_kind=RequestOutputKind.DELTA)  # fmt: skip
        engine.add_request(str(asked.number), {"prompt_token_ids": asked.prompt}, draw)

    def step() -> list[tuple[int, list[int], bool]]:
        return [(int(o.request_id.split("-")[0]), list(o.outputs[0].token_ids), o.finished) for o in engine.step()]

    row = closed_loop(plain(users, requests(engine.model_config.get_vocab_size())), count, send, step)
    engine.abort_request(list(engine.output_processor.request_states), internal=True)
    while engine.has_unfinished_requests():
        engine.step()
    return {"what": "users", **row}


def one(args: argparse.Namespace) -> None:
    """One engine: start, wait for the GPU, measure, write."""
    full = args.full == "yes"
    longest = max(LONGEST_PROMPT + LONGEST_NEW, LONG[1]) + 8 if full else 512
    batches = [int(b) for b in args.batches.split(",")]
    more: dict[str, Any] = {
        "max_num_seqs": max(batches),
        "cudagraph_capture_sizes": [n for n in SIZES if n <= 2 * max(batches)],
    }
    if args.eager:
        more = {"enforce_eager": True, "max_num_seqs": max(batches)}
    if args.tp > 1:
        more |= {"tensor_parallel_size": args.tp, "enable_expert_parallel": args.ep}
    if torch.cuda.is_available():
        more["attention_backend"] = "FLASH_ATTN"
    llm, facts = vllm_speed.start(
        args.folder,
        max_model_len=longest,
        kv_cache_memory_bytes=args.cache << 30,
        gpu_memory_utilization=0.05,
        **more,
    )
    row = {"bits": args.bits, "kernels": args.kernels, **facts, "rows": []}
    print(f"{args.bits}:{args.kernels} ready after {facts['start_s']:.0f} s; weights {facts['weights_gb']:.3f} GB", flush=True)

    def step_of(batch: int) -> Row:
        return vllm_speed.measure(llm, [batch])[0]

    def add(found: Row) -> None:
        row["rows"].append(found)
        told = {
            k: round(v, 2) if isinstance(v, float) else v
            for k, v in found.items()
            if k not in ("kernels", "seconds", "logprobs")
        }
        print(f"{args.bits}:{args.kernels} {told}", flush=True)
        part = args.out.with_suffix(".part")
        part.write_text(json.dumps(row))
        part.replace(args.out)

    args.ready.touch()
    # one that still compiles, or records graphs, would be in the others' times
    while len(list(args.meet.glob("ready-*"))) < args.of and time.time() < args.patience:
        time.sleep(0.05)
    time.sleep(args.after if full else args.after + 1)  # the full runs go first
    with (args.meet / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        steps: list[Callable[[], Row]] = [partial(scored, llm), *(partial(step_of, b) for b in batches)]
        if full:
            steps += [partial(read_long, llm)] if not args.eager else []
        if full and not args.no_users:
            served(llm, min(64, max(batches)), 64)  # prompts of all lengths: compiles kernels for these numbers of rows
            steps += [partial(served, llm, u, n) for u, n in USERS.items() if u <= max(batches)]
        if full and torch.cuda.is_available() and args.tp == 1:  # the profiler sees this process only
            steps += [partial(profiled, llm, b) for b in PROFILED if b <= max(batches)]
        for take in steps:
            try:
                add(take())
            except Exception as e:  # the others are still worth having
                print(f"{args.bits}:{args.kernels} failed: {type(e).__name__}: {e}"[:300], flush=True)


def main() -> None:
    """Make the checkpoints, start the engines, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--runs", default="4:export,4:lowq,8:export,8:lowq,2:lowq")
    parser.add_argument("--full", default="4", help="bits whose runs measure everything, as 4,8")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--layers", type=int, help="fewer than the shape has, to start sooner: every layer does the same")
    parser.add_argument("--no-users", action="store_true", help="without the closed loop of users")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share each layer")
    parser.add_argument("--ep", action="store_true", help="with --tp: whole experts a GPU, in the place of their shares")
    parser.add_argument("--meet", type=Path, help="folder in which runs of several calls wait for each other and take turns")
    parser.add_argument("--of", type=int, help="engines that meet there")
    parser.add_argument("--patience", type=float, default=1e12, help="unix time until which they wait for each other")
    parser.add_argument("--after", type=float, default=0.0, help="seconds by which this call's engines let others go first")
    parser.add_argument("--cache", type=int, default=14, help="GB of each engine's cache")
    parser.add_argument("--eager", action="store_true", help="neither torch.compile nor CUDA graphs: to try the script")
    parser.add_argument("--out", type=Path)
    for hidden in ("--folder", "--ready"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    for hidden in ("--bits", "--kernels"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        return one(args)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.cuda.get_device_name(0) if where == "cuda" else "cpu"
    began = time.perf_counter()
    full_bits = args.full.split(",")
    runs = sorted((tuple(r.split(":")) for r in args.runs.split(",")), key=lambda r: r[0] not in full_bits)
    for bits in sorted({bits for bits, _ in runs}):
        if not (args.work / bits).exists():
            make(args.work / bits, args.shape, int(bits), where, args.layers)
        if (bits, "export") in runs and not (args.work / f"{bits}-export").exists():
            export(args.work / bits, "compressed-tensors", args.work / f"{bits}-export")
    torch.cuda.empty_cache()
    print(f"checkpoints made in {time.perf_counter() - began:.0f} s", flush=True)
    started = []
    meet, of = args.meet or args.work, args.of or len(runs)
    ready = [meet / f"ready-{args.shape}-{'-'.join(run)}" for run in runs]
    for (bits, kernels), own in zip(runs, ready, strict=True):
        folder, out = args.work / (bits if kernels == "lowq" else f"{bits}-export"), args.work / f"{bits}-{kernels}.json"
        full, cache = ("yes", args.cache) if bits in full_bits else ("no", min(args.cache, 8))
        given = {"folder": folder, "ready": own, "meet": meet, "of": of, "bits": bits, "kernels": kernels, "tp": args.tp}
        given |= {"patience": args.patience, "after": args.after}
        given |= {"out": out, "work": args.work, "full": full, "batches": args.batches, "cache": cache}
        line = [sys.executable, __file__, *(str(word) for key, value in given.items() for word in (f"--{key}", value))]
        line += [f"--{flag.replace('_', '-')}" for flag in ("eager", "no_users", "ep") if getattr(args, flag)]
        started.append((out, subprocess.Popen(line, env={**os.environ, "VLLM_USE_DEEP_GEMM": "0"})))
    whole = SHAPES[args.shape]["num_hidden_layers"]
    facts: Row = {
        "shape": args.shape,
        "layers": args.layers or whole,
        "of_layers": whole,
        "tp": args.tp,
        "ep": args.ep,
        "device": device,
        "date": datetime.now(UTC).isoformat("T", "seconds"),
    }
    facts |= {p: version(p) for p in ("lowq", "torch", "transformers", "vllm")} | {"captured": SIZES, "side_by_side": len(runs)}
    to = args.out or results_of(device) / f"vllm_{args.shape}.json"

    def write() -> None:
        found = [json.loads(o.read_text()) for o, _ in started if o.is_file()]
        to.write_text(json.dumps({**facts, "agreement": agreement(found), "runs": found}, indent=1) + "\n")

    while any(process.poll() is None for _, process in started):
        time.sleep(1)
        for own, (_, process) in zip(ready, started, strict=True):
            if process.poll() is not None:  # stop waiting for one that failed to start
                own.touch()
        write()
    write()
    print(f"wrote {to}")


if __name__ == "__main__":
    main()
