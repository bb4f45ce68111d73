"""Configs of multimodal models whose files hold only the text model, as in derivatives: the text model's config is used."""

from collections.abc import Iterable, Mapping
from typing import Any

from lowq_packers.arch.towers import TOWERS
from lowq_packers.errors import UnsupportedError
from lowq_packers.heads import is_head

WHOLE = ("gemma4", "gemma4_unified")  # model types whose class works without towers; their text-only files keep the full names
OF_THE_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "tie_word_embeddings")
OF_THE_FILES = ("quantization_config", "transformers_version")


def text_alone(config: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The config for files with these tensors: `config`, or its text_config if all tensors belong to the text model."""
    text, called = config.get("text_config"), config.get("architectures")
    if not isinstance(text, Mapping) or "model_type" not in text or not isinstance(called, list) or is_head(config):
        return config
    whole = config.get("model_type") in WHOLE
    if any(TOWERS.search(name) or (whole and "language_model." in name) for name in names):
        return config
    more = {k: config[k] for k in OF_THE_WHOLE if k in config and text.get(k) is None}
    more |= {k: config[k] for k in OF_THE_FILES if k in config}
    return {**text, **more, "architectures": [str(a).replace("ForConditionalGeneration", "ForCausalLM") for a in called]}


def lifted(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the quantization fields of its text_config moved to the top level, where all readers look for them.

    Raises UnsupportedError if the two contradict each other.
    """
    text, field = config.get("text_config"), OF_THE_FILES[0]
    if not isinstance(text, Mapping) or text.get(field) is None:
        return config
    if config.get(field) not in (None, text[field]):
        raise UnsupportedError(f"config.json has a {field} and another in text_config; take out the one that is wrong")
    return {**config, field: text[field], "text_config": {k: v for k, v in text.items() if k != field}}


def way_out(missing: str, names: Iterable[str]) -> str:
    """A hint for a tensor that is missing from the files; they may have it under a text model's name."""
    parts, present = missing.split("."), set(names)
    other = ".".join(p for p in parts if p != "language_model")
    tower = next((n for n in sorted(present) if TOWERS.search(n)), None)
    if other == missing or other not in present or tower is None:
        return "fetch the model again"
    return (
        f"the files have it as {other}, the name in a text model, but also {tower}: a tool renamed only some tensors; "
        f"remove the tensors of images and sound, and it is read as a text model"
    )
