"""Plots: make a figure and write its file. `check` reports an unwritable file before any work starts."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowq_packers.atomic import replacing
from lowq_packers.errors import UsageError, disk_full

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check(path: Path) -> None:
    """Raise UsageError if no plot can be written to `path`: matplotlib or the folder is missing, or the format is unknown."""
    filetypes = figure(1, 1).canvas.get_supported_filetypes()
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.absolute().parent}")
    if path.suffix[1:].lower() not in filetypes:
        raise UsageError(f"--plot {path}: the name does not end in a format that can be drawn; use .png, .svg or .pdf")


def figure(width: float, height: float, **layout: Any) -> "Figure":
    """An empty figure; width and height are in inches. Raises UsageError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UsageError("--plot needs matplotlib; install it with: pip install matplotlib") from None
    return Figure(figsize=(width, height), **layout)


def save(drawn: "Figure", path: Path, dpi: int | None = None) -> None:
    """Write the figure atomically. Raises UsageError or DoesNotFitError if that fails."""
    try:
        with replacing(path) as partial:
            drawn.savefig(partial, dpi="figure" if dpi is None else dpi)
    except OSError as e:
        if full := disk_full(e, path):
            raise full from None
        raise UsageError(f"--plot {path} cannot be written: {e.strerror}") from None
