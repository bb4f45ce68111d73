"""The file of a calibrated layer, until the checkpoint holds it: codes, scales, zeros and tables of its matrices, and notes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lowq_cli.plan.plan import Item
from lowq_packers.errors import DamagedError
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.regular import opened


def save_item(q: QuantizedTensor, name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors to save: codes as bytes, scales and zeros in the checkpoint's dtype, a table in fp32."""
    q = q.held(dtype)
    leaves = {"codes": q.W_q, "scales": q.scales, "zeros": q.zeros, "table": q.table}
    return {f"{name}.{k}": t.to("cpu", copy=True).contiguous() for k, t in leaves.items() if t is not None}


def load_item(path: Path, item: Item) -> QuantizedTensor:
    """One item of a finished layer. Raises DamagedError if the file has changed since it was written."""
    scheme = item.scheme
    assert scheme is not None
    with _reading(path) as saved:
        has = {"codes": True, "scales": True, "zeros": scheme.zero != "none", "table": scheme.table_width}
        tensors = {k: saved.get_tensor(f"{item.name}.{k}") for k, there in has.items() if there}
    return QuantizedTensor.of(scheme, tensors["codes"], tensors["scales"], tensors.get("zeros"), tensors.get("table")).held(
        torch.float32
    )


def load_tensor(path: Path, name: str) -> torch.Tensor | None:
    """A tensor of a finished layer; None if the file has no tensor of that name."""
    with _reading(path) as saved:
        return saved.get_tensor(name) if name in saved.keys() else None  # noqa: SIM118  (not a dict)


def valued(path: Path) -> list[str]:
    """The names of the unquantized tensors whose new values a file holds, as `NAME.values`."""
    with _reading(path) as saved:
        return [key.removesuffix(".values") for key in saved.keys() if key.endswith(".values")]  # noqa: SIM118


def load_notes(path: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """The notes of a finished layer, and the inputs that could not be scaled."""
    with _reading(path) as saved:
        notes, unscaled = json.loads(saved.metadata()["notes"])
        return notes, tuple(unscaled)


def load_errors(path: Path) -> list[tuple[float, float]]:
    """The output error of each matrix of a finished layer before and after, where a file of another tool was improved."""
    with _reading(path) as saved:
        return [(float(before), float(after)) for before, after in json.loads(saved.metadata()["errors"])]


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with opened(path) as name, safe_open(name, framework="pt") as saved:
            yield saved
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as e:
        raise DamagedError(f"{path} is damaged ({e}); delete it and run the same command again") from None
