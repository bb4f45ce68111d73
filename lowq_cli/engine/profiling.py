"""Where the time of a decode step goes: microseconds per kernel, and a timeline that Perfetto (ui.perfetto.dev) shows."""

import time
from pathlib import Path
from typing import Any

import torch

from lowq_cli.engine.sampling import Sampling
from lowq_packers.errors import UsageError

STEPS = 8  # profiled, after as many to warm up


def profile_steps(decoder: Any, prompts: list[list[int]], sampling: Sampling, timeline: Path) -> list[tuple[str, float, float]]:
    """(kernel or operator, microseconds a step, calls a step), the most first; the last row is what none of them covers.

    Reads the prompts again and decodes a few tokens. On a GPU the rows are its kernels; with dependent launch they overlap,
    and a kernel's time holds its wait for the one before it. On the CPU they are torch's operators. The timeline is written
    to `timeline`. Raises UsageError where that cannot be written.
    """
    from torch.profiler import ProfilerActivity, profile

    on_gpu = decoder.device.type == "cuda"
    decoder.start(prompts, sampling, 2 * STEPS + 2)
    for _ in range(STEPS):
        decoder.step()
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    wait()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as found:
        start = time.perf_counter()
        for _ in range(STEPS):
            decoder.step()
        wait()
        wall_us = (time.perf_counter() - start) * 1e6 / STEPS
    try:
        timeline.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(timeline))
    except (OSError, RuntimeError) as e:
        raise UsageError(f"the timeline {timeline} cannot be written: {e}") from None
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = [(e.key, getattr(e, field) / STEPS, e.count / STEPS) for e in found.key_averages() if getattr(e, field) > 0]
    rows.sort(key=lambda row: -row[1])
    return [*rows, ("(a step, by the clock)", wall_us, 1.0)]
