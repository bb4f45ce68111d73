"""lowq tune: measure every kernel for this checkpoint's shapes on this machine and save the fastest ones in the checkpoint."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowq_cli import console
from lowq_cli.commands import EXIT_INTERRUPTED, AsJson, Device, checkpoint_argument

if TYPE_CHECKING:
    from lowq_cli.files.checkpoint import Checkpoint
    from lowq_cli.tuning.tuner import Steps
    from lowq_kernels.dispatch.measure import Budget
    from lowq_kernels.dispatch.tuning_file import Entry

EXAMPLES = """Examples:
  lowq tune
  lowq tune my-model-lowq-4b-g64 --batch 1,8,32
  lowq tune --budget 600 --exhaustive
  lowq generate --prompt Hi --explain   (shows the tuned kernels in use)"""


def tune(
    checkpoint: Annotated[str | None, checkpoint_argument("Checkpoint folder.")] = None,
    batch: Annotated[str, typer.Option(metavar="1,2,4,...", help="Rows per product: sequences decoded at once.")] = (
        "1,2,4,8,16,32,64"
    ),
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Stop after this long and keep the results.")] = 75.0,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Also time configs that the cost model rules out.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Time all kernels on this checkpoint's shapes; the winners go into its lowq_tune.json. Ctrl-C keeps those so far."""
    from lowq_cli import state
    from lowq_packers.errors import UsageError

    with console.status("starting"):
        import torch

        from lowq_cli.devices import pick_device
        from lowq_cli.engine.open_model import build_kernels, threads
        from lowq_cli.generation.statistics import count
        from lowq_cli.memory import others_at_work
        from lowq_cli.tuning import tuner, tuning_plan
        from lowq_kernels.dispatch import measure, tuning_file

    batches = tuner.parse_batches(batch)
    if not 0 < budget < float("inf"):
        raise UsageError(f"--budget {budget:g} is not a positive number of seconds")
    opened = tuning_plan.open_packed(state.checkpoint_or_last(checkpoint))
    where = pick_device(device)
    if where.type == "cpu":
        torch.set_num_threads(threads())  # as in generate: entries are valid for one number of threads
    shapes = tuning_plan.shapes_of(opened, tuner.compute_dtype(opened, where))
    if not shapes:
        raise UsageError(f"{opened.folder} holds no quantized weight; quantize with --bits 4")
    tuner.check_folder(opened.folder)
    if where.type == "cpu":
        build_kernels()  # before the clock starts: otherwise the build would use up the budget
    here, clock = tuning_file.Machine.here(where), measure.Budget(budget)
    per_shape = len(batches)
    what = f"{count(len(shapes), 'shape')} for {count(len(batches), 'batch size')}"
    console.say(f"tuning {what} on {here.gpu}; at most {console.duration(budget)}")
    if busy := others_at_work():
        console.warn(f"other programs keep the processors busy ({busy}): a quiet machine gives more exact times")
    entries: dict[tuple[object, ...], Entry] = {}  # keyed by call: a repeated measurement replaces an implausible time
    on_gpu = where.type == "cuda"
    alone = clock
    stopped = ""
    try:
        with console.progress("compile", 1000) as advance:
            tuner.compile_candidates(
                shapes, batches, where, exhaustive, lambda n, of: advance(1000 * n // of, f"{n} of {of} kernels")
            )
        alone = tuner.for_kernels(clock) if on_gpu else clock
        with console.progress("measure", len(shapes) * per_shape) as advance:
            for shape, e in tuner.measure_all(shapes, batches, where, alone, exhaustive):
                entries[(*e.place, e.M)] = e
                position = shapes.index(shape) * per_shape + batches.index(e.M) + 1
                advance(position, f"{shape.N}x{shape.K} M={e.M}: {e.kernel} {e.us:.1f} us")
        if not alone.left and not on_gpu:
            stopped = f"the budget of {console.duration(budget)} is used up"
    except KeyboardInterrupt:
        stopped = "interrupted"
    if not entries and stopped == "interrupted":
        raise KeyboardInterrupt("nothing was measured yet")
    if not entries:
        if not alone.left:
            way_out = f"try --budget {2 * budget:g}" + ("; compiled kernels are kept" if on_gpu else "")
            raise UsageError(f"nothing measured: the budget of {console.duration(budget)} is used up; {way_out}")
        raise UsageError("nothing measured: no kernel takes these shapes here")
    chosen = list(entries.values())
    if on_gpu and not stopped:
        chosen, stopped = race_batches(tuner.Steps(opened.folder, where), batches, chosen, clock)
    if not on_gpu and stopped != "interrupted":
        chosen = _unless_slower(opened, where, chosen, batches)
    path = tuner.save(opened.folder, where, chosen)
    winners, lost = tuner.taken(chosen)
    if winners:
        report(winners, as_json)
    for line in [*lost, *tuner.crossovers(chosen)]:
        console.say(line)
    for name, why in sorted(measure.failed.items()):
        console.say(f"skipped: {name}: {why.splitlines()[0][:160]}")
    if stopped:
        console.say(f"{stopped}; results until then are kept")
    console.say(f"wrote {len(chosen)} entries to {path} in {console.duration(clock.spent)}")
    if stopped != "interrupted":
        console.say(f"next: lowq generate{f' {state.as_argument(checkpoint)}' if checkpoint else ''} --prompt 'Hello'")
    if as_json:
        result: dict[str, Any] = {"gpu": here.gpu, "entries": len(chosen), "seconds": round(clock.spent, 1)}
        console.out_json(result | {"file": str(path), "complete": not stopped})
    if stopped == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)


