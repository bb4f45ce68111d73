"""Draft heads as descriptions: small models that guess further tokens from the hidden states of a large one, the target.

There is one file per published kind: it turns a config and the names and shapes of tensors into a `Head`, without torch. Names
are those of the kind's modules without publishers' prefixes; `Read.files` maps them to names in files. Unknown kinds and
fields are refused by name, since a head that is read wrongly still gives the right text, only slowly.
"""

from collections.abc import Mapping
from typing import Any

from lowq_packers.arch.common import NotDescribed
from lowq_packers.arch.config import NotPlain
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.heads import assistant, block, eagle3, mtp
from lowq_packers.heads.parts import Read, Shapes, Target

KINDS = (
    "EAGLE-3, P-EAGLE, DFlash, DSpark (their authors' files and speculators'), MTP layers (inside a checkpoint, speculators'), "
    "Gemma 4's assistants"
)
OTHERS = {  # published kinds that are not supported, by their name in config.json
    "dflash2draftmodel": "DFlash2", "domino": "Domino", "medusa": "Medusa", "hydra": "Hydra",
    "mlp_speculator": "MLP speculators",
    "gemma4_unified_assistant": "Gemma 4 unified assistants", "mtp": "stand-alone MTP files", "eagle": "EAGLE-1 and 2",
}  # fmt: skip


def is_head(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a draft head of any kind."""
    if "speculators_model_type" in config or "eagle_config" in config or "dflash_config" in config:
        return True
    names = [name.lower() for name in _classes(config)]
    marks = ("eagle", "dflash", "dspark", "medusa", "mlpspeculator", "draftmodel", "assistantfor")
    return any(mark in name for name in names for mark in marks) or str(config.get("model_type")) in (*OTHERS, assistant.KIND)


def _classes(config: Mapping[str, Any]) -> list[str]:
    """The class names of a config.json; none where the field is not a list."""
    named = config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def read_head(config: Mapping[str, Any], shapes: Shapes, target: Target) -> Read:
    """The head of a folder. Raises UnsupportedError for a kind that is not supported, DamagedError for missing parts."""
    given = [str(n) for n in (config.get("speculators_model_type"), *_classes(config)) if n]
    given += [name] if (name := str(config.get("model_type"))) in OTHERS else []
    names = [n.lower() for n in given[:1] if "speculators_model_type" in config] or [n.lower() for n in given]
    dflash = config.get("dflash_config")
    projector = (dflash.get("projector_type") if isinstance(dflash, Mapping) else None) or ""
    try:
        if config.get("speculators_model_type") == "mtp":
            return mtp.read_alone(config, shapes, target)
        if config.get("model_type") == assistant.KIND:
            return assistant.read(config, shapes, target)
        for mark, kind in (("eagle3", ""), ("peagle", ""), ("dspark", "DSpark"), ("dflash", "DFlash")):
            if not any(mark in n for n in names) or any(n in OTHERS for n in names):
                continue
            if not kind:
                return eagle3.read(config, shapes, target)
            return block.read(config, shapes, target, "DSpark" if projector == "dspark" else kind)
    except (NotDescribed, NotPlain) as e:
        raise UnsupportedError(f"this draft head is not supported: {e}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise DamagedError(f"config.json of the draft head has a field of another type ({type(e).__name__}: {e})") from e
    kind = next((OTHERS[n] for n in names if n in OTHERS), " or ".join(given) or "unnamed")
    raise UnsupportedError(f"draft heads of the kind {kind} are not supported; supported: {KINDS}")
