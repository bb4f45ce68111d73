"""Registers, spills and warnings of the CUDA instances that tests ask for; machine_code.json holds those of unchanged sources.

    python tests/emulator/machine_code.py after a change of a CUDA source: compiles what changed, writes machine_code.json

A compiler's answer is a function of the source, its includes, the expression, the architecture, the options and NVRTC's
version, and the key of an entry is a hash of all of them. So an instance without an entry is compiled by the test that asks.
"""

import json
import sys
from pathlib import Path

import pytest

from lowq_kernels.cuda import nvrtc

FILE = Path(__file__).with_suffix(".json")
FIELDS = ("registers", "stack", "spill_stores", "spill_loads", "smem", "serialized")
RECORD: dict[str, list[int]] = json.loads(FILE.read_text())
ASKED: dict[str, list[int]] = {}


def measured(file: str, expression: str, arch: str) -> list[int]:
    """The compiler's answer, in the order of FIELDS."""
    cubin = nvrtc.compiled(file, expression, arch)
    return [*(cubin.resources[field] for field in FIELDS[:-1]), int("serialized" in cubin.log)]


def used(file: str, expression: str, arch: str) -> dict[str, int]:
    """FIELDS of an instance; serialized: 1 where ptxas waits for every single wgmma (20 to 60% slower)."""
    key = nvrtc.key(file, expression, arch)
    ASKED[key] = RECORD.get(key) or measured(file, expression, arch)
    return dict(zip(FIELDS, ASKED[key], strict=True))


def without_spills(file: str, expression: str, arch: str) -> dict[str, int]:
    """`used`, checked: registers suffice, and products are not serialized."""
    result = used(file, expression, arch)
    bad = {field: n for field, n in result.items() if field not in ("registers", "smem") and n}
    assert not bad, f"{expression} {arch}: {bad}"
    return result


if __name__ == "__main__":
    from machine_code import ASKED as asked  # the module that the tests import

    kernels = Path(__file__).parents[1] / "kernels"
    code = pytest.main([str(f) for f in sorted(kernels.glob("test_*.py")) if "from machine_code import" in f.read_text()])
    lines = (f"{json.dumps(key)}: {json.dumps(asked[key])}" for key in sorted(asked))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.exit(code)