def _unless_slower(opened: "Checkpoint", where: Any, chosen: "list[Entry]", batches: "Sequence[int]") -> "list[Entry]":
    """The entries, or none if whole steps, timed in turn with and without them, are slower with them; prints the times."""
    from lowq_cli.tuning import trial

    if not trial.fits(opened.nbytes):
        console.say("two models do not fit into memory, so whole steps with and without the entries were not compared")
        return chosen
    with console.status("whole steps with and without the entries"):
        trials = trial.race(opened.folder, where, chosen, batches)
    for t in trials:
        console.say(f"batch {t.M}: {t.plain_us / 1e3:.2f} ms a step without the entries, {t.tuned_us / 1e3:.2f} with them")
    faster = trial.kept(chosen, trials)
    if chosen and not faster:
        console.warn("steps are slower with the entries, so none is kept: dispatch chooses as without tuning")
    return faster


def race_batches(
    steps: "Steps", batches: "Sequence[int]", entries: "Sequence[Entry]", clock: "Budget"
) -> "tuple[list[Entry], str]":
    """(entries to keep, why timing ended early or ""): batch sizes not timed in whole steps keep dispatch's own choice."""
    if steps.reason:
        console.say(f"kernels were timed alone, not in whole decode steps: {steps.reason}")
        return list(entries), ""
    raced: list[Entry] = []
    waiting, stopped = list(batches), ""
    try:
        with console.progress("whole steps", len(batches)) as advance:
            while waiting and clock.left:
                winners, before, after = steps.race(waiting[0], entries, lambda: clock.left)
                raced += winners
                M = waiting.pop(0)
                text = f"{before / 1e3:.3f} ms a step, {after / 1e3:.3f} with the winners in place"
                advance(batches.index(M) + 1, f"batch {M}: {text}")
    except KeyboardInterrupt:
        stopped = "interrupted"
    if waiting:
        missed = ", ".join(map(str, waiting))
        console.say(f"not timed in whole steps, so without an entry: batch {missed}; tune --batch {missed.replace(', ', ',')}")
    return raced, stopped


def report(entries: "Sequence[Entry]", as_json: bool) -> None:
    """The winners of each shape, a row for each run of batch sizes that differ in nothing but their times."""

    def row_of(e: "Entry") -> tuple[str, ...]:
        second = e.runners_up[0] if e.runners_up else None
        behind = f"{second['kernel']} {100 * (second['us'] / e.us - 1):+.0f}%" if second else ""
        scheme = f"{e.bits}-bit g{e.group}" + (f", {e.act} x" if e.act != "none" else "")
        return f"{e.N}x{e.K}", scheme, e.layout, e.kernel, behind

    rows = []
    for (shape, scheme, layout, kernel, behind), run in groupby(
        sorted(entries, key=lambda e: (-e.N * e.K, e.N, e.layout, e.act, e.M)), row_of
    ):
        first, *others = run
        last = others[-1] if others else None
        M, us = str(first.M), f"{first.us:.1f}"
        rows.append(
            (shape, scheme, layout, f"{M} to {last.M}", kernel, f"{us} to {last.us:.1f}", behind)
            if last
            else (shape, scheme, layout, M, kernel, us, behind)
        )
    columns = ("shape", "scheme", "layout", ">M", "kernel", ">us", "next")
    end = None if any(row[-1] for row in rows) else -1  # drop an empty last column
    console.table("", columns[:end], [row[:end] for row in rows], on_stdout=not as_json, spare=("layout",))
    if end and len({e.kernel for e in entries}) == 1:
        console.say(f"only {entries[0].kernel} computes these shapes here: there was nothing to choose")
