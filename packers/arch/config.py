"""Reads the config.json of a described family without transformers, as attributes like those of transformers' config class.

It is strict: if a field has another type, or is missing and has no default, transformers reads the config.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from lowq_packers.arch import SIZES, Family, families
from lowq_packers.arch.common import FULL, SLIDING, NotDescribed
from lowq_packers.arch.parts import Model, Router, walk

ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")  # kinds of rotary embeddings
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # one field by the names that versions gave it
STRETCHED = ("llama3", "yarn", "longrope")  # those that know the limit before
BY_TYPE = (FULL, SLIDING)
KINDS = (*BY_TYPE, "conv")
MOST = 4096  # layers, and experts of a layer, where the files' number of tensors does not bound them: four times the largest


class NotPlain(Exception):  # not an error: the reason why transformers reads a checkpoint
    """Why a checkpoint is not a described family in its plain form."""


class Config(SimpleNamespace):
    """The fields of a config.json, defaults filled in."""

    def get_text_config(self) -> "Config":
        """The part that describes the language model."""
        return getattr(self, "text_config", self)


def read_config(raw: Mapping[str, Any], tensors: int = MOST) -> tuple[Config, Model, Family]:
    """The config, the model it describes, and its family. tensors: their number in the files. Raises NotPlain."""
    family = families().get(str(raw.get("model_type")))
    if family is None:
        raise NotPlain(f"model_type {raw.get('model_type')!r} is not a described family")
    try:
        config = _wrapper(raw, family, tensors) if family.text else _text(raw, family, tensors)
        model = family.describe(config)
    except NotDescribed as e:
        raise NotPlain(str(e)) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise NotPlain(f"config.json lacks fields that its family needs ({type(e).__name__}: {e})") from None
    for part in walk(model.layers):
        if isinstance(part, Router) and (type(part.experts) is not int or part.experts > max(tensors, MOST)):
            raise NotPlain(f"config.json has no number of experts that a model can have: {part.experts}")
    return config, model, family


def _wrapper(raw: Mapping[str, Any], family: Family, tensors: int) -> Config:
    inside = raw.get("text_config")
    if inside is None:  # older configs have no text_config
        inside = {k: v for k, v in raw.items() if k not in ("model_type", "vision_config")}
    if not isinstance(inside, Mapping):
        raise NotPlain("config.json has no text_config")
    text = families().get(str(inside.get("model_type", family.text)))
    if text is None:
        raise NotPlain(f"a text_config of model_type {inside.get('model_type')!r}")
    config = _text({"model_type": text.model_type, **inside}, text, tensors)
    tied = raw.get("tie_word_embeddings", family.filled["tie_word_embeddings"])
    outer = {k: v for k, v in raw.items() if k != "quantization_config"}
    return Config(**{**outer, "text_config": config, "tie_word_embeddings": tied, "is_encoder_decoder": False})


def _text(raw: Mapping[str, Any], family: Family, tensors: int) -> Config:
    if family.defaults is None:
        raise NotPlain(f"configs of {family.model_type} are read by transformers")
    given = {k: v for k, v in raw.items() if k != "quantization_config"}
    experts = next((given[name] for name in EXPERTS if name in given), None)
    given = {k: _number(v) for k, v in given.items()}
    if isinstance(given.get("layers_block_type"), list):
        given.setdefault("num_hidden_layers", len(given["layers_block_type"]))
    fields = {**family.filled, **({} if experts is None else dict.fromkeys(EXPERTS, experts)), **given}
    for name, value in fields.items():
        if name in SIZES and (type(value) is not (float if name == "rms_norm_eps" else int) or value <= 0):
            raise NotPlain(f"config.json has no {name}")
        if isinstance(family.filled.get(name), bool) and isinstance(value, str | list | Mapping):  # true, as Python reads it
            raise NotPlain(f"config.json has {name} = {value!r:.80}")
    if fields["num_hidden_layers"] > tensors:
        raise NotPlain("config.json has more layers than the files have tensors")
    if fields.get("is_causal") is False or fields.get("use_bidirectional_attention") is True:
        raise NotPlain("attention that is not causal")
    if heads := fields.get("num_attention_heads"):
        rotated = fields.get("qk_rope_head_dim") if "qk_rope_head_dim" in family.filled else None
        divides = bool(fields.get("head_dim") or rotated) or fields["hidden_size"] % heads == 0
        fields["num_key_value_heads"] = fields.get("num_key_value_heads") or heads
        fields["head_dim"] = fields.get("head_dim") or rotated or fields["hidden_size"] // heads
        whole = [fields[n] for n in ("num_key_value_heads", "head_dim")]
        if any(type(v) is not int or v < 1 for v in whole) or not divides or heads % whole[0]:
            raise NotPlain("config.json has heads of an unusual kind")
    if "use_sliding_window" in family.defaults and not fields["use_sliding_window"]:  # a switch of some families only
        fields["sliding_window"] = None
    layers = fields.get("per_layer_config")
    if isinstance(layers, Mapping) and all(
        isinstance(v, Mapping) for v in layers.values()
    ):  # differences by layer number, a string
        n = fields["num_hidden_layers"]
        fields["per_layer_config"] = {i: SimpleNamespace(**{**fields, **layers.get(str(i), {})}) for i in range(n)}
    window = fields.get("sliding_window")
    if window is not None and (type(window) is not int or window < 0):
        raise NotPlain(f"config.json has sliding_window = {window}")
    if family.layer_types and fields.get("layer_types") is None:
        fields["layer_types"] = family.layer_types(fields)
    kinds = fields.get("layer_types") or []
    odd = set(kinds) - set(KINDS)
    plain = family.layer_types is None or not odd or odd <= set(family.layer_types(fields))
    if family.layer_types and (len(kinds) != fields["num_hidden_layers"] or not plain):
        raise NotPlain("config.json has layers of an unusual kind")
    if family.own_rope and not (fields.get("rope_parameters") or fields.get("rope_scaling")):
        raise NotPlain("config.json has no rope_parameters, and transformers' class has its own")
    rope = _by_type(fields, family) if family.local_rope_theta else _rope(fields, family)
    return Config(**{**fields, "rope_parameters": rope, "is_encoder_decoder": False})


def _number(value: Any) -> Any:
    """A value of config.json with infinities as floats; transformers writes them as objects, since JSON has no infinity."""
    if isinstance(value, list):
        return [_number(v) for v in value]
    given = value.get("__float__") if isinstance(value, Mapping) else None
    return float(given) if given in ("Infinity", "-Infinity", "NaN") else value


def _rope(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """rope_parameters as transformers standardizes them, from its own or the older fields."""
    rope = _mapping(fields.get("rope_scaling") or fields.get("rope_parameters"))
    base, share = family.rope_names
    rope.setdefault("rope_theta", fields.get(base, family.rope_theta))
    if fields.get(share) is not None:
        rope.setdefault("partial_rotary_factor", fields[share])
    return _standard(rope, fields)


def _by_type(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """`rope_parameters` for each kind of layer; older configs have two bases and scale only full attention."""
    given = _mapping(fields.get("rope_parameters"))
    by_type = {kind: _mapping(given.get(kind)) for kind in BY_TYPE}
    by_type[FULL].update(_mapping(fields.get("rope_scaling")))
    by_type[FULL].setdefault("rope_theta", fields.get("rope_theta", family.rope_theta))
    by_type[SLIDING].setdefault("rope_theta", fields.get("rope_local_base_freq", family.local_rope_theta))
    return {kind: _standard(rope, fields) for kind, rope in by_type.items()}


def _standard(rope: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rope_parameters of one kind of layer, with older spellings and their extra fields."""
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] == "mrope":  # three positions per token, which are equal in text
        rope["rope_type"] = "default"
    if "long_factor" in rope:  # Phi-3's names for longrope were su and yarn
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


def _mapping(given: Any) -> dict[str, Any]:
    """A copy of a mapping; an empty one for None. Raises NotPlain for anything else."""
    if given and not isinstance(given, Mapping):
        raise NotPlain("config.json has rope_parameters of an unusual kind")
    return dict(given or {})


def _checked(rope: dict[str, Any]) -> dict[str, Any]:
    """Check one rotation. Raises NotPlain for values that are not numbers, and for a missing field."""
    one = dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",))
    needs = one | {"llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    numbers = ("rope_theta", *needs.get(str(rope["rope_type"]), ()))
    if any(isinstance(v, Mapping) for v in rope.values()) or not all(type(rope.get(n)) in (int, float) for n in numbers):
        raise NotPlain("config.json has rope_parameters of an unusual kind")
    if rope["rope_type"] not in ROPES:
        raise NotPlain(f"rotary angles of the kind {rope['rope_type']}")
    return rope
