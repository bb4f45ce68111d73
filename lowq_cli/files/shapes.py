"""Do the shapes of a checkpoint fit its config.json? Asked before weights are read, and again when a checkpoint is opened.

Only what the config says outright is checked: the number of layers, the embedding, and the linear layers of families that
name and shape them as Llama does. A model that fails would load with random or cut weights, or not at all.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from typing import Any

from lowq_packers.errors import DamagedError
from lowq_packers.families import families

# Families whose self_attn.{q,k,v,o}_proj and mlp.{gate,up,down}_proj have the shapes of `_llama_shapes`.
LLAMA_LIKE = {name for name, family in families().items() if family.llama_shapes}
LLAMA_LIKE |= {"gemma", "gemma2", "olmo2", "granite", "smollm3"}  # whose layers are computed by transformers alone
MOST_DIGITS = 9  # of a layer's number
_LAYER = re.compile(r"(.*?(?:^|\.)(?:layers|h|blocks))\.(\d+)\.")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model: the config itself, or its text_config."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def whole(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that the config has, as a whole number. Raises DamagedError if it is anything else."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if type(value) is not int or value < 0:
                raise DamagedError(f"config.json has {name}={value!r}, which is not a whole number")
            return value
    return None


def check_shapes(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise DamagedError, naming tensor and field, unless `shapes` (full tensor names) fit `config`."""
    text = text_config(config)
    _check_layers(text, shapes)
    sizes = ("word_embed_proj_dim", "hidden_size", "n_embd")  # the first is OPT's, projected
    expected = whole(text, "vocab_size"), whole(text, *sizes)
    linear = _llama_shapes(text) if str(text.get("model_type")) in LLAMA_LIKE else {}
    for name, shape in shapes.items():  # beside a text_config, a vision tower's layers go by the same names, in another stack
        if name.endswith(("embed_tokens.weight", "wte.weight")) and len(shape) == 2:
            _compare(name, shape, expected)
        for suffix, wanted in linear.items():
            if name.endswith(suffix) and (stack := _LAYER.match(name)) and (text is config or "language_model." in stack[1]):
                _compare(name, shape, wanted)


def _compare(name: str, shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> None:
    if len(shape) != len(wanted) or any(w not in (None, s) for s, w in zip(shape, wanted, strict=True)):
        spelled = " x ".join("?" if w is None else str(w) for w in wanted)
        raise DamagedError(
            f"{name} is {' x '.join(map(str, shape))}, but config.json implies {spelled}; they do not belong together"
        )


def _check_layers(text: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Every stack of layers is numbered without gaps, and one has as many as the config says."""
    stacks: dict[str, set[int]] = defaultdict(set)
    for name in shapes:
        if found := _LAYER.match(name):
            if len(found[2]) > MOST_DIGITS:
                raise DamagedError(f"{name[:100]} is in a layer of {len(found[2])} digits; fetch the model again")
            stacks[found[1]].add(int(found[2]))
    for stack, numbers in stacks.items():
        if len(numbers) <= max(numbers):  # a name may say any number: nothing is made as long as it
            missing = next(i for i in count() if i not in numbers)
            raise DamagedError(f"{stack}.{missing} is missing, though {stack}.{max(numbers)} is there; fetch the model again")
    layers = whole(text, "num_hidden_layers", "n_layer")
    most = max((len(n) for n in stacks.values()), default=0)
    if layers is not None and stacks and most < layers:
        raise DamagedError(f"config.json says {layers} layers, the files hold {most}; fetch the model again")


def _llama_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int | None, int | None]]:
    """Suffix of a tensor name -> (N, K); None where the config does not say."""
    hidden, inter = whole(text, "hidden_size"), whole(text, "intermediate_size")
    heads, kv_heads = whole(text, "num_attention_heads"), whole(text, "num_key_value_heads")
    head_dim = whole(text, "head_dim")
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    q = heads * head_dim if heads and head_dim else None
    kv = (heads if kv_heads is None else kv_heads) or None
    kv = kv * head_dim if kv and head_dim else None
    return {
        ".self_attn.q_proj.weight": (q, hidden),
        ".self_attn.k_proj.weight": (kv, hidden),
        ".self_attn.v_proj.weight": (kv, hidden),
        ".self_attn.o_proj.weight": (hidden, q),
        ".mlp.gate_proj.weight": (inter, hidden),
        ".mlp.up_proj.weight": (inter, hidden),
        ".mlp.down_proj.weight": (hidden, inter),
    }
