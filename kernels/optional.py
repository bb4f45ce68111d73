"""Imports of modules that need an optional library: Triton, or NVRTC (which `cuda.nvrtc` reports missing as "cuda")."""

import importlib
from typing import Any


def optional(module: str, library: str) -> Any:
    """The module, or None where `library` is not installed. Any other failure to import it is a bug, and raised."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if (e.name or "").split(".")[0] != library:
            raise
        return None
