"""Prepare a run before it writes: the plan, the output folder, the budget. Only a budget of bits reads weights for it."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lowq_cli import quantizers
from lowq_cli.calibrate.requirements import is_calibrated, notes_of_codes, tokens_for
from lowq_cli.calibrate.texts import SELF, Text
from lowq_cli.devices import Device, name_devices, pick_device, pick_devices
from lowq_cli.files.folder import check_apart, staged
from lowq_cli.files.source import JOURNAL, Source
from lowq_cli.interop.foreign import open_decoded
from lowq_cli.plan.plan import Plan, common_group, default_out
from lowq_cli.plan.planner import SHARD_SIZE, make_plan
from lowq_cli.plan.recipe import Recipe, as_published
from lowq_cli.run.budget import Budget, make_budget, with_text
from lowq_cli.workers import worker_devices
from lowq_packers.errors import UsageError

if TYPE_CHECKING:
    import torch

    from lowq_cli.calibrate.mixed import Allocation
    from lowq_cli.run.bound import Bound, Search
    from lowq_cli.run.own_text import Make
    from lowq_cli.run.own_text_plan import Outlook

Watch = Callable[..., None]  # called with the name of a phase, the units done and their total, and a line, if not of layers
UNDECIDED = "calibrated on the model's own text unless that is more to compute than quantizing, else on the bundled one"


@dataclass(frozen=True)
class Prepared:
    """A prepared run: its plan, output folder and budget. mixed: the allocation of a budget of bits.

    text: the calibration text; own: the plan of generating it if it is the model's own; given: whether the user chose it.
    bound: the measurements of a search for a bound; trial: the folder of the checkpoint that met it.
    `pipeline.execute` runs it.
    """

    plan: Plan
    out: Path
    devices: tuple[Device, ...]
    budget: Budget
    mixed: "Allocation | None"
    source: Source
    workers: tuple[Device, ...]
    began: float
    text: Text | None = None
    own: "Outlook | None" = None
    given: bool = True
    bound: "Bound | None" = None
    trial: Path | None = None


@contextmanager
def prepare(
    model: str | os.PathLike[str],
    recipe: Recipe,
    out: str | os.PathLike[str] | None = None,
    device: str = "auto",
    shard_size: int = SHARD_SIZE,
    headers_only: bool = False,
    watch: Watch = lambda *progress: None,
    make: "Make | None" = None,
) -> Iterator[Prepared]:
    """Prepare to quantize `model` by `recipe` into `out`.

    headers_only: only for the plan; except for a budget of bits, no weight is read or downloaded, and torch is imported only
    to time samples of a calibration.
    device: one, or several as "cuda:0,cuda:1", each of which quantizes a tensor; the bytes do not depend on it.
    watch: called with the progress of what a budget of bits needs for its plan: the text, the layers, the rounds for a bound.
    make: quantizes the model by another recipe into a folder: trials for a bound, and the quick copy that generates the text if
    the model does not fit. Raises LowqError.
    """
    began = time.monotonic()
    devices: tuple[Device, ...] = name_devices(device) if headers_only else pick_devices(device)
    budgeted = recipe.budgeted
    with open_decoded(model, headers_only=headers_only and not budgeted) as raw:
        source = raw
        recipe, published = as_published(recipe, raw.stored_as)
        if recipe.rotate:
            from lowq_cli.calibrate.rotation import rotated  # builds a model with transformers

            source = rotated(raw)
        folder = default_out(source, recipe) if out is None else Path(out)
        check_apart(folder, source.folder if Path(model).is_dir() else None)
        if recipe.distills and recipe.calib_tokens is None and not recipe.bounded and devices[0].type == "cuda":
            recipe = replace(recipe, calib_tokens=tokens_for(make_plan(source, recipe.uniform, shard_size)))
        allocation = text = text_plan = met = trial = None
        given, notes = recipe.calib is not None, []
        if recipe.method != "auto" and quantizers.needs_text(recipe.method) and recipe.calib in (None, SELF):
            if raw.folder is None:  # only headers were fetched, which do not identify a text in the cache
                notes = [] if given else [UNDECIDED]
            else:
                from lowq_cli.run import own_text_plan  # the decoder

                recipe, text_plan, *notes = own_text_plan.decide(os.fspath(model), raw, recipe, pick_device(str(devices[0])))
        if budgeted:
            from lowq_cli.calibrate import mixed  # builds a model with transformers

            if text_plan:
                from lowq_cli.run import own_text

                steps = own_text.chosen(text_plan, make, source, make_plan(source, recipe.uniform, shard_size), given)
                text = own_text.result(steps, lambda s: watch("write", s.tokens, s.total, s.line))
                bundled = "calibrated on the bundled text: the model ends its own texts at once"
                notes = [replace(text_plan, seconds=0.0).summary if text.name == SELF else bundled]
                recipe, text_plan = replace(recipe, calib=text.name), None
            else:
                text = Text.read(recipe.calib)
            on = pick_device(str(devices[0]))
            if recipe.bounded:
                assert make
                search = _search(model, source, recipe, text, on, watch, make)
                recipe, allocation, met = search.run()
                trial = search.best
            else:
                recipe, allocation = mixed.resolve(source, recipe, text, on, partial(watch, "measure"))
                if recipe.method == "auto" and allocation.in_nats:
                    from lowq_cli.run import distill_hint

                    notes.append(distill_hint.offer(os.fspath(model), source, recipe, on))
        plan = make_plan(source, recipe, shard_size)
        if out is None and not budgeted:
            folder = default_out(source, recipe, common_group(plan, recipe))
        if (folder / JOURNAL).is_file():
            notes.append(f"{folder} holds an unfinished run: less is left to do than the time of a whole run, which is shown")
        notes += notes_of_codes(plan)
        plan = replace(plan, notes=(*plan.notes, *published, *notes))
        if not is_calibrated(plan):
            text = text_plan = None
        elif text is None and not text_plan and recipe.calib != SELF:
            text = Text.read(recipe.calib)  # raises with the plan if the file is missing or empty
        independent = _independent(source, plan)
        workers = worker_devices(devices, independent)
        source.pinned = independent and devices[0].type == "cuda"  # a calibration's whole tensors are too large
        if len(workers) < len(devices):
            raise UsageError(
                f"--device {device}: this run takes one tensor after another (the source is decoded while it is "
                "read, or the method is calibrated); name one device"
            )
        written = _bytes_in(folder, plan)
        timed = budgeted or not headers_only or is_calibrated(plan)  # a calibration's time is what a user wants to know first
        rounding = make_budget(plan, folder, devices[0], len(workers), written, source.held_bytes, timed)
        budget = with_text(rounding, text_plan)
        yield Prepared(plan, folder, devices, budget, allocation, source, workers, began, text, text_plan, given, met, trial)


def _search(
    model: str | os.PathLike[str],
    source: Source,
    recipe: Recipe,
    text: Text,
    device: "torch.device",
    watch: Watch,
    make: "Make",
) -> "Search":
    """The search for the smallest checkpoint that meets a recipe's bound."""
    from lowq_cli.calibrate import mixed
    from lowq_cli.evaluate.perplexity import read_text
    from lowq_cli.run import bound  # the judges

    judge = read_text(recipe.judge)
    spread = mixed.spread(source, recipe, text, device, partial(watch, "measure"))
    rounds = partial(watch, "search")
    return bound.Search(os.fspath(model), spread, recipe, (text.digest, judge), str(device), make, rounds)


def _independent(source: Source, plan: Plan) -> bool:
    """Whether tensors can be processed in parallel: not if reading decodes them, nor in a calibration layer by layer."""
    return type(source) is Source and not is_calibrated(plan)


def _bytes_in(folder: Path, plan: Plan) -> int:
    """Bytes on disk of the plan's files and of calibrated layers that are already in `folder`."""
    total = sum(p.stat().st_blocks * 512 for layers in staged(folder) for p in layers.iterdir())
    for shard in plan.shards:
        for path in (folder / shard.name, folder / f"{shard.name}.partial"):
            if path.is_file():
                total += path.stat().st_blocks * 512
    return total
