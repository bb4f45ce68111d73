"""Families of models whose layers lowq knows: a file each, whose FAMILY says what differs from Llama. The folder is the list.

Whoever asks what a family is, asks here: the fused decoder, rotation, GGUF, MLX, the check of shapes. A new family is one file
where it differs from Llama by what `Family` has fields for. What it has beside that is a new field, read by engine/blocks.py
(its layers), files/family_config.py and family_tensors.py (the start without transformers), kernels/decode (new arithmetic).
No torch is imported.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer. normalises: their weights sum to 1, in fp32; else norm_topk_prob says, and they are rounded.

    parent: their module in files. leaves: of an expert's gate, up and down there. width: config.json's field of how many values
    an expert has inside. router: the module that chooses them. rounded: their weights are rounded even where they sum to 1.
    """

    normalises: bool
    parent: str = "mlp"
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    width: str = "moe_intermediate_size"
    router: str = "gate"
    router_bias: bool = False
    rounded: bool = False


@dataclass(frozen=True)
class Family:
    """What a model_type's layers are. Every default is Llama's.

    defaults: fields that config.json may leave out, as transformers' config class fills them (checked by a test).
    """

    model_type: str
    defaults: Mapping[str, Any]
    rope_theta: float = 10000.0
    # tensors
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    qkv_bias: bool | None = None  # q, k, v have biases and o has none; None: all four or none, by attention_bias
    qk_norm: bool = False  # an RMSNorm over each head of q and k
    sinks: bool = False  # a score of each head that takes part in the softmax and has no value
    mixture: Mixture | None = None
    # what is computed
    norm_adds_one: bool = False  # RMSNorm multiplies by 1 + w
    post_norms: bool = False  # what attention and MLP add to the residual stream is normed, too
    windows: Literal["no", "every layer", "by layer_types"] = "no"  # where config.json's sliding_window holds
    rope_by_layer_type: bool = False  # rope_parameters and inverse frequencies of each kind of layer
    partial_rope: bool = False  # partial_rotary_factor holds without rope scaling, too
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(hidden_size)
    activation: str = "hidden_act"  # its field: a family passes over another's, whatever config.json has there
    soft_capped: bool = False  # logits, by final_logit_softcapping
    attention_scale: str = ""  # the field whose inverse square root scales attention, in place of head_dim's
    # elsewhere
    llama_shapes: bool = True  # linear layers of the shapes that config.json implies for Llama
    stacked: str = ""  # why files are read by way of transformers only
    not_rotated: str = ""  # why the residual stream cannot be rotated, "" where that is exact
    gguf: str = ""  # llama.cpp's architecture
    gguf_class: str = ""  # the transformers class of a file of that architecture, where this is the family it is read as
    mlx: bool = False  # mlx-lm has it: with silu, without its window, experts stacked as `formats.mlx` does
    layer_types: Callable[[Mapping[str, Any]], list[str]] | None = field(default=None)  # where config.json names none


@cache
def families() -> dict[str, Family]:
    """Every family, by model_type."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {m.FAMILY.model_type: m.FAMILY for m in modules if hasattr(m, "FAMILY")}
