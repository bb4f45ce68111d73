"""Measurements that ship with lowq: a file of tuned/ answers calls that a checkpoint's table does not.

    prefer    calls in which a kernel goes before others: its bits, ranges of M and N, `least_` group, K and N * K
    configs   of a kernel by bits and, up to so many, by group, N and K: [rows of x up to, config], first what was fastest. The
              next larger row answers, with its first config that is legal and for so many rows
    models    constants of the cost models that kernels' launchers evaluate: where many tiles of x make waves, what wins at one
              shape is slow at the next and 30 constants do better than 45,000 rows
              (benchmarks/notes/tile_wgmma.md)
    measured  winners by shape (tuning.Table), which also answer for shapes near them, in a layout that was measured (h100.json:
              strided, so where that was asked for, or where NVRTC is missing); on GPUs of the file's capability alone

A GPU asks the file of its name, else of its capability, else of its major number; of several the one of the nearest SM count.
Configs stand as numbers in the order of `keys`. A key never changes its meaning, a new meaning is a new key: rows whose keys
are not the kernel's are left out, as are configs that a kernel no longer has, and nothing else makes a row stale.
`benchmarks/ship.py` writes the files from measurements on a GPU.
"""

import json
import math
from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources
from typing import Any

from lowq_kernels import gpu
from lowq_kernels.dispatch.registry import Call, Config
from lowq_kernels.gpu import Gpu
from lowq_packers.layouts.tile import padded_rows

FORMAT = 2


@cache
def files() -> tuple[dict[str, Any], ...]:
    """Every shipped file, by name."""
    paths = [f for f in resources.files("lowq_kernels.tuned").iterdir() if f.name.endswith(".json")]
    return tuple({"file": f.name, **json.loads(f.read_text())} for f in sorted(paths, key=lambda f: f.name))


@cache
def file_for(on: Gpu) -> dict[str, Any]:
    """The shipped file that answers for a GPU."""
    return nearest(files(), on)


def nearest(files: Iterable[dict[str, Any]], on: Gpu) -> dict[str, Any]:
    """The one of these files that answers for a GPU."""

    def distance(file: dict[str, Any]) -> tuple[bool, bool, bool, float]:
        (major, minor), ratio = file["capability"], file["sms"] / on.sms
        return file["gpu"] != on.name, (major, minor) != on.capability, major != on.capability[0], abs(math.log(ratio))

    return min(files, key=distance)


def made_for(file: dict[str, Any], on: Gpu) -> bool:
    """Whether a file is of this GPU's architecture."""
    return tuple(file["capability"]) == on.capability


def prefers(kernel: str) -> Callable[[Call], bool]:
    """Whether a call is one that this kernel goes first in: a KernelSpec's `prefer`."""

    def prefer(call: Call) -> bool:
        s = call.scheme
        return any(
            row["kernel"] == kernel
            and s.bits in row["bits"]
            and row["M"][0] <= call.M
            and _up_to(call.M, row["M"][1])
            and row["N"][0] <= call.N
            and _up_to(call.N, row["N"][1])
            and row.get("least_K", 0) <= call.K
            and row.get("least_NK", 0) <= call.N * call.K
            and s.group_size >= min(row.get("least_group", 0), call.K)
            for row in file_for(gpu.of(call.capability))["prefer"]
        )

    return prefer


def row_of(table: list[dict[str, Any]], kernel: str, call: Call) -> list[list[int]]:
    """[most rows of x, *values] in the order to try them, of the first row of `configs` that is as large as the call: they
    ascend."""
    sizes = (call.scheme.group_size, padded_rows(call.N), call.K)
    rows = (row for row in table if row["kernel"] == kernel and row["bits"] == call.scheme.bits)
    return next((row["configs"] for row in rows if all(map(_up_to, sizes, row["up_to"]))), [])


def _up_to(value: int, most: int | None) -> bool:
    return most is None or value <= most


def configs(kernel: str, call: Call, rows: int, keys: tuple[str, ...]) -> list[Config]:
    """What to take for a call of `rows` rows of x a block, the best first."""
    file = file_for(gpu.of(call.capability))
    if tuple(file["keys"].get(kernel, ())) != keys:
        return []
    return [dict(zip(keys, v, strict=True)) for most, *v in row_of(file["configs"], kernel, call) if rows <= most]


def answers(kernel: str, call: Call) -> bool:
    """Whether a file made for the GPU of this call says when to take the kernel."""
    on = gpu.of(call.capability)
    return call.device == "cuda" and made_for(file_for(on), on) and prefers(kernel)(call)


def gate_up(call: Call, keys: tuple[str, ...]) -> list[Config]:
    """Configs with pairs of row tiles for act(gate) * up, the best first: what whole steps of an 8B model were fastest with,
    then what fits (us by [8, 2, 256, 1, 1, 1], by these: 4 bits 1930, 1897; 3 1788, 1747; 2 1582, 1432; 1 1438, 1240)."""
    rows = file_for(gpu.of(call.capability))["gated"][str(call.scheme.bits)]
    return [dict(zip(keys, v, strict=True)) for v in rows]


def model(kernel: str, on: Gpu) -> Any:
    """The constants of a kernel's cost model."""
    return file_for(on)["models"][kernel]
