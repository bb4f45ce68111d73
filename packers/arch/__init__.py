"""Descriptions of model families, one file each: its FAMILIES say how a config becomes a `parts.Model`.

All files of this folder are loaded. The decoder, the names and shapes of tensors, rotation, GGUF and MLX all use these
descriptions. A new family is one file with a function config -> Model of 6 to 20 lines. No torch is imported.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from lowq_packers.arch.parts import Model

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
    "rms_norm_eps",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One model_type.

    describe: config (transformers' object, or its fields with `defaults` filled in) -> Model; a wrapper gets the whole config.
    defaults: fields that config.json may leave out, as transformers' config class fills them (a test compares); None if
    transformers has to read the config. text: model_type of a wrapper's text_config, if that names none.
    sizes: defaults of SIZES; None for a field that the family does not have.
    rope_theta, local_rope_theta: bases of the rotary embedding if config.json has none; the second is for layers with a window,
    in families whose kinds of layers have different ones (0: the same for all).
    rope_names: fields outside rope_parameters that give the base and the share of a head that is rotated.
    own_rope: transformers' class has a rotation of its own, often a scaled one, for a config.json without rope_parameters;
    transformers then reads that.
    gguf: llama.cpp's architecture. gguf_class: the transformers class as which such a file is read. mlx: mlx-lm supports it.
    """

    model_type: str
    describe: Callable[[Any], Model]
    defaults: Mapping[str, Any] | None = None
    rope_theta: float = 10000.0
    local_rope_theta: float = 0.0
    text: str = ""
    gguf: str = ""
    gguf_class: str = ""
    mlx: bool = False
    layer_types: Callable[[Mapping[str, Any]], list[str]] | None = field(default=None)  # if config.json has none
    rope_names: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    own_rope: bool = False
    sizes: tuple[float | None, ...] = (None,) * len(SIZES)

    @property
    def filled(self) -> dict[str, Any]:
        """The defaults of every field that config.json may leave out."""
        return {name: v for name, v in zip(SIZES, self.sizes, strict=True) if v is not None} | dict(self.defaults or {})


@cache
def families() -> dict[str, Family]:
    """Every family, by model_type."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {family.model_type: family for m in modules for family in getattr(m, "FAMILIES", ())}
