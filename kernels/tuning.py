"""What was measured decides: time every kernel and config that may take a call, keep the best, look them up at dispatch.

`measure` times one shape over a list of batch sizes; `Table` holds the results of many, reads and writes them as JSON,
and answers `registry.select` through `registry.TABLES`. A checkpoint's own table (`lowq_tune.json`, written by `lowq tune`)
is asked first, then those shipped in tuned/, then the registry's rule. Entries bind to what they were measured with:
GPU, torch and triton versions, a hash of the kernel's sources. Stale ones are skipped, and `stale` counts them.
"""

import datetime
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lowq_kernels import registry
from lowq_kernels.registry import Call, Config, KernelSpec, capability, kernels
from lowq_kernels.timing import graph_time, rotation, wall_time
from lowq_packers.errors import DamagedError
from lowq_packers.layouts import LAYOUTS, PackedWeight, pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

FILE = "lowq_tune.json"
FORMAT = 1
RUNNERS_UP = 2
BATCHES = (1, 2, 4, 8, 16, 32, 64)
NEVER_TUNED = {"cpu": ("reference",), "cuda": ("reference", "dequant")}  # truth, and a fallback that triton's outruns
COARSE_REPLAYS, COARSE_US = 3, 200.0  # the first look at a config; the best few are then timed by the full protocol
FINALISTS = 3
REACH = 4.0  # a shipped entry answers for shapes up to this factor away in N * K, where none is nearer


@dataclass(frozen=True)
class Shape:
    """One weight shape of a checkpoint and how many layers have it."""

    N: int
    K: int
    scheme: Scheme
    dtype: torch.dtype
    count: int = 1

    @property
    def weights(self) -> int:
        """Weights that all layers of this shape hold: how much of a decode step they are."""
        return self.N * self.K * self.count


@dataclass(frozen=True)
class Entry:
    """The winner of one call and its runners-up."""

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

    @property
    def place(self) -> tuple[Any, ...]:
        """What an entry answers for, M aside."""
        return self.bits, self.group, self.zero, self.dtype, self.layout, self.N, self.K


@dataclass(frozen=True)
class Machine:
    """What times depend on besides the call."""

    gpu: str
    capability: tuple[int, int]
    torch: str
    triton: str

    @classmethod
    def here(cls, device: torch.device) -> "Machine":
        """This device, with the versions installed."""
        if device.type == "cuda":
            return cls(torch.cuda.get_device_name(device), capability(device), torch.__version__, _version("triton"))
        return cls(f"cpu ({torch.get_num_threads()} threads)", (0, 0), torch.__version__, "")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


@cache
def source_hash(kernel: str) -> str:
    """Twelve hex digits of the sources next to a kernel's launcher: any edit there makes its times stale."""
    module = kernels()[kernel].launch.__module__
    package, _, name = module.rpartition(".")
    folder = resources.files(package)
    if package == "lowq_kernels":  # single files: cpu.py, dequant.py
        files = [folder / f"{name}.py"]
    else:
        files = sorted((f for f in folder.iterdir() if f.name.endswith((".py", ".cu", ".cuh"))), key=lambda f: f.name)
    digest = hashlib.sha256()
    for f in files:
        digest.update(f.read_bytes())
    return digest.hexdigest()[:12]


# ---- measuring ----

failed: dict[str, str] = {}  # "kernel config" -> why it could not be compiled or launched: reported, then passed over


def random_weight(shape: Shape, layout: str, device: torch.device) -> PackedWeight:
    """A weight of this shape with all codes drawn, to time on: real data takes as long (zeros would not)."""
    gen = torch.Generator(device).manual_seed(shape.N * 31 + shape.K)
    s, G = shape.scheme, shape.scheme.groups(shape.K)
    W_q = torch.randint(0, s.levels, (shape.N, shape.K), dtype=torch.uint8, device=device, generator=gen)
    scales = (torch.rand(shape.N, G, device=device, generator=gen) * 0.009 + 0.001).to(shape.dtype)
    zeros = None
    if s.zero != "none":
        zeros = torch.randint(0, s.levels, (shape.N, G), device=device, generator=gen).to(shape.dtype)
    return pack(QuantizedTensor(W_q, scales, zeros, s.bits, s.group_size, s.zero), layout)


