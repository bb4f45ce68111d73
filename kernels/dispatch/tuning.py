"""What was measured decides: tables of the fastest kernel and config per call, on disk and at dispatch.

`Table` answers `registry.select` through `registry.TABLES`: a checkpoint's own (`lowq_tune.json`, written by `lowq tune`)
first, then the winners by shape that ship in tuned/, then the registry's rule, which reads that file's other rows (policy.py).
A checkpoint's entries bind to what they were measured with: GPU, torch and triton versions, a hash of the kernel's sources;
stale ones are skipped, and `stale` counts them. Shipped ones bind to the configs that kernels have. measure.py makes entries.
"""

import datetime
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lowq_kernels import gpu
from lowq_kernels.dispatch import policy, registry
from lowq_kernels.dispatch.registry import Call, Config, kernels
from lowq_kernels.dispatch.sources import source_hash
from lowq_kernels.gpu import Gpu, capability
from lowq_packers.atomic import write_whole
from lowq_packers.errors import DamagedError
from lowq_packers.layouts import LAYOUTS
from lowq_packers.scheme import Act, Scheme

FILE = "lowq_tune.json"
Device = torch.device  # by another name in Machine, which has a field called torch
FORMAT = 2  # 1 had other names for the configs of the tile kernels
PLACE = ("bits", "group", "zero", "dtype", "layout", "N", "K", "act")  # what an entry answers for, M aside
MAX_M_RATIO = 2  # an entry of the largest measured M answers for so many times its rows
MAX_SIZE_RATIO = 4.0  # a shipped entry answers for shapes up to this factor away in N * K, where none is nearer


@dataclass(frozen=True)
class Shape:
    """One weight shape of a checkpoint and how many layers have it."""

    N: int
    K: int
    scheme: Scheme
    dtype: torch.dtype
    count: int = 1
    act: Act = "none"  # how its layers round their inputs

    @property
    def weights(self) -> int:
        """Weights that all layers of this shape hold: how much of a decode step they are."""
        return self.N * self.K * self.count


@dataclass(frozen=True)
class Entry:
    """The winner of one call and its runners-up.

    Under an `act` either a kernel that multiplies 8 bits, or one that does not, to which x comes rounded.
    """

    bits: int
    group: int
    zero: str
    dtype: str
    layout: str
    N: int
    K: int
    M: int
    kernel: str
    config: Config
    us: float
    source: str  # hash of the kernel's sources
    runners_up: tuple[dict[str, Any], ...] = ()
    act: Act = "none"

    @property
    def place(self) -> tuple[Any, ...]:
        """What an entry answers for: PLACE."""
        return tuple(getattr(self, name) for name in PLACE)


@dataclass(frozen=True)
class Machine:
    """What times depend on besides the call."""

    gpu: str
    capability: tuple[int, int]
    torch: str
    triton: str

    @classmethod
    def here(cls, device: Device) -> "Machine":
        """This device, with the versions installed."""
        if device.type == "cuda":
            return cls(torch.cuda.get_device_name(device), capability(device), torch.__version__, _version("triton"))
        return cls(f"cpu ({torch.get_num_threads()} threads)", (0, 0), torch.__version__, "")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


# ---- tables ----


