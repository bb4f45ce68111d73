"""Measure how fast model families decode in lowq's server engine and in vLLM. benchmarks/results/<gpu>/families_vllm.json.

    python benchmarks/families_vllm.py --work /dev/shm/x [--families qwen3_moe,llama] [--engines vllm,lowq] [--out FILE]

Shapes of published models (`tests/families/sizes.py`), of as many layers as CUTS says, and as large a part of the vocabulary:
the head has the share of a step that it has in the whole. Random weights, 4 bits, 16-bit embedding, head and routers. vLLM
makes them itself (load_format dummy) for the quantization_config of a compressed-tensors export, symmetric; no checkpoint is
written. Both engines run in a process of their own, vLLM with its defaults (torch.compile, CUDA graphs of the batches). The
engines of --at-once families start side by side, and one after another is measured while no other starts or computes.

Tokens/s: of the difference between answers of NEW tokens, so prompts (128 tokens) drop out. first: seconds until one token of
a prompt, read alone. busy_us: what the GPU computes in a step, by torch's profiler (waits of dependent launches are in it).
distinct: share of different tokens among an answer's; last: different tokens among the last of all answers, which go to as many
experts.
"""

import argparse
import fcntl
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from families_speed import random_model, sizes
from pages import results_of
from serve_load import Asked
from serve_own import Engine
from transformers import AutoConfig

from lowq_cli.interop import vllm_speed

Row = dict[str, Any]
# Family -> the number of layers to measure, the class that vLLM runs, and the group size, which is 64 where a width is not a
# multiple of 128.
CUTS: dict[str, tuple[int, str, int]] = {
    "qwen3_moe": (24, "Qwen3MoeForCausalLM", 128),
    "qwen3_5": (24, "Qwen3_5ForConditionalGeneration", 128),
    "qwen3_5_moe": (20, "Qwen3_5MoeForConditionalGeneration", 128),
    "gemma3": (18, "Gemma3ForCausalLM", 128),
    "gemma4": (18, "Gemma4ForCausalLM", 128),
    "gemma4/26b-a4b": (18, "Gemma4ForCausalLM", 64),
    "glm4_moe": (8, "Glm4MoeForCausalLM", 64),
    "deepseek_v2": (20, "DeepseekV2ForCausalLM", 64),
    "deepseek_v3": (5, "DeepseekV3ForCausalLM", 128),
    "nemotron_h": (26, "NemotronHForCausalLM", 64),
    "minimax_m2": (5, "MiniMaxM2ForCausalLM", 128),
    "mixtral": (12, "MixtralForCausalLM", 128),
    "llama": (32, "LlamaForCausalLM", 128),
}
# Fields that vLLM asks for, beyond those that shape a model. transformers 5.17 raises where a config's width differs by layer.
GEMMA4 = {"allow_global_per_layer_attribute_access": True}
MORE: dict[str, Row] = {
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"},
    "gemma4": GEMMA4,
    "gemma4/26b-a4b": GEMMA4,
}
GEMMA = ("gemma3", "gemma4", "gemma4/26b-a4b")  # their embedding is the head, too
# vLLM refuses Gemma 3 in fp16, and its router of DeepSeek V3 takes bf16 alone; Qwen 3.5 is published in it.
BF16 = (*GEMMA, "deepseek_v3", "qwen3_5", "qwen3_5_moe")
IN_16_BITS = [
    "re:.*lm_head$",
    "re:.*gate$",
    "re:.*router.*",
    "re:.*shared_expert_gate$",
    "re:.*in_proj_[ab]+$",
    "re:.*visual.*",
]
BATCHES, PROMPT, NEW = (1, 8, 64), 128, (32, 160)
PROMPTS, REPEATS = (1000, 8000), 3
CACHE = 8  # GB of vLLM's cache; the widest needs 5 for 64 sequences
CACHE_TOKENS = 64 * 320
PATIENCE = 230  # seconds that an engine may take to start


