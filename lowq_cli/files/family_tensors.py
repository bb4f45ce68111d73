"""The tensors that a checkpoint of a known family has, from its config: names, shapes and what each is. No torch is imported.

The plan of `quantize` takes them for what the files hold, and the decoder without transformers for what it reads. A checkpoint
that holds anything else is asked of transformers (hf/structure.py), which also says what is wrong with it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowq_cli.files.family_config import Config, NotPlain, read_config
from lowq_cli.files.fp8_tensors import InBlocks
from lowq_cli.files.quant_config import Stored
from lowq_cli.files.roles import Part, Role
from lowq_cli.files.safetensors_io import FLOATS, TensorHeader
from lowq_packers.families import Family

EMBED, HEAD, NORM = "model.embed_tokens", "lm_head", "model.norm"
Place = tuple[str, tuple[str, ...]]  # a module and the names of its layers that are one product


@dataclass(frozen=True)
class Matrix:
    """One (N, K) weight of the files, by its name without ".weight". how: where it is quantized; None where it is dense."""

    stem: str
    N: int
    K: int
    bias: bool = False
    how: Stored | InBlocks | None = None


def linears(layer: str, config: Config, family: Family) -> dict[Place, list[Matrix]]:
    """The linear layers of one decoder layer with an MLP."""
    hidden, inter, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    all_bias = bool(getattr(config, "attention_bias", False))
    bias, mlp_bias = all_bias if family.qkv_bias is None else family.qkv_bias, bool(getattr(config, "mlp_bias", False))
    rows = {1: [q + 2 * kv], 3: [q, kv, kv]}[len(family.qkv)]
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    each = 2 * inter // len(family.gate_up)
    return {
        (attention, family.qkv): [Matrix(f"{attention}.{n}", N, hidden, bias) for n, N in zip(family.qkv, rows, strict=True)],
        (attention, ("o_proj",)): [Matrix(f"{attention}.o_proj", hidden, q, all_bias if family.qkv_bias is None else False)],
        (mlp, family.gate_up): [Matrix(f"{mlp}.{n}", each, hidden, mlp_bias) for n in family.gate_up],
        (mlp, ("down_proj",)): [Matrix(f"{mlp}.down_proj", hidden, inter, mlp_bias)],
    }


def experts(layer: str, config: Config, family: Family) -> tuple[Matrix, dict[str, list[Matrix]]]:
    """The router of a layer, and by the model's parameter that holds them its experts' matrices: gate, up, gate, up, ..."""
    mixture = family.mixture
    assert mixture
    parent, hidden, (gate, up, down) = f"{layer}.{mixture.parent}", config.hidden_size, mixture.leaves
    E = int(getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0))  # the older name last
    inter, stems = int(getattr(config, mixture.width, 0)), [f"{parent}.experts.{e}" for e in range(E)]
    return Matrix(f"{parent}.gate", E, hidden), {
        "gate_up_proj": [Matrix(f"{stem}.{leaf}", inter, hidden) for stem in stems for leaf in (gate, up)],
        "down_proj": [Matrix(f"{stem}.{down}", hidden, inter) for stem in stems],
    }


def vectors(layer: str, config: Config, family: Family) -> dict[str, int]:
    """The norms of one decoder layer, and their lengths."""
    names = ["input_layernorm", "post_attention_layernorm"]
    names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if family.post_norms else []
    found = {f"{layer}.{n}": config.hidden_size for n in names}
    of_heads = ("q_norm", "k_norm") if family.qk_norm else ()
    return found | {f"{layer}.self_attn.{n}": config.head_dim for n in of_heads}


def known_roles(raw: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> dict[str, Role] | None:
    """What every tensor is, as `hf.structure.roles` would say; None unless they are a known family's, no more and no fewer."""
    try:
        config, family = read_config(raw, len(headers))
    except NotPlain:
        return None
    if family.stacked:
        return None
    found = dict(_roles(config, family))
    fits = found.keys() == headers.keys() and all(
        tuple(headers[n].shape) == shape and headers[n].dtype in FLOATS for n, (shape, _) in found.items()
    )
    return {name: found[name][1] for name in headers} if fits else None


def linear_weights(raw: Mapping[str, Any], tensors: int) -> set[str]:
    """Names of the weights of linear layers, experts left out, of a known family's config.json. Raises NotPlain for another.

    tensors: how many there are in the files, as `read_config` takes it.
    """
    config, family = read_config(raw, tensors)
    if family.stacked:
        raise NotPlain(family.stacked)
    return {n for n, (_, role) in _roles(config, family) if role.parts and role.kind in ("attention", "mlp", "head")}


def _roles(config: Config, family: Family) -> Iterator[tuple[str, tuple[tuple[int, ...], Role]]]:
    """Every tensor's name, shape and role."""
    for stem, kind in ((EMBED, "embedding"), *(() if config.tie_word_embeddings else ((HEAD, "head"),))):
        name = f"{stem}.weight"
        yield name, ((config.vocab_size, config.hidden_size), Role(kind, (Part(stem, target=name),)))
    norms = {NORM: config.hidden_size}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        norms |= vectors(layer, config, family)
        for (parent, _), row in linears(layer, config, family).items():
            kind = "attention" if parent.endswith("attn") else "mlp"
            if kind == "mlp" and family.mixture:
                continue
            for m in row:
                yield f"{m.stem}.weight", ((m.N, m.K), Role(kind, (Part(m.stem, target=f"{m.stem}.weight"),)))
                if m.bias:
                    yield f"{m.stem}.bias", ((m.N,), Role(kind, reason="bias"))
        if family.mixture:
            yield from _experts(layer, config, family)
    for stem, size in norms.items():
        yield f"{stem}.weight", ((size,), Role("norm", reason="norm"))


def _experts(layer: str, config: Config, family: Family) -> Iterator[tuple[str, tuple[tuple[int, ...], Role]]]:
    """The router of a layer and its experts' gate, up and down, which the model holds in two parameters."""
    router, stacks = experts(layer, config, family)
    yield f"{router.stem}.weight", ((router.N, router.K), Role("router", reason="router"))
    for joined, row in stacks.items():
        for m in row:
            yield f"{m.stem}.weight", ((m.N, m.K), Role("expert", (Part(m.stem, target=f"{layer}.mlp.experts.{joined}"),)))
