"""The streaming run: `prepare` plans it; `run` reads, quantizes, packs and writes one tensor after another and yields events.

transform.py processes one tensor; `ShardFile.write` (output_folder.py) writes its bytes at positions that the plan gives.

Without a calibrated method no model is built: one slab of one tensor is in memory at a time. A calibrated method first runs
calibrate/calibration.py, layer by layer. After a kill, the same call continues and writes the same
bytes as an uninterrupted run (see output_folder.py). The same input, recipe and kind of device give the same bytes; calibrated
methods also need the same number of threads, because torch splits the sums of their matmuls over threads.
"""

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowq_cli.cached_models import model_path
from lowq_cli.calibrate.requirements import identity
from lowq_cli.calibrate.texts import Text
from lowq_cli.files.safetensors_writer import to_json
from lowq_cli.files.source import CONFIG, REPORT, Source
from lowq_cli.files.weight_files import INDEX
from lowq_cli.plan.plan import Item, Plan, Shard, index_json, output_config
from lowq_cli.plan.planner import SHARD_SIZE
from lowq_cli.plan.recipe import Recipe, make_recipe
from lowq_cli.run import transform
from lowq_cli.run.events import Event, Finished, LayerDone, Result, ShardDone, TensorDone
from lowq_cli.run.output_folder import UNREAD, OutputFolder, ShardFile, check_run, output_names
from lowq_cli.run.prepare import Prepared, prepare
from lowq_cli.run.records import known_result, make_report, result_of
from lowq_cli.state import name_of
from lowq_cli.workers import in_order, on_free_device
from lowq_packers.errors import LowqError, UsageError

if TYPE_CHECKING:
    from lowq_cli.calibrate.calibration import Calibration
    from lowq_cli.run.own_text import Make

FILES_AT_ONCE = {"cpu": 1, "cuda": 4}  # max. output files that workers write into at once
LARGE = 1 << 28  # items of more weights than this are started first, as one worker takes long for each
Task = tuple[Shard, Item, bool]  # output file, item, and whether an earlier run finished it
Outcome = tuple[float | None, list[int]]  # relative error, CRC-32 of each tensor written


def quantize(model: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, **options: Any) -> dict[str, Any]:
    """Quantize a model into a checkpoint folder.

    Args:
        model: a model folder, a hub id, a name of `lowq ls`, or "demo".
        out: the folder to write; by default ./MODEL-lowq-4b-g64.
        options: the keys of a recipe (docs/recipes.md: bits, group, method, zero, overrides, skip, lm_head, dtype, ...), recipe
            (a TOML file or its name), and device, shard_size, fresh (discard what the folder holds).
    Returns:
        out, bpw, bytes, source_bytes, quantized_fraction, seconds, peak_rss_bytes, and more about the run.
    Raises:
        LowqError for every error that the caller can correct.
    """
    names = {f.name for f in fields(Recipe)}
    if isinstance(options.get("dtype"), torch.dtype):
        options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    recipe = make_recipe(options.pop("recipe", None), **{k: options.pop(k) for k in list(options) if k in names})
    known = ("device", "shard_size", "fresh")
    if unknown := [k for k in options if k not in known]:
        raise UsageError(f"quantize has no option {unknown[0]!r}; there are {', '.join(sorted({*names, *known, 'recipe'}))}")
    for event in run(model_path(model), recipe, out, **options):
        if isinstance(event, Finished):
            return event.result.to_json()
    raise AssertionError("a run ends with Finished")


