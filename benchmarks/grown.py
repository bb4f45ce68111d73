"""A small trained model inside a large model's shape, for benchmarks whose texts must be a trained model's.

    from grown import grown

The small model's weights stand in the first channels, heads and layers, and all other products into the residual stream are 0.
So the large model writes the small one's texts, and a step reads as many bytes as one of any model of that shape.
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
Row = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def grown(base: Path, folder: Path, shape: Row, device: str, bits: int) -> None:
    """Write a checkpoint of a Llama's shape in 4 or 16 bits with the small model `base` inside, a file a layer.

    base: a Llama with tied embeddings. Widths of the shape are multiples of GROUP; its heads are as many times as wide as the
    small ones for every pair of channels that turn together to keep its angle.
    """
    folder.mkdir(parents=True)
    small, weights, index = json.loads((base / "config.json").read_text()), Tensors(), dict[str, str]()
    for file in base.glob("*.safetensors"):
        weights |= {name: t.float().to(device) for name, t in load_file(file).items()}
    less = (small["hidden_size"] / shape["hidden_size"]) ** 0.5  # the mean of squares is over more channels, most of them 0

    def write(name: str, tensors: Tensors) -> None:
        save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    def norm(name: str) -> torch.Tensor:
        found = torch.ones(shape["hidden_size"], dtype=torch.float16, device=device)
        if name in weights:
            found[: small["hidden_size"]] = less * weights[name]
        return found

    torch.manual_seed(0)
    for i in range(shape["num_hidden_layers"]):
        at = f"model.layers.{i}."
        tensors = {f"{at}{leaf}.weight": norm(f"{at}{leaf}.weight") for leaf in NORMS}
        for name, w in matrices(at, weights, small, shape, device):
            tensors |= dict(zip((name, f"{name}_scale"), packed(w), strict=True)) if bits == 4 else {name: w.half()}
        write(f"{at}safetensors", tensors)
    known = weights["model.embed_tokens.weight"]
    embedding = torch.zeros(shape["vocab_size"], shape["hidden_size"], dtype=torch.float16, device=device)
    embedding[: len(known), : small["hidden_size"]] = known
    head = embedding.clone()
    head[len(known) :] = head[small["bos_token_id"]]  # as likely as a token that no text has
    dense = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": norm("model.norm.weight")}
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


def matrices(at: str, weights: Tensors, small: Row, shape: Row, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices of the layer `at`: random where what they make is not used, 0 where it would come into a text."""
    places = heads(small, shape)
    wider = (shape["head_dim"] / small["head_dim"]) ** 0.5  # scores are divided by the root of a head's width
    for leaf, (N, K) in linears(shape).items():
        name, part = f"{at}{leaf}.weight", leaf.rpartition(".")[2]
        used, stream = name in weights, part in ("o_proj", "down_proj")
        zero = stream or (used and part in places)
        w = torch.zeros(N, K, device=device) if zero else torch.randn(N, K, device=device) * K**-0.5
        if used:
            own = weights[name] * (wider if part == "q_proj" else 1)
            rows, columns = torch.arange(len(own)), torch.arange(own.shape[1])
            rows, columns = (rows, places.get(part, columns)) if stream else (places.get(part, rows), columns)
            w[rows[:, None].to(device), columns.to(device)] = own
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
