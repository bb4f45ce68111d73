"""Tensors that are made once and stay, as recorded CUDA graphs hold their addresses: scratch memory, row numbers, ones.

What is made while a graph is recorded lies in memory that graphs share. One that was recorded earlier may write there whenever
it is replayed, and only replays of the graph that is recorded now fill it. So a recording keeps nothing of what it makes: each
of its replays fills the tensor again, and nobody else reads it.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Key = TypeVar("Key")
Made = TypeVar("Made")


def recording() -> bool:
    """Whether a CUDA graph is recorded on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def kept(held: dict[Key, Made], key: Key, make: Callable[[], Made]) -> Made:
    """held[key], made where it is missing; kept there unless a graph is recorded."""
    found = held.get(key)
    if found is None:
        found = make()
        if not recording():
            held[key] = found
    return found


def lasting(make: Callable[..., Made]) -> Callable[..., Made]:
    """As `functools.cache`, for a function that makes tensors: see `kept`. Its arguments are given by place."""
    held = dict[tuple[Any, ...], Made]()

    @wraps(make)
    def found(*key: Any) -> Made:
        return kept(held, key, lambda: make(*key))

    return found
