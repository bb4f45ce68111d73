"""A model as a GGUF file in a mixture of types such as Q4_K_M, with codes and scales chosen on a calibration text.

The file is first written to the cache by least squares, and then improved as `lowq refine` improves any file. Both copies are
removed from the cache at the end; the same call after an interruption continues with them.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path

import torch

from lowq_cli.files.folder import check_copies, check_free
from lowq_cli.interop import exporter, gguf_export
from lowq_cli.interop.exported import Progress
from lowq_cli.interop.gguf_bytes import chosen
from lowq_cli.interop.gguf_file import GgufTensor
from lowq_cli.interop.importer import cached
from lowq_cli.plan import gguf_types
from lowq_cli.plan.recipe import Recipe
from lowq_cli.run.budget import Budget
from lowq_cli.run.events import Event
from lowq_cli.run.pipeline import maker, run_hash, text_of
from lowq_cli.run.prepare import Prepared, prepare
from lowq_cli.run.refine import COPIES, Refined, Refining, recorded
from lowq_cli.run.refine_plan import improving_s, made_as, making_s, text_line
from lowq_cli.run.refined_file import GgufFile
from lowq_cli.state import export_of, is_cached, remember_export, was_exported
from lowq_packers.errors import UnsupportedError
from lowq_packers.formats.gguf import PLAIN


@dataclass(frozen=True)
class MixturePlan:
    """What a run reads, how long it takes, and what it writes. copies: folder of the two copies of `nbytes` meanwhile."""

    text: str
    budget: Budget
    device: str
    out: Path
    copies: Path
    nbytes: int


def _by_kind(rows: list[GgufTensor]) -> dict[str, list[tuple[int, int]]]:
    """Type -> the shapes of the quantized matrices of that type."""
    shapes: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        if chosen(row) and row.kind not in PLAIN:
            shapes.setdefault(row.kind, []).append((prod(row.shape[:-1]), row.shape[-1]))
    return shapes


def writing_s(rows: list[GgufTensor]) -> float:
    """Estimated seconds of rounding a file's matrices by least squares, from timing a sample of each type."""
    return sum(making_s(kind, shapes) for kind, shapes in _by_kind(rows).items())


class CalibratedMixture:
    """One run: call `text`; then, unless it is `done`, `start` and `improve`; then `export`.

    Args:
        kind: such as Q4_K_M. recipe: only its calibration text is used. out: the file to write, by default ./MODEL-KIND.gguf.
    Raises:
        UsageError: an unknown kind. UnsupportedError: a model that cannot be written as GGUF, or one with a tower.
    """

    def __init__(self, model: str, kind: str, recipe: Recipe, out: str | None, device: str) -> None:
        self.model, self.kind, self.recipe, self.device = model, kind.upper(), recipe, device
        self.out = exporter.export_path(model, "gguf", out or exporter.mixture_path(model, kind))
        self.run = ""
        with (opened := exporter.with_weights(model)).source as source:
            self.rows, tower = gguf_export.rows_of(opened, gguf_types.get(kind))
            if tower:
                raise UnsupportedError(
                    f"{model} has a vision tower, and such models are not calibrated for GGUF; leave --calib out"
                )
            self.base = cached(source, "exports") / self.kind / exporter.mixture_path(model, kind)

    @contextmanager
    def prepared(self) -> Iterator[Prepared]:
        """The model opened for the run. Raises as `prepare`."""
        with prepare(self.model, self.recipe, self.out, self.device, make=maker(self.model, self.device)) as prepared:
            yield prepared

    def plan(self, prepared: Prepared) -> MixturePlan:
        """The plan; the time of the types is measured on samples, which takes half a second for each."""
        on, budget = torch.device(str(prepared.workers[0])), prepared.budget
        shapes = _by_kind([row for row in self.rows if row.name.startswith("blk.")])
        for kind, some in shapes.items() if budget.seconds is not None else ():
            budget = budget.longer(sum(improving_s(*made_as(kind), some, on)))
        nbytes = sum(row.nbytes for row in self.rows)
        return MixturePlan(text_line(prepared), budget, str(on), self.out, self.base.parents[3], nbytes)

    def text(self, show: Callable[[MixturePlan], object] | None = None) -> Iterator[Event]:
        """Write the calibration text if the model writes it itself. show: called with the plan first."""
        with self.prepared() as prepared:
            if show:
                show(self.plan(prepared))
            if not export_of(self.out)[0]:
                check_copies(1 + COPIES, sum(row.nbytes for row in self.rows), self.base.parent, self.out)
            text, plan = yield from text_of(prepared, prepared.plan)
            on = torch.device(str(prepared.workers[0]))
            self.run = f"calibrated {self.kind} {run_hash(prepared.source, plan, on, text)}"
        if not self.done and not export_of(self.out)[0].startswith(
            f"refined {self.base.name}-"
        ):  # killed before it was recorded
            check_free(self.out)

    @property
    def done(self) -> bool:
        """Whether an earlier run wrote the same file, and it has not changed."""
        return was_exported(self.out, self.run)

    def start(self, progress: Progress | None = None) -> None:
        """Write the file to the cache by least squares, without a text."""
        self.base.parent.mkdir(parents=True, exist_ok=True)
        self.notes = exporter.export(self.model, "gguf", self.base, progress=progress, kind=self.kind).notes

    def improve(self) -> Iterator[Event]:
        """Choose codes and scales, layer by layer."""
        self.refining = Refining(str(self.base), self.model, self.recipe, str(self.out), self.device)
        yield from self.refining.run()

    def export(self, progress: Progress | None = None) -> Refined:
        """Write the file and remove the copies from the cache."""
        if self.done:
            self._clean()
            return recorded(self.out)
        refined = self.refining.export(progress)
        refined = replace(refined, exported=replace(refined.exported, matrices=sum(map(chosen, self.rows)), notes=self.notes))
        remember_export(self.out, self.run, self.out, asdict(refined))
        assert isinstance(self.refining.file, GgufFile)
        folder = self.refining.file.raw.folder  # the tokenizer of the copy
        if folder and is_cached(folder):
            shutil.rmtree(folder, ignore_errors=True)
        self._clean()
        return refined

    def _clean(self) -> None:
        shutil.rmtree(self.base.parent, ignore_errors=True)
        with suppress(OSError):  # other kinds of this model are there
            self.base.parent.parent.rmdir()
