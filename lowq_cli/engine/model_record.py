"""The record that lowq keeps with a model, its own or transformers': plan, decoder, drafters, tuning table."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowq_cli.files.mapped_file import MappedFile, check_all

ATTRIBUTE = "_lowq"
DRAFT = "draft"  # the subfolder of a checkpoint where `lowq draft train` writes its head


@dataclass
class Owned:
    """The record. plan: an `engine.plan.Plan`. decoder: an `engine.stream.Decoder`. Their modules import this one.

    drafters: draft heads and models for this model, by their --draft name.
    tuned: the folder whose lowq_tune.json selects kernels while this model computes; "" without one.
    sight: an `engine.vision.Sight`, once the model has been given an image. folder: the folder that the model was read from.
    mapped: the files whose pages it computes with, which must not be written over.
    """

    plan: Any = None
    decoder: Any = None
    drafters: dict[str, Any] = field(default_factory=dict)
    tuned: str = ""
    sight: Any = None
    folder: str = ""
    mapped: tuple[MappedFile, ...] = ()

    def check_files(self) -> None:
        """Raise OverwrittenError if mapped weights were written over, so that what the model has computed may be wrong."""
        check_all(self.mapped)


def owned(model: Any) -> Owned:
    """The record of a model, created empty at the first call."""
    if getattr(model, ATTRIBUTE, None) is None:
        object.__setattr__(model, ATTRIBUTE, Owned())  # object's method: nn.Module's might register it as a submodule
    record: Owned = getattr(model, ATTRIBUTE)
    return record


def tuned_by(model: Any, folder: str) -> None:
    """Use only the tuning table of this folder to select kernels while the model computes."""
    record = owned(model)
    record.tuned = folder
    if record.plan is not None:
        record.plan.tuned = folder


def file_facts(folder: str) -> list[tuple[str, int, int, int]]:
    """Name, size, time of change and inode of each file of a model's folder: what differs once its files have changed.

    The files of a draft head trained for the model count, too: with another head a cache has other contents.
    """
    paths = [Path(folder), *Path(folder).glob("*"), *Path(folder, DRAFT).glob("*")]
    files = ((f, f.stat()) for f in paths if folder and f.is_file())
    return sorted((str(f), facts.st_size, facts.st_mtime_ns, facts.st_ino) for f, facts in files)
