"""Run a few steps under torch's profiler: the time of each part, and a timeline for Perfetto (ui.perfetto.dev)."""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from lowq_cli.engine import timeline as lines
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.stream import Decoder
from lowq_cli.engine.timeline import StepPart
from lowq_packers.atomic import scratch
from lowq_packers.errors import UsageError

STEPS = 8  # profiled steps, after as many warm-up steps
WHOLE, BETWEEN = "(a step)", "(between operators)"
QUIET = "99"  # above level 5, the profiler's library does not log its starts and stops to stderr


def profile_steps(
    decoder: Decoder, prompts: list[list[int]], sampling: Sampling, timeline: Path, products: Sequence[str] = ()
) -> list[StepPart]:
    """The parts of a step with their times; the last entry is the whole step. The timeline is written to `timeline`.

    It reads the prompts again and decodes a few tokens. On a GPU the entries are the step's work in order, from
    `timeline.parts` for these `products`, and add up to the step. On the CPU they are torch's operators and the time between
    them, mostly Python, the longest first; the whole is measured by the clock. Raises UsageError if the timeline cannot be
    written.
    """
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    on_gpu = decoder.device.type == "cuda"
    decoder.start(prompts, sampling, 2 * STEPS + 2)
    for _ in range(STEPS):
        decoder.step()
    wait = torch.cuda.current_stream(decoder.device).synchronize if on_gpu else (lambda: None)
    wait()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as profiler:
        start = time.perf_counter()
        for _ in range(STEPS):
            decoder.step()
        wait()
        wall_us = (time.perf_counter() - start) * 1e6 / STEPS
    _write(profiler, timeline)
    if on_gpu:
        rows = lines.parts(lines.spans(timeline), STEPS, products)
        return [*rows, StepPart(WHOLE, sum(r.us for r in rows), 1.0)]
    averages = [e for e in profiler.key_averages() if e.self_cpu_time_total > 0]
    rows = [StepPart(e.key, e.self_cpu_time_total / STEPS, e.count / STEPS) for e in averages]
    rows.append(StepPart(BETWEEN, max(0.0, wall_us - sum(r.us for r in rows)), 0.0))
    return [*sorted(rows, key=lambda r: -r.us), StepPart(WHOLE, wall_us, 1.0)]


def _write(profile: Any, timeline: Path) -> None:
    """Write the profiler's timeline completely or not at all: on a full disk the library silently writes only a part."""
    with ExitStack() as stack:
        try:
            timeline.parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(scratch(timeline.parent, ".lowq-timeline"))
        except OSError as e:
            raise UsageError(f"the timeline {timeline} cannot be written: {e.strerror}") from None
        try:
            profile.export_chrome_trace(f"{folder}/{timeline.name}")
            os.replace(f"{folder}/{timeline.name}", timeline)
        except (OSError, RuntimeError) as e:
            why = "is the disk full?" if isinstance(e, FileNotFoundError) else e
            raise UsageError(f"the timeline {timeline} cannot be written: {why}") from None
