"""What tests of other libraries' own files share: a folder of one matrix that a library wrote, walked through lowq and back.

Each test file generates every variant that its library can write. A variant is decoded as the library decodes it, or refused as
unsupported by the reason that the generator names: never called damaged, never another matrix. What was decoded is imported and
exported in the same format, and the library decodes that to the same weights.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowq_cli.files.checkpoint import is_checkpoint, open_checkpoint
from lowq_cli.interop.export_checks import exportable
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import open_decoded
from lowq_cli.interop.importer import runnable
from lowq_packers.errors import UnsupportedError

NAME = "model.layers.0.mlp.up_proj"
Tensors = dict[str, torch.Tensor]


def write(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    """A folder of one matrix, whose tensors are named by their leaves, and a norm."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"{NAME}.{leaf}": t.detach().clone().contiguous() for leaf, t in tensors.items()}
    save_file(named | {"model.norm.weight": torch.ones(8)}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def leaves(folder: Path) -> Tensors:
    """The matrix's tensors by their leaves."""
    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix(f"{NAME}."): t for name, t in tensors.items() if name.startswith(NAME)}


def decoded(folder: Path) -> torch.Tensor:
    """The matrix as lowq decodes it."""
    with open_decoded(folder) as source:
        assert source.raw.headers.keys() >= {"model.norm.weight"}
        return source.read(f"{NAME}.weight").reshape(source.headers[f"{NAME}.weight"].shape)


def refused(folder: Path, reason: str) -> None:
    """That lowq does not read the folder, says why, and does not call it damaged."""
    with pytest.raises(UnsupportedError, match=reason):
        decoded(folder)


def there_and_back(
    folder: Path, to: str, decode: Callable[[Path], torch.Tensor], tolerance: float = 0.0, rounding: bool = False
) -> bool:
    """Whether the matrix, imported, is one that `to` holds; if so, that the library decodes the export to the same weights.

    Where it is not, that the export says so without calling anything damaged.
    """
    imported = runnable(str(folder))
    if not is_checkpoint(imported):
        return False
    with (result := open_checkpoint(imported)).source:
        promised = to in exportable(result)
        (t,) = (t for t in result.tensors if t.scheme)
        expected = result.read_matrix(t).dequantize()
    out = folder.parent / f"{folder.name}-out"
    try:
        export(imported, to, out, rounding=rounding)
    except UnsupportedError as e:
        output = str(e)
    else:
        output = ""
    assert promised == (not output), output
    if output:
        return False
    theirs = decode(out)
    ours = expected.to(theirs.dtype).float()
    assert (theirs.float() - ours).abs().max() <= tolerance * expected.abs().max()
    return True