class Table:
    """Entries of one machine by place and M; those of kernels that are not here, or changed since, only count as stale.

    Shipped ones have no hash of sources: of them those are stale whose config the kernel no longer has.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries: dict[tuple[Any, ...], dict[int, Entry]] = {}
        self.stale = 0
        for e in entries:
            spec = kernels().get(e.kernel)
            if spec and (e.source == source_hash(e.kernel) if e.source else e.config in spec.configs):
                self.add(e)
            else:
                self.stale += 1

    def add(self, e: Entry) -> None:
        """Keep an entry, in place of an older one for the same call."""
        self.entries.setdefault(e.place, {})[e.M] = e

    def __len__(self) -> int:
        return sum(len(by_m) for by_m in self.entries.values())

    def __iter__(self) -> Iterator[Entry]:
        for by_m in self.entries.values():
            yield from by_m.values()

    def lookup(self, call: Call, near: bool = False) -> tuple[str, Config] | None:
        """Kernel and config for a call: the entry of the next larger M, or the largest's up to MAX_M_RATIO times it.

        `near` also asks like shapes. Past that nobody knows: a table for decoding must not choose for prompts.
        """
        by_m = self.entries.get(place_of(call)) or (self._nearest(call) if near else None)
        if not by_m or MAX_M_RATIO * max(by_m) < call.M:
            return None
        e = by_m[min((m for m in by_m if m >= call.M), default=max(by_m))]
        return e.kernel, e.config

    def _nearest(self, call: Call) -> dict[int, Entry] | None:
        bits, _, zero, dtype, layout, N, K, act = place_of(call)
        best, found = MAX_SIZE_RATIO, None
        for place, by_m in self.entries.items():
            if (place[0], place[4], place[7]) != (bits, layout, act):
                continue
            ratio = max(N * K / (place[5] * place[6]), place[5] * place[6] / (N * K))
            skew = max(N * place[6] / (K * place[5]), K * place[5] / (N * place[6])) ** 0.25
            other = 1.1 if (place[1], place[2], place[3]) != (call.scheme.group_size, zero, dtype) else 1.0
            if ratio * skew * other < best:
                best, found = ratio * skew * other, by_m
        return found


def place_of(call: Call) -> tuple[Any, ...]:
    """The `Entry.place` that answers a call."""
    s, dtype = call.scheme, str(call.dtype).removeprefix("torch.")
    return s.bits, s.group_size, s.zero, dtype, call.layout, call.N, call.K, call.act


def preferred_layout(table: Table, shape: Shape, layouts: Iterable[str]) -> str | None:
    """The layout with the least geometric mean of times over the batch sizes that all were measured for.

    None where fewer than two were measured: then there is nothing to compare, and the registry's rule decides.
    """
    dtype = str(shape.dtype).removeprefix("torch.")
    s = shape.scheme
    times: dict[str, dict[int, float]] = {}
    for layout in layouts:
        by_m = table.entries.get((s.bits, s.group_size, s.zero, dtype, layout, shape.N, shape.K, "none"))
        if by_m:
            times[layout] = {m: e.us for m, e in by_m.items()}
    most = max((len(t) for t in times.values()), default=0)
    finished = {name: t for name, t in times.items() if len(t) == most}  # the others dropped out of the race, or time did
    common = set.intersection(*(set(t) for t in finished.values())) if len(times) > 1 else set()
    if not common:
        return None
    return min(finished, key=lambda name: (sum(math.log(finished[name][m]) for m in common), name))


# ---- files ----


def read_file(path: Path) -> list[dict[str, Any]]:
    """The machines of a tuning file. Raises DamagedError where it is not one."""
    try:
        data = json.loads(path.read_text())
        machines = data["machines"]
        if data["format"] != FORMAT or not isinstance(machines, list):
            raise ValueError(f"it has format {data['format']}, of another lowq")
        for m in machines:
            _entries(m), Machine(m["gpu"], tuple(m["capability"]), m["torch"], m["triton"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise DamagedError(f"{path} is not a tuning file of format {FORMAT} ({e}); run lowq tune again") from None
    return machines


def _entries(machine: dict[str, Any]) -> list[Entry]:
    """Entries as `asdict` spelled them. Raises KeyError or TypeError for others: dispatch compares and divides their fields."""
    found = [Entry(**{**e, "runners_up": tuple(e["runners_up"])}) for e in machine["entries"]]
    for e in found:
        numbers, names = (e.bits, e.group, e.N, e.K, e.M), (e.zero, e.dtype, e.layout, e.kernel, e.source, e.act)
        sizes = all(type(n) is int and n > 0 for n in numbers) and isinstance(e.us, int | float) and e.us > 0
        if not sizes or not all(isinstance(n, str) for n in names) or not isinstance(e.config, dict):
            raise TypeError(f"an entry is {e}"[:200])
    return found


def write_file(path: Path, here: Machine, entries: Iterable[Entry]) -> None:
    """Put this machine's entries into a tuning file, over its older ones; other machines' stay. Written whole or not at all.

    Of two processes that write at once the later one's entries stay.
    """
    try:
        machines = read_file(path) if path.exists() else []
    except DamagedError:
        machines = []
    mine: dict[tuple[Any, ...], Entry] = {}
    others = []
    for m in machines:
        if Machine(m["gpu"], tuple(m["capability"]), m["torch"], m["triton"]) == here:
            mine.update({(*e.place, e.M): e for e in _entries(m)})
        else:
            others.append(m)
    mine.update({(*e.place, e.M): e for e in entries})
    date = datetime.date.today().isoformat()
    kept = [asdict(e) for _, e in sorted(mine.items(), key=lambda item: str(item[0]))]
    machine = {**asdict(here), "date": date, "entries": kept}
    write_whole(path, _dumps({"format": FORMAT, "machines": [*others, machine]}).encode())


def _dumps(data: dict[str, Any]) -> str:
    """JSON with one line per entry, so that a diff of a table can be read."""
    machines = []
    for m in data["machines"]:
        head = json.dumps({k: v for k, v in m.items() if k != "entries"})[:-1]
        rows = ",\n".join("   " + json.dumps(e) for e in m["entries"])
        machines.append(f'  {head}, "entries": [\n{rows}\n  ]}}')
    body = ",\n".join(machines)
    return f'{{"format": {data["format"]}, "machines": [\n{body}\n]}}\n'


# ---- what dispatch asks ----

_active: dict[str, Table] = {}  # folder of a checkpoint -> its table for this machine


def use(folder: str | Path, device: torch.device | None = None, notice: Callable[[str], None] | None = None) -> int:
    """Let a checkpoint's lowq_tune.json decide from now on; returns how many of its entries hold here.

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
        entries = _entries(m)
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
    """Drop every checkpoint's table."""
    _active.clear()
    registry.forget_choices()


