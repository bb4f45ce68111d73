"""What most families' layers have in common, for the functions that describe them. `c` is a config, `p` a layer's path."""

from collections.abc import Callable
from typing import Any

from lowq_packers.arch.parts import Act, Attention, Linear, Mixer, Mlp, Model, Norm, Rope, Update

FULL, SLIDING = "full_attention", "sliding_attention"  # of a config's layer_types
ACTS: dict[str, Act] = {  # as config.json spells them
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip


class NotDescribed(ValueError):
    """Why a config of a known family is not described: the reason, for people."""


def act(name: str) -> Act:
    """An activation by config.json's name. Raises NotDescribed."""
    if name not in ACTS:
        raise NotDescribed(f"activation {name}")
    return ACTS[name]


def head_dim(c: Any) -> int:
    """Values of a head."""
    return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads


def rope_parameters(c: Any, kind: str = "") -> dict[str, Any]:
    """The rope_parameters of a kind of layer, or of all."""
    given = c.rope_parameters or {}
    return given[kind] if kind else given


def rope(c: Any, kind: str = "", pairing: Any = "halves", partial: bool = True, **more: Any) -> Rope:
    """How heads turn. partial: whether the family takes partial_rotary_factor without scaled positions, too."""
    given = rope_parameters(c, kind)
    share = given.get("partial_rotary_factor") or getattr(c, "partial_rotary_factor", None) or 1.0
    partial = partial or given.get("rope_type", "default") != "default"
    return Rope(int(head_dim(c) * (share if partial else 1.0)), kind, pairing, **more)


def window(c: Any, i: int) -> int:
    """The sliding window of layer i, by layer_types; 0 where it sees all."""
    return (c.sliding_window or 0) if c.layer_types[i] == SLIDING else 0


def rms(c: Any, name: str, size: int = 0, **more: Any) -> Norm:
    """An RMSNorm of the config's eps, over the residual stream unless `size` is given."""
    return Norm(name, size or c.hidden_size, float(c.rms_norm_eps), **more)


def linear(c: Any, name: str | tuple[str, ...], rows: int | tuple[int, ...], columns: int = 0, **more: Any) -> Linear:
    """A product of the residual stream unless `columns` is given."""
    parts = (name,) if isinstance(name, str) else name
    return Linear(parts, (rows,) if isinstance(rows, int) else rows, columns or c.hidden_size, **more)


def attention(
    c: Any,
    p: str,
    bias: bool = False,
    o_bias: bool = False,
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
    o: str = "o_proj",
    module: str = "self_attn",
    turned: Rope | None | str = "own",
    **more: Any,
) -> Attention:
    """Llama's attention, its projections by name: three, or one that holds q, k, v. What else `Attention` has is given by name."""
    D = more.pop("dim", head_dim(c))
    q, kv = c.num_attention_heads * D, c.num_key_value_heads * D
    rows = (q, kv, kv) if len(names) == 3 else (q + 2 * kv,)
    turned = rope(c) if isinstance(turned, str) else turned
    return Attention(
        linear(c, tuple(f"{p}.{module}.{n}" for n in names), rows, bias=bias, cut="rows"),
        linear(c, f"{p}.{module}.{o}", c.hidden_size, q, bias=o_bias, cut="columns"),
        c.num_attention_heads, c.num_key_value_heads, D, more.pop("scale", D**-0.5), turned, **more,
    )  # fmt: skip


def head_norms(c: Any, p: str, module: str = "self_attn", **more: Any) -> dict[str, Norm]:
    """q_norm and k_norm over each head."""
    return {n: rms(c, f"{p}.{module}.{n}", head_dim(c), **more) for n in ("q_norm", "k_norm")}


def mlp(c: Any, p: str, inner: int = 0, joined: str = "", bias: bool = False, activation: str = "", **more: Any) -> Mlp:
    """Llama's gated MLP at path `p`; joined: the name of one projection that holds gate and up."""
    inner = inner or c.intermediate_size
    names, rows = ((f"{p}.{joined}",), (2 * inner,)) if joined else ((f"{p}.gate_proj", f"{p}.up_proj"), (inner, inner))
    return Mlp(
        linear(c, names, rows, bias=bias, cut="rows"),
        linear(c, f"{p}.down_proj", c.hidden_size, inner, bias=bias, cut="columns"),
        act(activation or c.hidden_act), **more,
    )  # fmt: skip


def pre_norm(c: Any, p: str, first: Mixer, second: Mixer, **more: Any) -> tuple[Update, ...]:
    """Llama's layer: a norm before each of two mixers."""
    before = rms(c, f"{p}.input_layernorm"), rms(c, f"{p}.post_attention_layernorm")
    return Update((first,), before[0], **more), Update((second,), before[1], **more)


def model(c: Any, layer: Callable[[int, str], tuple[Update, ...]], norm: Norm | None = None, **more: Any) -> Model:
    """Layers "layers.0" to "layers.n-1", each made by layer(i, path); the last norm is "norm" unless given."""
    made = tuple(layer(i, f"layers.{i}") for i in range(c.num_hidden_layers))
    return Model(made, norm or rms(c, "norm"), c.vocab_size, c.hidden_size, bool(c.tie_word_embeddings), **more)
