"""Compile the kernels of vLLM's graphs in parallel, before vLLM measures memory and records the graphs.

While recording, vLLM launches the captured batch sizes one after another, so kernels that are not in the cache on disk would be
compiled one by one.
"""

from collections.abc import Callable
from functools import partial

import torch
from vllm.config import get_current_vllm_config

from lowq_kernels.dispatch.precompile import launch_all
from lowq_kernels.graphs import wait

PROMPTS = (300, 600, 768, 1024, 1536, 2048, 3072, 4096, 6144)  # token counts of prefill steps that represent all others

_met: set[object] = set()


def warm(key: object, launch: Callable[[int], object], device: torch.device) -> None:
    """Launch for each number of rows that the engine will use; once per key, which contains all that the kernels depend on."""
    if device.type != "cuda" or key in _met:
        return
    _met.add(key)
    config = get_current_vllm_config()
    captured, most = config.compilation_config.cudagraph_capture_sizes or [1], config.scheduler_config.max_num_batched_tokens
    rows = {*captured, most, *(n for n in PROMPTS if n < most)}
    launch_all([partial(launch, n) for n in sorted(rows)], lambda done, of: None)
    wait(device)
