"""Which engine serves a model: the fastest that can, with the reason why the ones before it could not."""

from typing import Any

from lowq_cli.serving import continuous
from lowq_cli.serving.request import Engine
from lowq_cli.serving.sequential import SequentialEngine
from lowq_kernels.decode.kv import PLAIN

WAITING = 512  # requests in the queue


def engine_of(model: Any, waiting: int = WAITING, kv: str = PLAIN, **how: Any) -> Engine:
    """The engine for this model on its device, not started yet; `how`: what ContinuousEngine takes besides."""
    if reason := continuous.why_not(model):
        return SequentialEngine(model, waiting, reason, kv, how.get("cache_bytes"))
    return continuous.ContinuousEngine(model, waiting, kv=kv, **how)
