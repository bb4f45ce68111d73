"""Parts that many families share, for the functions that describe them. `c` is a config, `p` the path of a module."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lowq_packers.arch.parts import (
    Act,
    Attention,
    Conv,
    Experts,
    Images,
    Linear,
    Mamba2,
    Mixer,
    Mlp,
    Model,
    Norm,
    Rope,
    Router,
    Update,
)

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # values in a config's layer_types
ACTS: dict[str, Act] = {  # config.json's name -> activation
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
GATED = ("gate_proj", "up_proj", "down_proj")  # an expert's matrices in most files
STACKS = ("gate_up_proj", "down_proj")  # the matrices of all experts, in files that stack them in two tensors


class NotDescribed(ValueError):
    """Why a config of a known family cannot be described; the message is shown to users."""


def unless(wrong: Any, reason: str) -> None:
    """Raise NotDescribed if `wrong`."""
    if wrong:
        raise NotDescribed(reason)


def act(name: str) -> Act:
    """An activation by config.json's name. Raises NotDescribed."""
    unless(name not in ACTS, f"activation {name}")
    return ACTS[name]


def head_dim(c: Any) -> int:
    """Values of a head."""
    return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads


def check_head_dim(c: Any) -> None:
    """For a family whose class reads no head_dim: refuse a config with another one. Raises NotDescribed."""
    D = c.hidden_size // c.num_attention_heads
    unless(head_dim(c) != D, f"a head_dim of {head_dim(c)}, where transformers' class computes with {D}")


def kv_heads(c: Any) -> int:
    """Heads of keys and values."""
    return getattr(c, "num_key_value_heads", None) or c.num_attention_heads


def rope_parameters(c: Any, kind: str = "") -> dict[str, Any]:
    """The rope_parameters of one kind of layer, or of all layers."""
    given = c.rope_parameters or {}
    return given[kind] if kind else given


def rope(c: Any, kind: str = "", pairing: Any = "halves", share: float | None = None, **more: Any) -> Rope:
    """The rotation of heads: of all dims, unless the family has partial_rotary_factor or the rotation is scaled.

    share: the default of that factor.
    """
    given = rope_parameters(c, kind)
    if share is not None or given.get("rope_type", "default") != "default":
        share = given.get("partial_rotary_factor") or getattr(c, "partial_rotary_factor", None) or share
    return Rope(int(head_dim(c) * (share or 1.0)), kind, pairing, **more)


def window(c: Any, i: int) -> int:
    """The sliding window of layer i, by layer_types; 0: it sees all tokens."""
    return (c.sliding_window or 0) if c.layer_types[i] == SLIDING else 0


def rms(c: Any, name: str, size: int = 0, **more: Any) -> Norm:
    """An RMSNorm of the config's eps, over the residual stream unless `size` is given."""
    return Norm(name, size or c.hidden_size, float(c.rms_norm_eps), **more)


def linear(c: Any, name: str | tuple[str, ...], rows: int | tuple[int, ...], columns: int = 0, **more: Any) -> Linear:
    """A linear layer over the residual stream unless `columns` is given."""
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
    turned: Rope | str | None = "own",
    **more: Any,
) -> Attention:
    """Llama's attention. names: its projections q, k and v, or one for all. turned: the rotation; "own": the
    config's; None: none. more: further fields of `Attention`."""
    D, kv = more.pop("dim", 0) or head_dim(c), more.pop("kv_heads", 0) or kv_heads(c)
    parts = (c.num_attention_heads * D * (2 if more.get("gated") else 1), kv * D, kv * D)
    rows = (sum(parts),) if len(names) == 1 and more.get("shares") is None else parts[: len(names)]
    turned = rope(c) if isinstance(turned, str) else turned
    wide = (turned.of or turned.dims) if turned else 0
    unless(wide > D or wide % 2, f"a rotation of {wide} values in heads of {D}")
    return Attention(
        linear(c, tuple(f"{p}.{module}.{n}" for n in names), rows, bias=bias),
        linear(c, f"{p}.{module}.{o}", c.hidden_size, c.num_attention_heads * D, bias=o_bias),
        c.num_attention_heads, kv, D, more.pop("scale", D**-0.5), turned, **more,
    )  # fmt: skip