def copies(p: PackedWeight) -> list[PackedWeight]:
    """p and enough clones of it that no cache holds them all."""
    rest = (p.scheme, p.N, p.K, p.layout)
    found = [p]
    for _ in range(rotation(p.nbytes, p.words.device) - 1):
        words, scales, zeros, aux = (None if t is None else t.clone() for t in (p.words, p.scales, p.zeros, p.aux))
        assert words is not None
        assert scales is not None
        found.append(PackedWeight(words, scales, zeros, *rest, aux))
    return found


def call_for(shape: Shape, M: int, layout: str, device: torch.device) -> Call:
    """The dispatch question for M rows of this shape."""
    return Call(M, shape.N, shape.K, shape.scheme, layout, shape.dtype, device.type, capability(device))


def layouts_for(shape: Shape, device: torch.device) -> list[str]:
    """Layouts worth measuring for this shape here: each offers a kernel that the ones before it do not. rowstream first."""
    found: list[str] = []
    offered: set[str] = set()
    for name, layout in sorted(LAYOUTS.items(), key=lambda item: (item[0] != "rowstream", item[0])):
        if layout.why_not(shape.scheme, shape.N, shape.K) is None:
            call = call_for(shape, 1, name, device)
            never = NEVER_TUNED.get(device.type, ())
            legal = {s.name for s in kernels().values() if s.name not in never and s.why_not(call) is None}
            if legal - offered:
                found.append(name)
                offered |= legal
    return found


def candidates(call: Call, exhaustive: bool = False) -> list[tuple[KernelSpec, Config]]:
    """Kernels and configs to time for a call, those that a model gives no chance left out unless `exhaustive`.

    The model counts, per config, the rows it multiplies beyond M, how often it decodes each weight, and how much of the GPU
    its programs fill; a config worse than another of its kernel by PRUNE in their product is not timed.
    """
    found = []
    for spec in kernels().values():
        if spec.name in NEVER_TUNED.get(call.device, ()) or spec.why_not(call):
            continue
        legal = spec.legal_configs(call)
        if exhaustive or len(legal) < 4:
            found += [(spec, c) for c in legal]
            continue
        cost = [_cost(call, c) for c in legal]
        limit = PRUNE * min(cost)
        found += [(spec, c) for c, t in zip(legal, cost, strict=True) if t <= limit]
    return found


PRUNE = 2.5


