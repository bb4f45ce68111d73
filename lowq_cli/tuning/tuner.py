"""The work of `lowq tune`: shapes -> compiled candidates -> measured entries -> lowq_tune.json in the checkpoint."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

from lowq_cli.files.checkpoint import Checkpoint
from lowq_kernels.dispatch import measure, tuning, tuning_file
from lowq_kernels.dispatch.measure import Budget
from lowq_kernels.dispatch.precompile import Work, compile_all
from lowq_kernels.dispatch.sources import source_hash
from lowq_kernels.dispatch.tuning import Named, Shape
from lowq_kernels.dispatch.tuning_file import Entry, Machine
from lowq_packers.errors import UsageError, disk_full
from lowq_packers.scheme import Scheme

CLOSE = 1.12  # candidates slower than this many times the fastest in isolation are not timed in whole steps
MEASURING = 0.5  # fraction of the budget for compiling and for timing kernels in isolation; the rest is for whole steps
LEAST = 0.25  # min. fraction of the time left after compiling, so that a nearly used budget still measures something
IN_PLACE_TOKENS = 64  # tokens of the prompt that steps are timed after, and of the room after it


def compute_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The dtype of this checkpoint's activations: bf16 on a CPU, the config's on a GPU, as in hf/load.py."""
    if device.type == "cpu":
        return torch.bfloat16
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    dtype = getattr(torch, str(named), None)
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16


def parse_batches(text: str) -> tuple[int, ...]:
    """Parse "1,2,8" as ascending batch sizes. Raises UsageError."""
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1 or sizes[-1] > 1 << 20:
        raise UsageError(f"--batch {text!r} is not a list of rows such as 1,2,4,8")
    return sizes


def compile_candidates(
    shapes: Sequence[Shape], batches: Sequence[int], device: torch.device, exhaustive: bool, done: Callable[[int, int], None]
) -> int:
    """Compile the candidates in parallel; nothing to do on a CPU. Returns the number of kernels."""
    if device.type != "cuda":
        return 0
    work = []
    for shape in shapes:
        for layout in measure.layouts_for(shape, device):
            for M, act in product(batches, dict.fromkeys(("none", shape.act))):
                for spec, config in measure.candidates(measure.call_for(shape, M, layout, device, act), exhaustive):
                    work.append(Work.of(spec.name, config, shape.scheme, layout, shape.dtype, M, shape.N, shape.K))
    distinct = _same_binary(work)
    return compile_all(distinct, lambda n: done(n, len(distinct)))


def _same_binary(work: Sequence[Work]) -> list[Work]:
    """One item per binary: Triton specializes on sizes only by whether 16 divides them and whether steps of k tile K."""
    by_key: dict[object, Work] = {}
    for w in work:
        key = (w.kernel, w.config, w.scheme, w.layout, w.dtype, w.M, w.N % 16 == 0, w.K % 4096 == 0 or w.K)
        by_key.setdefault(key, w)
    return list(by_key.values())


def for_kernels(budget: Budget) -> Budget:
    """The time budget for kernels in isolation, after compiling."""
    return Budget(max(MEASURING * budget.seconds - budget.spent, LEAST * (budget.seconds - budget.spent)))


def measure_all(
    shapes: Sequence[Shape], batches: Sequence[int], device: torch.device, budget: Budget, exhaustive: bool
) -> Iterator[tuple[Shape, Entry]]:
    """Yield entries as they are measured, shapes with the most weights first, until the budget ends."""
    for shape in shapes:
        for entry in measure.measure(shape, batches, device, budget, exhaustive):
            yield shape, entry


def check_folder(folder: Path) -> None:
    """Raise, before minutes of measuring, the UsageError that `save` would raise for a folder that is not writable."""
    if not os.access(folder, os.W_OK):
        raise _refused(folder / tuning_file.FILE, "you may not write there")


def _refused(path: Path, why: str | None) -> UsageError:
    return UsageError(f"{path} cannot be written ({why}); tune a copy of the checkpoint that you own")


def save(folder: Path, device: torch.device, entries: Sequence[Entry]) -> Path:
    """Write entries into the folder's tuning file and activate them. Raises UsageError if the file cannot be
    written, DoesNotFitError if the disk is full."""
    path = folder / tuning_file.FILE
    try:
        tuning_file.write_file(path, Machine.here(device), entries)
    except OSError as e:
        if full := disk_full(e, path, "tune again"):
            raise full from None
        raise _refused(path, e.strerror) from None
    tuning.use(folder, device)
    return path


