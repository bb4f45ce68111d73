"""Tuning tables: the fastest measured kernel and config per call, on disk and at dispatch.

`Table` answers `registry.select` through `registry.TABLES`: a checkpoint's own (`lowq_tune.json`, written by `lowq tune`)
first, then the winners by shape that ship in tuned/, then the registry's rule, which reads that file's other rows (policy.py).
A checkpoint's entries bind to what they were measured with: GPU, torch and triton versions, a hash of the kernel's sources;
stale ones are skipped, and `stale` counts them. Shipped ones bind to the configs that kernels have. measure.py makes entries,
tuning_file.py keeps them.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from lowq_kernels import gpu
from lowq_kernels.dispatch import policy, registry
from lowq_kernels.dispatch.registry import AnyCall, Call, Config, kernels
from lowq_kernels.dispatch.sources import source_hash
from lowq_kernels.dispatch.tuning_file import FILE, Entry, Machine, Place, entries_of, read_file
from lowq_kernels.gpu import Gpu
from lowq_packers.errors import DamagedError
from lowq_packers.layouts import LAYOUTS
from lowq_packers.scheme import Act, Scheme

Named = tuple[str, Config]  # a kernel by name, and its config
MAX_M_RATIO = 2  # the entry of the largest measured M answers for up to this many times its rows
MAX_SIZE_RATIO = 4.0  # a shipped entry answers for shapes within this factor in N * K if none is nearer


@dataclass(frozen=True)
class Shape:
    """One weight shape of a checkpoint and how many layers have it."""

    N: int
    K: int
    scheme: Scheme
    dtype: torch.dtype
    count: int = 1
    act: Act = "none"  # rounding of its layers' inputs

    @property
    def weights(self) -> int:
        """Weights that all layers of this shape hold: how much of a decode step they are."""
        return self.N * self.K * self.count


# ---- tables ----


class Table:
    """Entries of one machine by place and M. Entries of missing or changed kernels are only counted, as stale.

    Shipped entries have no hash of sources: they are stale if the kernel no longer has their config.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries: dict[Place, dict[int, Entry]] = {}
        self.stale = 0
        for e in entries:
            spec = kernels().get(e.kernel)
            if spec and (e.source == source_hash(e.kernel) if e.source else e.config in spec.configs):
                self.add(e)
            else:
                self.stale += 1

    def add(self, e: Entry) -> None:
        """Add an entry; it replaces an older one for the same call."""
        self.entries.setdefault(e.place, {})[e.M] = e

    def __len__(self) -> int:
        return sum(len(by_m) for by_m in self.entries.values())

    def __iter__(self) -> Iterator[Entry]:
        for by_m in self.entries.values():
            yield from by_m.values()

    def lookup(self, call: Call, near: bool = False) -> Named | None:
        """Kernel and config for a call: the entry of the next larger M, or the largest's up to MAX_M_RATIO times it.

        `near` also searches similar shapes. Larger M get None: a table for decode steps must not choose for prompts.
        """
        by_m = self.entries.get(place_of(call)) or (self._nearest(call) if near else None)
        if not by_m or MAX_M_RATIO * max(by_m) < call.M:
            return None
        e = by_m[min((m for m in by_m if m >= call.M), default=max(by_m))]
        return e.kernel, e.config

    def _nearest(self, call: Call) -> dict[int, Entry] | None:
        target = place_of(call)
        N, K = target.N, target.K
        best, nearest = MAX_SIZE_RATIO, None
        for place, by_m in self.entries.items():
            if (place.bits, place.layout, place.act) != (target.bits, target.layout, target.act):
                continue
            ratio = max(N * K / (place.N * place.K), place.N * place.K / (N * K))
            skew = max(N * place.K / (K * place.N), K * place.N / (N * place.K)) ** 0.25
            other = 1.1 if (place.group, place.zero, place.dtype) != (target.group, target.zero, target.dtype) else 1.0
            if ratio * skew * other < best:
                best, nearest = ratio * skew * other, by_m
        return nearest


def place_of(call: Call) -> Place:
    """The `Entry.place` that answers a call."""
    s, dtype = call.scheme, str(call.dtype).removeprefix("torch.")
    return Place(s.bits, s.group_size, s.kind, dtype, call.layout, call.N, call.K, call.act)