def cut(name: str) -> tuple[Row, Row, Row]:
    """The config of the smaller model, the part of it that describes the text model, and the facts that a result row states."""
    (layers, _, group), whole = CUTS[name], deepcopy(sizes.CONFIGS[name])
    text = whole.get("text_config", whole)
    of = text["num_hidden_layers"]
    text |= {"num_hidden_layers": layers, "vocab_size": text["vocab_size"] * layers // of // 128 * 128}
    text |= {key: text[key][:layers] for key in ("layer_types", "hybrid_override_pattern") if key in text}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    text.setdefault("max_position_embeddings", 32768)
    dtype = "bfloat16" if name in BF16 else "float16"
    return whole, text, {"layers": layers, "of_layers": of, "vocabulary": text["vocab_size"], "group": group, "dtype": dtype}


def written(name: str, folder: Path) -> Path:
    """A folder with nothing but config.json, as an export of 4 bits has it."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": CUTS[name][2]}
    config, text, facts = cut(name)
    kind, architecture = name.split("/")[0], CUTS[name][1]
    if architecture.endswith("CausalLM") and text is not config:
        kind, config = f"{kind}_text", text
    config |= {"model_type": kind, "architectures": [architecture], "dtype": facts["dtype"], **MORE.get(name, {})}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": IN_16_BITS,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def embedding_of(name: str) -> float:
    """The spread of the embedding: a smaller one is lost in the sum of the layers, and every text goes on alike. Gemma scales
    it itself."""
    return float(name not in GEMMA)


@torch.no_grad()
def spread(module: torch.nn.Module, embedding: float) -> None:
    """In the place of vLLM's dummy values: random codes, and weights of the spread of trained ones, so that tokens go to as
    many experts as there; norms 1, biases 0, decays -1. embedding: its spread, or 0 for that of a matrix."""
    for name, p in module.named_parameters(recurse=False):
        if name.endswith("_zero_point") or name in ("q_scale", "k_scale", "v_scale"):
            continue  # of a cache in 8 bits
        if name.endswith("weight_packed"):
            p.random_(-(1 << 31), (1 << 31) - 1)
        elif name.endswith("weight_scale"):  # experts' are transposed
            K = p.shape[1 if p.dim() == 3 else -1] * 128
            p.uniform_(0.5, 1.5).mul_((torch.rand_like(p) < 0.5).to(p.dtype).mul_(2).sub_(1)).mul_(0.2 / K**0.5)
        elif torch.is_floating_point(p):
            constant = -1.0 if name == "A" else float("bias" not in name)
            own = embedding if type(module).__name__ == "VocabParallelEmbedding" else 0
            p.fill_(constant) if p.dim() < 2 else p.normal_(0, own or p.shape[-1] ** -0.5)


Answers = list[list[int]]
Ask = Callable[[Answers, int], Answers]  # (prompts, new tokens) -> answers


def vllm_engine(name: str, args: argparse.Namespace) -> tuple[Ask, Row]:
    """vLLM's engine in this process."""
    os.environ["VLLM_USE_DEEP_GEMM"] = "0"
    for key, value in vllm_speed.ENGINE.items():
        os.environ.setdefault(key, value)
    from vllm import SamplingParams  # type: ignore[import-not-found]
    from vllm.model_executor.model_loader import dummy_loader  # type: ignore[import-not-found]

    filled = 0

    def fill(module: torch.nn.Module, *_: Any) -> None:
        nonlocal filled
        filled += 1
        spread(module, embedding_of(name))

    dummy_loader.initialize_dummy_weights = fill
    folder = written(name, args.work / f"config-{name.replace('/', '-')}")
    more: Row = {"language_model_only": True} if CUTS[name][1].endswith("ConditionalGeneration") else {}
    if find_spec("flashinfer") is None:  # vLLM takes its kernels for prompts of gated delta nets as given on an H100 or H200
        more["gdn_prefill_backend"] = "triton"
    llm, facts = vllm_speed.start(
        folder, load_format="dummy", max_model_len=8192, max_num_seqs=max(BATCHES), max_num_batched_tokens=8192,
        cudagraph_capture_sizes=list(BATCHES), kv_cache_memory_bytes=CACHE << 30, gpu_memory_utilization=0.05, **more,
    )  # fmt: skip

    if not filled:
        raise RuntimeError(f"vLLM {facts['vllm']} fills dummy weights in another way")

    def ask(prompts: Answers, new: int) -> Answers:
        draw = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], draw, use_tqdm=False)
        return [list(a.outputs[0].token_ids) for a in found]

    return ask, facts


