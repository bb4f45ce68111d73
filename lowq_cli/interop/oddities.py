"""List oddities of a model folder: content that lowq ignores but other programs may use. Every weight is read."""

from collections.abc import Iterator
from pathlib import Path

from lowq_cli.console import visible
from lowq_cli.files.checkpoint import is_checkpoint, open_checkpoint
from lowq_cli.files.resolution import is_own
from lowq_cli.files.safetensors_io import read_json
from lowq_cli.files.source import REPORT, Source
from lowq_cli.files.weight_files import PICKLES
from lowq_cli.interop.foreign import open_decoded
from lowq_cli.state import user_path
from lowq_packers.errors import LowqError

CODE = ("*.py", "*.so", "*.sh", "*.exe")


def oddities(model: str) -> list[str]:
    """A line for each oddity of a folder; [] without any. Raises if the folder cannot be opened."""
    folder = user_path(model)
    lines = [line for path in sorted(folder.iterdir()) for line in _of_path(path)] if folder.is_dir() else []
    if is_checkpoint(folder):
        with (checkpoint := open_checkpoint(folder)).source as source:
            lines += _of_model(source, folder)
            if not checkpoint.report:
                lines.append(f"no {REPORT}, so the weights cannot be verified")
            for check in (checkpoint.check_files, checkpoint.check_values):
                try:
                    unhashed = check()
                except LowqError as e:
                    lines.append(str(e))
                else:
                    lines += [f"{name} has no hash in {REPORT}" for name in unhashed] if isinstance(unhashed, list) else []
        return lines
    with open_decoded(model) as source:
        return lines + _of_model(source, folder) + list(_of_values(source))


def _of_path(path: Path) -> Iterator[str]:
    """The oddities of one entry of a folder."""
    if visible(path.name) != path.name:
        yield f"{path.name} has control characters in its name"
    if path.is_symlink() and not is_own(path):
        yield f"{path.name} is a link to {path.resolve()}, outside the folder"
    elif not path.is_file() and not path.is_dir():
        yield f"{path.name} is not a regular file"
    if any(path.match(p) for p in PICKLES):
        yield f"{path.name} is a pickle, which can run any code when another program opens it"
    if any(path.match(p) for p in CODE):
        yield f"{path.name} is code, which other programs may run (lowq does not)"
    if path.name.startswith(("adapter_", "lowq-calibrated-")) or path.name.endswith(".partial"):
        yield f"{path.name} does not belong to the model"
    if path.suffix == ".json" and path.is_file():
        try:
            config = read_json(path)
        except LowqError as e:
            yield str(e)
            return
        if config.get("auto_map"):
            yield f"{path.name} has auto_map: code that other programs may run (lowq does not)"


def _of_model(source: Source, folder: Path) -> list[str]:
    """Weight files that do not belong to the model, and tensor names with unsafe characters."""
    used = {header.path.name for header in source.files.values()}
    strays = (p.name for kind in ("*.safetensors", "*.gguf") for p in folder.glob(kind) if p.name not in used)
    names = (n for n in source.headers if visible(n) != n)
    return [f"{s} holds weights that the model does not use" for s in sorted(strays)] + [
        f"a tensor is called {n}" for n in names
    ]


def _of_values(source: Source) -> Iterator[str]:
    """Weights that cannot be read or are not finite."""
    import torch

    for name, header in source.headers.items():
        try:
            if header.dtype in ("F64", "F32", "F16", "BF16") and not torch.isfinite(source.read(name)).all():
                yield f"{name} holds NaN or infinite values"
        except LowqError as e:
            yield str(e)
