"""`lowq tune` without its printing: shapes -> compiled candidates -> measured entries -> lowq_tune.json in the checkpoint."""

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

CLOSE = 1.12  # times the winner's time alone: slower ones do not win in a step either
MEASURING = 0.5  # of the budget, compiling included, for kernels alone: the rest is for whole steps
LEAST = 0.25  # ... but that of what compiling has left: a budget that it nearly fills measures something
IN_PLACE_TOKENS = 64  # of the text that steps are timed at, and of the room after it


def compute_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The dtype that this checkpoint's activations will have: bf16 on a CPU, the config's on a GPU (hf/load.py says so too)."""
    if device.type == "cpu":
        return torch.bfloat16
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    found = getattr(torch, str(named), None)
    return found if found in (torch.float16, torch.bfloat16) else torch.float16


def parse_batches(text: str) -> tuple[int, ...]:
    """The batch sizes that "1,2,8" names, ascending. Raises UsageError."""
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 1 or found[-1] > 1 << 20:
        raise UsageError(f"--batch {text!r} is not a list of rows such as 1,2,4,8")
    return found


def compile_candidates(
    shapes: Sequence[Shape], batches: Sequence[int], device: torch.device, exhaustive: bool, done: Callable[[int, int], None]
) -> int:
    """Compile what will be timed, in parallel; on a CPU there is nothing to compile. Returns how many kernels."""
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
    """One item for each binary: Triton specializes on sizes only as far as 16 divides them and steps of k tile K."""
    found: dict[object, Work] = {}
    for w in work:
        key = (w.kernel, w.config, w.scheme, w.layout, w.dtype, w.M, w.N % 16 == 0, w.K % 4096 == 0 or w.K)
        found.setdefault(key, w)
    return list(found.values())


def for_kernels(budget: Budget) -> Budget:
    """What kernels alone may take, now that they are compiled."""
    return Budget(max(MEASURING * budget.seconds - budget.spent, LEAST * (budget.seconds - budget.spent)))


def measure_all(
    shapes: Sequence[Shape], batches: Sequence[int], device: torch.device, budget: Budget, exhaustive: bool
) -> Iterator[tuple[Shape, Entry]]:
    """Entries as they are found, the shapes with most weights first, until the budget ends."""
    for shape in shapes:
        for entry in measure.measure(shape, batches, device, budget, exhaustive):
            yield shape, entry


def check_folder(folder: Path) -> None:
    """Raise now, before minutes of measuring, the UsageError that `save` would raise for a folder of somebody else's."""
    if not os.access(folder, os.W_OK):
        raise _refused(folder / tuning_file.FILE, "you may not write there")


def _refused(path: Path, why: str | None) -> UsageError:
    return UsageError(f"{path} cannot be written ({why}); tune a copy of the checkpoint that you own")


def save(folder: Path, device: torch.device, entries: Sequence[Entry]) -> Path:
    """Write entries into the folder's tuning file and let them decide at once. Raises UsageError where it cannot be
    written, DoesNotFitError where the disk is full."""
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
    """Whole decode steps of a checkpoint: what finally decides among kernels.

    Alone the best kernel fills a GPU; in a step the next one wants to start early. So dispatch's own choice races the kernels
    that were fastest alone, in the loaded model, and what comes out is never slower than no table.

    reason: why steps cannot be raced here, or "".
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        from lowq_cli.engine.decoders import decoder_of
        from lowq_cli.engine.native import NativeDecoder
        from lowq_cli.engine.open_model import ready

        model, _ = ready(str(folder), device.type, lambda text: None)
        tuning.forget()  # an older table of this folder: what is to be beaten is dispatch without one
        self.decoder: Any = decoder_of(model)  # a NativeDecoder where there is no reason against it
        self.dtype = model.dtype
        recorded = isinstance(self.decoder, NativeDecoder) and self.decoder.graphs
        self.reason = "" if recorded else self.decoder.reason or "its steps are not recorded"

    def race(self, M: int, entries: Sequence[Entry], left: Callable[[], bool]) -> tuple[list[Entry], float, float]:
        """(entries for M sequences, their winners chosen in place; microseconds of a step before and after)."""
        from lowq_cli.engine import search
        from lowq_cli.engine.sampling import Sampling

        found = {e.place: e for e in entries if e.M == M}
        self.decoder.start([[1] * IN_PLACE_TOKENS] * M, Sampling(), IN_PLACE_TOKENS)
        now = search.calls_of(self.decoder, M, self.dtype)
        known = {call: e for call in now if (e := found.get(tuning.place_of(call)))}
        options = {call: _close(e) for call, e in known.items()}
        chosen, before, after = search.search(self.decoder, now, options, left)
        self.decoder.captured.clear()
        return [_reordered(e, chosen[call]) for call, e in known.items()], before, after


def _close(e: Entry) -> list[Named]:
    """The finalists of an entry that a step may yet bring to the front."""
    return [(e.kernel, e.config), *((r["kernel"], r["config"]) for r in e.runners_up if r["us"] <= CLOSE * e.us)]


def _reordered(e: Entry, winner: Named) -> Entry:
    """The entry with another of its finalists in front."""
    own = {"kernel": e.kernel, "config": e.config, "us": e.us}
    best = next((r for r in e.runners_up if (r["kernel"], r["config"]) == winner), None)
    if best is None:
        return e
    others = tuple(r for r in (own, *e.runners_up) if r is not best)
    source = source_hash(best["kernel"])
    return replace(e, kernel=best["kernel"], config=best["config"], us=best["us"], source=source, runners_up=others)


def taken(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """The entries of the layout that each shape will have, and a line for each layout that lost."""
    table, kept, behind = tuning.Table(entries), list[Entry](), dict[str, list[float]]()
    us = {(*e.place, e.M): e.us for e in entries}
    layouts = list(dict.fromkeys(e.layout for e in entries))
    for e in entries:
        scheme = Scheme.of(e.bits, e.group, e.zero)
        best = tuning.preferred_layout(table, Shape(e.N, e.K, scheme, getattr(torch, e.dtype)), layouts) or e.layout
        if e.layout == best:
            kept.append(e)
        elif theirs := us.get((*replace(e, layout=best).place, e.M)):
            behind.setdefault(e.layout, []).append(e.us / theirs)
    used = {e.layout for e in kept}
    lost = []
    for name, r in behind.items():
        so = "for the shapes that do not take it" if name in used else "so no shape takes it"
        lost.append(f"layout {name}: {min(r):.1f} to {max(r):.1f} times as long{',' if name not in used else ''} {so}")
    return kept, lost


def crossovers(entries: Sequence[Entry]) -> list[str]:
    """Where another layout becomes the faster one as M grows, one line a shape that has such a point."""
    places: dict[tuple[object, ...], dict[int, list[Entry]]] = {}
    for e in entries:
        key = (e.bits, e.group, e.zero, e.dtype, e.N, e.K, e.act)
        places.setdefault(key, {}).setdefault(e.M, []).append(e)
    lines = []
    for (bits, group, _, _, N, K, _), by_m in places.items():
        best = [(M, min(found, key=lambda e: e.us)) for M, found in sorted(by_m.items())]
        for (_, before), (M, after) in pairwise(best):
            if before.layout != after.layout:
                lines.append(f"{N}x{K} {bits}-bit g{group}: {before.kernel} below M = {M}, {after.kernel} from there")
    return lines
