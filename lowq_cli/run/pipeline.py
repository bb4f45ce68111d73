"""The streaming run: `prepare` plans it, `run` goes tensor by tensor: read -> quantize -> pack -> write, and yields events.

No model is built: one slab of one tensor is in memory at a time. Run again after a kill, it continues, and leaves the same
bytes as an uninterrupted run (see writer.py). The same input, recipe and kind of device give the same bytes; calibrated
methods also need as many threads, over which torch shares out the sums of their products.
"""

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowq_cli.calibrate.calibration import Calibration, identity, is_calibrated
from lowq_cli.calibrate.rotation import rotated
from lowq_cli.devices import pick_devices
from lowq_cli.files.shards import to_json
from lowq_cli.files.source import INDEX, REPORT, Source
from lowq_cli.interop.foreign import open_decoded
from lowq_cli.plan.plan import Item, Plan, Shard, default_out, index_json, output_config
from lowq_cli.plan.planner import SHARD_SIZE, make_plan
from lowq_cli.plan.recipe import Recipe, make_recipe
from lowq_cli.run import transform
from lowq_cli.run.budget import Budget, make_budget
from lowq_cli.run.events import Event, Finished, LayerDone, Result, ShardDone, TensorDone
from lowq_cli.run.report import known_result, make_report, result_of
from lowq_cli.run.workers import in_order, on_free_device, worker_devices
from lowq_cli.run.writer import OutputFolder, ShardFile, output_names
from lowq_packers.errors import LowqError, UsageError

if TYPE_CHECKING:
    from lowq_cli.calibrate.mixed import Mixed

FILES_AT_ONCE = {"cpu": 1, "cuda": 4}  # that workers write into
LARGE = 1 << 28  # weights of an item that one worker is long at, of those that are begun first
Task = tuple[Shard, Item, bool]  # an item, the file it goes into, and whether an earlier run did it
Outcome = tuple[float | None, list[int]]  # relative error, CRC-32 of each tensor written


def quantize(model: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, **options: Any) -> dict[str, Any]:
    """Quantize a model into a checkpoint folder.

    Args:
        model: a folder, a hub id, or "demo".
        out: the folder to write; by default ./MODEL-lowq-4b-g64.
        options: Recipe's fields (bits, group, method, zero, overrides, skip, lm_head, dtype), recipe (a TOML file), and
            device, shard_size, fresh of `run`.
    Returns:
        out, bpw, bytes, source_bytes, quantized_fraction, seconds, peak_rss_bytes, and more about the run.
    Raises:
        LowqError for every mistake a caller can mend.
    """
    names = {f.name for f in fields(Recipe)}
    recipe = make_recipe(options.pop("recipe", None), **{k: options.pop(k) for k in list(options) if k in names})
    known = ("device", "shard_size", "fresh")
    if unknown := [k for k in options if k not in known]:
        raise UsageError(f"quantize has no option {unknown[0]!r}; there are {', '.join(sorted({*names, *known, 'recipe'}))}")
    for event in run(model, recipe, out, **options):
        if isinstance(event, Finished):
            return event.result.to_json()
    raise AssertionError("a run ends with Finished")


