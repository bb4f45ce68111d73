"""`lowq serve --engine vllm`: run vLLM with the faster kernels for a checkpoint.

These are lowq's kernels, through `vllm_plugin`, on the checkpoint itself; or vLLM's kernels on an export in the cache, in a
format that they support. docs/serving.md has the measurements.
"""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from lowq_cli import console
from lowq_cli.files.checkpoint import Checkpoint, is_checkpoint, open_checkpoint
from lowq_cli.files.shapes import text_config
from lowq_cli.files.source import DEMO
from lowq_cli.files.tensor_parallel import family_problem, fusion_problems, shard_problems
from lowq_cli.interop.export_checks import check
from lowq_cli.interop.exporter import export
from lowq_cli.interop.importer import cached, copy_new
from lowq_cli.state import user_path
from lowq_packers import formats
from lowq_packers.errors import LowqError, UnsupportedError, UsageError
from lowq_packers.layouts import DISK

VLLM_FORMATS = ("compressed-tensors", "awq")  # formats that vLLM has kernels for, in the order of preference
NATIVE = "lowq"
TESTED = ("0.24", "0.33")  # versions of vLLM whose models and loaders ran with the plugin; 0.24 on a GPU


class Kernels(NamedTuple):
    """The kernels that serve a checkpoint: the format that vLLM reads (NATIVE, or an export's), and the reason."""

    format: str
    why: str


def command(
    model: str,
    ranks: int = 1,
    port: int = 8000,
    extra: tuple[str, ...] = (),
    write: bool = True,
    native: bool | None = None,
    stages: int = 1,
) -> list[str]:
    """The `vllm serve` command line for a lowq checkpoint, or for a model that vLLM reads directly.

    write: make the export if one is needed; False only returns its path. native: lowq's kernels, or vLLM's on an export; None
    selects the faster. ranks: GPUs that share each layer; stages: pipeline stages.
    Raises UnsupportedError for weights that vLLM fuses but that differ, or that `ranks` ranks cannot share.
    """
    for flag, value in (("--tp", ranks), ("--pp", stages)):
        if value < 1:
            raise UsageError(f"{flag} {value} must be at least 1")
    if not 0 < port < 1 << 16:
        raise UsageError(f"--port {port} must be from 1 to 65535")
    folder = DEMO if model == "demo" else user_path(model)
    name = folder.resolve().name if folder.is_dir() else model
    served = str(folder) if model == "demo" else model
    if served.startswith("-"):  # vLLM would parse it as an option, even without the =
        if not folder.is_dir():
            raise UsageError(f"{model} is not a model: it begins with a dash")
        served = str(folder.absolute())
    if is_checkpoint(folder):
        target, kernels = prepare(folder, ranks, native, write=False)
        whose = "lowq's kernels, by its plugin" if kernels.format == NATIVE else f"vLLM's kernels, on {kernels.format}"
        console.say(f"{whose}: {kernels.why}; {installed()}")
        if write:
            prepare(folder, ranks, native)
        served = str(target)
    parallel = ["--tensor-parallel-size", str(ranks)] if ranks > 1 else []
    parallel += ["--pipeline-parallel-size", str(stages)] if stages > 1 else []
    return ["vllm", "serve", served, f"--served-model-name={name}", "--port", str(port), *parallel, *extra]


def prepare(folder: Path, ranks: int = 1, native: bool | None = None, write: bool = True) -> tuple[Path, Kernels]:
    """The folder that vLLM reads for a checkpoint, exported if needed (unless `write` is False), and the kernels."""
    with (opened := open_checkpoint(folder)).source:
        kernels = choose(opened, ranks, native)
        if kernels.format == NATIVE:
            return folder.resolve(), kernels
        target = cached(opened.source, f"exports/{kernels.format}")
    if write and (target / "config.json").is_file():
        copy_new(opened.source, target)
    elif write:
        console.say(f"exporting to {kernels.format} in {target}")
        export(folder, kernels.format, target)
    return target, kernels


