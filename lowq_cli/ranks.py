"""Which process of how many this is, as torchrun says in the environment. Imports nothing."""

import os


def world() -> int:
    """Processes that share the model; 1 outside torchrun."""
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """This process's place among them, from 0."""
    return _number("RANK", 0)


def _number(name: str, otherwise: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else otherwise