def lowq_engine(name: str, args: argparse.Namespace) -> tuple[Ask, Row]:
    """lowq's server engine, without HTTP."""
    began = time.perf_counter()
    whole, _, facts = cut(name)
    config = AutoConfig.for_model(name.split("/")[0], **whole).get_text_config()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(config, f"4g{facts['group']}n", device, getattr(torch, facts["dtype"]))
    held = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    if own := embedding_of(name):
        with torch.no_grad():
            model.get_input_embeddings().weight.normal_(0, own)
    engine = Engine(model, running=max(BATCHES), cache_tokens=CACHE_TOKENS)

    def ask(prompts: Answers, new: int) -> Answers:
        return engine.answers([Asked(i, ids, new) for i, ids in enumerate(prompts)])

    how = {"engine_name": engine.engine.name, "reason": engine.engine.reason, "lowq": version("lowq")}
    return ask, how | {"start_s": time.perf_counter() - began, "weights_gb": sum(held.values()) / 1e9}


ENGINES = {"vllm": vllm_engine, "lowq": lowq_engine}


def steps_of(ask: Ask, batch: int, draw: Callable[[int, int], Answers]) -> Row:
    """Tokens/s of so many sequences at once, from answers of two lengths."""
    seconds: dict[int, list[float]] = {n: [] for n in NEW}
    for turn in range(REPEATS + 1):
        for new in NEW:
            prompts = draw(batch, PROMPT)
            began = time.perf_counter()
            answers = ask(prompts, new)
            took = time.perf_counter() - began
            assert all(len(a) == new for a in answers)
            if turn:  # the first compiles what is left
                seconds[new].append(took)
    step = (statistics.median(seconds[NEW[1]]) - statistics.median(seconds[NEW[0]])) / (NEW[1] - NEW[0])
    distinct, last = statistics.mean(len(set(a)) / len(a) for a in answers), {a[-1] for a in answers}
    row: Row = {"batch": batch, "tokens_per_s": batch / step, "step_us": step * 1e6, "distinct": distinct, "last": len(last)}
    return row | {"seconds": {str(n): s for n, s in seconds.items()}}


def busy_us(ask: Ask, batch: int, draw: Callable[[int, int], Answers]) -> float:
    """Microseconds of kernels that a step has, of the difference between two answers."""
    totals = []
    for new in (8, 24):
        prompts = draw(batch, PROMPT)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
            ask(prompts, new)
            torch.cuda.synchronize()
        totals.append(sum(e.self_device_time_total for e in p.key_averages()))
    return (totals[1] - totals[0]) / 16