@dataclass(frozen=True)
class Prepared:
    """A run before its first byte: what it will do, where, and what that takes. mixed: how a budget of bits was spent."""

    plan: Plan
    out: Path
    devices: tuple[torch.device, ...]
    budget: Budget
    mixed: "Mixed | None"
    source: Source
    workers: tuple[torch.device, ...]
    began: float

    def run(self, fresh: bool = False) -> Iterator[Event]:
        """Do it, inside the block of `prepare`: LayerDone, TensorDone and ShardDone, then Finished.

        fresh: start over what lowq wrote into `out` before. Interrupted anywhere, the same call continues. Raises LowqError.
        """
        source, plan, on = self.source, self.plan, self.devices[0]
        self.budget.check(self.out)
        companions = [p.name for p in source.companions()]
        name = run_hash(source, plan, on)
        calibration = Calibration(source, plan, self.out, name, on) if is_calibrated(plan) else None
        with OutputFolder(self.out, name, output_names(plan, companions), fresh) as output:
            if output.already_done:
                yield Finished(known_result(plan, output, time.monotonic() - self.began))
                return
            output.log(f"lowq {version('lowq')}: {source.name} -> {self.out}, {json.dumps(plan.recipe.to_json())}, {on}")
            try:
                for step in calibration.run() if calibration else ():
                    if isinstance(step, LayerDone):
                        output.log(_logged(step))
                    yield step
                result = yield from _write(source, plan, output, self.workers, self.began, calibration)
            except BaseException as e:
                with suppress(LowqError):  # the reason matters more than the log
                    output.log(f"stopped by {type(e).__name__}{f': {e}' if str(e) else ''}; the same command continues")
                raise
        yield Finished(result)


@contextmanager
def prepare(
    model: str | os.PathLike[str],
    recipe: Recipe,
    out: str | os.PathLike[str] | None = None,
    device: str = "auto",
    shard_size: int = SHARD_SIZE,
    headers_only: bool = False,
    watch: Callable[[int, int], None] | None = None,
) -> Iterator[Prepared]:
    """What quantizing `model` by `recipe` into `out` will do; its `run` does it.

    headers_only: to look at the plan; but for a budget of bits no weight is read or downloaded. device: one, or several as
    "cuda:0,cuda:1", which take a tensor each; the bytes are the same. watch: how many layers of how many are measured for a
    budget of bits. Raises LowqError.
    """
    began = time.monotonic()
    devices = pick_devices(device)
    budgeted = recipe.bpw is not None or recipe.size is not None
    with open_decoded(model, headers_only=headers_only and not budgeted) as raw:
        source = rotated(raw) if recipe.rotate else raw
        folder = default_out(source, recipe) if out is None else Path(out)
        found = None
        if budgeted:
            from lowq_cli.calibrate import mixed  # builds a model with transformers

            recipe, found = mixed.resolve(source, recipe, devices[0], watch)
        plan = make_plan(source, recipe, shard_size)
        independent = _independent(source, plan)
        workers = worker_devices(devices, independent)
        source.pinned = independent and devices[0].type == "cuda"  # slabs: a calibration reads whole tensors, too much to pin
        if len(workers) < len(devices):
            raise UsageError(
                f"--device {device}: this run takes one tensor after another (the source is decoded while it is "
                "read, or the method is calibrated); name one device"
            )
        budget = make_budget(plan, folder, devices[0], len(workers), _bytes_in(folder, plan), source.held_bytes)
        identity(plan)  # a calibration text that is missing or empty is told with the plan
        yield Prepared(plan, folder, devices, budget, found, source, workers, began)


def run(
    model: str | os.PathLike[str],
    recipe: Recipe,
    out: str | os.PathLike[str] | None = None,
    device: str = "auto",
    shard_size: int = SHARD_SIZE,
    fresh: bool = False,
) -> Iterator[Event]:
    """`prepare`, and then its `run`: LayerDone, TensorDone and ShardDone, then Finished."""
    with prepare(model, recipe, out, device, shard_size) as prepared:
        yield from prepared.run(fresh)


def _logged(layer: LayerDone) -> str:
    """A calibrated layer's line of the log."""
    done = "calibrated before" if layer.resumed else f"error {layer.error:.4g}, {layer.seconds:.1f} s"
    return f"layer {layer.index} of {layer.total}: {done}"


def run_hash(source: Source, plan: Plan, device: torch.device) -> str:
    """What names a run: two runs share it only if they write the same bytes."""
    facts = [version("lowq"), source.identity, plan.fingerprint, device.type]
    facts += [text] if (text := identity(plan)) else []
    return hashlib.sha256(" ".join(facts).encode()).hexdigest()[:16]


