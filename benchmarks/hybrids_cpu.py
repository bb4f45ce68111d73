"""Time prompts and steps of hybrids on this CPU next to a Llama of the same number of weights, and in llama.cpp.

    python benchmarks/hybrids_cpu.py [--threads N] [--rounds N] [--out FILE] [FAMILY ...]
    python benchmarks/hybrids_cpu.py --llama-cpp FOLDER ...        and in llama.cpp, built as hybrids_llamacpp.py shows

Width 2,048, four layers, 4 bits in bf16; and about 22 million parameters in fp32. Llama has the hybrid's width and layers, and
an MLP as wide as makes its matrices as many weights. All take turns in one process; a time is the least CPU time of all rounds.
A row: {family, form, weights and llama_weights in millions, rounds, mb of weights that a step reads, seconds of a prompt of
1,000 tokens and ms of a step after 256, of both}. Another call with the same --out adds rounds: of each time the least stays.

With --llama-cpp, "llama.cpp" in a row has its times of the same two models. In fp32 both programs have the same weights, and
"apart" is the norm of the difference of their logits after 256 tokens, divided by the norm of lowq's. In 4 bits each program
has random weights of its own; times do not depend on them.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import process_time
from typing import Any

import torch
from accuracy_rows import words
from cpu_llamacpp import cpu_name
from e2e_decode import fill, quantized_model
from families_speed import COMMON, SHAPES
from hybrids_llamacpp import LlamaCpp, converted
from transformers import AutoConfig, AutoModelForCausalLM

from lowq_cli.engine import explain
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.sampling import Sampling

FAMILIES = ("qwen3_5_text", "falcon_h1", "lfm2")
PROMPT, BEFORE, STEPS = 1000, 256, 24


@dataclass(frozen=True)
class Form:
    """Hidden size, the width of weights as e2e_decode.py names it ("": fp32), and llama.cpp's like."""

    width: int
    variant: str
    gguf: str = ""


FORMS = {
    "4-bit g128": Form(2048, "4g128"),
    "4-bit g32": Form(2048, "4g32n", "Q4_0"),
    "4-bit g64": Form(2048, "4g64", "Q4_K_M"),
    "fp32": Form(512, "", "F32"),
}
STEP = 256  # of Llama's MLP: a block of Q4_K has as many weights
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


