"""lowq_tune.json: a checkpoint's measurements by machine. It is read without torch, since `lowq inspect` lists the machines."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lowq_packers.atomic import alone, write_whole
from lowq_packers.errors import DamagedError, LowqError
from lowq_packers.regular import MAX_CONFIG, read_text
from lowq_packers.scheme import Act

if TYPE_CHECKING:
    from torch import device as Device  # by another name, since Machine has a field called torch

FILE = "lowq_tune.json"
FORMAT = 2  # format 1 had other names for the configs of the tile kernels
Config = dict[str, int]  # of a kernel, as in the registry


class Place(NamedTuple):
    """The key of an entry, without M."""

    bits: int
    group: int
    zero: str
    dtype: str
    layout: str
    N: int
    K: int
    act: Act


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
    def place(self) -> Place:
        """The key of this entry."""
        return Place(*(getattr(self, name) for name in Place._fields))


@dataclass(frozen=True)
class Machine:
    """What times depend on besides the call."""

    gpu: str
    capability: tuple[int, int]
    torch: str
    triton: str

    @classmethod
    def here(cls, device: Device) -> Machine:
        """This device, with the versions installed."""
        import torch

        from lowq_kernels.gpu import capability

        if device.type == "cuda":
            return cls(torch.cuda.get_device_name(device), capability(device), torch.__version__, _version("triton"))
        n = torch.get_num_threads()
        return cls(f"cpu ({n} thread{'s' * (n > 1)})", (0, 0), torch.__version__, "")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def read_file(path: Path) -> list[dict[str, Any]]:
    """The machines of a tuning file. Raises DamagedError where it is not one."""
    try:
        data = json.loads(read_text(path, MAX_CONFIG))
        machines = data["machines"]
        if data["format"] != FORMAT or not isinstance(machines, list):
            raise ValueError(f"it has format {data['format']}, of another lowq")
        for m in machines:
            entries_of(m)
            _check_machine(Machine(m["gpu"], tuple(m["capability"]), m["torch"], m["triton"]))
    except LowqError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise DamagedError(f"{path} is not a tuning file of format {FORMAT} ({e}); run lowq tune again") from None
    return machines


def _check_machine(m: Machine) -> None:
    """Raise TypeError for fields of other types than a machine's."""
    if not all(isinstance(n, str) for n in (m.gpu, m.torch, m.triton)) or [*map(type, m.capability)] != [int, int]:
        raise TypeError(f"a machine is {m}"[:200])


def entries_of(machine: dict[str, Any]) -> list[Entry]:
    """Entries as `asdict` spelled them. Raises KeyError or TypeError for others: dispatch compares and divides their fields."""
    entries = [Entry(**{**e, "runners_up": tuple(e["runners_up"])}) for e in machine["entries"]]
    for e in entries:
        numbers, names = (e.bits, e.group, e.N, e.K, e.M), (e.zero, e.dtype, e.layout, e.kernel, e.source, e.act)
        sizes = all(type(n) is int and n > 0 for n in numbers) and isinstance(e.us, int | float) and e.us > 0
        if not sizes or not all(isinstance(n, str) for n in names) or not isinstance(e.config, dict):
            raise TypeError(f"an entry is {e}"[:200])
    return entries


def write_file(path: Path, here: Machine, entries: Iterable[Entry]) -> None:
    """Put this machine's entries into a tuning file, over its older ones, of which none stays where there are no entries;
    other machines' stay. Written whole or not at all.
    """
    with alone(path.parent):
        _write_file(path, here, list(entries))


def _write_file(path: Path, here: Machine, entries: list[Entry]) -> None:
    try:
        machines = read_file(path) if path.exists() else []
    except DamagedError:
        machines = []
    mine: dict[tuple[Any, ...], Entry] = {}
    others = []
    for m in machines:
        if Machine(m["gpu"], tuple(m["capability"]), m["torch"], m["triton"]) == here:
            mine.update({(*e.place, e.M): e for e in entries_of(m)} if entries else {})
        else:
            others.append(m)
    mine.update({(*e.place, e.M): e for e in entries})
    date = datetime.date.today().isoformat()
    rows = [asdict(e) for _, e in sorted(mine.items(), key=lambda item: str(item[0]))]
    machine = {**asdict(here), "date": date, "entries": rows}
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