def execute(prepared: Prepared, fresh: bool = False, files_at_once: int | None = None) -> Iterator[Event]:
    """Run what `prepare` planned, inside its block. Yields TextStep, LayerDone, TensorDone and ShardDone, then Finished.

    fresh: discard what lowq wrote into `out` before. files_at_once: output files that several workers write into at once; None
    takes FILES_AT_ONCE. After an interruption, the same call continues. Raises LowqError.
    """
    source, plan, workers = prepared.source, prepared.plan, [torch.device(str(d)) for d in prepared.workers]
    on = workers[0]
    prepared.budget.check(prepared.out)
    companions = [*source.companion_files()]
    if prepared.own and not fresh:
        check_run(prepared.out, run_hash(source, plan, on, None))  # before the minutes that the text takes
    text, plan = yield from text_of(prepared, plan)
    adopted = False
    if prepared.trial:
        from lowq_cli.run import bound  # the judges

        adopted = bound.adopt(prepared.trial, prepared.out)
    name = run_hash(source, plan, on, text)
    calibration = None
    if text:
        from lowq_cli.calibrate.calibration import Calibration  # builds a model with transformers

        calibration = Calibration(source, plan, text, prepared.out, name, on)
    with OutputFolder(prepared.out, name, output_names(plan, companions), fresh) as output:
        if output.already_done:
            result = known_result(plan, output, time.monotonic() - prepared.began)
            yield Finished(replace(result, already_done=not adopted))
            return
        output.log(f"lowq {version('lowq')}: {source.name} -> {prepared.out}, {json.dumps(plan.recipe.to_json())}, {on}")
        try:
            for step in calibration.run() if calibration else ():
                if isinstance(step, LayerDone):
                    output.log(log_line(step))
                yield step
            result = yield from _write(source, plan, output, workers, prepared.began, calibration, files_at_once)
        except BaseException as e:
            with suppress(LowqError):  # a failing log must not hide the reason
                output.log(f"stopped by {type(e).__name__}{f': {e}' if str(e) else ''}; the same command continues")
            raise
    yield Finished(result)


def text_of(prepared: Prepared, plan: Plan) -> Generator[Event, None, tuple[Text | None, Plan]]:
    """The calibration text, and the plan with the text's name; the model's own text is generated first."""
    if not prepared.own:
        return prepared.text, plan
    from lowq_cli.run import own_text  # the decoder

    make = maker(prepared.own.model, str(prepared.workers[0]))
    text = yield from own_text.chosen(prepared.own, make, prepared.source, plan, prepared.given)
    return text, replace(plan, recipe=replace(plan.recipe, calib=text.name))


def run(
    model: str | os.PathLike[str],
    recipe: Recipe,
    out: str | os.PathLike[str] | None = None,
    device: str = "auto",
    shard_size: int = SHARD_SIZE,
    fresh: bool = False,
) -> Iterator[Event]:
    """Call `prepare`, then `execute`. Yields LayerDone, TensorDone and ShardDone, then Finished."""
    make = maker(name_of(model), device, shard_size)
    with prepare(model, recipe, out, device, shard_size, make=make) as prepared:
        yield from execute(prepared, fresh)


def log_line(layer: LayerDone) -> str:
    """The log line of a calibrated layer."""
    done = "calibrated before" if layer.resumed else f"error {layer.error:.4g}, {layer.seconds:.1f} s"
    return f"layer {layer.index} of {layer.total}: {done}"


def maker(model: str, device: str, shard_size: int = SHARD_SIZE) -> "Make":
    """A function that quantizes the model by a recipe into a folder."""

    def make(recipe: Recipe, folder: Path) -> None:
        deque(run(model, recipe, folder, device, shard_size), maxlen=0)

    return make


def run_hash(source: Source, plan: Plan, device: torch.device, text: Text | None) -> str:
    """The hash that names a run: two runs share it only if they write the same bytes. Its first half does not need the text."""
    facts = [version("lowq"), source.identity, plan.fingerprint, device.type]
    name = hashlib.sha256(" ".join(facts).encode()).hexdigest()[:16]
    if calibrated := identity(plan, text):
        name = name[:UNREAD] + hashlib.sha256(" ".join([*facts, calibrated]).encode()).hexdigest()[: 16 - UNREAD]
    return name


