"""Split the time of a GPU's step over its kernels, from the profiler's timeline.

Kernels overlap (dependent launch), so their durations add up to 1.5 times the step. The time that a kernel adds is measured
from the end of all earlier kernels to its own end; these times and the idle time add up to the step.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the timeline's events
IDLE, EMBEDDING, CHOICE, OTHER = "(nothing running)", "embedding", "choice of a token", "other"
KINDS = {"attend": "attention", "_add_norm": "norms", "_gated": "activation", "route": "router"}
KINDS |= {"_best_kernel": CHOICE, "_choose_kernel": CHOICE}
SMALL = ("at::native", "Memset", "Memcpy", "splitKreduce")  # launches that torch and cuBLAS add


@dataclass(frozen=True)
class Span:
    """A kernel or copy on the device, with its start and end in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class StepPart:
    """The time that one kind of work adds to a step: microseconds and number of launches."""

    what: str
    us: float
    calls: float


def spans(timeline: Path) -> list[Span]:
    """The kernels and copies on the device, in order of their starts, from a file in the profiler's format."""
    events = json.loads(timeline.read_text())["traceEvents"]
    device_spans = [Span(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in ON_DEVICE]
    return sorted(device_spans, key=lambda s: s.start)


def parts(spans: Sequence[Span], steps: int, products: Sequence[str] = ()) -> list[StepPart]:
    """The parts of a step in the order of their first launches, idle time last. They add up to the time of a step.

    Args:
        spans: the kernels of `steps` consecutive steps.
        products: names of a layer's weights in the order of their products, then the head's. Where a step's kernels match
            these, parts are named by their work; otherwise by kernel.
    """
    per_step, rest = divmod(len(spans), steps)
    names = [s.name for s in spans]
    first = 0
    if not rest and steps > 1:  # leave out the first step: no kernel ran before it
        first = per_step
        names = (roles(names[:per_step], products) or names[:per_step]) * steps
        steps -= 1
    us, calls = dict.fromkeys(names[first:], 0.0), dict.fromkeys(names[first:], 0)
    us[IDLE] = 0.0
    over = max((s.end for s in spans[:first]), default=spans[0].start if spans else 0.0)
    for name, s in zip(names[first:], spans[first:], strict=True):
        us[IDLE] += max(0.0, s.start - over)
        us[name] += max(0.0, s.end - max(over, s.start))
        calls[name] += 1
        over = max(over, s.end)
    return [StepPart(name, t / steps, calls.get(name, 0) / steps) for name, t in us.items()]


def roles(names: Sequence[str], products: Sequence[str]) -> list[str] | None:
    """The work of each kernel of a step, for a model whose layers have attention and, between two attentions, all products.

    None where the kernels do not match that.
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
