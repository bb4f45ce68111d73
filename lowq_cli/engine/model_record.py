"""The record that lowq keeps with a model, its own or transformers': plan, decoder, drafters, tuning table."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import is_
from pathlib import Path
from typing import Any

from lowq_cli.files.mapped_file import MappedFile, check_all

ATTRIBUTE = "_lowq"
DRAFT = "draft"  # the subfolder of a checkpoint where `lowq draft train` writes its head
OF_PEFT = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # attributes that change a PEFT layer's output
LOCK = threading.RLock()  # held while a decoder is chosen and prepared: its construction replaces the model's layers


def _as_it_is(plan: Any) -> None:
    """Leave a plan without adapters."""


@dataclass
class Owned:
    """The record. plan: an `engine.plan.Plan`. decoder: an `engine.stream.Decoder`. Their modules import this one.

    drafters: draft heads and models for this model, by their --draft name.
    tuned: the folder whose lowq_tune.json selects kernels while this model computes; "" without one.
    sight: an `engine.vision.Sight`, once the model has been given an image. folder: the folder that the model was read from.
    mapped: the files whose pages it computes with, which must not be written over. adapt: what `engine.lora.attach` does to
    each plan. facts: the model's `facts_of` when plan and decoder were made.
    """

    plan: Any = None
    decoder: Any = None
    drafters: dict[str, Any] = field(default_factory=dict)
    tuned: str = ""
    sight: Any = None
    folder: str = ""
    mapped: tuple[MappedFile, ...] = ()
    adapt: Callable[[Any], None] = _as_it_is
    facts: Any = None

    def __reduce__(self) -> Any:
        """A copy of a model makes its own plan and decoder; those of the original hold addresses and compiled kernels."""
        return Owned, (None, None, {}, self.tuned, None, self.folder, (), self.adapt)

    def forget(self) -> None:
        """Drop what was made from the model's modules."""
        self.plan = self.decoder = self.facts = None
        self.drafters = {}  # a generation in progress keeps the drafter that it has

    def check_files(self) -> None:
        """Raise OverwrittenError if mapped weights were written over, so that what the model has computed may be wrong."""
        check_all(self.mapped)


def owned(model: Any) -> Owned:
    """The record of a model, created empty at the first call."""
    if getattr(model, ATTRIBUTE, None) is None:
        object.__setattr__(model, ATTRIBUTE, Owned())  # object's method: nn.Module's might register it as a submodule
    record: Owned = getattr(model, ATTRIBUTE)
    return record


def facts_of(model: Any) -> tuple[list[Any], list[Any]]:
    """(modules and tensors, facts about them): what differs once a model has other layers, weights, hooks or adapters.

    Writes through `tensor.data` cannot be seen.
    """
    objects, facts = list[Any](), list[Any]()
    for module in model.modules():
        layer = vars(module).get("whole", module)  # of `JoinedRows`
        tensors = [t for kind in (layer._parameters, layer._buffers) for n, t in kind.items() if "inv_freq" not in n]
        objects += [module, *tensors]
        facts += [None if t is None else (t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]
        facts.append((*module._forward_hooks, *module._forward_pre_hooks, vars(layer).get("act")))
        if OF_PEFT[0] in vars(module):
            facts.append(repr([vars(module).get(name) for name in OF_PEFT]))
    return objects, facts


def up_to_date(model: Any) -> Owned:
    """The record of a model, without a plan and decoder that were made before the model was changed."""
    record = owned(model)
    if record.facts is not None and not _same(record.facts, facts_of(model)):
        record.forget()
    return record


def note(model: Any) -> None:
    """Record the model's facts, after something was made of it. lowq's own class, which has its plan, is never changed."""
    if not hasattr(model, "plan"):
        owned(model).facts = facts_of(model)


def _same(a: tuple[list[Any], list[Any]], b: tuple[list[Any], list[Any]]) -> bool:
    return len(a[0]) == len(b[0]) and all(map(is_, a[0], b[0])) and a[1] == b[1]


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
