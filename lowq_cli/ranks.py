"""Rank and number of processes, from torchrun's environment variables. Imports nothing heavy."""

import os


def world() -> int:
    """Number of processes that share the model; 1 outside torchrun."""
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """Rank of this process, from 0."""
    return _number("RANK", 0)


def _number(name: str, otherwise: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else otherwise
