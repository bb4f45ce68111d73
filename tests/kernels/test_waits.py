"""Kernels with dependent launch wait for those before them, and not in a loop (decode/launch.py says why)."""

import ast
import re
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
WAITS = {"gdc_wait", "overlap_previous", "overlap", "wait"}  # the last two are those of decode/launch.py


def calls(tree):
    """Names of the functions that a piece of code calls."""
    names = {call.func for call in ast.walk(tree) if isinstance(call, ast.Call)}
    return {name.id for name in names if isinstance(name, ast.Name)}


def faults(text):
    """Kernels that have the argument PDL and never wait, and those that wait in a loop."""
    functions = [f for f in ast.walk(ast.parse(text)) if isinstance(f, ast.FunctionDef)]
    waits = WAITS | {f.name for f in functions if calls(f) & WAITS}
    for function in functions:
        if any(a.arg == "PDL" for a in function.args.args) and not calls(function) & waits:
            yield f"{function.name} does not wait"
        if any(isinstance(loop, ast.For | ast.While) and calls(loop) & waits for loop in ast.walk(function)):
            yield f"{function.name} waits in a loop"


IMPORTED = r"import .*\b(?:gdc_wait|overlap_previous|overlap|wait)\b"
DEPENDENT = [p for p in sorted(KERNELS.rglob("*.py")) if re.search(IMPORTED, p.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", DEPENDENT, ids=lambda p: p.stem)
def test_kernels_wait_and_not_in_a_loop(path):
    assert not list(faults(path.read_text(encoding="utf-8")))


def test_the_rule_catches_a_file_that_breaks_it():
    assert len(DEPENDENT) > 10
    head, wait = "def f(x, PDL):\n", "if PDL:\n        gdc_wait()\n"
    assert list(faults(f"{head}    {wait}")) == []
    assert list(faults(f"{head}    overlap(PDL, TRIGGER)\n")) == []
    assert list(faults(f"{head}    for i in range(x):\n     wait(PDL)\n")) == ["f waits in a loop"]
    assert list(faults(f"{head}    g(x)\n")) == ["f does not wait"]
    part = f"def g(x, PDL):\n    {wait}"
    assert list(faults(f"{part}{head}    g(x)\n")) == []
    assert list(faults(f"{part}{head}    for i in range(x):\n     g(i)\n")) == ["f waits in a loop"]
    assert list(faults(f"{head}    for i in range(x):\n     {wait}")) == ["f waits in a loop"]


PREPARES = {"act_rows.cu", "int8_planes.cu"}  # x for a product, which is a launch of its own
CUDA = [p for p in (*KERNELS.glob("products/cuda/*.cu"), *KERNELS.glob("fp8/*.cu")) if p.name not in PREPARES]


def late(text):
    """Whether each launch of the next kernel comes right after a wait, and there is one."""
    launches = re.findall(r"(?:next_grid_launch|gdc_launch_dependents)\(\)", text)
    after = re.findall(r"(?:previous_grid_wait|gdc_wait)\(\);?\s+(?:next_grid_launch|gdc_launch_dependents)\(\)", text)
    return len(launches) == len(after) > 0


def test_products_let_the_next_kernel_start_when_x_is_there():
    """What adapters add reads the same x, beside the product."""
    cuda = [p for p in CUDA if "next_grid_launch()" in p.read_text(encoding="utf-8")]
    assert {p.name for p in cuda} > {"tile_mma.cu", "tile_wgmma.cu", "dense_mma.cu"}
    for path in (*cuda, KERNELS / "products/triton/overlap.py"):
        assert late(path.read_text(encoding="utf-8")), path.name
    assert not late("next_grid_launch();\n previous_grid_wait();")
