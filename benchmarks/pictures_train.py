"""Train a small vision-language model on one CPU core or a GPU: a vision tower and a small Llama, on drawn digits and shapes.

    python benchmarks/pictures_train.py LLAMA OUT [--seconds 660] [--batch 32] [--device cpu]

Mistral 3's form: Pixtral's tower of 3 layers on 64 patches of 8 x 8, two of which a side become a row: 16 rows a picture. The
tower learns names and colours by itself for the first part of the time, which is cheap; then the Llama answers questions.
The folder is one that `lowq generate --image` takes as any other; `pictures_right.py` counts its right answers by width.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawn import COLOURS, DOTS, SHAPES, SIDE, Drawn, draw
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, Mistral3Config, Mistral3ForConditionalGeneration

TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
VOCAB = 8256  # the Llama's 8,192 tokens, these three, filled up to a multiple of 64
ROWS = SIDE // 16
NAMES = (*DOTS, *SHAPES)
ALONE = 0.6  # of the time, in which the tower learns by itself
SEVERAL = 0.25  # of the batches of questions are about two pictures
TOWER = {
    "model_type": "pixtral", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
    "head_dim": 32, "image_size": SIDE, "patch_size": 8, "num_channels": 3,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": SIDE}, "patch_size": 8,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255,
}  # fmt: skip


def place_of(tokens: Tokenizer) -> int:
    """The token that stands for a row of a picture."""
    found = tokens.token_to_id(TOKENS[0])
    assert found is not None
    return found


def model_of(base: Path, tokens: Tokenizer) -> Any:
    """The model: base's weights, a new tower."""
    text = AutoConfig.from_pretrained(str(base)).to_dict() | {"vocab_size": VOCAB}
    text.pop("_name_or_path", None)
    config = Mistral3Config(
        text_config=text, vision_config=TOWER, image_token_index=place_of(tokens), spatial_merge_size=2,
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


def rows_of(model: Any, seen: list[Drawn]) -> torch.Tensor:
    """(pictures, 16, H): what the tower and projector make of them, as `get_image_features` does; that lays all patches of a
    batch in one row of attention, which takes four times as long for 32 pictures."""
    pixels = torch.from_numpy(np.stack([s.pixels for s in seen]).transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1)
    pixels = pixels.to(model.device)
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    x = tower.ln_pre(tower.patch_conv(pixels).flatten(2).transpose(1, 2))
    turns = tower.patch_positional_embedding(x, torch.arange(x.shape[1])[None])
    x = tower.transformer(x, attention_mask=None, position_embeddings=turns, return_dict=True).last_hidden_state
    return projector(x.flatten(0, 1), torch.full((len(seen), 2), SIDE)).reshape(len(seen), ROWS * ROWS, -1)


def alone(model: Any, heads: torch.nn.ModuleList, r: np.random.Generator, batch: int) -> torch.Tensor:
    """The loss of names and colours that are read off the mean row of each picture."""
    seen = [draw(r) for _ in range(batch)]
    rows = rows_of(model, seen).mean(1)
    wanted = ([NAMES.index(s.name) for s in seen], [list(COLOURS).index(s.colour) for s in seen])
    return sum((cross_entropy(head(rows), torch.tensor(w)) for head, w in zip(heads, wanted, strict=True)), torch.zeros(()))


def answers(model: Any, tokens: Tokenizer, r: np.random.Generator, batch: int) -> torch.Tensor:
    """The loss of the answers to questions about one picture, or about two."""
    several = r.random() < SEVERAL
    picture = (TOKENS[0] * ROWS + TOKENS[1]) * (ROWS - 1) + TOKENS[0] * ROWS + TOKENS[2]
    texts, pictures = list[tuple[list[int], list[int]]](), list[Drawn]()
    for _ in range(batch // 2 if several else batch):
        seen = [draw(r) for _ in range(2 if several else 1)]
        asked, answer = seen[0].question(r.random() < 0.4)
        if several:
            asked, answer = "What are these?", f"{seen[0].colour} {seen[0].name} and {seen[1].colour} {seen[1].name}"
        texts.append((tokens.encode(picture * len(seen) + asked).ids, [*tokens.encode(" " + answer).ids, 0]))
        pictures += seen
    longest = max(len(a) + len(b) for a, b in texts)
    ids, mask = (torch.zeros(len(texts), longest, dtype=torch.int64) for _ in range(2))
    labels = torch.full_like(ids, -100)
    for i, (before, after) in enumerate(texts):
        end = len(before) + len(after)
        ids[i, :end], mask[i, :end] = torch.tensor(before + after), 1
        labels[i, len(before) : end] = torch.tensor(after)
    embedded = model.get_input_embeddings()(ids)
    embedded = embedded.masked_scatter((ids == place_of(tokens))[..., None], rows_of(model, pictures).float())
    inner = model.model.language_model(inputs_embeds=embedded, attention_mask=mask, use_cache=False).last_hidden_state
    asks = labels[:, 1:] >= 0  # logits of 8,256 tokens for these places only
    return cross_entropy(model.lm_head(inner[:, :-1][asks]), labels[:, 1:][asks])


def descend(loss_of: Callable[[], torch.Tensor], groups: list[dict[str, Any]], seconds: float, what: str) -> Iterator[int]:
    """Descend for so many seconds, printing what the loss is; the steps as they are taken."""
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)
    most, began, step, mean = [g["lr"] for g in optimizer.param_groups], time.monotonic(), 0, 0.0
    while (done := (time.monotonic() - began) / seconds) < 1:
        for group, lr in zip(optimizer.param_groups, most, strict=True):
            group["lr"] = lr * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        with torch.autocast(groups[0]["params"][0].device.type, torch.bfloat16):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = float(loss.detach()) if step == 0 else 0.98 * mean + 0.02 * float(loss.detach())
        if step % 50 == 0:
            line = {"what": what, "step": step, "loss": round(mean, 4), "s": round(time.monotonic() - began, 1)}
            print(json.dumps(line), flush=True)
        step += 1
        yield step


def train(model: Any, tokens: Tokenizer, seconds: float, batch: int) -> dict[str, int]:
    """Train; the pictures that were seen in each part."""
    r, model = np.random.default_rng(0), model.train()
    text = [p for n, p in model.named_parameters() if "language_model.layers" in n]
    table = model.get_input_embeddings().weight.requires_grad_(False)  # 2 M weights, of which answers use thirty rows
    sight = [p for n, p in model.named_parameters() if "language_model" not in n and p is not table]
    heads = torch.nn.ModuleList(torch.nn.Linear(table.shape[1], n) for n in (len(NAMES), len(COLOURS)))
    first = descend(
        lambda: alone(model, heads, r, batch),
        [{"params": [*sight, *heads.parameters()], "lr": 1.5e-3}],
        ALONE * seconds,
        "alone",
    )
    steps = max(first)
    groups = [{"params": text, "lr": 5e-4}, {"params": sight, "lr": 5e-4}]
    more = max(descend(lambda: answers(model, tokens, r, batch), groups, (1 - ALONE) * seconds, "answers"))
    return {"alone": steps * batch, "answers": more * batch}


def write(model: Any, tokens: Tokenizer, base: Path, out: Path, facts: dict[str, int]) -> None:
    """Write the folder, and in it `trained.json`, which describes the model."""
    text = sum(p.numel() for n, p in model.named_parameters() if "language_model" in n)
    sight = sum(p.numel() for n, p in model.named_parameters() if "language_model" not in n)
    model.to(torch.bfloat16).save_pretrained(out)
    tokens.save(str(out / "tokenizer.json"))
    shutil.copyfile(base / "tokenizer_config.json", out / "tokenizer_config.json")
    (out / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=1))
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}))
    (out / "trained.json").write_text(json.dumps({"llama": base.name, "text": text, "sight": sight, **facts}))


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("llama", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=660.0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_device(args.device)
    tokens = Tokenizer.from_file(str(args.llama / "tokenizer.json"))
    tokens.add_special_tokens([AddedToken(t, special=True) for t in TOKENS])
    model = model_of(args.llama, tokens)
    facts = train(model, tokens, args.seconds, args.batch) | {"seconds": int(args.seconds)}
    print(json.dumps(facts))
    write(model, tokens, args.llama, args.out, facts)


if __name__ == "__main__":
    main()