class Steps:
    """Time whole decode steps of a checkpoint, which decide among the finalist kernels.

    In isolation the fastest kernel fills a GPU; in a step, the next kernel should start early. So dispatch's own choice is
    compared with the kernels fastest in isolation, in the loaded model; the resulting table is never slower than no table.

    reason: why steps cannot be compared here, or "".
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        from lowq_cli.engine.decoders import decoder_of
        from lowq_cli.engine.native import NativeDecoder
        from lowq_cli.engine.open_model import ready

        model, _ = ready(str(folder), device.type, lambda text: None)
        tuning.forget()  # drop this folder's older table: the baseline is dispatch without a table
        self.decoder: Any = decoder_of(model)  # a NativeDecoder unless it has a reason
        self.dtype = model.dtype
        recorded = isinstance(self.decoder, NativeDecoder) and self.decoder.graphs
        self.reason = "" if recorded else self.decoder.reason or "its steps do not run as CUDA graphs"

    def race(self, M: int, entries: Sequence[Entry], left: Callable[[], bool]) -> tuple[list[Entry], float, float]:
        """(entries for M sequences with winners chosen in whole steps; microseconds of a step before and after)."""
        from lowq_cli.engine import search
        from lowq_cli.engine.sampling import Sampling

        entry_of = {e.place: e for e in entries if e.M == M}
        self.decoder.start([[1] * IN_PLACE_TOKENS] * M, Sampling(), IN_PLACE_TOKENS)
        now = search.calls_of(self.decoder, M, self.dtype)
        known = {call: e for call in now if (e := entry_of.get(tuning.place_of(call)))}
        options = {call: _close(e) for call, e in known.items()}
        chosen, before, after = search.search(self.decoder, now, options, left)
        self.decoder.captured.clear()
        return [_reordered(e, chosen[call]) for call, e in known.items()], before, after


def _close(e: Entry) -> list[Named]:
    """The finalists of an entry that may still win in a whole step."""
    return [(e.kernel, e.config), *((r["kernel"], r["config"]) for r in e.runners_up if r["us"] <= CLOSE * e.us)]


def _reordered(e: Entry, winner: Named) -> Entry:
    """The entry with another of its finalists as winner."""
    fastest = {"kernel": e.kernel, "config": e.config, "us": e.us}
    best = next((r for r in e.runners_up if (r["kernel"], r["config"]) == winner), None)
    if best is None:
        return e
    others = tuple(r for r in (fastest, *e.runners_up) if r is not best)
    source = source_hash(best["kernel"])
    return replace(e, kernel=best["kernel"], config=best["config"], us=best["us"], source=source, runners_up=others)


def taken(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """The entries of each shape's fastest layout, and a line for each layout that lost: on a CPU, as a GPU times one layout."""
    table, present, behind = tuning.Table(entries), list[Entry](), dict[str, list[float]]()
    us = {(*e.place, e.M): e.us for e in entries}
    layouts = list(dict.fromkeys(e.layout for e in entries))
    for e in entries:
        scheme = Scheme.of(e.bits, e.group, e.zero)
        best = tuning.preferred_layout(table, Shape(e.N, e.K, scheme, getattr(torch, e.dtype)), layouts) or e.layout
        if e.layout == best:
            present.append(e)
        elif theirs := us.get((*replace(e, layout=best).place, e.M)):
            behind.setdefault(e.layout, []).append(e.us / theirs)
    used = {e.layout for e in present}
    lost = []
    for name, r in behind.items():
        so = "for the shapes that do not take it" if name in used else "so no shape takes it"
        lost.append(f"layout {name}: {min(r):.1f} to {max(r):.1f} times as long{',' if name not in used else ''} {so}")
    return present, lost


def crossovers(entries: Sequence[Entry]) -> list[str]:
    """A line for each change of a shape's fastest layout as M grows (on a CPU), with the kernels below and above that M."""
    places: dict[tuple[object, ...], dict[int, list[Entry]]] = {}
    for e in entries:
        key = (e.bits, e.group, e.zero, e.dtype, e.N, e.K, e.act)
        places.setdefault(key, {}).setdefault(e.M, []).append(e)
    lines = []
    for (bits, group, _, _, N, K, _), by_m in places.items():
        best = [(M, min(of_size, key=lambda e: e.us)) for M, of_size in sorted(by_m.items())]
        for (_, before), (M, after) in pairwise(best):
            if before.layout != after.layout:
                lines.append(f"{N}x{K} {bits}-bit g{group}: {before.kernel} below M = {M}, {after.kernel} from there")
    return lines