def one(args: argparse.Namespace) -> None:
    """One engine: start, wait until no other starts or computes, measure, write."""
    whose, _, name = args.one.partition(":")
    torch.manual_seed(0)
    with (args.work / "turn").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_SH)  # others start as well
        ask, facts = ENGINES[whose](name, args)
        row: Row = {"family": name, "engine": whose, **cut(name)[2], **facts, "steps": [], "first": []}
        rng, vocabulary = random.Random(0), row["vocabulary"]

        def draw(count: int, tokens: int) -> Answers:
            return [[rng.randrange(3, vocabulary) for _ in range(tokens)] for _ in range(count)]

        def write() -> None:
            part = args.out.with_suffix(".part")
            part.write_text(json.dumps(row))
            part.replace(args.out)

        print(f"{args.one} ready after {row['start_s']:.0f} s, {row['weights_gb']:.2f} GB", flush=True)
        write()
        fcntl.flock(turn, fcntl.LOCK_UN)
        fcntl.flock(turn, fcntl.LOCK_EX)
        began = time.perf_counter()
        for batch in BATCHES:
            row["steps"].append(steps_of(ask, batch, draw))
            print(args.one, {k: v for k, v in row["steps"][-1].items() if k != "seconds"}, flush=True)
            write()
        for tokens in PROMPTS:
            seconds = []
            for _ in range(REPEATS + 3):
                prompts = draw(1, tokens)
                start = time.perf_counter()
                ask(prompts, 1)
                seconds.append(time.perf_counter() - start)
            row["first"].append({"tokens": tokens, "seconds": statistics.median(seconds[2:]), "all": seconds})
            print(args.one, row["first"][-1], flush=True)
            write()
        if torch.cuda.is_available():
            for found in row["steps"]:
                found["busy_us"] = busy_us(ask, found["batch"], draw)
            print(args.one, "busy", [round(s["busy_us"]) for s in row["steps"]], flush=True)
        row["measured_s"] = time.perf_counter() - began
        write()
    os._exit(0)  # neither engine's threads are needed any more


def main() -> None:
    """Start the engines of some families, wait for them, then those of the next."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--families", default=",".join(CUTS))
    parser.add_argument("--engines", default="lowq,vllm")
    parser.add_argument("--at-once", type=int, default=2, help="families whose engines start side by side")
    parser.add_argument("--seconds", type=float, default=1e9, help="no further family starts this long after the start")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return one(args)
    args.work.mkdir(parents=True, exist_ok=True)
    began, left = time.monotonic(), args.families.split(",")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    to = args.out or results_of(device) / "families_vllm.json"
    facts: Row = {"device": device, "date": datetime.now(UTC).isoformat("T", "minutes"), "prompt": PROMPT, "new": NEW}
    facts |= {p: version(p) for p in ("torch", "transformers")} | {"side_by_side": args.at_once * len(args.engines.split(","))}
    rows: dict[str, Row] = {}

    def collect(started: dict[str, tuple[Path, Path, Any]]) -> None:
        for what, (out, log, process) in started.items():
            whose, _, name = what.partition(":")
            rows[what] = json.loads(out.read_text()) if out.is_file() else {"family": name, "engine": whose}
            if process.poll():
                words = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line or "error" in line]
                rows[what]["failed"] = (words or ["ended by a signal"])[-1][-300:]
        to.write_text(json.dumps(facts | {"rows": list(rows.values())}, indent=1) + "\n")

    while left and time.monotonic() - began < args.seconds:
        now, left = left[: args.at_once], left[args.at_once :]
        started, since = {}, time.monotonic()
        for what in (f"{whose}:{name}" for name in now for whose in args.engines.split(",")):
            plain = what.replace(":", "-").replace("/", "-")
            out, log = args.work / f"{plain}.json", args.work / f"{plain}.log"
            line = [sys.executable, sys.argv[0], "--one", what, "--work", str(args.work), "--out", str(out)]
            with log.open("w") as sink:
                started[what] = out, log, subprocess.Popen(line, stdout=sink, stderr=sink)
        while any(process.poll() is None for _, _, process in started.values()):
            time.sleep(0.5)
            for out, _, process in started.values():
                if not out.is_file() and time.monotonic() - since > PATIENCE:  # others wait for it
                    process.kill()
            collect(started)
        collect(started)
        for what in started:
            print(json.dumps({k: v for k, v in rows[what].items() if k not in ("first", "reason")})[:700], flush=True)
    print(f"wrote {to}")


if __name__ == "__main__":
    main()
