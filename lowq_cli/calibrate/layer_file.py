"""A calibrated layer set down until the checkpoint holds it: codes, scales and zeros of its matrices, and the notes on it."""

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


def save_item(q: QuantizedTensor, name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors to set down: codes as bytes, scales and zeros in the checkpoint's dtype."""
    found = {f"{name}.codes": q.W_q, f"{name}.scales": q.scales.to(dtype)}
    if q.zeros is not None:
        found[f"{name}.zeros"] = q.zeros.to(dtype)
    return {k: t.to("cpu", copy=True).contiguous() for k, t in found.items()}


def load_item(path: Path, item: Item) -> QuantizedTensor:
    """One item out of a finished layer. Raises DamagedError if the file is no longer what was written."""
    scheme = item.scheme
    assert scheme is not None
    with _reading(path) as saved:
        codes, scales = saved.get_tensor(f"{item.name}.codes"), saved.get_tensor(f"{item.name}.scales").float()
        zeros = None if scheme.zero == "none" else saved.get_tensor(f"{item.name}.zeros").float()
    return QuantizedTensor(codes, scales, zeros, scheme.bits, scheme.group_size, scheme.zero)


def load_tensor(path: Path, name: str) -> torch.Tensor | None:
    """A tensor out of a finished layer; None if it holds none of that name."""
    with _reading(path) as saved:
        return saved.get_tensor(name) if name in saved.keys() else None  # noqa: SIM118  (not a dict)


def load_notes(path: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """The notes of a finished layer, and the inputs that could not be scaled."""
    with _reading(path) as saved:
        notes, unscaled = json.loads(saved.metadata()["notes"])
        return notes, tuple(unscaled)


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as saved:
            yield saved
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as e:
        raise DamagedError(f"{path} is damaged ({e}); delete it and run the same command again") from None
