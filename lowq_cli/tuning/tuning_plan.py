"""The shapes that `lowq tune` measures: the distinct weight shapes of a checkpoint as its decoder multiplies them."""

import torch

from lowq_cli.files.checkpoint import Checkpoint, open_checkpoint
from lowq_cli.files.source import open_source
from lowq_cli.files.storage import FP8, method
from lowq_cli.interop.importer import runnable
from lowq_kernels.dispatch.tuning import Shape
from lowq_packers.errors import UsageError
from lowq_packers.scheme import Scheme

# The native decoder joins these into one weight (engine/folding.py); prefill may use them one by one.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def open_packed(name: str) -> Checkpoint:
    """Open a checkpoint whose packed weights can be timed. Raises UsageError for fp8 weights."""
    folder = runnable(name)
    with open_source(folder) as source:
        if method(source.config) == FP8:
            raise UsageError(f"{name} holds weights in fp8 blocks, whose kernel chooses by a rule: there is nothing to tune")
    return open_checkpoint(folder)


def shapes_of(checkpoint: Checkpoint, dtype: torch.dtype) -> list[Shape]:
    """Every (N, K, scheme) of the packed matrices, those with the most weights first; joined matrices replace their parts.

    A part that occurs only in joined matrices is omitted, because a decode step never multiplies it alone.
    """
    sizes = {t.name: (t.shape[0], t.shape[1], t.scheme) for t in checkpoint.tensors if t.scheme is not None}
    counts: dict[tuple[int, int, Scheme], int] = {}
    taken: set[str] = set()
    for name, (N, K, scheme) in sizes.items():
        if name in taken:
            continue
        parent, _, leaf = name.rpartition(".")
        names = next((ns for ns in JOINED if leaf in ns), ())
        parts = [sizes[f"{parent}.{n}"] for n in names if f"{parent}.{n}" in sizes]
        if names and len(parts) == len(names) and len({(k, s) for _, k, s in parts}) == 1:
            taken.update(f"{parent}.{n}" for n in names)
            N = sum(n for n, _, _ in parts)
        counts[N, K, scheme] = counts.get((N, K, scheme), 0) + 1
    act = checkpoint.config["quantization_config"].get("activations", "none")
    shapes = [Shape(N, K, scheme, dtype, count, act) for (N, K, scheme), count in counts.items()]
    return sorted(shapes, key=lambda s: (-s.weights, s.N, s.K))