def head_norms(c: Any, p: str, names: tuple[str, str] = ("q_norm", "k_norm"), **more: Any) -> dict[str, Any]:
    """Attention's norms of each head of q and of k."""
    q, k = (rms(c, f"{p}.self_attn.{n}", head_dim(c), **more) for n in names)
    return {"q_norm": q, "k_norm": k}


def norms_of_all(c: Any, p: str) -> dict[str, Any]:
    """Attention's norms over all heads of q, and of k, at once."""
    sizes = {"q_norm": c.num_attention_heads * head_dim(c), "k_norm": kv_heads(c) * head_dim(c)}
    return {n: rms(c, f"{p}.self_attn.{n}", size) for n, size in sizes.items()} | {"norm_over": "all"}


def mlp(
    c: Any,
    p: str,
    inner: int = 0,
    names: tuple[str, ...] = ("gate_proj", "up_proj"),
    down: str = "down_proj",
    bias: bool = False,
    activation: str = "",
    gated: bool = True,
    **more: Any,
) -> Mlp:
    """Llama's gated MLP at path `p`. names: gate and up, one projection for both, or only up if it is not gated."""
    inner, name = inner or c.intermediate_size, activation or c.hidden_act
    if name == "xielu" and not gated:
        more["scalars"] = f"{p}.act_fn"
    rows = (2 * inner if gated and len(names) == 1 else inner,) * len(names)
    return Mlp(
        linear(c, tuple(f"{p}.{n}" for n in names), rows, bias=bias),
        linear(c, f"{p}.{down}", c.hidden_size, inner, bias=bias),
        "xielu" if more.get("scalars") else act(name), gated, **more,
    )  # fmt: skip


