"""How a model's publisher has it sampled: its generation_config.json, which flags override and which overrides a default."""

from collections.abc import Mapping
from typing import Any

from lowq_cli.engine.sampling import Sampling
from lowq_packers.errors import DamagedError, UsageError

FILE = "generation_config.json"
DRAWING = ("temperature", "top_p", "top_k")
NAMES = (*DRAWING, "repetition_penalty")
GREEDY: Mapping[str, float] = {"temperature": 0.0}
CONVERSATION: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95}  # the likeliest tokens alone make small models repeat
DEFAULTS = {"greedy": GREEDY, "conversation": CONVERSATION}  # by what commands call them
FLAG, DEFAULT = "given", "default"


def published(model: Any) -> dict[str, Any]:
    """The settings of `Sampling` that the model's generation_config.json names; empty where it names none.

    A file that says do_sample, or any of temperature, top_p and top_k, asks for sampling, at temperature 1 where it names
    no other; do_sample false asks for the likeliest token. top_k -1 is "off" in vLLM's words.
    """
    config = getattr(model, "generation_config", None)
    found = {n: value for n in NAMES if (value := getattr(config, n, None)) is not None}
    sample = getattr(config, "do_sample", None)
    if sample is False:
        return {**{n: value for n, value in found.items() if n not in DRAWING}, **GREEDY}
    if sample or any(n in found for n in DRAWING):
        found.setdefault("temperature", 1.0)
    if found.get("top_k") == -1:
        found["top_k"] = 0
    return found


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as they are. Raises DamagedError for one out of its range, which generation_config.json names."""
    try:
        Sampling(**settings)
    except UsageError as e:
        raise DamagedError(f"the model's {FILE} says {e}; correct it there, or give another value") from None
    return dict(settings)


def settle(model: Any, given: Mapping[str, Any], default: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, str]]:
    """(settings of `Sampling`, where each came from): `given` ones that are not None, else the publisher's, else the default.

    A default counts as a whole: where the file says how to draw, none of it is taken. `given` was checked before.
    Raises DamagedError where the file names a value out of range that is not `given`.
    """
    return settled(published(model), given, default)


def settled(
    file: Mapping[str, Any], given: Mapping[str, Any], default: Mapping[str, float]
) -> tuple[dict[str, Any], dict[str, str]]:
    """As `settle`, from what is published."""
    flags = {n: value for n, value in given.items() if value is not None}
    below = file if any(n in file for n in DRAWING) else {**default, **file}
    origins = {n: FILE if n in file else DEFAULT for n in below} | dict.fromkeys(flags, FLAG)
    return checked({**below, **flags}), origins


def described(settings: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Settings that draw, with where they came from: "temperature 0.6, top_p 0.9 (generation_config.json)"."""
    groups = {o: [f"{n} {settings[n]:g}" for n in settings if origins.get(n) == o] for o in (FLAG, FILE, DEFAULT)}
    return ", ".join(f"{', '.join(names)} ({origin})" for origin, names in groups.items() if names)
