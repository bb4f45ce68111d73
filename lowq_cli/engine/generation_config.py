"""The publisher's sampling settings, from generation_config.json: flags override them, and they override the defaults."""

from collections.abc import Mapping
from typing import Any

from lowq_cli.engine.sampling import Sampling
from lowq_packers.errors import DamagedError, UsageError

FILE = "generation_config.json"
DRAWING = ("temperature", "top_p", "top_k")
NAMES = (*DRAWING, "repetition_penalty")
GREEDY: Mapping[str, float] = {"temperature": 0.0}
CONVERSATION: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95}  # greedy decoding makes small models repeat themselves
DEFAULTS = {"greedy": GREEDY, "conversation": CONVERSATION}  # by their names in the commands
FLAG, DEFAULT = "given", "default"


def published(model: Any) -> dict[str, Any]:
    """The settings of `Sampling` in the model's generation_config.json; empty without any.

    A file with do_sample, or with temperature, top_p or top_k, asks for sampling, at temperature 1 unless it has another one;
    do_sample false asks for greedy decoding. top_k -1 means off, as in vLLM.
    """
    config = getattr(model, "generation_config", None)
    values = {n: value for n in NAMES if (value := getattr(config, n, None)) is not None}
    sample = getattr(config, "do_sample", None)
    if sample is False:
        return {**{n: value for n, value in values.items() if n not in DRAWING}, **GREEDY}
    if sample or any(n in values for n in DRAWING):
        values.setdefault("temperature", 1.0)
    if values.get("top_k") == -1:
        values["top_k"] = 0
    return values


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings. Raises DamagedError for a setting of generation_config.json that is out of range."""
    try:
        Sampling(**settings)
    except UsageError as e:
        raise DamagedError(f"the model's {FILE} says {e}; correct it there, or give another value") from None
    return dict(settings)


def settle(model: Any, given: Mapping[str, Any], default: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, str]]:
    """(settings of `Sampling`, origin of each): those `given` that are not None, else the publisher's, else the defaults.

    The defaults are used only if the file has no sampling settings at all. `given` has been checked before.
    Raises DamagedError for a value in the file that is out of range and not `given`.
    """
    return settled(published(model), given, default)


def settled(
    file: Mapping[str, Any], given: Mapping[str, Any], default: Mapping[str, float]
) -> tuple[dict[str, Any], dict[str, str]]:
    """As `settle`, from the publisher's settings."""
    flags = {n: value for n, value in given.items() if value is not None}
    below = file if any(n in file for n in DRAWING) else {**default, **file}
    origins = {n: FILE if n in file else DEFAULT for n in below} | dict.fromkeys(flags, FLAG)
    return checked({**below, **flags}), origins


def described(settings: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Sampling settings with their origins, such as "temperature 0.6, top_p 0.9 (generation_config.json)"."""
    groups = {o: [f"{n} {settings[n]:g}" for n in settings if origins.get(n) == o] for o in (FLAG, FILE, DEFAULT)}
    return ", ".join(f"{', '.join(names)} ({origin})" for origin, names in groups.items() if names)