def _write(
    source: Source,
    plan: Plan,
    output: OutputFolder,
    devices: Sequence[torch.device],
    start: float,
    calibration: "Calibration | None" = None,
    files_at_once: int | None = None,
) -> Generator[Event, None, Result]:
    """Write all shards, one tensor at a time on each of `devices`; then index, companions, report and, last, config.json."""
    done = params = resumed = 0
    files: dict[str, ShardFile] = {}  # name of a shard -> its file, opened when its first item is drawn
    left = {s.name: len(s.items) for s in plan.shards}
    unfinished = deque(enumerate(plan.shards, 1))
    together = files_at_once or FILES_AT_ONCE[devices[0].type] if len(devices) > 1 else 1

    def tasks(stack: ExitStack) -> Iterator[Task]:
        for shard, item in in_turn(plan.shards, together):
            if shard.name not in files:
                files[shard.name] = stack.enter_context(ShardFile(output, shard))
            yield shard, item, item.name in output.finished

    def work(task: Task, device: torch.device) -> tuple[Task, Outcome | None, float]:
        shard, item, before = task
        file = files[shard.name]
        began = time.monotonic()
        values = calibration.values(item) if calibration and not before else None
        if before:
            outcome: Outcome | None = None
        elif item.scheme is None:
            outcome = transform.copy(item, source, file, values)
        else:
            quantizer = calibration.quantizer(item) if calibration else None
            factors = calibration.factors(item) if calibration else (None, None)
            outcome = transform.quantize_matrix(item, source, file, device, quantizer, factors, values)
        return task, outcome, time.monotonic() - began

    # Workers continue with the next files while one file is finished; they stop before the files are closed.
    with ExitStack() as stack, in_order(tasks(stack), on_free_device(work, devices), len(devices)) as outcomes:
        for (shard, item, _), outcome, seconds in outcomes:
            if outcome:
                output.record(item, *outcome)
                error = outcome[0]
                numbers = "" if error is None else f", error {error:.4g}, {seconds:.2f} s"
                output.log(f"{item.name}: {item.spelled or 'kept'}{numbers}")
            else:
                resumed += 1
            error = output.finished[item.name]["rel_error"]
            done, params = done + 1, params + item.params
            progress = done, len(plan.items), params, plan.params
            yield TensorDone(item.name, item.kind, item.spelled, error, seconds, item.nbytes, *progress, outcome is None)
            left[shard.name] -= 1
            while unfinished and not left[unfinished[0][1].name]:
                number, whole = unfinished.popleft()
                if not files[whole.name].complete:
                    files[whole.name].finish()
                yield ShardDone(whole.name, whole.size, number, len(plan.shards))
    report = _finish(source, plan, output, devices[0], calibration)
    result = result_of(plan, output, report, time.monotonic() - start, resumed)
    output.log(f"finished: {result.bytes} bytes, {result.bpw:.3f} bits per weight, {result.seconds:.1f} s")
    return result


def _finish(
    source: Source, plan: Plan, output: OutputFolder, device: torch.device, calibration: "Calibration | None"
) -> dict[str, Any]:
    """Write what belongs to the weights: index, companions, report and, last, config.json; return the report."""
    index = index_json(plan)
    contents = {INDEX: to_json(index)} if index else {}
    contents |= source.companion_files()
    for name, content in contents.items():
        output.replace(name, content)
    contents[CONFIG] = to_json(output_config(source, plan))
    read = calibration.facts() if calibration else None
    report = make_report(source, plan, output, device, calibration.notes if calibration else {}, contents, read)
    output.replace(REPORT, to_json(report))
    output.finish(contents[CONFIG])
    if calibration:
        calibration.close()
    return report


def in_turn(shards: Sequence[Shard], together: int, large: int = LARGE) -> Iterator[tuple[Shard, Item]]:
    """Every item once, interleaved over `together` files; items of more than `large` weights come first: each takes long.

    Writes into one file are serialised: for the 1.1 GB of a 3.6 GB model one worker takes 0.24 s, eight together 0.67 s.
    """
    if together > 1:
        yield from ((s, i) for s in shards for i in s.items if i.params > large)
    for some in (shards[n : n + together] for n in range(0, len(shards), together)):
        for row in zip_longest(*([(s, i) for i in s.items if together == 1 or i.params <= large] for s in some)):
            yield from filter(None, row)
