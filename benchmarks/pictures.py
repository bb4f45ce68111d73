"""Time pictures on one GPU: the first token after one, where its time goes, and users of a server who send pictures.

    python benchmarks/pictures.py --work /dev/shm/pictures [--layers N] [--parts first,tower,together,serve] [--out FILE]

Writes benchmarks/results/<gpu>/pictures.json. An 8B language model of Qwen3-VL's shape, random weights in 4 bits g128, with its
tower (27 layers, 1152 wide) in bfloat16. A picture is a JPEG of 1,024 x 1,024 (4,096 patches, 1,024 rows), with 30 tokens of
text. `first`: rows {what, ms}: reading the file; the processor; hash and copies of its output between the server's processes;
the tower; the prompt; a step; as many tokens of text; from the file to the first token.
`tower`: microseconds of the tower's kernels. `together`: milliseconds per picture of several of one size in the recorded tower.
`serve`: users of pictures_serve.py. `--device cpu` tries the script, small.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import transformers
from e2e_decode import quantized_model
from pages import results_of
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from lowq_cli.engine.model_record import owned
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.pictures import Shown
from lowq_cli.engine.plan import Plan
from lowq_cli.engine.recorded_tower import MOST_ROWS, RecordedTower, Recorder
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.vision import Sight
from lowq_cli.engine.weights import ModelWeights, describe
from lowq_cli.files.picture_file import decode
from lowq_cli.files.source import open_source
from lowq_cli.hf.pictures import Processor, packed, unpacked
from lowq_cli.hf.tower import load_tower
from lowq_packers.arch.parts import Images

Row = dict[str, Any]
TEXT: Row = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 32768, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
TOWER: Row = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096, "patch_size": 16,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
SMALL_TEXT = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL_TOWER = {
    "depth": 3, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256,
    "deepstack_visual_indexes": [0, 1, 2],
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
TOKEN, SIDE, NEW = 151655, 1024, 100
RECORDED_AFTER = 4  # runs until a size is recorded
IMAGES = Images(TOKEN, patch=16, merge=2, sections=(24, 20, 20), interleaved=True, deepstack=3)
DTYPE = torch.bfloat16


def model_of(folder: Path, layers: int, device: str) -> Any:
    """A language model of that many layers whose tower is in `folder`; small on a CPU."""
    text, tower = TEXT | SMALL_TEXT if device == "cpu" else TEXT, TOWER | SMALL_TOWER if device == "cpu" else TOWER
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    with torch.device(device):
        module: Any = Qwen3VLVisionModel(Qwen3VLVisionConfig(**tower))
        module.to(DTYPE)
    save_file({f"model.visual.{n}": t.contiguous() for n, t in module.state_dict().items()}, folder / "model.safetensors")
    config = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": TOKEN}
    config |= {"text_config": text, "vision_config": tower}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    with torch.device("meta"):
        plain = AutoConfig.for_model("qwen3", num_hidden_layers=layers, **text)
        model = AutoModelForCausalLM.from_config(plain, dtype=DTYPE).eval()
    model = quantized_model(model, "4g128", DTYPE, device)
    for name, b in list(model.named_buffers()):
        if b.is_meta:  # of the rotation, which the plan makes for itself
            model.get_submodule(name.rpartition(".")[0]).register_buffer(
                name.rpartition(".")[2], torch.zeros(b.shape, device=device)
            )
    described, _ = describe(model.config)
    weights = ModelWeights(model, described)
    described = replace(described, images=IMAGES)
    record = owned(model)
    record.plan = Plan(described, model.config, weights, model.device, model.dtype)
    record.sight = Sight(folder, IMAGES, model.device, model.dtype)
    return model


def photo(seed: int) -> bytes:
    """A JPEG of smooth random colours."""
    g = torch.Generator().manual_seed(seed)
    small = Image.fromarray(torch.randint(0, 256, (48, 48, 3), dtype=torch.uint8, generator=g).numpy())
    into = BytesIO()
    small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(into, "JPEG", quality=90)
    return into.getvalue()


def prompt_of(rows: int) -> list[int]:
    """A prompt with a picture of so many rows."""
    return [*range(10, 25), *[TOKEN] * rows, *range(25, 40)]


def wait() -> None:
    """Until the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], Any], runs: int = 15) -> float:
    """Milliseconds of the fastest of some runs, after one."""
    work()
    times = []
    for _ in range(runs):
        wait()
        began = time.perf_counter()
        work()
        wait()
        times.append((time.perf_counter() - began) * 1e3)
    return min(times)


