"""What `lowq serve` runs: vLLM, on a checkpoint in a format that it has kernels for, exported into the cache if need be."""

import os
from pathlib import Path

from lowq_cli import console
from lowq_cli.checkpoint import Checkpoint, is_checkpoint, open_checkpoint
from lowq_cli.exporter import check, export
from lowq_cli.importer import cached
from lowq_cli.sharding import fusion_problems, shard_problems
from lowq_packers import formats
from lowq_packers.errors import LowqError, UnsupportedError, UsageError

FORMATS = ("compressed-tensors", "awq", "humming")  # in the order of vLLM's kernels for them


def command(model: str, ranks: int = 1, port: int = 8000, extra: tuple[str, ...] = (), write: bool = True) -> list[str]:
    """The `vllm serve` command line for a checkpoint of ours, or for a model that vLLM reads as it is.

    write: export what must be exported; False only says where it would be.
    Raises UnsupportedError for a scheme that vLLM has no kernel for, or that `ranks` ranks cannot share.
    """
    if ranks < 1:
        raise UsageError(f"--tp {ranks} must be at least 1")
    folder = Path(model).expanduser()
    name = folder.resolve().name if folder.is_dir() else model
    served = model
    if is_checkpoint(folder):
        with (found := open_checkpoint(folder)).source:
            to = choose(found, ranks)
            target = cached(found.source, f"exports/{to}")
        served = str(target)
        if write and not (target / "config.json").is_file():
            console.say(f"exporting to {to} in {target}")
            export(folder, to, target)
    parallel = ["--tensor-parallel-size", str(ranks)] if ranks > 1 else []
    return ["vllm", "serve", served, "--served-model-name", name, "--port", str(port), *parallel, *extra]


def choose(found: Checkpoint, ranks: int) -> str:
    """The export format that vLLM serves a checkpoint in. Raises UnsupportedError where there is none."""
    shapes = {t.name: (t.shape[0], t.shape[1]) for t in found.tensors if t.scheme}
    problems = fusion_problems(found.schemes) or shard_problems(found.config, found.schemes, shapes, ranks)
    if problems:
        raise UnsupportedError(f"vLLM cannot serve {found.folder} on {ranks} GPU(s): {problems[0]}")
    reasons = []
    for to in FORMATS:
        try:
            check(found, formats.get(to))
        except LowqError as e:
            reasons.append(str(e))
            continue
        if to == "compressed-tensors" and not _has_kernels(found):
            reasons.append("vLLM has compressed-tensors kernels for 8, 4 and 2 bits without a zero, and 4 bits with whole ones")
            continue
        return to
    raise UnsupportedError(f"vLLM cannot serve {os.fspath(found.folder)}: {reasons[0]}; quantize with --for vllm")


def _has_kernels(found: Checkpoint) -> bool:
    return all(s.bits in (8, 4, 2) if s.zero == "none" else s.bits == 4 for s in found.schemes.values())
