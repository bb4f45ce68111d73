"""Time the first token after a picture and the tokens after it, on one GPU: benchmarks/results/<gpu>/pictures.json.

    python benchmarks/pictures.py [--layers N] [--out FILE]

An 8B language model of Qwen3-VL's shape, random weights in 4 bits g128, with its tower (27 layers, 1152 wide) in bfloat16: one
picture of 1,024 x 1,024 (4,096 patches, 1,024 rows), 30 tokens of text, 100 new tokens. Rows: {what, ms}: the tower as
transformers calls it, and as a CUDA graph; the prompt with the picture; a step behind it, whose rows turn by places of three
parts, and one behind a text; the whole answer.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from e2e_decode import quantized_model
from pages import results_of
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from lowq_cli.engine.model_record import owned
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.pictures import Shown
from lowq_cli.engine.plan import Plan
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.weights import ModelWeights, describe
from lowq_cli.hf.pictures import Picture
from lowq_packers.arch.parts import Images

TEXT = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 32768, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096, "patch_size": 16,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
TOKEN, SIDE, NEW = 151655, 64, 100
IMAGES = Images(TOKEN, patch=16, merge=2, sections=(24, 20, 20), interleaved=True, deepstack=3)


def decoder_of(layers: int, device: str) -> NativeDecoder:
    """A language model of that many layers that takes pictures."""
    with torch.device("meta"):
        config = AutoConfig.for_model("qwen3", num_hidden_layers=layers, **TEXT)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model = quantized_model(model, "4g128", torch.bfloat16, device)
    for name, b in list(model.named_buffers()):
        if b.is_meta:  # of the rotation, which the plan makes for itself
            model.get_submodule(name.rpartition(".")[0]).register_buffer(
                name.rpartition(".")[2], torch.zeros(b.shape, device=device)
            )
    described, _ = describe(model.config)
    weights = ModelWeights(model, described)
    described = replace(described, images=IMAGES)
    owned(model).plan = Plan(described, model.config, weights, model.device, model.dtype)
    return NativeDecoder(model)


def timed(work: Callable[[], Any], runs: int = 5) -> float:
    """Milliseconds of the fastest of some runs, after one."""
    work()
    found = []
    for _ in range(runs):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) * 1e3)
    return min(found)


def recorded(work: Callable[[], Any]) -> Callable[[], Any]:
    """Work as a CUDA graph. Raises RuntimeError where it waits for the device."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


@torch.inference_mode()
def measure(layers: int, say: Callable[[str, float | str], None]) -> None:
    """Tell of every row."""
    device = "cuda"
    tower: Any = Qwen3VLVisionModel(Qwen3VLVisionConfig(**TOWER))
    tower = tower.to(device, torch.bfloat16).eval()
    pixels = torch.randn(SIDE * SIDE, 3 * 2 * 16 * 16, device=device, dtype=torch.bfloat16)
    grid = torch.tensor([[1, SIDE, SIDE]], device=device)

    def see() -> Any:
        return tower(pixels, grid_thw=grid, return_dict=True)

    say("tower, as transformers calls it", timed(see))
    out = see()
    rows = out.pooler_output if isinstance(out.pooler_output, torch.Tensor) else torch.cat(list(out.pooler_output))
    layers_of = tuple(f if isinstance(f, torch.Tensor) else torch.cat(list(f)) for f in out.deepstack_features)
    decoder = decoder_of(layers, device)
    picture = Picture({"pixel_values": pixels.float().cpu()}, len(rows), (SIDE // 2, SIDE // 2))
    ids = [*range(10, 25), *[TOKEN] * len(rows), *range(25, 40)]
    shown = Shown(IMAGES, ids, [picture]).see([(rows, layers_of)], decoder.device, decoder.dtype)
    text = [1000 + i for i in range(len(ids))]

    def read(prompt: list[int], seen: list[Shown | None]) -> None:
        decoder.held = []
        decoder.start([prompt], Sampling(), NEW, shown=seen)

    def answer(prompt: list[int], seen: list[Shown | None]) -> None:
        read(prompt, seen)
        for _ in range(NEW - 1):
            decoder.step()

    asked: list[tuple[str, list[int], list[Shown | None]]] = [("picture", ids, [shown]), ("text", text, [None])]
    for name, prompt, seen in asked:
        first = timed(lambda: read(prompt, seen))  # noqa: B023
        whole = timed(lambda: answer(prompt, seen), 3)  # noqa: B023
        say(f"prompt of {len(prompt)} tokens with a {name}", first)
        say(f"step behind a {name}", (whole - first) / (NEW - 1))
        say(f"{name}: first token and {NEW - 1} more, the tower left out", whole)

    try:  # last: where a recording fails, the generator of random numbers stays unusable
        say("tower, as a CUDA graph", timed(recorded(see)))
    except RuntimeError as e:
        torch.cuda.synchronize()
        say("tower, as a CUDA graph", str(e).splitlines()[0])


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--out")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    path = Path(args.out) if args.out else results_of(torch.cuda.get_device_name()) / "pictures.json"

    def say(what: str, ms: float | str) -> None:
        rows.append({"what": what, "ms": round(ms, 3)} if isinstance(ms, float) else {"what": what, "ms": None, "why": ms})
        print(json.dumps(rows[-1]), flush=True)
        head = {
            "gpu": torch.cuda.get_device_name(),
            "date": datetime.now(UTC).isoformat(timespec="minutes"),
            "layers": args.layers,
        }
        path.write_text(json.dumps({**head, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")

    measure(args.layers, say)


if __name__ == "__main__":
    main()
