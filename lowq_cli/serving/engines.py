"""Choose the engine for a model: the fastest that can serve it, with the reason why no faster one can."""

from typing import Any

from lowq_cli.serving import continuous
from lowq_cli.serving.request import Engine
from lowq_cli.serving.sequential import SequentialEngine
from lowq_kernels.decode.kv import PLAIN

WAITING = 512  # default limit of requests in the queue


def engine_of(model: Any, waiting: int = WAITING, kv: str = PLAIN, **how: Any) -> Engine:
    """Return the engine for this model on its device, not started yet; `how`: further arguments of ContinuousEngine."""
    if reason := continuous.why_not(model):
        return SequentialEngine(model, waiting, reason, kv, how.get("cache_bytes"))
    return continuous.ContinuousEngine(model, waiting, kv=kv, **how)
