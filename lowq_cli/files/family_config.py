"""A config.json of a known family as the attributes that transformers' config class would have, without transformers.

Only what is spelled out is taken: a field of another type, or one that is missing and has no default in
`lowq_packers.families`, is a reason to let transformers read it.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from lowq_packers.families import Family, families

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
ACTS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # as config.json spells them -> as lowq does
ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")  # kinds of rotary angles
STRETCHED = ("llama3", "yarn", "longrope")  # those that know the limit before
BY_TYPE = ("full_attention", "sliding_attention")


class NotPlain(Exception):  # no error: the reason why a checkpoint goes by way of transformers
    """Why a checkpoint is not one of a known family in its plain form."""


class Config(SimpleNamespace):
    """The fields of a config.json, defaults filled in."""

    def get_text_config(self) -> "Config":
        """Itself, as transformers' configs of text models."""
        return self


def read_config(raw: Mapping[str, Any], tensors: int) -> tuple[Config, Family]:
    """The config and its family. Raises NotPlain."""
    family = families().get(str(raw.get("model_type")))
    if family is None:
        raise NotPlain(f"model_type {raw.get('model_type')!r} is not a family with fused layers")
    fields = {**family.defaults, **{k: v for k, v in raw.items() if k != "quantization_config"}}
    for name in SIZES:
        if type(fields.get(name)) is not int or fields[name] < 1:
            raise NotPlain(f"config.json has no {name}")
    if fields["num_hidden_layers"] > tensors:
        raise NotPlain("config.json has more layers than the files have tensors")
    if not isinstance(fields.get("rms_norm_eps"), float):
        raise NotPlain("config.json has no rms_norm_eps")
    if (act := str(fields.get(family.activation))) not in ACTS:
        raise NotPlain(f"activation {act}")
    heads = fields["num_attention_heads"]
    fields["num_key_value_heads"] = fields.get("num_key_value_heads") or heads
    fields["head_dim"] = fields.get("head_dim") or fields["hidden_size"] // heads
    whole = [fields[n] for n in ("num_key_value_heads", "head_dim")]
    if any(type(v) is not int or v < 1 for v in whole) or fields["hidden_size"] % heads or heads % whole[0]:
        raise NotPlain("config.json has heads of an unusual kind")
    if not fields.get("use_sliding_window", True):
        fields["sliding_window"] = None
    if family.layer_types and fields.get("layer_types") is None:
        fields["layer_types"] = family.layer_types(fields)
    if family.windows == "every layer" and "layer_types" in fields:  # mistral's have transformers take Ministral's class
        raise NotPlain("config.json has layer_types, which its family has not")
    kinds = fields.get("layer_types") or []
    if family.layer_types and (len(kinds) != fields["num_hidden_layers"] or not set(kinds) <= set(BY_TYPE)):
        raise NotPlain("config.json has layers of an unusual kind")
    rope = _by_type(fields, family) if family.rope_by_layer_type else _rope(fields, family)
    return Config(**{**fields, "rope_parameters": rope, "is_encoder_decoder": False}), family


def _rope(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """rope_parameters as transformers standardizes them, from its own or the older fields."""
    rope = _mapping(fields.get("rope_scaling") or fields.get("rope_parameters"))
    rope.setdefault("rope_theta", fields.get("rope_theta", family.rope_theta))
    if fields.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", fields["partial_rotary_factor"])
    rope.setdefault("rope_type", rope.get("type", "default"))
    if "long_factor" in rope:  # Phi-3 called it su, and yarn
        rope["rope_type"] = "longrope"
    if rope["rope_type"] in STRETCHED:
        if fields.get("original_max_position_embeddings"):
            rope["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
        rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        pairs = int(fields["head_dim"] * (rope.get("partial_rotary_factor") or 1.0)) // 2
        for factors in (rope.get("short_factor"), rope.get("long_factor")):
            if type(factors) is not list or [type(v) in (int, float) for v in factors] != [True] * pairs:
                raise NotPlain("config.json has no factors of its rotation")
    return _checked(rope)


def _by_type(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The same for each kind of layer; older configs have two bases and scale only full attention."""
    given = _mapping(fields.get("rope_parameters"))
    found = {kind: _mapping(given.get(kind)) for kind in BY_TYPE}
    found["full_attention"].update(_mapping(fields.get("rope_scaling")))
    found["full_attention"].setdefault("rope_theta", fields.get("rope_theta", family.rope_theta))
    found["sliding_attention"].setdefault("rope_theta", fields.get("rope_local_base_freq", 10000.0))
    for rope in found.values():
        rope.setdefault("rope_type", rope.get("type", "default"))
        if rope["rope_type"] in (*STRETCHED, "dynamic"):
            raise NotPlain("a scaled rotation of one kind of layers")
        _checked(rope)
    return found


def _mapping(given: Any) -> dict[str, Any]:
    """A copy; of nothing, an empty one. Raises NotPlain for what is none."""
    if given and not isinstance(given, Mapping):
        raise NotPlain("config.json has rope_parameters of an unusual kind")
    return dict(given or {})


def _checked(rope: dict[str, Any]) -> dict[str, Any]:
    """The rotation itself. Raises NotPlain for values that are no numbers, and for a field that its kind needs."""
    one = dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",))
    needs = one | {"llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    numbers = ("rope_theta", *needs.get(str(rope["rope_type"]), ()))
    if any(isinstance(v, Mapping) for v in rope.values()) or not all(type(rope.get(n)) in (int, float) for n in numbers):
        raise NotPlain("config.json has rope_parameters of an unusual kind")
    if rope["rope_type"] not in ROPES:
        raise NotPlain(f"rotary angles of the kind {rope['rope_type']}")
    return rope