@torch.inference_mode()
def first(model: Any, folder: Path, say: Callable[[Row], None]) -> None:
    """The rows of `first`."""
    data, processor, sight, decoder = photo(1), Processor(folder, IMAGES), owned(model).sight, NativeDecoder(model)
    with open_source(folder) as source:
        tower = load_tower(source, model.device, model.dtype)
    image = decode(data)
    picture = processor(image)
    ids = prompt_of(picture.rows)
    text = [1000 + i for i in range(len(ids))]
    shown = Shown(IMAGES, ids, [picture]).see([tower(picture.inputs)], decoder.device, decoder.dtype)

    def row(what: str, work: Callable[[], Any], runs: int = 15) -> float:
        ms = timed(work, runs)
        say({"what": what, "ms": ms})
        return ms

    def read(prompt: list[int], seen: Shown | None) -> None:
        decoder.held = []
        decoder.start([prompt], Sampling(), NEW, shown=[seen])

    def answer(prompt: list[int], seen: Shown | None) -> None:
        read(prompt, seen)
        for _ in range(NEW - 1):
            decoder.step()

    def whole() -> None:
        prepared = sight.picture(data)
        sight._kept.clear()
        read(ids, sight.shown(ids, [prepared]))
        decoder.token.tolist()

    row("file to pixels", lambda: decode(data))
    row("pixels to patches", lambda: processor(image))
    row("hash", lambda: replace(picture).name)
    row("copies between processes", lambda: unpacked(packed(picture)))
    row("patches to the device", lambda: tower.arguments(picture.inputs))
    row("tower", lambda: tower(picture.inputs))
    recorded = RecordedTower(tower, Recorder(model.device) if model.device.type == "cuda" else None)
    for _ in range(RECORDED_AFTER):
        recorded([picture.inputs], picture.rows)
    say({"what": "why not recorded", "reason": recorded.reason})
    row("tower, recorded", lambda: recorded([picture.inputs], picture.rows))
    for name, prompt, seen in (("a picture", ids, shown), ("text", text, None)):
        begun = row(f"prompt of {len(prompt)} tokens with {name}", lambda: read(prompt, seen))  # noqa: B023
        ms = timed(lambda: answer(prompt, seen), 3)  # noqa: B023
        say({"what": f"step after {name}", "ms": (ms - begun) / (NEW - 1)})
    row("file to first token", whole)


@torch.inference_mode()
def kernels(model: Any, folder: Path, say: Callable[[Row], None]) -> None:
    """Microseconds of the tower's kernels for one picture, and of its prompt's, by name."""
    with open_source(folder) as source:
        tower = load_tower(source, model.device, model.dtype)
    picture, decoder = Processor(folder, IMAGES)(decode(photo(1))), NativeDecoder(model)
    ids = prompt_of(picture.rows)
    shown = Shown(IMAGES, ids, [picture]).see([tower(picture.inputs)], decoder.device, decoder.dtype)

    def read() -> None:
        decoder.held = []
        decoder.start([ids], Sampling(), 2, shown=[shown])

    works: list[tuple[str, Callable[[], Any]]] = [("tower", lambda: tower(picture.inputs)), ("prompt", read)]
    for what, work in works:
        timed(work, 1)
        with torch.profiler.profile() as profile:
            work()
            wait()
        events = (e for e in profile.key_averages() if not e.key.startswith("aten::"))  # whose time is that of their kernels
        found = [(e.self_device_time_total, e.count, e.key[:120]) for e in events if e.self_device_time_total]
        total = sum(us for us, _, _ in found)
        say({"what": f"kernels of the {what}", "ms": total / 1e3, "launches": sum(n for _, n, _ in found)})
        for us, n, name in sorted(found, reverse=True)[:14]:
            say({"what": f"{what}: {name}", "us": round(us), "calls": n})


@torch.inference_mode()
def together(model: Any, folder: Path, say: Callable[[Row], None]) -> None:
    """Milliseconds per picture of several of one size in one run of the recorded tower."""
    with open_source(folder) as source:
        record = Recorder(model.device) if model.device.type == "cuda" else None
        tower = RecordedTower(load_tower(source, model.device, model.dtype), record)
    processor = Processor(folder, IMAGES)
    for side in (256, 512, 1024):
        picture = processor(decode(photo(1)).resize((side, side)))
        for count in (1, 2, 4, 8, 16):
            if count * picture.rows <= MOST_ROWS:
                images = [picture.inputs] * count
                for _ in range(RECORDED_AFTER):
                    tower(images, picture.rows)
                ms = timed(lambda: tower(images, picture.rows)) / count  # noqa: B023
                say({"side": side, "pictures": count, "ms": ms, "reason": tower.reason})


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the tower")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--parts", default="first,tower,together,serve")
    parser.add_argument("--requests", type=int, default=64, help="answers of each load of `serve`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    path = args.out or results_of(gpu) / "pictures.json"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    head = {"gpu": gpu, "date": datetime.now(UTC).isoformat(timespec="minutes"), "layers": args.layers, **versions}
    rows: dict[str, list[Row]] = {}
    model = model_of(args.work, args.layers, args.device)
    for part in args.parts.split(","):

        def say(row: Row) -> None:
            rows.setdefault(part, []).append(row)  # noqa: B023
            print(json.dumps(row), flush=True)
            path.write_text(json.dumps({**head, **rows}, indent=1) + "\n")

        if part == "serve":
            from pictures_serve import serve

            serve(model, args.work, args.requests, say)
        else:
            {"first": first, "tower": kernels, "together": together}[part](model, args.work, say)


if __name__ == "__main__":
    main()