def _independent(source: Source, plan: Plan) -> bool:
    """Whether tensors can be worked on side by side: other sources decode as they read, calibration goes layer by layer."""
    return type(source) is Source and not is_calibrated(plan)


def _bytes_in(folder: Path, plan: Plan) -> int:
    """Disk that the plan's files already take in `folder`."""
    found = 0
    for shard in plan.shards:
        for path in (folder / shard.name, folder / f"{shard.name}.partial"):
            if path.is_file():
                found += path.stat().st_blocks * 512
    return found


def _write(
    source: Source,
    plan: Plan,
    output: OutputFolder,
    devices: tuple[torch.device, ...],
    start: float,
    calibration: Calibration | None = None,
) -> Generator[Event, None, Result]:
    """All shards, a tensor at a time on each of `devices`; then index, companions, report and, last, config.json."""
    done = params = resumed = 0
    files: dict[str, ShardFile] = {}  # name of a shard -> its file, opened when its first item is drawn
    left = {s.name: len(s.items) for s in plan.shards}
    unfinished = deque(enumerate(plan.shards, 1))

    def tasks(stack: ExitStack) -> Iterator[Task]:
        for shard, item in in_turn(plan.shards, FILES_AT_ONCE[devices[0].type] if len(devices) > 1 else 1):
            if shard.name not in files:
                files[shard.name] = stack.enter_context(ShardFile(output, shard))
            yield shard, item, item.name in output.finished

    def work(task: Task, device: torch.device) -> tuple[Task, Outcome | None, float]:
        shard, item, before = task
        file = files[shard.name]
        began = time.monotonic()
        if before:
            outcome: Outcome | None = None
        elif item.block:
            outcome = transform.quantize_fp8(item, source, file, device)
        elif item.scheme is None:
            outcome = transform.copy(item, source, file, calibration.values(item) if calibration else None)
        else:
            quantizer = calibration.quantizer(item) if calibration else None
            factors = calibration.factors(item) if calibration else (None, None)
            outcome = transform.quantize(item, source, file, device, quantizer, factors)
        return task, outcome, time.monotonic() - began

    # Workers go on into the next files while one is finished; they stop before the files are closed.
    with ExitStack() as stack, in_order(tasks(stack), on_free_device(work, devices), len(devices)) as outcomes:
        for (shard, item, _), outcome, seconds in outcomes:
            if outcome:
                output.record(item, *outcome)
                error = outcome[0]
                told = "" if error is None else f", error {error:.4g}, {seconds:.2f} s"
                output.log(f"{item.name}: {item.spelled or 'kept'}{told}")
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
    if index := index_json(plan):
        output.replace(INDEX, to_json(index))
    for path in source.companions():
        output.replace(path.name, path.read_bytes())
    report = make_report(source, plan, output, devices[0], calibration.notes if calibration else {})
    output.replace(REPORT, to_json(report))
    output.finish(to_json(output_config(source, plan)))
    if calibration:
        calibration.close()
    result = result_of(plan, output, report, time.monotonic() - start, resumed)
    output.log(f"finished: {result.bytes} bytes, {result.bpw:.3f} bits per weight, {result.seconds:.1f} s")
    return result


def in_turn(shards: Sequence[Shard], together: int) -> Iterator[tuple[Shard, Item]]:
    """Every item once; of several files `together` by turns, and the largest items before all, since one worker is long at it.

    Writes into one file wait for each other: the 1.1 GB of a 3.6 GB model take one worker 0.24 s, eight 0.67 s together.
    """
    if together > 1:
        yield from ((s, i) for s in shards for i in s.items if i.params > LARGE)
    for some in (shards[n : n + together] for n in range(0, len(shards), together)):
        for row in zip_longest(*([(s, i) for i in s.items if together == 1 or i.params <= LARGE] for s in some)):
            yield from filter(None, row)
