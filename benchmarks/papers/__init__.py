"""Reproductions of published kernels and of their layout, held to the same definition as ours: what papers_speed.py measures.

`PAPERS` has each by name, as the registry has ours; dispatch does not know them.
"""

import importlib
import pkgutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lowq_kernels.dispatch.registry import KernelSpec, Launch

PAPERS: dict[str, KernelSpec] = {}


def paper(name: str, **facts: object) -> Callable[[Launch], Launch]:
    """As `registry.register`, for a kernel that dispatch does not choose."""

    def add(launch: Launch) -> Launch:
        PAPERS[name] = KernelSpec(name=name, launch=launch, **facts)  # type: ignore[arg-type]
        return launch

    return add


with suppress(ModuleNotFoundError):  # no NVRTC
    from lowq_kernels.cuda import nvrtc

    nvrtc.sources().update({p.name: p.read_text() for p in Path(__file__).parent.glob("*.cu*")})
for module in pkgutil.iter_modules(__path__):
    with suppress(ModuleNotFoundError):  # no Triton, or no NVRTC
        importlib.import_module(f"papers.{module.name}")
