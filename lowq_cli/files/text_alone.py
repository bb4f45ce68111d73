"""A config of a model with images or sound whose files hold its text part alone, as derivatives do: the text's own."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

TOWERS = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|multi_?modal\w*|mm_\w+|embed_vision|embed_audio)\.")
OF_THE_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "tie_word_embeddings")
OF_THE_FILES = ("quantization_config", "transformers_version")


def text_alone(config: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The config to read tensors of these names by: `config`, or its text_config where no tensor is another part's."""
    text, called = config.get("text_config"), config.get("architectures")
    if not isinstance(text, Mapping) or "model_type" not in text or not isinstance(called, list):
        return config
    if any(map(TOWERS.search, names)):
        return config
    more = {k: config[k] for k in OF_THE_WHOLE if k in config and text.get(k) is None}
    more |= {k: config[k] for k in OF_THE_FILES if k in config}
    return {**text, **more, "architectures": [str(a).replace("ForConditionalGeneration", "ForCausalLM") for a in called]}
