"""A small trained model and its draft head inside a large model's shape, for benchmarks whose texts must be a trained model's.

    from grown import grown, grown_head

The small model's weights stand in the first channels, heads and layers, and all other products into the residual stream are 0.
So the large model writes the small one's texts, and a step reads as many bytes as one of any model of that shape. An EAGLE-3
head, too, guesses what the small one guesses, in the time of a large one.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm_speed import LLAMA, linears

from lowq_cli.files.quant_config import compact
from lowq_packers.bitstream import pack
from lowq_packers.scheme import Scheme

GROUP = 128
NORMS = ("input_layernorm", "post_attention_layernorm")
GUESSES = 32_000  # tokens among which the large head guesses: as many as published heads for Llama 3.1 have
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
Row = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def grown(base: Path, folder: Path, shape: Row, device: str, bits: int) -> None:
    """Write a checkpoint of a Llama's shape in 4 or 16 bits with the small model `base` inside, a file a layer.

    base: a Llama with tied embeddings. Widths of the shape are multiples of GROUP; its heads are as many times as wide as the
    small ones for every pair of channels that turn together to keep its angle.
    """
    folder.mkdir(parents=True)
    (small, weights), index = read(base, device), dict[str, str]()
    less = narrower(small, shape)

    def write(name: str, tensors: Tensors) -> None:
        save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    torch.manual_seed(0)
    for i in range(shape["num_hidden_layers"]):
        at = f"model.layers.{i}."
        tensors = {f"{at}{leaf}.weight": norm(weights.get(f"{at}{leaf}.weight"), shape, less, device) for leaf in NORMS}
        for name, w in matrices(at, weights, small, shape, device):
            tensors |= dict(zip((name, f"{name}_scale"), packed(w), strict=True)) if bits == 4 else {name: w.half()}
        write(f"{at}safetensors", tensors)
    known = weights["model.embed_tokens.weight"]
    embedding = torch.zeros(shape["vocab_size"], shape["hidden_size"], dtype=torch.float16, device=device)
    embedding[: len(known), : small["hidden_size"]] = known
    head = embedding.clone()
    head[len(known) :] = head[small["bos_token_id"]]  # as likely as a token that no text has
    last = norm(weights["model.norm.weight"], shape, less, device)
    dense = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": last}
    write("dense.safetensors", dense)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = LLAMA | shape | {"dtype": "float16", "rms_norm_eps": small["rms_norm_eps"] * less**2}
    config |= {"rope_theta": small["rope_theta"]}
    config |= {name: small[name] for name in ("max_position_embeddings", "bos_token_id", "eos_token_id")}
    if bits == 4:
        schemes = {n.removesuffix(".weight_scale"): Scheme(4, GROUP, "none") for n in index if n.endswith("_scale")}
        config["quantization_config"] = compact(schemes, ["model.embed_tokens", "lm_head"])
    (folder / "config.json").write_text(json.dumps(config))
    for part in ("tokenizer.json", "tokenizer_config.json"):
        (folder / part).write_text((base / part).read_text())


def grown_head(head: Path, folder: Path, shape: Row, device: str, guesses: int = GUESSES) -> None:
    """Write an EAGLE-3 head in 16 bits for what `grown` writes, with a small model's head, of `lowq draft train`, inside.

    It reads the small model's layers. Tokens that the small head does not guess are as likely as one that no text has.
    Raises ValueError for a head of another kind.
    """
    small, weights = read(head, device)
    if "midlayer.hidden_norm.weight" not in weights:
        raise ValueError(f"{head} is not an EAGLE-3 head as lowq trains it")
    folder.mkdir(parents=True)
    H, less = shape["hidden_size"], narrower(small, shape)
    tensors = {n: norm(w, shape, less, device) for n, w in weights.items() if n.rpartition(".")[0].endswith("norm")}
    torch.manual_seed(0)
    tensors |= dict(matrices("midlayer.", weights, small, shape, device, joined=2))
    own = weights["fc.weight"]
    tensors["fc.weight"] = torch.zeros(H, own.shape[1] // small["hidden_size"] * H, device=device)
    place(tensors["fc.weight"], own, torch.arange(len(own)), beside(own.shape[1] // small["hidden_size"], small, shape))
    known, count = weights["lm_head.weight"], min(guesses, shape["vocab_size"])
    first = torch.arange(len(known), device=device) + weights.get("d2t", torch.zeros(1, device=device)).long()
    free = torch.ones(shape["vocab_size"], dtype=torch.bool, device=device).index_fill(0, first, False).nonzero()[:, 0]
    ids = torch.cat([first, free])[:count].sort().values
    tensors["lm_head.weight"] = torch.zeros(count, H, device=device)
    tensors["lm_head.weight"][:, : small["hidden_size"]] = known[:1]  # token 0 begins a text, and stands nowhere in it
    place(tensors["lm_head.weight"], known, torch.searchsorted(ids, first), beside(1, small, shape))
    written = {n: t.half().cpu().contiguous() for n, t in tensors.items()}
    if count < shape["vocab_size"]:
        written["d2t"] = ids.cpu() - torch.arange(count)
        written["t2d"] = torch.zeros(shape["vocab_size"], dtype=torch.bool).index_fill(0, ids.cpu(), True)
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    config = small | {name: shape[name] for name in SIZES} | {"rms_norm_eps": small["rms_norm_eps"] * less**2}
    config |= {"target_hidden_size": H, "draft_vocab_size": count, "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))


def read(folder: Path, device: str) -> tuple[Row, Tensors]:
    """The config.json of a folder, and its tensors in fp32."""
    weights = Tensors()
    for file in folder.glob("*.safetensors"):
        weights |= {name: t.float().to(device) for name, t in load_file(file).items()}
    return json.loads((folder / "config.json").read_text()), weights


def narrower(small: Row, shape: Row) -> float:
    """The factor of a norm's weights: its mean of squares is over more channels, most of them 0."""
    return float((small["hidden_size"] / shape["hidden_size"]) ** 0.5)


