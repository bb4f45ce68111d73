"""The end of a new family's file: `python tests/families/start.py olmo` prints what its config class fills in.

Delete the fields that the family's function does not read; `hidden_size` and its like stand in `sizes` alone.
"""

import sys
import textwrap

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lowq_packers.arch import SIZES

UNUSED = ("initializer_range", "use_cache", "pad_token_id", "bos_token_id", "rope_parameters")  # they shape no logits
TRAINING = ("dropout", "aux_loss", "output_", "jitter", "pretraining_tp")  # parts of names of fields that only training reads


def printed(model_type: str) -> str:
    """DEFAULTS and FAMILIES of a model_type that transformers has."""
    cls = CONFIG_MAPPING[model_type]
    names = [n for base in reversed(cls.__mro__[: cls.__mro__.index(PreTrainedConfig)]) for n in base.__annotations__]
    fields = {n: getattr(cls, n) for n in dict.fromkeys(names) if not n.startswith("_") and hasattr(cls, n)}
    useful = {n: v for n, v in fields.items() if n not in UNUSED and not any(part in n for part in TRAINING)}
    given = {n: v for n, v in useful.items() if n not in SIZES and not isinstance(v, property)}
    text = textwrap.fill(", ".join(f'"{n}": {v!r}' for n, v in given.items()), 120).replace("'", '"')
    theta = f", {cls.default_theta}" if cls.default_theta != 10000.0 else ""
    sizes = tuple(fields.get(n) for n in SIZES)
    family = f'Family("{model_type}", {model_type}, DEFAULTS{theta}, sizes={sizes})'
    return f"DEFAULTS = {{\n{textwrap.indent(text, '    ')},\n}}  # fmt: skip\nFAMILIES = ({family},)"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(printed(name))