def router(c: Any, name: str, experts: int, **more: Any) -> Router:
    """A router of the residual stream; top_k is the config's unless given."""
    top_k, (groups, kept) = more.pop("top_k", None) or c.num_experts_per_tok, more.get("groups", (1, 1))
    unless(experts % groups or top_k > experts // groups * kept, f"{top_k} of {experts} experts in {kept} of {groups} groups")
    return Router(name, experts, c.hidden_size, top_k, **more)


def experts(c: Any, p: str, of: Router, inner: int, leaves: tuple[str, ...] = GATED, **more: Any) -> Experts:
    """A mixture whose experts are below path `p`, also in files by default."""
    files, activation = more.pop("files", f"{p}.experts"), more.pop("activation", "") or c.hidden_act
    return Experts(of, f"{p}.experts", files, leaves, inner, more.pop("hidden", c.hidden_size), act(activation), **more)


def mamba2(c: Any, p: str, heads: int, dim: int, groups: int, N: int, width: int, eps: float, **more: Any) -> Mamba2:
    """Mamba-2 of most families.

    biases: whether in_proj, out_proj and the convolution have one. limit: min. and max. dt. normed: whether it has a norm.
    """
    in_bias, out_bias, conv_bias = more.pop("biases")
    least, most = more.pop("limit", None) or (0.0, float("inf"))
    inner, channels = heads * dim, heads * dim + 2 * groups * N
    norm = Norm(f"{p}.norm", inner, float(eps), groups=groups) if more.pop("normed", True) else None
    a_log, dt_bias, d = (f"{p}.{n}" for n in ("A_log", "dt_bias", "D"))
    return Mamba2(
        linear(c, f"{p}.in_proj", inner + channels + heads, bias=bool(in_bias)),
        Conv(f"{p}.conv1d", channels, width, bool(conv_bias)),
        linear(c, f"{p}.out_proj", c.hidden_size, inner, bias=bool(out_bias)),
        a_log, dt_bias, d, heads, dim, groups, N, norm, dt=(float(least), float(most)), **more,
    )  # fmt: skip


def pre_norm(
    c: Any, p: str, first: Mixer, second: Mixer, norm: Callable[[Any, str], Norm] = rms, **more: Any
) -> tuple[Update, ...]:
    """Llama's layer: a norm before each of two mixers."""
    before = norm(c, f"{p}.input_layernorm"), norm(c, f"{p}.post_attention_layernorm")
    return Update((first,), before[0], **more), Update((second,), before[1], **more)


def model(
    c: Any, layer: Callable[[int, str], tuple[Update, ...]], norm: Norm | None = None, by_layer: bool = False, **more: Any
) -> Model:
    """A model of layers "layers.0" to "layers.n-1", each made by layer(i, path); the last norm is "norm" unless given.

    by_layer: whether the family supports per_layer_config, transformers' field for layers that differ.
    """
    differ = getattr(c, "is_heterogeneous", False) or isinstance(getattr(c, "per_layer_config", None), dict)
    unless(differ and not by_layer, "layers that differ by per_layer_config")
    unless(getattr(c, "is_causal", True) is False, "attention that is not causal")
    built = tuple(layer(i, f"layers.{i}") for i in range(c.num_hidden_layers))
    return Model(
        built, norm or rms(c, "norm"), c.vocab_size, c.hidden_size, bool(getattr(c, "tie_word_embeddings", False)), **more
    )


def mtp_layers(c: Any) -> tuple[str, ...]:
    """Prefixes of the layers after the last one, in which models like DeepSeek V3 publish their MTP layers."""
    n = getattr(c, "num_nextn_predict_layers", 0) or 0
    return tuple(f"model.layers.{c.num_hidden_layers + i}." for i in range(n))


def wrapper(
    text: Callable[[Any], Model],
    *outside_text: str,
    prefix: str = "model.language_model.",
    files: tuple[tuple[str, str], ...] = (("language_model.model.", "language_model.lm_head"),),
    images: Callable[[Any], Images] | None = None,
    placeholders: Mapping[str, int] | None = None,
    read_as: Callable[[Any], int] = lambda c: 0,
) -> Callable[[Any], Model]:
    """A model with a tower: describes its text part, under a prefix, from text_config, or in old files from the whole config.

    images: from the whole config; a wrapper with vision_config null takes no images.
    placeholders: fields of the config that name tokens of `Model.read_as`, and their defaults. read_as: a function of the
    text's config.
    """

    def described(c: Any) -> Model:
        inside = text(getattr(c, "text_config", None) or c)
        extra = tuple(prefix + e.removeprefix("model.") if e.startswith("model.") else e for e in inside.extra)
        tied = bool(c.tie_word_embeddings)
        seen = images(c) if images is not None and getattr(c, "vision_config", {}) is not None else None
        ids = {(getattr(c, name, default), read_as(c.text_config)) for name, default in (placeholders or {}).items()}
        token_ids = tuple(sorted(pair for pair in ids if pair[0] is not None and pair[0] < inside.vocab))
        named = replace(inside, prefix=prefix, outside_text=outside_text, files=files, extra=extra)
        return replace(named, tied=tied, images=seen, read_as=token_ids)

    return described


def of_vision(c: Any, name: str, default: Any) -> Any:
    """A field of a wrapper's vision_config, which is a dict if config.json was read without transformers."""
    inside = getattr(c, "vision_config", {})
    value = inside.get(name) if isinstance(inside, Mapping) else getattr(inside, name, None)
    return default if value is None else value


def token_of(c: Any, name: str, default: int) -> int:
    """The id of an image token ("image", "boi", "eoi"); the field's name ends in _token_id or _token_index."""
    return getattr(c, f"{name}_token_id", None) or getattr(c, f"{name}_token_index", None) or default


def three_part(token: int, sections: tuple[int, ...], interleaved: bool, deepstack: bool = False) -> Callable[[Any], Images]:
    """Qwen's images, whose tokens have positions in time, height and width. token, sections: defaults for the config's."""

    def described(c: Any) -> Images:
        inside = getattr(c, "text_config", None) or c
        given = rope_parameters(inside).get("mrope_section") or sections
        whole = interleaved or 2 * sum(given) == head_dim(inside)
        unless(len(given) != 3 or not whole, f"places of three parts in sections of {given} pairs")
        layers = len(of_vision(c, "deepstack_visual_indexes", (8, 16, 24))) if deepstack else 0
        merge = of_vision(c, "spatial_merge_size", 2)
        tokens = ("image", token), ("vision_start", token - 3), ("vision_end", token - 2)
        stands_for, begin, end = (token_of(c, *of) for of in tokens)
        return Images(
            stands_for, begin=begin, end=end, merge=merge, sections=tuple(given), interleaved=interleaved, deepstack=layers
        )

    return described