def _cost(call: Call, c: Config) -> float:
    """Relative time of a tiled config by the model of `candidates`; 1 for configs without tiles."""
    if "BLOCK_N" not in c or "BLOCK_M" not in c:
        return 1.0
    tiles_m = math.ceil(call.M / c["BLOCK_M"])
    programs = tiles_m * math.ceil(call.N / c["BLOCK_N"]) * c.get("SPLIT_K", 1)
    slots = _processors() * max(1, 8 // c.get("num_warps", 4))
    fill = min(1.0, programs / _processors()) * programs / (math.ceil(programs / slots) * slots) ** 0.5 / programs**0.5
    padded = tiles_m * c["BLOCK_M"]
    work = tiles_m + padded / 128  # decoding once per tile of rows, multiplying once per padded row
    least = 1 + call.M / 128
    return work / least / max(fill, 1e-3)


@cache
def _processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 1


@dataclass
class Budget:
    """Seconds that may be spent; infinite by default."""

    seconds: float = math.inf
    started: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def left(self) -> bool:
        """Whether there is any."""
        return self.spent < self.seconds


def measure(
    shape: Shape, batches: Sequence[int], device: torch.device, budget: Budget, exhaustive: bool = False
) -> Iterator[Entry]:
    """Time one shape in every layout and batch size; yields an Entry per (layout, M) as soon as it is known.

    A kernel that fails to compile or launch is passed over. Stops where the budget ends.
    """
    for layout in layouts_for(shape, device):
        if not budget.left:
            return
        weights = copies(random_weight(shape, layout, device))
        for M in batches:
            if not budget.left:
                return
            if entry := best(shape, M, weights, device, exhaustive):
                yield entry
        del weights


def best(shape: Shape, M: int, weights: list[PackedWeight], device: torch.device, exhaustive: bool = False) -> Entry | None:
    """The fastest kernel and config for M rows of these copies of one weight; None where none runs."""
    call = call_for(shape, M, weights[0].layout, device)
    x = torch.randn(M, shape.K, device=device).to(shape.dtype)
    coarse = []
    for spec, config in candidates(call, exhaustive):
        us = _time(spec, config, x, weights, COARSE_REPLAYS, COARSE_US)
        if us is not None:
            coarse.append((us, spec, config))
    coarse.sort(key=lambda t: t[0])
    final = []
    for us, spec, config in coarse[:FINALISTS]:
        precise = _time(spec, config, x, weights, 12, 1500.0) if device.type == "cuda" else us
        if precise is not None:
            final.append((precise, spec, config))
    if not final:
        return None
    final.sort(key=lambda t: t[0])
    (us, spec, config), s = final[0], shape.scheme
    others = tuple({"kernel": k.name, "config": c, "us": round(t, 2)} for t, k, c in final[1 : 1 + RUNNERS_UP])
    dtype = str(shape.dtype).removeprefix("torch.")
    place = (s.bits, s.group_size, s.zero, dtype, weights[0].layout, shape.N, shape.K, M)
    return Entry(*place, spec.name, config, round(us, 2), source_hash(spec.name), others)


def _time(
    spec: KernelSpec, config: Config, x: torch.Tensor, weights: list[PackedWeight], replays: int, replay_us: float
) -> float | None:
    """Microseconds of one kernel and config, or None where it cannot run."""
    calls = [lambda w=w: spec.launch(x, w, None, config) for w in weights]
    try:
        return graph_time(calls, replays, replay_us) if x.is_cuda else wall_time(calls)
    except Exception as e:
        if "illegal memory access" in str(e) or "misaligned" in str(e):
            raise  # the device is lost: no later time would mean anything
        failed[f"{spec.name} {config}"] = f"{type(e).__name__}: {e}"
        return None


# ---- tables ----


class Table:
    """Entries of one machine, found by place and M. `sources` False takes entries whatever sources they were timed with.

    Entries of kernels that cannot be imported here, and otherwise those of changed sources, are counted as stale.
    """

    def __init__(self, entries: Iterable[Entry] = (), sources: bool = True) -> None:
        self.entries: dict[tuple[Any, ...], dict[int, Entry]] = {}
        self.stale = 0
        for e in entries:
            if e.kernel not in kernels() or (sources and e.source != source_hash(e.kernel)):
                self.stale += 1
            else:
                self.add(e)

    def add(self, e: Entry) -> None:
        """Keep an entry, in place of an older one for the same call."""
        self.entries.setdefault(e.place, {})[e.M] = e

    def __len__(self) -> int:
        return sum(len(by_m) for by_m in self.entries.values())

    def __iter__(self) -> Iterator[Entry]:
        for by_m in self.entries.values():
            yield from by_m.values()

    def lookup(self, call: Call, near: bool = False) -> tuple[str, Config] | None:
        """Kernel and config for a call: the entry of the next larger M, else of the largest; `near` also asks like shapes."""
        by_m = self.entries.get(_place(call)) or (self._nearest(call) if near else None)
        if not by_m:
            return None
        e = by_m[min((m for m in by_m if m >= call.M), default=max(by_m))]
        return e.kernel, e.config

    def _nearest(self, call: Call) -> dict[int, Entry] | None:
        bits, _, zero, dtype, layout, N, K = _place(call)
        best, found = REACH, None
        for place, by_m in self.entries.items():
            if (place[0], place[4]) != (bits, layout):
                continue
            ratio = max(N * K / (place[5] * place[6]), place[5] * place[6] / (N * K))
            skew = max(N * place[6] / (K * place[5]), K * place[5] / (N * place[6])) ** 0.25
            other = 1.1 if (place[1], place[2], place[3]) != (call.scheme.group_size, zero, dtype) else 1.0
            if ratio * skew * other < best:
                best, found = ratio * skew * other, by_m
        return found


def _place(call: Call) -> tuple[Any, ...]:
    s, dtype = call.scheme, str(call.dtype).removeprefix("torch.")
    return s.bits, s.group_size, s.zero, dtype, call.layout, call.N, call.K


def preferred_layout(table: Table, shape: Shape, layouts: Iterable[str]) -> str | None:
    """The layout with the least geometric mean of times over the batch sizes that all were measured for.

    None where fewer than two were measured: then there is nothing to compare, and the registry's rule decides.
    """
    dtype = str(shape.dtype).removeprefix("torch.")
    s = shape.scheme
    times: dict[str, dict[int, float]] = {}
    for layout in layouts:
        by_m = table.entries.get((s.bits, s.group_size, s.zero, dtype, layout, shape.N, shape.K))
        if by_m:
            times[layout] = {m: e.us for m, e in by_m.items()}
    common = set.intersection(*(set(t) for t in times.values())) if len(times) > 1 else set()
    if not common:
        return None
    return min(times, key=lambda name: (sum(math.log(times[name][m]) for m in common), name))


# ---- files ----


def read_file(path: Path) -> list[dict[str, Any]]:
    """The machines of a tuning file. Raises DamagedError where it is not one."""
    try:
        data = json.loads(path.read_text())
        machines = data["machines"]
        if data["format"] != FORMAT or not isinstance(machines, list):
            raise ValueError(f"format {data['format']}")
        for m in machines:
            _entries(m), Machine(m["gpu"], tuple(m["capability"]), m["torch"], m["triton"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise DamagedError(f"{path} is not a tuning file of format {FORMAT} ({e}); run lowq tune again") from None
    return machines


def _entries(machine: dict[str, Any]) -> list[Entry]:
    return [Entry(**{**e, "runners_up": tuple(e["runners_up"])}) for e in machine["entries"]]


def write_file(path: Path, here: Machine, entries: Iterable[Entry]) -> None:
    """Put this machine's entries into a tuning file, over its older ones; other machines' stay. Written whole or not at all."""
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
    partial = path.with_name(path.name + ".partial")
    partial.write_text(_dumps({"format": FORMAT, "machines": [*others, machine]}))
    partial.replace(path)


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
        for e in fresh:
            table.add(e)
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
def shipped(gpu: str) -> Table:
    """The table measured for this GPU and shipped with lowq, possibly empty."""
    table = Table()
    for f in sorted(resources.files("lowq_kernels.tuned").iterdir(), key=lambda f: f.name):
        if f.name.endswith(".json"):
            for m in json.loads(f.read_text())["machines"]:
                if m["gpu"] == gpu:
                    for e in Table(_entries(m), sources=False):
                        table.add(e)
    return table


def _from_checkpoint(call: Call) -> tuple[str, Config] | None:
    return next((found for t in _active.values() if (found := t.lookup(call))), None)


def _from_shipped(call: Call) -> tuple[str, Config] | None:
    if call.device != "cuda" or not torch.cuda.is_available():
        return None
    return shipped(torch.cuda.get_device_name()).lookup(call, near=True)


def best_layout(shape: Shape, device: torch.device) -> str | None:
    """The layout that measurements prefer for this shape here, or None where none were made."""
    tables = list(_active.values())
    if device.type == "cuda":
        tables.append(shipped(torch.cuda.get_device_name(device)))
    return next((name for t in tables if (name := preferred_layout(t, shape, LAYOUTS))), None)


registry.TABLES[:] = [_from_checkpoint, _from_shipped]
