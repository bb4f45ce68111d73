"""Time decoding of families on this CPU with and without its own routers, experts, latent attention and activations.

    python benchmarks/families_cpu.py [--threads N] [--rounds N] [--out FILE] [FAMILY ...]

Shapes of families_speed.py with two or three layers and 16 experts, random weights, 4 bits. "torch" is the same decoder with
the definitions in place of the C++ of mixture.h, latent.h and activate.h. Both decode in turn in one process. A row: {family,
CPU ms of a step with and without, the least of all rounds, share of the torch step outside of the library, replayed, agree}.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch
from families_speed import SHAPES, model_of

from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.profiling import profile_steps
from lowq_cli.engine.sampling import Sampling
from lowq_cli.hf.experts import QuantExperts
from lowq_kernels.decode import activation, cpu, latent, mixture_cpu, router

MIXTURES = ("qwen3_moe", "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss")
FAMILIES = (*MIXTURES, "gemma4_text", "nemotron_h", "llama")
MORE: dict[str, dict[str, Any]] = {
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "full_attention"], "num_hidden_layers": 3},
    "deepseek_v3": {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128}
    | {"num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "n_group": 4, "topk_group": 2},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
STEPS = 24


@contextmanager
def in_torch(decoder: Any) -> Iterator[None]:
    """The definitions in place of the CPU forms, for this decoder's steps."""
    own, experts = decoder.plan.ops, mixture_cpu.experts
    forms = {"route_by": router.route_by, "activated": activation.activated, "opened_by": activation.opened_by}
    decoder.plan.ops = replace(own, latent=latent.DEFINITION, gated=gated_before, **forms)
    mixture_cpu.experts = lambda *operands: None
    try:
        yield
    finally:
        decoder.plan.ops, mixture_cpu.experts = own, experts


def gated_before(gate_up: torch.Tensor, act: str, gate_scale: float = 1.0) -> torch.Tensor:
    """`cpu.gated`, of the two activations that it had alone."""
    plain = act in ("silu", "gelu_tanh") and gate_scale == 1.0
    return cpu.gated(gate_up, act) if plain else activation.gated(gate_up, act, gate_scale)


def step_ms(decoder: Any, prompt: list[list[int]]) -> tuple[float, list[int]]:
    """The least CPU time of a step after a prompt, and the tokens drawn."""
    drawn, times = [int(decoder.start(prompt, Sampling(), STEPS + 2)[0])], []
    for _ in range(STEPS):
        began = process_time()
        drawn.append(int(decoder.step()[0]))
        times.append(process_time() - began)
    return min(times[2:]) * 1e3, drawn


def row(family: str, rounds: int) -> dict[str, Any]:
    """What is measured of one family."""
    SHAPES[family] = {**SHAPES.get(family, {}), "num_hidden_layers": 2, **MORE.get(family, {})}
    shape = SHAPES[family]
    shape |= dict.fromkeys([name for name in EXPERTS if name in shape], 16)
    if family == "deepseek_v3":
        shape |= {"n_routed_experts": 16, "num_experts_per_tok": 8, "first_k_dense_replace": 1}
    torch.manual_seed(0)
    model = model_of(family, "cpu", torch.bfloat16)
    for m in model.modules():
        if isinstance(m, QuantExperts):
            m.prepare()
    prompt = torch.randint(2, 8000, (1, 256), generator=torch.Generator().manual_seed(1)).tolist()
    own, other = NativeDecoder(model), NativeDecoder(model)
    times: dict[str, list[float]] = {"own": [], "torch": []}
    for _ in range(rounds):
        ms, tokens = step_ms(own, prompt)
        times["own"].append(ms)
        with in_torch(other):
            ms, wanted = step_ms(other, prompt)
        times["torch"].append(ms)
    made = {"family": family, **{f"{name}_ms": round(min(ms), 2) for name, ms in times.items()}}
    agree = sum(a == b for a, b in zip(tokens, wanted, strict=True))
    with TemporaryDirectory() as folder, in_torch(other):
        parts = profile_steps(other, prompt, Sampling(), Path(folder) / "timeline.json")
    library = sum(p.us for p in parts if p.what.startswith("lowq::") and p.what != "lowq::experts_linear")
    made |= {"share_outside": round(1 - library / parts[-1].us, 2), "agree": f"{agree}/{len(tokens)}"}
    assert own.repeated is not None
    replays = bool(own.repeated.made) and all(step is not None for step in own.repeated.made.values())
    return made | {"replayed": replays, "parts": {p.what: round(p.us) for p in parts[:6]}}


def main() -> None:
    """A row a family; what fails says why."""
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for family in args.families or FAMILIES:
        try:
            rows.append(row(family, args.rounds))
        except Exception as e:
            rows.append({"family": family, "reason": f"{type(e).__name__}: {e}"[:300]})
        print(rows[-1], flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
