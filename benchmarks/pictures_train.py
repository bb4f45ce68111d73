"""Train a small model that sees: a tower of 3 M parameters before a small Llama, on drawn digits and shapes (`drawn.py`).

    python benchmarks/pictures_train.py LLAMA OUT [--steps 3000] [--batch 96] [--seconds 150]

Mistral 3's form: Pixtral's tower of 4 layers on patches of 8 x 8, two of which a side become a row: 16 rows a picture.
The folder is one that `lowq generate --image` takes as any other; `pictures_right.py` counts its right answers by width.
"""

import argparse
import json
import math
import os
import shutil
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawn import SIDE, Drawn, draw
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from transformers import AutoConfig, Mistral3Config, Mistral3ForConditionalGeneration

TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
VOCAB = 8256  # base's 8,192 tokens, these three, filled up to a multiple of 64
ROWS = SIDE // 16
AHEAD = 32  # batches that are drawn before they are needed
TOWER = {
    "model_type": "pixtral", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "head_dim": 64, "image_size": SIDE, "patch_size": 8, "num_channels": 3,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": SIDE}, "patch_size": 8,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255,
}  # fmt: skip


def model_of(base: Path, tokens: Tokenizer) -> Any:
    """The model: base's weights, a new tower."""
    text = AutoConfig.from_pretrained(str(base)).to_dict() | {"vocab_size": VOCAB}
    text.pop("_name_or_path", None)
    config = Mistral3Config(
        text_config=text, vision_config=TOWER, image_token_index=tokens.token_to_id(TOKENS[0]), spatial_merge_size=2,
        vision_feature_layer=-1, multimodal_projector_bias=False, tie_word_embeddings=True,
    )  # fmt: skip
    model = Mistral3ForConditionalGeneration(config).float()
    held: dict[str, torch.Tensor] = {}
    for file in sorted(base.glob("*.safetensors")):
        held |= {n.removeprefix("model."): t.float() for n, t in load_file(file).items()}
    table = model.model.language_model.embed_tokens.weight.detach().clone() * 0
    table[: held["embed_tokens.weight"].shape[0]] = held["embed_tokens.weight"]
    table[held["embed_tokens.weight"].shape[0] :] = held["embed_tokens.weight"].mean(0)
    missing = model.model.language_model.load_state_dict(held | {"embed_tokens.weight": table}, strict=False)
    assert not missing.missing_keys, missing
    return model


def batch_of(seed: int, n: int, tokens: Tokenizer) -> dict[str, np.ndarray]:
    """Questions about one picture, or about two; the loss is of the answers."""
    r = np.random.default_rng(seed)
    several = r.random() < 0.2
    picture = (TOKENS[0] * ROWS + TOKENS[1]) * (ROWS - 1) + TOKENS[0] * ROWS + TOKENS[2]
    rows, pixels = [], []
    for _ in range(n):
        seen: list[Drawn] = [draw(r) for _ in range(2 if several else 1)]
        asked, answer = seen[0].question(r.random() < 0.4)
        if several:
            asked, answer = "What are these?", f"{seen[0].colour} {seen[0].name} and {seen[1].colour} {seen[1].name}"
        rows.append((tokens.encode(picture * len(seen) + asked).ids, [*tokens.encode(" " + answer).ids, 0]))
        pixels += [s.pixels for s in seen]
    longest = max(len(a) + len(b) for a, b in rows)
    ids, mask = np.zeros((n, longest), np.int64), np.zeros((n, longest), np.int64)
    labels = np.full((n, longest), -100, np.int64)
    for i, (asked, answer) in enumerate(rows):
        end = len(asked) + len(answer)
        ids[i, :end], mask[i, :end] = asked + answer, 1
        labels[i, len(asked) : end] = answer
    values = np.stack(pixels).transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
    sizes = np.full((len(pixels), 2), SIDE, np.int64)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "pixel_values": values, "image_sizes": sizes}


def train(model: Any, tokens: Tokenizer, steps: int, batch: int, seconds: float, device: str) -> int:
    """Train; the steps taken within the seconds."""
    drawing = ProcessPoolExecutor(min(8, os.cpu_count() or 1))
    waiting = deque(drawing.submit(batch_of, i, batch, tokens) for i in range(AHEAD))  # before the GPU knows this process
    model.to(device).train()
    text = [p for n, p in model.named_parameters() if "language_model" in n]
    others = [p for n, p in model.named_parameters() if "language_model" not in n and "lm_head" not in n]
    rates = (2e-4, 1e-3)
    optimizer = torch.optim.AdamW([{"params": text}, {"params": others}], lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.monotonic()
    for step in range(steps):
        done = max(step / steps, (time.monotonic() - began) / seconds)
        if done >= 1:
            steps = step
            break
        waiting.append(drawing.submit(batch_of, step + AHEAD, batch, tokens))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        inputs = {k: torch.from_numpy(v).to(device) for k, v in waiting.popleft().result().items()}
        with torch.autocast(device, torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(
                json.dumps({"step": step, "loss": round(float(loss), 4), "s": round(time.monotonic() - began, 1)}), flush=True
            )
    drawing.shutdown(cancel_futures=True)
    return steps


def write(model: Any, tokens: Tokenizer, base: Path, out: Path) -> None:
    """The folder."""
    model.to("cpu", torch.bfloat16).save_pretrained(out)
    tokens.save(str(out / "tokenizer.json"))
    shutil.copyfile(base / "tokenizer_config.json", out / "tokenizer_config.json")
    (out / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=1))
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}))


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("llama", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=150.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokens = Tokenizer.from_file(str(args.llama / "tokenizer.json"))
    tokens.add_special_tokens([AddedToken(t, special=True) for t in TOKENS])
    model = model_of(args.llama, tokens)
    print(
        json.dumps(
            {
                "steps": train(
                    model, tokens, args.steps, args.batch, args.seconds, "cuda" if torch.cuda.is_available() else "cpu"
                )
            }
        )
    )
    write(model, tokens, args.llama, args.out)


if __name__ == "__main__":
    main()