def installed() -> str:
    """A sentence about the installed version of vLLM, and whether lowq was tested with it."""
    try:
        release = version("vllm")
    except PackageNotFoundError:
        return "vLLM is not installed here: install lowq where vLLM runs, so that vLLM finds the plugin"
    known = ".".join(release.split(".")[:2]) in TESTED
    return f"vLLM {release}{'' if known else ', which lowq was not tested with (' + ', '.join(TESTED) + ' were)'}"


def choose(
    checkpoint: Checkpoint, ranks: int, native: bool | None = None, capability: tuple[int, int] | None = None
) -> Kernels:
    """The kernels that serve a checkpoint. Raises UnsupportedError if the requested kernels, or all, cannot.

    capability: of the GPUs that serve it; None: of the first one here.
    """
    where = f"vLLM cannot serve {checkpoint.folder} on {ranks} GPU(s)"
    if fused := fusion_problems(checkpoint.schemes):
        raise UnsupportedError(f"{where}: {fused[0]}")
    exported, problem = _exported(checkpoint, ranks), _plugin_problem(checkpoint, ranks)
    slower = _slower(checkpoint, capability)
    if problem and (native or not exported):
        raise UnsupportedError(f"{where}: {problem}")
    if native is False and not exported:
        raise UnsupportedError(f"{where} with its own kernels: it has none for these schemes; leave --export out")
    if native is not None:
        return Kernels(NATIVE if native or not exported else exported, "asked for")
    if not exported:
        return Kernels(NATIVE, "vLLM has none for these schemes")
    if problem:
        return Kernels(exported, f"the plugin cannot: {problem}")
    mixture = any(
        ".experts." in name for name in checkpoint.schemes
    )  # Qwen3-30B-A3B: 1.24, 1.24, 1.21 times as fast at 1, 16, 64
    why = "measured faster" + (" on mixtures of up to 64 sequences" if mixture else "")
    return Kernels(exported, slower) if slower else Kernels(NATIVE, why)


def _exported(checkpoint: Checkpoint, ranks: int) -> str | None:
    """The first format that vLLM has kernels for and that can hold the checkpoint on `ranks` ranks."""
    for to in VLLM_FORMATS:
        if to == "compressed-tensors" and not _has_kernels(checkpoint):
            continue
        with suppress(LowqError):
            check(checkpoint, formats.get(to))
            if not shard_problems(checkpoint.config, checkpoint.schemes, checkpoint.shapes, ranks):
                return to
    return None


def _plugin_problem(checkpoint: Checkpoint, ranks: int) -> str | None:
    """The reason why lowq's plugin cannot serve the checkpoint on `ranks` ranks; None if it can."""
    if problems := shard_problems(checkpoint.config, checkpoint.schemes, checkpoint.shapes, ranks, packed_zeros=False):
        return problems[0]
    if other := next((t for t in checkpoint.tensors if t.scheme and t.layout != DISK), None):
        return f"{other.name} is stored in layout {other.layout}; quantize without --layout"
    return family_problem(text_config(checkpoint.config).get("model_type"))


def _slower(checkpoint: Checkpoint, here: tuple[int, int] | None) -> str | None:
    """The reason to prefer vLLM's kernels although lowq's would work, or None."""
    if any(s.table for s in checkpoint.schemes.values()):
        return "lowq's were not timed in vLLM on tables (--native takes them)"
    import torch

    from lowq_kernels import gpu

    if here is None:
        here = gpu.capability(torch.device("cuda")) if torch.cuda.is_available() else gpu.HOPPER.capability
    return None if here == gpu.HOPPER.capability else "lowq's were not timed in vLLM on this kind of GPU (--native takes them)"


def _has_kernels(checkpoint: Checkpoint) -> bool:
    return all(s.bits in (8, 4, 2) if s.zero == "none" else s.bits == 4 for s in checkpoint.schemes.values())
