"""Time decoding of all families on one GPU: real layer widths, few layers. benchmarks/results/<gpu>/families_speed.json.

    python benchmarks/families_speed.py [--out FILE] [--launches] [--kernels] [--dtype bfloat16] [FAMILY or whole:NAME ...]
    python benchmarks/families_speed.py --contexts 32768,131072 --variant 4g128h4 whole:qwen3_5

Random weights, 4 bits g128 (NARROW: g64), vocabulary 8,192. Share: bytes of weights that a step touches (experts by their
share, the embedding left out) over the memory's measured read speed, of a step's time at batch 1. First token: of a prompt of
1,000 tokens, warm. A row: {family, layers, decoder, step_us, share, tokens_per_s_8, first_token_ms}; --launches adds names and
numbers of the kernels of one step, and the tokens drawn, for comparing two trees; --kernels the times of those of a prompt;
--timeline what each kernel adds to a step of 1 and of 8 sequences (`lowq_cli/engine/timeline.py`).
whole:NAME is a published model of `tests/families/sizes.py`, with its own vocabulary and all layers, or as many as make MOST
billions of parameters. --contexts adds the step after so many tokens. Processes with one --turn
FILE build side by side and measure one after another.
"""

import argparse
import fcntl
import gc
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from copy import deepcopy
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from e2e_decode import quantized_model
from pages import results_of
from transformers import AutoConfig, AutoModelForCausalLM

from lowq_cli.engine import bandwidth, explain, precompiling, profiling
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.sampling import Sampling

