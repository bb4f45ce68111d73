"""Time prompts and steps of hybrids on this CPU next to a Llama of the same number of weights.

    python benchmarks/hybrids_cpu.py [--threads N] [--rounds N] [--out FILE] [FAMILY ...]

Width 2,048, four layers, 4 bits g128 in bf16; and about 16 million parameters in fp32. Llama has the hybrid's width and layers,
and an MLP as wide as makes its matrices as many weights. Both take turns in one process; a time is CPU time, the least of all
rounds. A row: {family, form, weights and llama_weights in millions, seconds of a prompt of 1,000 tokens and ms of a step after
256, of both; prompt and step: the hybrid's time over Llama's, each per weight}.
"""

import argparse
import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import process_time
from typing import Any

import torch
from e2e_decode import fill, quantized_model
from families_speed import COMMON, SHAPES
from transformers import AutoConfig, AutoModelForCausalLM

from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.sampling import Sampling

FAMILIES = ("qwen3_5_text", "falcon_h1", "lfm2")
PROMPT, BEFORE, STEPS = 1000, 256, 24
WIDTHS = {"4 bits": 2048, "fp32": 512}  # hidden size by form
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}


def shape(family: str, width: int, intermediate: int) -> dict[str, Any]:
    """A config's fields: those of families_speed.py at this width; small models have a quarter of the heads."""
    fields = COMMON | SHAPES[family] | {"hidden_size": width, "intermediate_size": intermediate, "num_hidden_layers": 4}
    if family == "llama":
        fields |= HEADS
    if width < 1024:
        heads = [name for name in fields if name.endswith("_heads") and fields[name]]
        fields |= {name: max(1, fields[name] // 4) for name in heads}
    return fields


def skeleton(family: str, form: str, intermediate: int) -> Any:
    """The model on the meta device."""
    config = AutoConfig.for_model(family, **shape(family, WIDTHS[form], intermediate))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if form == "fp32" else torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return model


def weights(model: Any) -> int:
    """Weights of all matrices but the embedding."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def decoder(model: Any, form: str) -> NativeDecoder:
    """A decoder of the skeleton with random weights."""
    model = fill(model, "cpu") if form == "fp32" else quantized_model(model, "4g128", torch.bfloat16, "cpu")
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path).register_buffer(leaf, torch.zeros(buffer.shape, dtype=buffer.dtype))
    return NativeDecoder(model)


def times(engine: NativeDecoder, ids: list[int]) -> tuple[float, float]:
    """Seconds of CPU time of a prompt and of a step, the least of one run."""
    began = process_time()
    engine.start([ids[:PROMPT]], Sampling(), 1)
    prompt = process_time() - began
    engine.start([ids[:BEFORE]], Sampling(), STEPS + 2)
    steps = []
    for _ in range(STEPS):
        began = process_time()
        engine.step()
        steps.append(process_time() - began)
    return prompt, min(steps[2:])


def row(family: str, form: str, rounds: int) -> dict[str, Any]:
    """Both models' times."""
    width = WIDTHS[form]
    hybrid = skeleton(family, form, 3 * width)
    base, unit = weights(skeleton("llama", form, 128)), 4 * 3 * width
    llama = skeleton("llama", form, 128 + max(0, round((weights(hybrid) - base) / unit / 128)) * 128)
    sizes = [weights(m) / 1e6 for m in (hybrid, llama)]
    torch.manual_seed(0)
    engines = [decoder(m, form) for m in (hybrid, llama)]
    ids = torch.randint(2, 8000, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    runs = [[times(engine, ids) for engine in engines] for _ in range(rounds)]
    (prompt, step), (llama_prompt, llama_step) = ([min(run[i][j] for run in runs) for j in (0, 1)] for i in (0, 1))
    larger = sizes[0] / sizes[1]
    return {
        "family": family,
        "form": form,
        "weights": round(sizes[0], 2),
        "llama_weights": round(sizes[1], 2),
        "prompt_s": round(prompt, 3),
        "llama_prompt_s": round(llama_prompt, 3),
        "step_ms": round(step * 1e3, 3),
        "llama_step_ms": round(llama_step * 1e3, 3),
        "prompt": round(prompt / llama_prompt / larger, 2),
        "step": round(step / llama_step / larger, 2),
    }


def main() -> None:
    """A row a family and form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for family in args.families or FAMILIES:
        for form in WIDTHS:
            rows.append(row(family, form, args.rounds))
            print(rows[-1], flush=True)
    if args.out:
        facts = {"measured": datetime.now(UTC).strftime("%Y-%m-%d"), "torch": torch.__version__}
        facts |= {
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "threads": args.threads,
            "transformers": version("transformers"),
        }
        args.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
