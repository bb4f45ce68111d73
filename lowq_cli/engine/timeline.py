"""Where the microseconds of a GPU's step go: the profiler's timeline, read as one kernel after the other.

Kernels overlap (dependent launch), so their own times add up to half as much again as the step. What a kernel adds is the time
from when everything before it has ended to its own end; that, and the time in which nothing ran, adds up to the step.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the timeline's events
IDLE, EMBEDDING, CHOICE, OTHER = "(nothing running)", "embedding", "choice of a token", "other"
KINDS = {"attend": "attention", "_add_norm": "norms", "_gated": "activation", "route": "router"}
KINDS |= {"_best_kernel": CHOICE, "_choose_kernel": CHOICE}
SMALL = ("at::native", "Memset", "Memcpy", "splitKreduce")  # what torch and cuBLAS add


@dataclass(frozen=True)
class Span:
    """A kernel (or copy) on the device, from start to end, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class StepPart:
    """What one kind of work adds to a step: microseconds, in how many launches."""

    what: str
    us: float
    calls: float


def spans(timeline: Path) -> list[Span]:
    """What ran on the device, in the order it started, from a file in the profiler's format."""
    events = json.loads(timeline.read_text())["traceEvents"]
    found = [Span(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in ON_DEVICE]
    return sorted(found, key=lambda s: s.start)


def parts(found: Sequence[Span], steps: int, products: Sequence[str] = ()) -> list[StepPart]:
    """What a step consists of, in the order of its first launches, idle time last. Parts add up to the time of a step.

    Args:
        found: `steps` steps, one after the other.
        products: names of a layer's weights in the order of their products, then the head's. Where the kernels of a step fit
            these, parts are named by what is done; else by kernel.
    """
    per_step, rest = divmod(len(found), steps)
    names = [s.name for s in found]
    first = 0
    if not rest and steps > 1:  # the first step's beginning has nothing before it
        first = per_step
        names = (roles(names[:per_step], products) or names[:per_step]) * steps
        steps -= 1
    us, calls = dict.fromkeys(names[first:], 0.0), dict.fromkeys(names[first:], 0)
    us[IDLE] = 0.0
    over = max((s.end for s in found[:first]), default=found[0].start if found else 0.0)
    for name, s in zip(names[first:], found[first:], strict=True):
        us[IDLE] += max(0.0, s.start - over)
        us[name] += max(0.0, s.end - max(over, s.start))
        calls[name] += 1
        over = max(over, s.end)
    return [StepPart(name, t / steps, calls.get(name, 0) / steps) for name, t in us.items()]


def roles(names: Sequence[str], products: Sequence[str]) -> list[str] | None:
    """What each kernel of a step does, for a model of layers: attention, and between two of them one product a weight.

    None where the kernels are not so.
    """
    *body, head = products or ("",)
    kinds = [next((kind for part, kind in KINDS.items() if part in name), None) for name in names]
    small = [kind is None and any(part in name for part in SMALL) for name, kind in zip(names, kinds, strict=True)]
    at = [i for i, kind in enumerate(kinds) if kind is None and not small[i]]
    layers = kinds.count("attention")
    if not layers or len(at) != len(body) * layers + 1 or any(kinds[i + 1 :].count("attention") for i in at[-1:]):
        return None
    named = dict(zip(at, [*body * layers, head], strict=True))

    def said(i: int) -> str:
        if kind := named.get(i) or kinds[i]:
            return kind
        return EMBEDDING if i < at[0] else CHOICE if i > at[-1] else OTHER

    return [said(i) for i in range(len(names))]