def skeleton(family: str, form: Form, intermediate: int, dtype: torch.dtype | None = None) -> Any:
    """The model on the meta device."""
    config = AutoConfig.for_model(family, **shape(family, form.width, intermediate))
    dtype = dtype or (torch.bfloat16 if form.variant else torch.float32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def weights(model: Any) -> int:
    """Weights of all matrices but the embedding."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def sizes(family: str, form: Form) -> tuple[tuple[str, int], tuple[str, int]]:
    """The hybrid and the Llama, each with the width of its MLP."""
    base, unit = weights(skeleton("llama", form, STEP)), 4 * 3 * form.width
    wide = STEP + max(0, round((weights(skeleton(family, form, 3 * form.width)) - base) / unit / STEP)) * STEP
    return (family, 3 * form.width), ("llama", wide)


def decoders(model: tuple[str, int], form: Form, args: argparse.Namespace) -> tuple[list[Any], list[float]]:
    """A decoder of a model of random weights and, with --llama-cpp, llama.cpp's; the megabytes of weights that a step reads."""
    made = skeleton(model[0], form, model[1])
    made = quantized_model(made, form.variant, torch.bfloat16, "cpu") if form.variant else fill(made, "cpu")
    for name, buffer in list(made.named_buffers()):
        if buffer.is_meta:
            path, _, leaf = name.rpartition(".")
            made.get_submodule(path).register_buffer(leaf, torch.zeros(buffer.shape, dtype=buffer.dtype))
    theirs = []
    if args.llama_cpp and form.gguf:  # before lowq joins the layers
        plain = fill(skeleton(model[0], form, model[1], torch.float32), "cpu") if form.variant else made
        with tempfile.TemporaryDirectory() as work:
            file = converted(plain, Path(work), args.llama_cpp, form.gguf)
            theirs = [LlamaCpp(args.llama_cpp, file, args.threads, PROMPT + STEPS)]
    own = NativeDecoder(made)
    embedding = made.config.vocab_size * form.width * (2 if form.variant else 4)
    sizes = [explain.bytes_per_token(made, own, 1), *(engine.bytes - embedding for engine in theirs)]
    return [own, *theirs], [round(size / 1e6, 1) for size in sizes]


def times(engine: Any, ids: list[int]) -> tuple[float, float]:
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


def named(hybrid: Sequence[float], llama: Sequence[float]) -> dict[str, float]:
    """Two models' times of a prompt and of a step."""
    seconds = {"prompt_s": round(hybrid[0], 3), "llama_prompt_s": round(llama[0], 3)}
    return seconds | {"step_ms": round(hybrid[1] * 1e3, 3), "llama_step_ms": round(llama[1] * 1e3, 3)}


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A row of more rounds: the least of each time."""
    least = {key: min(old[key], new[key]) for key in old if key.endswith(("_s", "_ms"))}
    inner = {key: joined(old[key], new[key]) for key in ("llama.cpp",) if key in old and key in new}
    return old | new | least | inner | ({"rounds": old["rounds"] + new["rounds"]} if "rounds" in old else {})


def apart(engines: list[Any], ids: list[int]) -> float:
    """The distance of the logits of lowq and of llama.cpp after the same tokens, over the length of lowq's."""
    for engine in engines:
        engine.start([ids[:BEFORE]], Sampling(), 2)
    exact, other = engines[0].sampler.logits[0].float(), engines[1].logits()
    return float(f"{(exact - other).norm() / exact.norm():.2g}")


def row(family: str, name: str, form: Form, args: argparse.Namespace) -> dict[str, Any]:
    """Both models' times."""
    models = sizes(family, form)
    millions = [weights(skeleton(of, form, wide)) / 1e6 for of, wide in models]
    torch.manual_seed(0)
    made = [decoders(model, form, args) for model in models]
    pairs, mb = [m[0] for m in made], [m[1] for m in made]
    ids = torch.randint(2, 8000, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    rounds = [[[times(engine, ids) for engine in pair] for pair in pairs] for _ in range(args.rounds)]
    least = [[[min(r[m][e][what] for r in rounds) for what in (0, 1)] for m in (0, 1)] for e in range(len(pairs[0]))]
    found: dict[str, Any] = {
        "family": family,
        "form": name,
        "weights": round(millions[0], 2),
        "llama_weights": round(millions[1], 2),
    }
    found |= {"rounds": args.rounds, "mb": [m[0] for m in mb], **named(*least[0])}
    if len(least) > 1:
        found["llama.cpp"] = {"file": form.gguf, "mb": [m[1] for m in mb], **named(*least[1])}
        if not form.variant:
            found["llama.cpp"]["apart"] = [apart(pair, ids) for pair in pairs]
    return found


def main() -> None:
    """A row a family and form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forms", type=words, help=", ".join(FORMS))
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="llama-cpp-python's source distribution, built")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    facts: dict[str, Any] = {"measured": datetime.now(UTC).strftime("%Y-%m-%d"), "torch": torch.__version__}
    facts |= {"cpu": torch.backends.cpu.get_cpu_capability(), "threads": args.threads, "transformers": version("transformers")}
    facts |= {"processor": cpu_name(), "load": [round(os.getloadavg()[0], 1)]}  # of the minute before each call
    facts |= {"llama_cpp": args.llama_cpp.name.replace("_", "-")} if args.llama_cpp else {}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if args.out and args.out.exists():
        before = json.loads(args.out.read_text())
        rows = {(r["family"], r["form"]): r for r in before["rows"]}
        facts["load"] = [*before["load"], *facts["load"]]
    for family in args.families or FAMILIES:
        for name in args.forms or FORMS:
            at, new = (family, name), row(family, name, FORMS[name], args)
            rows[at] = joined(rows[at], new) if at in rows else new
            print(new, flush=True)
            if args.out:
                args.out.write_text(json.dumps(facts | {"rows": list(rows.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main()