def preferred_layout(table: Table, shape: Shape, layouts: Iterable[str]) -> str | None:
    """The layout with the least geometric mean of times over the batch sizes that all were measured for.

    None where fewer than two were measured: then there is nothing to compare, and the registry's rule decides.
    """
    dtype = str(shape.dtype).removeprefix("torch.")
    s = shape.scheme
    times: dict[str, dict[int, float]] = {}
    for layout in layouts:
        by_m = table.entries.get(Place(s.bits, s.group_size, s.kind, dtype, layout, shape.N, shape.K, "none"))
        if by_m:
            times[layout] = {m: e.us for m, e in by_m.items()}
    most = max((len(t) for t in times.values()), default=0)
    finished = {name: t for name, t in times.items() if len(t) == most}  # layouts measured at every batch size
    common = set.intersection(*(set(t) for t in finished.values())) if len(times) > 1 else set()
    if not common:
        return None
    return min(finished, key=lambda name: (sum(math.log(finished[name][m]) for m in common), name))


# ---- what dispatch asks ----

_active: dict[str, Table] = {}  # folder of a checkpoint -> its table for this machine


def use(folder: str | Path, device: torch.device | None = None, notice: Callable[[str], None] | None = None) -> int:
    """Use a checkpoint's lowq_tune.json from now on; returns how many of its entries are valid on this machine.

    If the folder's model has a scope (`registry.scope`), the file is used for that model alone.

    Entries of other machines are left alone; stale ones of this machine are reported through `notice`, as is a damaged
    file, which is then ignored: a bad tuning file must not stop a model from running.
    """
    path = Path(folder) / FILE
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    say = notice or (lambda message: None)
    if not path.is_file():
        return 0
    here = Machine.here(device)
    try:
        machines = read_file(path)
    except DamagedError as e:
        say(f"ignoring {e}")
        return 0
    table, stale = Table(), 0
    for m in machines:
        if m["gpu"] != here.gpu:
            continue
        entries = entries_of(m)
        if Machine(m["gpu"], tuple(m["capability"]), m["torch"], m["triton"]) != here:
            stale += len(entries)
            continue
        fresh = Table(entries)
        stale += fresh.stale
        for entry in fresh:
            table.add(entry)
    if stale:
        say(f"{stale} entries of {path} were measured with other versions of torch, triton or lowq; run lowq tune again")
    _active[str(folder)] = table
    registry.forget_choices()
    return len(table)


def forget() -> None:
    """Forget all checkpoints' tables."""
    _active.clear()
    registry.forget_choices()


@cache
def shipped(on: Gpu) -> Table:
    """The winners by shape that ship for this GPU's architecture, possibly none; measured with whatever torch and triton."""
    file = policy.file_for(on)
    return Table(
        Entry(**{k: row[k] for k in Place._fields}, M=int(M), kernel=kernel, config=config, us=us, source="")
        for row in (file["measured"] if policy.made_for(file, on) else ())
        for M, (kernel, config, us) in row["M"].items()
    )


def _from_checkpoint(call: Call) -> Named | None:
    current = registry.scope.get()
    tables = [t for folder, t in _active.items() if current in ("", folder)]
    return next((answer for t in tables if (answer := t.lookup(call))), None)


def _from_shipped(call: Call) -> Named | None:
    return shipped(gpu.of(call.capability)).lookup(call, near=True) if call.device == "cuda" else None


def chosen_by(call: AnyCall, kernel: str | None = None) -> str:
    """The source of `registry.select`'s choice: "name", "tuned" (the checkpoint's table), "shipped" (a file of tuned/) or
    "rule", the kernels' own."""
    if registry.forced(kernel, call.op):
        return "name"
    if not isinstance(call, Call):  # only products have tables
        return "rule"
    spec, config = registry.select(call)
    tables = {"tuned": _from_checkpoint, "shipped": _from_shipped}
    origin = next((who for who, table in tables.items() if table(call) == (spec.name, config)), "rule")
    return "shipped" if origin == "rule" and policy.answers(spec.name, call) else origin


def best_layout(shape: Shape, device: torch.device) -> str | None:
    """The layout that measurements prefer for this shape here, or None where none were made."""
    tables = list(_active.values())
    if device.type == "cuda":
        tables.append(shipped(gpu.here(device.index)))
    return next((name for t in tables if (name := preferred_layout(t, shape, LAYOUTS))), None)


registry.TABLES[:] = [_from_checkpoint, _from_shipped]
