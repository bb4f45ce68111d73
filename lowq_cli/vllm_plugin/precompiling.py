"""Compile what vLLM is going to capture before it measures memory and records, several kernels at a time.

It launches each captured batch size, one after the other, while it records; kernels that are not in the cache on disk would be
compiled then, one by one.
"""

from collections.abc import Callable
from functools import partial

import torch
from vllm.config import get_current_vllm_config

from lowq_kernels.dispatch.precompile import launch_all

PROMPTS = (300, 600, 768, 1024, 1536, 2048, 3072, 4096, 6144)  # tokens of a pass that reads prompts: a few that stand for all

_met: set[object] = set()


def warm(key: object, launch: Callable[[int], object], device: torch.device) -> None:
    """Launch for each number of rows that the engine will: once for a key, which says what the kernels depend on."""
    if device.type != "cuda" or key in _met:
        return
    _met.add(key)
    config = get_current_vllm_config()
    captured, most = config.compilation_config.cudagraph_capture_sizes or [1], config.scheduler_config.max_num_batched_tokens
    rows = {*captured, most, *(n for n in PROMPTS if n < most)}
    launch_all([partial(launch, n) for n in sorted(rows)], lambda done, of: None)
    torch.cuda.synchronize(device)