@cache
def shipped(on: Gpu) -> Table:
    """The winners by shape that ship for this GPU's architecture, possibly none; measured with whatever torch and triton."""
    file = policy.file_for(on)
    return Table(
        Entry(**{k: row[k] for k in PLACE}, M=int(M), kernel=kernel, config=config, us=us, source="")
        for row in (file["measured"] if policy.made_for(file, on) else ())
        for M, (kernel, config, us) in row["M"].items()
    )


def _from_checkpoint(call: Call) -> tuple[str, Config] | None:
    return next((found for t in _active.values() if (found := t.lookup(call))), None)


def _from_shipped(call: Call) -> tuple[str, Config] | None:
    return shipped(gpu.of(call.capability)).lookup(call, near=True) if call.device == "cuda" else None


def chosen_by(call: Call, kernel: str | None = None) -> str:
    """Who made `registry.select`'s choice for a call: "name", "tuned" (the checkpoint's table), "shipped" (a file of tuned/) or
    "rule", the kernels' own."""
    if registry.forced(kernel, call.op):
        return "name"
    spec, config = registry.select(call)
    asked = {"tuned": _from_checkpoint, "shipped": _from_shipped}
    found = next((who for who, table in asked.items() if table(call) == (spec.name, config)), "rule")
    return "shipped" if found == "rule" and policy.answers(spec.name, call) else found


def best_layout(shape: Shape, device: torch.device) -> str | None:
    """The layout that measurements prefer for this shape here, or None where none were made."""
    tables = list(_active.values())
    if device.type == "cuda":
        tables.append(shipped(gpu.here(device.index)))
    return next((name for t in tables if (name := preferred_layout(t, shape, LAYOUTS))), None)


registry.TABLES[:] = [_from_checkpoint, _from_shipped]
