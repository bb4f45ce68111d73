"""Checks of --tasks before anything is loaded: torch takes seconds to import, lm-eval's index 20 seconds."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from lowq_packers.errors import NotFoundError, UsageError

YAML = (".yaml", ".yml")


def check_names(names: Sequence[str]) -> None:
    """Raise UsageError if lm-eval is not installed or no task is named, NotFoundError for a missing task file."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError("--tasks needs lm-eval; install it with: pip install 'lm-eval<0.5'")
    if not names:
        raise UsageError("--tasks names no task; give lm-eval's names or YAML files, separated by commas")
    for name in names:
        if name.endswith(YAML) and not Path(name).expanduser().is_file():
            raise NotFoundError(f"there is no task file {name}")
