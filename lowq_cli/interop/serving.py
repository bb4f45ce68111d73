"""What `lowq serve` runs: vLLM, on a checkpoint exported into the cache in a format that it has kernels for.

Where there is none, or on request, vLLM takes the checkpoint as it is and our kernels with it, through `vllm_plugin`.
"""

from contextlib import suppress

from lowq_cli import console
from lowq_cli.files.checkpoint import Checkpoint, is_checkpoint, open_checkpoint
from lowq_cli.files.sharding import fusion_problems, shard_problems
from lowq_cli.files.source import DEMO
from lowq_cli.interop.exporter import check, export
from lowq_cli.interop.importer import cached, copy_new
from lowq_cli.state import user_path
from lowq_packers import formats
from lowq_packers.errors import LowqError, UnsupportedError, UsageError
from lowq_packers.layouts import DISK

VLLM_FORMATS = ("compressed-tensors", "awq")  # in the order of vLLM's kernels for them
NATIVE = "lowq"


def command(
    model: str, ranks: int = 1, port: int = 8000, extra: tuple[str, ...] = (), write: bool = True, native: bool = False
) -> list[str]:
    """The `vllm serve` command line for a checkpoint of ours, or for a model that vLLM reads as it is.

    write: export what must be exported; False only says where it would be. native: do not export, use our kernels.
    Raises UnsupportedError for weights that vLLM fuses but that differ, or that `ranks` ranks cannot share.
    """
    if ranks < 1:
        raise UsageError(f"--tp {ranks} must be at least 1")
    if not 0 < port < 1 << 16:
        raise UsageError(f"--port {port} must be from 1 to 65535")
    folder = DEMO if model == "demo" else user_path(model)
    name = folder.resolve().name if folder.is_dir() else model
    served = str(folder) if model == "demo" else model
    if is_checkpoint(folder):
        with (found := open_checkpoint(folder)).source:
            to = choose(found, ranks, native)
            target = folder.resolve() if to == NATIVE else cached(found.source, f"exports/{to}")
        served = str(target)
        if to == NATIVE:
            console.say("served by lowq's own kernels: lowq must be installed where vLLM is (it finds the plugin by itself)")
        elif write and (target / "config.json").is_file():
            copy_new(found.source, target)
        elif write:
            console.say(f"exporting to {to} in {target}")
            export(folder, to, target)
    parallel = ["--tensor-parallel-size", str(ranks)] if ranks > 1 else []
    return ["vllm", "serve", served, "--served-model-name", name, "--port", str(port), *parallel, *extra]


def choose(found: Checkpoint, ranks: int, native: bool = False) -> str:
    """The export format that vLLM serves a checkpoint in, or NATIVE. Raises UnsupportedError where neither can."""
    shapes = {t.name: (t.shape[0], t.shape[1]) for t in found.tensors if t.scheme}
    where = f"vLLM cannot serve {found.folder} on {ranks} GPU(s)"
    if fused := fusion_problems(found.schemes):
        raise UnsupportedError(f"{where}: {fused[0]}")
    for to in () if native else VLLM_FORMATS:
        if to == "compressed-tensors" and not _has_kernels(found):
            continue
        with suppress(LowqError):
            check(found, formats.get(to))
            if not shard_problems(found.config, found.schemes, shapes, ranks):
                return to
    if problems := shard_problems(found.config, found.schemes, shapes, ranks, packed_zeros=False):
        raise UnsupportedError(f"{where}: {problems[0]}")
    if other := next((t for t in found.tensors if t.scheme and t.layout != DISK), None):
        raise UnsupportedError(f"{where}: {other.name} is stored in layout {other.layout}; quantize without --layout")
    return NATIVE


def _has_kernels(found: Checkpoint) -> bool:
    return all(s.bits in (8, 4, 2) if s.zero == "none" else s.bits == 4 for s in found.schemes.values())
