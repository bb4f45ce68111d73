"""The output of a run for the user: the plan, then progress and a line per layer."""

import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from lowq_cli import console, quantizers
from lowq_cli.memory import others_at_work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lowq_cli.calibrate.mixed import Allocation
    from lowq_cli.plan.plan import Plan
    from lowq_cli.run.budget import Budget
    from lowq_cli.run.events import Event, LayerDone, Result
    from lowq_cli.run.prepare import Prepared, Watch

FEW_BITS = 3  # max. bits at which calibration halves the loss of quantization (docs/accuracy.md)
BAR = "#"
EMBEDDING_BITS = 8.5  # bits per weight of an 8-bit embedding with a scale and zero per 64 weights
MUCH = 0.2  # a 16-bit embedding that takes a larger share of the file gets a hint
STEPS = 1000  # length of a progress bar that is shown before the number of steps is known


@contextmanager
def preparing(model: str) -> "Iterator[Watch]":
    """Show what `prepare` does before there is a plan: yields its `watch`, which shows a progress bar per phase."""
    with ExitStack() as shown:
        shown.enter_context(console.status(f"reading {model}"))
        phase, advance = "", None

        def watch(name: str, done: int, total: int, line: str = "") -> None:
            nonlocal phase, advance
            if advance is None or name != phase:
                shown.close()
                phase, advance = name, shown.enter_context(console.progress(name, STEPS))
            advance(STEPS * done // total, line or f"{done} of {total} layers")

        yield watch


def show_plan(prepared: "Prepared", on_stdout: bool = False) -> None:
    """Print the plan before the work starts: the table of classes, then totals, budget, notes and warnings.

    on_stdout: whether the plan is the result of the command.
    """
    plan, budget = prepared.plan, prepared.budget
    say = console.out_line if on_stdout else console.say
    rows = [
        (c.kind, c.tensors, f"{c.params / 1e6:,.1f} M", ", ".join(c.schemes), f"{c.bits:.2f}", console.size(c.nbytes))
        for c in plan.classes
    ]
    columns = ("weights", ">tensors", ">parameters", "scheme", ">bits each", ">size")
    console.table(f"{plan.source} -> {prepared.out}", columns, rows, on_stdout=on_stdout)
    say(
        f"{plan.coverage:.1%} of {plan.params / 1e6:,.1f} M parameters quantized; {console.size(plan.source_bytes)} -> "
        f"{console.size(plan.nbytes)}, {plan.bpw:.2f} bits per weight ({plan.quantized_bpw:.2f} where quantized)"
    )
    methods = Counter(i.method for i in plan.items if i.method)
    by = ", ".join(f"{method} ({n})" if len(methods) > 1 else str(method) for method, n in methods.most_common())
    where = ", ".join(map(str, prepared.devices))
    say(f"{f'by {by}, ' if by else ''}{budget_line(where, budget)}")
    if prepared.mixed:
        _show_mixed(prepared.mixed, on_stdout)
    if prepared.bound:
        say(prepared.bound.summary)
    if plan.recipe.act != "none":
        but = ", but not in experts" if any(c.kind == "expert" for c in plan.classes) else ""
        say(f"note: linear layers will round their inputs to {plan.recipe.act} while running{but}")
    for note in (*plan.notes, *_kept_embedding(plan)):
        say(f"note: {note}")
    for warning in plan.warnings:
        console.warn(warning)
    from lowq_cli.plan.recipe import NOT_CALIBRATED

    few = (i for i in plan.items if i.scheme and i.scheme.bits <= FEW_BITS and i.kind not in NOT_CALIBRATED)
    if any(i.method and not quantizers.needs_text(i.method) for i in few):
        say(f"hint: --method {quantizers.ADVISED} reads a calibration text; far more accurate at 3 bits and fewer (slower)")


def budget_line(where: str, budget: "Budget") -> str:
    """On which devices a run works, how long it takes, and how much memory it needs."""
    time = "" if budget.seconds is None else f", {time_line(budget.seconds, budget.within)}"
    available = "" if budget.available_bytes is None else f" of {console.size(budget.available_bytes)} available"
    return f"on {where}{time}, peak memory about {console.size(budget.peak_bytes)}{available}"


def time_line(seconds: float, within: int = 1) -> str:
    """How long a run takes, and whether other programs disturb it. within: it may take this factor longer or shorter."""
    busy = others_at_work()
    line = f"about {console.duration(seconds)}{f' (within {within}x)' if within > 1 else ''}"
    return f"{line} on a quiet machine; this one is not ({busy})" if busy else line


def _kept_embedding(plan: "Plan") -> "Iterator[str]":
    """A hint how to quantize a tied embedding, if it stays in 16 bits and takes much of the file."""
    table = next((i for i in plan.items if i.kind == "embedding" and not i.scheme), None)
    if table is None or plan.recipe.skip or plan.recipe.in_blocks or any(i.kind == "head" for i in plan.items):
        return
    share, smaller = table.nbytes / plan.nbytes, table.params * EMBEDDING_BITS / 8
    if share > MUCH:
        bpw = 8 * (plan.nbytes - table.nbytes + smaller) / plan.params
        yield (
            f"the embedding, which is the output head too, stays {8 * table.nbytes // table.params}-bit and is {share:.0%} of "
            f"the file; --embedding 8 would make the whole {bpw:.2f} bits per weight"
        )


def _show_mixed(mixed: "Allocation", on_stdout: bool) -> None:
    """Print the number of groups and weights of each scheme, and the expected loss."""
    params = sum(s.params for s in mixed.shares)
    rows = [(scheme, groups, f"{100 * n / params:.1f}%", BAR * round(40 * n / params)) for scheme, groups, n in mixed.histogram]
    console.table("bits where they matter most", ("scheme", ">groups", ">weights", ""), rows, on_stdout=on_stdout)
    expected = f"expected KL divergence from the original {mixed.error:.4f} nats per token"
    by_weights = f"by the errors of the weights alone, because {mixed.why_not_nats}"
    say = console.out_line if on_stdout else console.say
    say(f"{mixed.bpw:.3f} bits per weight over {len(mixed.shares)} groups; {expected if mixed.in_nats else by_weights}")


def follow(events: "Iterator[Event]", plan: "Plan") -> "Result":
    """Show the run's progress, with a line per calibrated layer, and return the result. Ctrl-C prints how to resume."""
    try:
        return _follow(events, plan)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command again to continue") from None


def _follow(events: "Iterator[Event]", plan: "Plan") -> "Result":
    from lowq_cli.calibrate.requirements import is_calibrated
    from lowq_cli.run.events import Finished, TensorDone

    if is_calibrated(plan):
        events = follow_calibration(events)
    with console.progress("quantize", plan.params) as advance:
        for event in events:
            if isinstance(event, TensorDone):
                error = "kept" if event.rel_error is None else f"error {event.rel_error:.4f}"
                advance(event.params_done, f"{event.index}/{event.total} {event.name} {error}")
            elif isinstance(event, Finished):
                return event.result
    raise AssertionError("a run ends with Finished")


def follow_calibration(events: "Iterator[Event]") -> "Iterator[Event]":
    """Show the generation of the text and the calibration of each layer; yields the events that follow."""
    from lowq_cli.run.events import CurvatureDone, LayerDone, MatrixDone, PassDone, TextStep

    shown, what = set[str](), "what errors of each layer's outputs cost"
    begun = _follow_first(time.monotonic(), events, TextStep, "write", lambda e: (e.tokens, e.line))
    began, events = _follow_first(*begun, CurvatureDone, "measure", lambda e: (e.index, f"{e.index:,} of {e.total:,}: {what}"))
    with console.progress("calibrate", STEPS, began) as advance:
        for event in events:
            if isinstance(event, MatrixDone):
                advance(STEPS * event.index // event.total, f"{event.index}/{event.total} {event.name}")
            elif isinstance(event, LayerDone):
                _show_layer(event, shown)
            elif isinstance(event, PassDone):
                told_of = f"pass {event.index} of {event.total}" + (f", part {event.part} of the text" if event.part else "")
                console.say(f"learnt together, {told_of}: {event.loss:.4f} nats from the original")
            else:
                return chain([event], events)
    return iter(())


Begun = tuple[float, "Iterator[Event]"]  # when the work on the next event began, by the monotonic clock; the events


def _follow_first(
    began: float, events: "Iterator[Event]", kind: type[Any], title: str, shown: "Callable[[Any], tuple[int, str]]"
) -> Begun:
    """Show the leading events of one kind on a progress bar; returns the rest. shown: event -> (progress, its line)."""
    first: Any = next(events, None)
    if isinstance(first, kind):
        with console.progress(title, first.total, began) as advance:
            while isinstance(first, kind):
                advance(*shown(first))
                began, first = time.monotonic(), next(events, None)
    return began, events if first is None else chain([first], events)


def _show_layer(layer: "LayerDone", shown: set[str]) -> None:
    """Print a calibrated layer's error and its problems, except those in `shown`, which another layer has reported."""
    if layer.resumed:
        console.say(f"layer {layer.index} of {layer.total} was calibrated before")
    else:
        before = "" if layer.before is None else f"{layer.before:.4f} -> "
        console.say(f"calibrated layer {layer.index} of {layer.total}: output error {before}{layer.error:.4f}")
    for name, note in layer.notes.items():
        console.say(f"note: {name}: {note}")
    for place in layer.unscaled:
        if place not in shown:
            console.say(f"note: the inputs of {place} are not scaled: no earlier operation can absorb the factor exactly")
            shown.add(place)
