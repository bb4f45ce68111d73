"""Check the shapes of a checkpoint against its config.json, before weights are read and whenever a checkpoint is opened.

This covers the number of layers, the embedding, and every tensor of families that are described (`lowq_packers.arch`). A model
that fails the check would load with random or truncated weights, or not at all.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from typing import Any

from lowq_packers.arch.config import NotPlain, read_config
from lowq_packers.arch.names import tensors
from lowq_packers.errors import DamagedError
from lowq_packers.heads import is_head

MOST_DIGITS = 9  # max. digits of a layer's number
_LAYER = re.compile(r"(.*?(?:^|\.)(?:layers|h|blocks))\.(\d+)\.")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model: the config itself, or its text_config."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def whole(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields in the config, an integer. Raises DamagedError if it has another type."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if type(value) is not int or value < 0:
                raise DamagedError(f"config.json has {name}={value!r}, which is not a whole number")
            return value
    return None


def check_shapes(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise DamagedError with tensor and field unless `shapes` (by full tensor name) agree with `config`."""
    if is_head(config):  # a draft head is checked together with its model when it is loaded
        return
    text = text_config(config)
    _check_layers(text, shapes)
    sizes = ("word_embed_proj_dim", "hidden_size", "n_embd")  # the first is OPT's, whose embedding is projected
    expected = whole(text, "vocab_size"), whole(text, *sizes)
    described = _described(config, len(shapes))
    for name, shape in shapes.items():
        if name.endswith(("embed_tokens.weight", "wte.weight")) and len(shape) == 2:
            _compare(name, shape, expected)
        if name in described and shape not in (forms := described[name]):
            _compare(name, shape, forms[0])


def _compare(name: str, shape: tuple[int, ...], expected: tuple[int | None, ...]) -> None:
    if len(shape) != len(expected) or any(w not in (None, s) for s, w in zip(shape, expected, strict=True)):
        spelled = " x ".join("?" if w is None else str(w) for w in expected)
        raise DamagedError(
            f"{name} is {' x '.join(map(str, shape))}, but config.json implies {spelled}; they do not belong together"
        )


def _check_layers(text: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that every stack of layers is numbered without gaps, and that one has the number of layers in the config."""
    stacks: dict[str, set[int]] = defaultdict(set)
    for name in shapes:
        if match := _LAYER.match(name):
            if len(match[2]) > MOST_DIGITS:
                raise DamagedError(f"{name[:100]} is in a layer of {len(match[2])} digits; fetch the model again")
            stacks[match[1]].add(int(match[2]))
    for stack, numbers in stacks.items():
        if len(numbers) <= max(numbers):  # names may contain any number: never allocate by its value
            missing = next(i for i in count() if i not in numbers)
            raise DamagedError(f"{stack}.{missing} is missing, though {stack}.{max(numbers)} is there; fetch the model again")
    layers = whole(text, "num_hidden_layers", "n_layer")
    most = max((len(n) for n in stacks.values()), default=0)
    if layers is not None and stacks and most < layers:
        raise DamagedError(f"config.json says {layers} layers, the files hold {most}; fetch the model again")


def _described(config: Mapping[str, Any], count: int) -> dict[str, list[tuple[int, ...]]]:
    """Name -> allowed shapes of the tensors of a described family; empty for other configs."""
    try:
        _, model, _ = read_config(config, count)
    except NotPlain:
        return {}
    shapes: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for place in (None, *model.files):
        for form in ("split", "files"):
            for name, tensor in tensors(model, form, place).items():
                shapes[name].append(tensor.shape)
    return shapes
