"""Mistral: Llama with a sliding window in every layer; Ministral: in some; Ministral 3: queries grow with their position."""

from collections.abc import Mapping
from typing import Any

from lowq_packers.arch import Family, families
from lowq_packers.arch.common import (
    FULL,
    SLIDING,
    attention,
    mlp,
    model,
    of_vision,
    pre_norm,
    rope_parameters,
    token_of,
    unless,
    window,
    wrapper,
)
from lowq_packers.arch.parts import Images, Model, PositionScale, Update


def mistral(c: Any) -> Model:
    unless(
        getattr(c, "layer_types", None), "config.json has layer_types, which its family has not"
    )  # Ministral's class takes it

    def layer(i: int, p: str) -> tuple[Update, ...]:
        return pre_norm(c, p, attention(c, p, window=c.sliding_window or 0), mlp(c, f"{p}.mlp"))

    return model(c, layer)


def ministral(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        return pre_norm(c, p, attention(c, p, window=window(c, i)), mlp(c, f"{p}.mlp"))

    return model(c, layer)


def position_scale(c: Any) -> PositionScale | None:
    """By llama_4_scaling_beta of rope_parameters."""
    r = rope_parameters(c)
    beta, period = r.get("llama_4_scaling_beta"), r.get("original_max_position_embeddings")
    return PositionScale(float(beta), float(period)) if beta and period else None


def ministral3(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, window=c.sliding_window or 0, position_scale=position_scale(c))
        return pre_norm(c, p, a, mlp(c, f"{p}.mlp"))

    return model(c, layer)


def text(c: Any) -> Model:
    """Mistral 3's language model, which is any of Mistral's."""
    return families()[c.model_type].describe(c)


def images(c: Any) -> Images:
    merge, patch = getattr(c, "spatial_merge_size", None) or 2, of_vision(c, "patch_size", 14)
    return Images(token_of(c, "image", 10), "rows", patch=patch, merge=merge)


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer of a Ministral, for a config.json that names none."""
    return [SLIDING if config.get("sliding_window") is not None else FULL] * config["num_hidden_layers"]


DEFAULTS = {"eos_token_id": 2, "tie_word_embeddings": False, "num_key_value_heads": 8, "hidden_act": "silu"}
WINDOW = DEFAULTS | {"head_dim": None, "sliding_window": 4096}
TOWERS = ("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.")
FAMILIES = (
    Family("mistral", mistral, WINDOW, gguf="llama", mlx=True, sizes=(32000, 4096, 14336, 32, 32, 131072, 1e-6)),
    Family("ministral", ministral, WINDOW | {"layer_types": None}, layer_types=layer_types,
        sizes=(32000, 4096, 14336, 32, 32, 131072, 1e-6)),
    Family("ministral3", ministral3, DEFAULTS | {"head_dim": 128, "sliding_window": None}, own_rope=True,
        sizes=(131072, 4096, 14336, 34, 32, 262144, 1e-5)),
    Family("mistral3", wrapper(text, *TOWERS, images=images), {"tie_word_embeddings": True}, text="mistral", gguf="llama"),
)  # fmt: skip