COMMON = {"vocab_size": 8192, "max_position_embeddings": 32768, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
A3B = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128}
A3B |= {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True}
DELTA = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
QWEN35 = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "linear_conv_kernel_dim": 4} | DELTA
SHAPES: dict[str, dict[str, Any]] = {  # of one published size each; num_hidden_layers is what is measured
    "llama": WIDE | {"num_hidden_layers": 8},
    "mistral": WIDE | {"num_hidden_layers": 8, "sliding_window": 4096},
    "qwen2": WIDE
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    | {"num_hidden_layers": 8},
    "qwen3": WIDE | {"intermediate_size": 12288, "num_hidden_layers": 8},
    "phi3": {"hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40, "num_key_value_heads": 10}
    | {"num_hidden_layers": 8},
    "gemma3_text": {"hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"head_dim": 256, "num_hidden_layers": 8, "sliding_window": 1024, "query_pre_attn_scalar": 256},
    "mixtral": WIDE | {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4},
    "qwen3_moe": A3B | {"num_hidden_layers": 8},
    "gpt_oss": {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
    | {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 8, "sliding_window": 128},
    "gemma2": {"hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"head_dim": 256, "num_hidden_layers": 8, "sliding_window": 4096, "query_pre_attn_scalar": 256},
    "gemma4_text": {"num_hidden_layers": 12},
    "glm4": {"hidden_size": 4096, "intermediate_size": 13696, "num_attention_heads": 32, "num_key_value_heads": 2}
    | {"head_dim": 128, "num_hidden_layers": 8},
    "granite": WIDE | {"intermediate_size": 12800, "num_hidden_layers": 8},
    "olmo3": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}
    | {"num_hidden_layers": 8},
    "smollm3": {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 4}
    | {"num_hidden_layers": 8},
    "cohere2": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"num_hidden_layers": 8},
    "ministral3": WIDE | {"num_hidden_layers": 8},
    "seed_oss": {"hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 80, "num_key_value_heads": 8}
    | {"head_dim": 128, "num_hidden_layers": 4},
    "exaone4": {"hidden_size": 5120, "intermediate_size": 27392, "num_attention_heads": 40, "num_key_value_heads": 8}
    | {"num_hidden_layers": 4},
    "starcoder2": {"hidden_size": 4608, "intermediate_size": 18432, "num_attention_heads": 36, "num_key_value_heads": 4}
    | {"num_hidden_layers": 8},
    "qwen3_5_text": QWEN35 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 8},
    "qwen3_5_moe_text": QWEN35
    | {"hidden_size": 2048, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256}
    | {"num_experts_per_tok": 8, "num_hidden_layers": 8},
    "granitemoehybrid": {"num_hidden_layers": 8},
    "nemotron_h": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    | {"intermediate_size": 21504, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8}
    | {"layers_block_type": ["mamba", "mlp", "mamba", "mlp", "mamba", "full_attention", "mlp", "mamba"]},
    "falcon_h1": {"hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 12, "num_key_value_heads": 2}
    | {"head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "num_hidden_layers": 8},
    "lfm2": {"hidden_size": 2560, "intermediate_size": 10752, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"num_hidden_layers": 8},
    "deepseek_v2": {"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 16}
    | {
        "num_key_value_heads": 16,
        "num_hidden_layers": 8,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "q_lora_rank": None,
    },
    "glm4_moe": {"hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 96}
    | {"num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 4},
    "minimax_m2": {"hidden_size": 3072, "intermediate_size": 1536, "num_attention_heads": 48, "num_key_value_heads": 8}
    | {"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 4},
}
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "families"))
import sizes  # noqa: E402

MOST = 50  # billions of parameters; a model of more is cut to layers of so many, or to LEAST layers
LEAST = 6  # DeepSeek V3's first three have no experts
NINE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss")
# whose layers are no multiple of 128 wide: groups of 64
NARROW = ("gpt_oss", "glm4_moe", "deepseek_v2")
STEPS, SECONDS, PROMPT = 200, 0.4, 1000  # of a run: max. steps and about so many seconds


def model_of(family: str, device: str, dtype: torch.dtype, variant: str = "") -> Any:
    """The model of a family's shape, of random weights in 4 bits, or as a variant of `e2e_decode.widths` says."""
    name = family.removeprefix("whole:")
    if name == family:
        config = AutoConfig.for_model(family, **COMMON, **SHAPES[family])
        return random_model(config, variant or ("4g64" if family in NARROW else "4g128"), device, dtype)
    config = AutoConfig.for_model(name.split("/")[0], **deepcopy(sizes.CONFIGS[name])).get_text_config()
    every = config.num_hidden_layers
    layers = min(every, max(LEAST, round(every * MOST / sizes.BILLIONS[name])))
    for key, value in list(vars(config).items()):
        if layers < every and isinstance(value, list) and len(value) == every:
            setattr(config, key, value[:layers])
    config.num_hidden_layers = layers
    fields = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "mamba_d_ssm")
    widths = [n for key in fields if (n := getattr(config, key, None))]
    group = next(g for g in (128, 64, 32) if all(n % g == 0 for w in widths for n in (w if isinstance(w, list) else [w])))
    return random_model(config, variant or f"4g{group}", device, dtype)


def random_model(config: Any, variant: str, device: str, dtype: torch.dtype) -> Any:
    """The model of a config, of random weights packed as `variant` says."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model = quantized_model(model, variant, dtype, device)
    # Gemma's factors of layers and embeddings; with 0 all tokens were alike and went to the same experts. Other buffers: 0.
    factors = {"layer_scalar": 1.0, "embed_scale": config.hidden_size**0.5}
    for name, b in list(model.named_buffers()):
        if b.is_meta:
            module, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            module.register_buffer(leaf, torch.full(b.shape, factors.get(leaf, 0.0), dtype=b.dtype, device=device))
    return model


def step_seconds(decoder: Any, prompts: list[list[int]], steps: int) -> float:
    """Seconds of a step after these prompts: the least of three runs, of one after long ones."""
    found = list[float]()
    for _ in range(1 if len(prompts[0]) > 8 * PROMPT else 3):
        decoder.start(prompts, Sampling(), steps + 20)
        for count in (10, min(steps, max(20, round(SECONDS / found[0]))) if found else steps // 4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                decoder.step()
            torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / count)
    return min(found)


def launches(decoder: Any) -> dict[str, int]:
    """Kernels of one step by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        decoder.step()
        torch.cuda.synchronize()
    return dict(Counter(e.name for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA))


def of_prompt(decoder: Any, prompt: list[list[int]]) -> dict[str, float]:
    """Microseconds of each kernel of a prompt's pass by name, the largest 16; waits of dependent launches are in them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        decoder.start(prompt, Sampling(), 1)
        torch.cuda.synchronize()
    us = Counter[str]()
    for e in p.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            us[e.name[:60]] += e.device_time
    return {name: round(n, 1) for name, n in us.most_common(16)}


def of_steps(decoder: Any, prompts: list[list[int]]) -> list[tuple[str, float, float]]:
    """(kernel, microseconds that it adds, launches) of a step after these prompts, in order of the first launches."""
    with tempfile.TemporaryDirectory() as folder:
        parts = profiling.profile_steps(decoder, prompts, Sampling(), Path(folder) / "timeline.json")
    return [(p.what[:100], round(p.us, 1), round(p.calls, 1)) for p in parts]


def first_token(decoder: Any, prompt: list[list[int]]) -> float:
    """Milliseconds until the first token of a prompt, the least of three after a first one."""
    times = []
    for i in range(4):
        prompt[0][0] = 100 + i  # nothing of the prompt before is held
        torch.cuda.synchronize()
        began = time.perf_counter()
        decoder.start(prompt, Sampling(), 1)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return round(min(times[1:]) * 1e3, 1)


def row(family: str, device: str, args: argparse.Namespace, speed: float, turn: Any) -> dict[str, Any]:
    """What is measured of one family."""
    torch.manual_seed(0)
    fcntl.flock(turn, fcntl.LOCK_SH)  # others build as well
    model = model_of(family, device, getattr(torch, args.dtype), args.variant)
    decoder = decoder_of(model)
    g = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, 8000, (8, 128), generator=g).tolist()
    long = torch.randint(2, 8000, (1, PROMPT), generator=g).tolist()
    for warmed in (prompts[:1], prompts, long):
        precompiling.warm(model, decoder, warmed, Sampling())
    fcntl.flock(turn, fcntl.LOCK_UN)
    fcntl.flock(turn, fcntl.LOCK_EX)
    first = decoder.start(prompts[:1], Sampling(), 40)
    drawn = [int(first[0]), *(int(decoder.step()[0]) for _ in range(30))]
    made = {"family": family, "layers": model.config.num_hidden_layers, "decoder": decoder.name, "reason": decoder.reason}
    if args.launches:
        made |= {"launches": launches(decoder), "tokens": hashlib.sha256(str(drawn).encode()).hexdigest()[:12]}
    one = step_seconds(decoder, prompts[:1], STEPS)
    nbytes = explain.bytes_per_token(model, decoder, 1)
    eight = step_seconds(decoder, prompts, STEPS // 2)
    made |= {"step_us": round(one * 1e6, 1), "share": round(nbytes / speed / one, 3), "bytes": nbytes}
    made |= {"tokens_per_s_8": round(8 / eight), "first_token_ms": first_token(decoder, long)}
    if args.kernels:
        long[0][0] = 99
        made["prompt_kernels_us"] = of_prompt(decoder, long)
    if args.timeline:
        made |= {"timeline": of_steps(decoder, prompts[:1]), "timeline_8": of_steps(decoder, prompts)}
    for tokens in map(int, filter(None, args.contexts.split(","))):
        ids = torch.randint(2, 8000, (1, tokens), generator=g).tolist()
        made.setdefault("contexts", {})[tokens] = round(step_seconds(decoder, ids, STEPS) * 1e6, 1)
    return made


def main() -> None:
    """A row a family; what fails says why."""
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--launches", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--variant", default="", help="as e2e_decode.py spells them")
    parser.add_argument("--contexts", default="")
    parser.add_argument("--turn", type=Path, default=Path("/dev/null"))
    args = parser.parse_args()
    rows, device = list[dict[str, Any]](), torch.device("cuda")
    name, everything = torch.cuda.get_device_name(), (*SHAPES, *(f"whole:{name}" for name in sizes.CONFIGS))
    out = args.out or results_of(name) / "families_speed.json"
    with args.turn.open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        speed = bandwidth.measured(device)
        fcntl.flock(turn, fcntl.LOCK_UN)
        for family in args.families or everything:
            try:
                rows.append(row(family, "cuda", args, speed, turn))
            except Exception as e:
                rows.append({"family": family, "decoder": "none", "reason": f"{type(e).__name__}: {e}"[:300]})
            fcntl.flock(turn, fcntl.LOCK_UN)
            print({k: v for k, v in rows[-1].items() if k not in ("launches", "timeline", "timeline_8")}, flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            found = {"gpu": name, "gbs": round(speed / 1e9), "date": datetime.now(UTC).isoformat(timespec="minutes")}
            found |= {"torch": torch.__version__, "transformers": version("transformers"), "rows": rows}
            out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
