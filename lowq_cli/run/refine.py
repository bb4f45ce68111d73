"""Improve the codes and scales in another tool's quantized file, given its original model; format and schemes stay the same.

The original runs layer by layer on a text, as for gptq. Each matrix gets the codes that gptq chooses on the file's existing
grid, and the best scales for them, if they lower the error of its output (calibrate/file_matrix.py). Everything else is copied
unchanged. Results are kept in the cache: the same call resumes after the last finished layer, and finds a finished result
there.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from lowq_cli.calibrate.calibration import Calibration
from lowq_cli.files.folder import check_free, new_folder
from lowq_cli.files.source import Source
from lowq_cli.interop import exporter
from lowq_cli.interop.exported import Exported, Progress
from lowq_cli.interop.importer import cached
from lowq_cli.plan.plan import Plan
from lowq_cli.plan.recipe import NOT_CALIBRATED, Recipe
from lowq_cli.run import refined_file
from lowq_cli.run.events import Event
from lowq_cli.run.pipeline import maker, run_hash, text_of
from lowq_cli.run.prepare import prepare
from lowq_cli.run.refined_file import RefinedFile
from lowq_cli.run.scaled_original import scaled_original
from lowq_cli.state import user_path
from lowq_packers.errors import UnsupportedError

SAME = 2.0**-6  # max. relative difference of norm weights that rounding to another dtype explains


@dataclass(frozen=True)
class Refined:
    """The result. matrices: the number examined; better: the number of them with new codes or scales."""

    exported: Exported
    matrices: int
    better: int


class Refining:
    """One file and its original model, checked before anything is computed. Call `run`, then `export`.

    Args:
        checkpoint: another tool's folder or file. out: folder (GGUF: file) to write, by default ./NAME-refined.
        recipe: only its calibration text is used.
    Raises:
        UsageError: not quantized by another tool, or `out` exists. UnsupportedError: a format or scheme that lowq reads
        but does not write. Also raises as `open_checkpoint`.
    """

    def __init__(self, checkpoint: str, model: str, recipe: Recipe, out: str | None = None, device: str = "auto") -> None:
        self.model, self.recipe, self.device = model, recipe, device
        path = user_path(checkpoint).resolve()
        self.file: RefinedFile = refined_file.opened(checkpoint, path)
        self.out = Path(out or (f"{path.stem}-refined.gguf" if path.is_file() else f"{path.name}-refined"))
        self.kept = self.file.kept  # its name identifies the file and the version of lowq
        if not any(self.kept.parent.glob(f"{self.kept.name}-*")):
            check_free(self.out)  # before a text is generated; if results exist, `export` checks whether `out` is one of them
        self.work = self.kept  # holds the result until its export

    def run(self) -> Iterator[Event]:
        """Choose codes; yields events of generating the text and of the layers, none if an earlier call has finished.

        Raises UnsupportedError for another model or learnt norms; and as `prepare`.
        """
        make, file = maker(self.model, self.device), self.file
        with prepare(self.model, self.recipe, self.out, self.device, make=make) as prepared:
            plan = _plan(prepared.plan, file)
            source = _target(file, prepared.source)
            text, plan = yield from text_of(prepared, plan)
            assert text
            on = torch.device(str(prepared.workers[0]))
            facts = f"{run_hash(source, plan, on, text)} {self.kept.name} scales"
            run = hashlib.sha256(facts.encode()).hexdigest()[:16]
            self.work = self.kept.with_name(f"{self.kept.name}-{run}")
            if file.is_done(self.work):
                return
            check_free(self.out)
            with new_folder(self.work, run) as new:
                calibration = Calibration(source, plan, text, new, run, on, file)
                yield from calibration.run()
                loaders = {i.name: partial(file.load, calibration.layer_of[i.name], i) for i in calibration.items.values()}
                file.write(loaders, new)
                calibration.close()

    def export(self, progress: Progress | None = None) -> Refined:
        """Write the result in the file's format. It stays in the cache (until `lowq rm`), where the same call finds it."""
        done, better = self.file.export(self.work, self.out, progress)
        return Refined(done, len(self.file.matrices), better)


def least_squares(model: str, kind: str, progress: Progress | None = None) -> Exported:
    """Write a model to the cache as a GGUF file in a mixture of types such as Q4_K_M, without a text, for `Refining`.

    Raises UnsupportedError for a model with a tower, whose second file `Refining` does not write; else as `exporter.export`.
    """
    with exporter.with_weights(model).source as source:
        path = cached(source, "exports") / kind.upper() / exporter.mixture_path(model, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    exported = exporter.export(model, "gguf", path, progress=progress, kind=kind)
    if list(path.parent.glob("mmproj-*")):
        raise UnsupportedError(f"{model} has a vision tower, and such models are not calibrated for GGUF; leave --calib out")
    return exported


def _plan(plan: Plan, file: RefinedFile) -> Plan:
    """The original's plan with the file's schemes; unquantized tensors, heads and embeddings are not changed."""
    items = []
    for i in plan.items:
        shape, scheme = file.matrices.get(i.name, (None, None))
        scheme = scheme if i.scheme and i.kind not in NOT_CALIBRATED else None
        if scheme and shape != i.shape:
            raise UnsupportedError(
                f"{i.name} is {list(shape or ())} in the file and {list(i.shape)} in the model; name the file's own model"
            )
        items.append(replace(i, scheme=scheme, method=i.method if scheme else None))
    if not any(i.scheme for i in items):
        raise UnsupportedError(f"no weight of {plan.source} is quantized in the file; name the model that it was made from")
    return replace(plan, items=tuple(items))


def _target(file: RefinedFile, source: Source) -> Source:
    """The model whose outputs the file's should have: the original, scaled as AWQ does where the file's norms are.

    Raises UnsupportedError if norms differ otherwise: another model, or trained. Codes are chosen for inputs that the
    original's norms produce; with other norms they would not lower the real error.
    """
    norms = {}
    for name, values in file.norms():
        if name in source.headers and "norm" in name:
            values, original = values.float().flatten(), source.read(name).float().flatten()
            near = SAME * float(original.abs().mean())
            if values.shape != original.shape or not torch.allclose(values, original, rtol=SAME, atol=near):
                norms[name] = values
    if not norms:
        return source
    if (scaled := scaled_original(source, file, norms)) is None:
        raise UnsupportedError(
            f"{min(norms)} differs from that of {source.name}, and no AWQ scales explain the weights next to it: "
            "the file is of another model, or its norms were trained, as by distill"
        )
    return scaled