def norm(own: torch.Tensor | None, shape: Row, less: float, device: str) -> torch.Tensor:
    """A norm's weights with the small model's, if there are any, in the first channels."""
    found = torch.ones(shape["hidden_size"], dtype=torch.float16, device=device)
    if own is not None:
        found[: len(own)] = less * own
    return found


def beside(count: int, small: Row, shape: Row) -> torch.Tensor:
    """Columns of the small model's channels where a matrix reads so many vectors of the large stream side by side."""
    channels = torch.arange(small["hidden_size"])
    return torch.cat([i * shape["hidden_size"] + channels for i in range(count)])


def place(w: torch.Tensor, own: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Write `own` into these rows and columns of w."""
    w[rows[:, None].to(w.device), columns.to(w.device)] = own


def matrices(
    at: str, weights: Tensors, small: Row, shape: Row, device: str, joined: int = 1
) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices of the layer `at`: random where what they make is not used, 0 where it would come into a text.

    joined: how many vectors queries, keys and values are made of.
    """
    places = heads(small, shape)
    wider = (shape["head_dim"] / small["head_dim"]) ** 0.5  # scores are divided by the root of a head's width
    for leaf, (N, K) in linears(shape).items():
        name, part = f"{at}{leaf}.weight", leaf.rpartition(".")[2]
        used, stream = name in weights, part in ("o_proj", "down_proj")
        zero, several = stream or (used and part in places), joined if part in ("q_proj", "k_proj", "v_proj") else 1
        w = torch.zeros(N, several * K, device=device) if zero else torch.randn(N, several * K, device=device) * K**-0.5
        if used:
            own = weights[name] * (wider if part == "q_proj" else 1)
            rows = torch.arange(len(own))
            columns = places.get(part, torch.arange(own.shape[1])) if stream else beside(several, small, shape)
            place(w, own, rows if stream else places.get(part, rows), columns)
        yield name, w


def heads(small: Row, shape: Row) -> dict[str, torch.Tensor]:
    """Where rows of the small model's queries, keys and values, and columns of its output product, stand in the large one.

    Pair i of a small head is pair i * (ratio of widths) of a large one, which turns by the same angle.
    """
    d, D = small["head_dim"], shape["head_dim"]
    turned = torch.arange(d // 2) * (D // d)
    turned = torch.cat([turned, turned + D // 2])
    own, group = (c["num_attention_heads"] // c["num_key_value_heads"] for c in (small, shape))
    queries = torch.tensor([h // own * group + h % own for h in range(small["num_attention_heads"])])
    keys = torch.arange(small["num_key_value_heads"])
    at = lambda heads, inside: (heads[:, None] * D + inside).flatten()  # noqa: E731
    found = {"q_proj": at(queries, turned), "k_proj": at(keys, turned), "v_proj": at(keys, torch.arange(d))}
    return found | {"o_proj": at(queries, torch.arange(d))}


def packed(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and scales of symmetric groups: the largest of a group is code 0, which means -8."""
    groups = w.view(len(w), -1, GROUP)
    scale = groups.gather(2, groups.abs().argmax(2, keepdim=True)).div(-8).half()
    codes = (groups / scale.float().where(scale != 0, 1)).round().add(8).clamp(0, 15)
    return pack(codes.view(w.shape).to(torch.uint8), 4).view(torch.int32), scale.squeeze(2)
