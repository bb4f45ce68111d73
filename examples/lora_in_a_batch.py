"""One base model, two LoRA adapters, three requests computed side by side, each by its own adapter.

Over HTTP the same is `lowq serve MODEL --lora german=DIR --lora law=DIR`, and "model": "german" in a request.
"""

import json
import queue
from pathlib import Path

import torch
from safetensors.torch import save_file

import lowq
from lowq_cli.engine.lora import adapt
from lowq_cli.engine.plan import plan_of
from lowq_cli.files.adapter import read_adapter
from lowq_cli.serving.engines import engine_of
from lowq_cli.serving.request import Request

RANK = 4


def random_adapter(folder: Path, sizes: dict[str, tuple[int, int]], seed: int) -> Path:
    """An adapter as PEFT saves it. Real ones come from training (qlora_with_peft.py)."""
    g, tensors = torch.Generator().manual_seed(seed), {}
    for name, (n, k) in sizes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, k, generator=g) / k**0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(n, RANK, generator=g)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}))
    return folder


def main() -> None:
    model, tokenizer = lowq.load("demo", device="cpu")
    c = model.config
    sizes = {f"model.layers.{i}.mlp.down_proj": (c.hidden_size, c.intermediate_size) for i in range(c.num_hidden_layers)}
    folders = [random_adapter(Path(name), sizes, seed) for seed, name in enumerate(("german", "law"))]
    adapt(plan_of(model), [read_adapter(folder, folder.name) for folder in folders])

    engine, events = engine_of(model, 8), queue.SimpleQueue()
    engine.start(events.put)
    ids, texts = tuple(tokenizer("Once upon a time").input_ids), {}
    for adapter in (0, 1, 2):  # 0 is the base alone
        texts[engine.submit(Request(ids, 12, frozenset(), adapter=adapter))] = []
    ended = 0
    while ended < len(texts):
        for number, event in events.get():
            texts[number] += [] if event.token is None else [event.token]
            ended += event.finish_reason is not None
    engine.stop(0)
    for name, tokens in zip(("base", "german", "law"), texts.values(), strict=True):
        print(f"{name:7}{tokenizer.decode(tokens)!r}")
    assert len(set(map(tuple, texts.values()))) == 3


if __name__ == "__main__":
    main()
