"""Better codes and scales inside another tool's quantized file, given the model it was made from: same format and schemes.

The original is walked layer by layer on a text, as for gptq; each matrix gets the codes that gptq chooses on the file's own
grid, and the scales that are best with them, where the output's error is less than with the file's (calibrate/file_matrix.py).
All else is taken over as it is. What was found is kept in the cache: the same call goes on behind the last layer that was
finished, and where all were finds its result there.
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
from lowq_cli.interop.exported import Exported, Progress
from lowq_cli.plan.plan import Plan
from lowq_cli.plan.recipe import NOT_CALIBRATED, Recipe
from lowq_cli.run import refined_file
from lowq_cli.run.events import Event
from lowq_cli.run.pipeline import maker, run_hash, text_of
from lowq_cli.run.prepare import prepare
from lowq_cli.run.refined_file import RefinedFile
from lowq_cli.state import user_path
from lowq_packers.errors import UnsupportedError

SAME = 2.0**-6  # relative difference of a norm's weights that another dtype explains


@dataclass(frozen=True)
class Refined:
    """What was written. matrices: that were looked at; better: of those, how many have other codes or scales now."""

    exported: Exported
    matrices: int
    better: int


class Refining:
    """One file and the model it was made from, checked before anything is computed. `run`, then `export`.

    Args:
        checkpoint: another tool's folder or file. out: folder (GGUF: file) to write, by default ./NAME-refined.
        recipe: what it says of the calibration text counts.
    Raises:
        UsageError: nothing that another tool quantized; `out` is there. UnsupportedError: a format or scheme that lowq reads
        but does not write. And as `open_checkpoint`.
    """

    def __init__(self, checkpoint: str, model: str, recipe: Recipe, out: str | None = None, device: str = "auto") -> None:
        self.model, self.recipe, self.device = model, recipe, device
        path = user_path(checkpoint).resolve()
        self.file: RefinedFile = refined_file.opened(checkpoint, path)
        self.out = Path(out or (f"{path.stem}-refined.gguf" if path.is_file() else f"{path.name}-refined"))
        self.kept = self.file.kept  # says which file, and which lowq
        if not any(self.kept.parent.glob(f"{self.kept.name}-*")):
            check_free(self.out)  # before a text is written; where there is a result, the run says whether it is this one's
        self.work = self.kept  # where the result waits for its export

    def run(self) -> Iterator[Event]:
        """Choose codes: the events of the text's writing and of the layers; none where an earlier call has done it.

        Raises UnsupportedError for another model, or weights that were scaled before they were quantized; and as `prepare`.
        """
        make, file = maker(self.model, self.device), self.file
        with prepare(self.model, self.recipe, self.out, self.device, make=make) as prepared:
            plan = _plan(prepared.plan, file)
            _check_same_model(file, prepared.source)
            text, plan = yield from text_of(prepared, plan)
            assert text
            on = torch.device(str(prepared.workers[0]))
            facts = f"{run_hash(prepared.source, plan, on, text)} {self.kept.name} scales"
            run = hashlib.sha256(facts.encode()).hexdigest()[:16]
            self.work = self.kept.with_name(f"{self.kept.name}-{run}")
            if file.is_done(self.work):
                return
            check_free(self.out)
            with new_folder(self.work, run) as made:
                calibration = Calibration(prepared.source, plan, text, made, run, on, file)
                yield from calibration.run()
                found = {i.name: partial(file.load, calibration.layer_of[i.name], i) for i in calibration.items.values()}
                file.write(found, made)
                calibration.close()

    def export(self, progress: Progress | None = None) -> Refined:
        """The result in the file's own format. It stays in the cache (`lowq rm`), so that the same call again finds it done."""
        done, better = self.file.export(self.work, self.out, progress)
        return Refined(done, len(self.file.matrices), better)


def _plan(plan: Plan, file: RefinedFile) -> Plan:
    """The original's plan with the file's schemes; what the file keeps, and heads and embeddings, is not touched."""
    items = []
    for i in plan.items:
        shape, scheme = file.matrices.get(i.name, (None, None))
        scheme = scheme if i.scheme and i.kind not in NOT_CALIBRATED else None
        if scheme and shape != i.shape:
            raise UnsupportedError(
                f"{i.name} is {list(shape or ())} in the file and {list(i.shape)} in the model; name its own"
            )
        items.append(replace(i, scheme=scheme, method=i.method if scheme else None))
    if not any(i.scheme for i in items):
        raise UnsupportedError(f"no weight of {plan.source} is quantized in the file; name the model that it was made from")
    return replace(plan, items=tuple(items))


def _check_same_model(file: RefinedFile, source: Source) -> None:
    """Raise UnsupportedError where norms are not the model's: another model, factors moved into its weights (AWQ), or learnt.

    Codes are chosen for the inputs that the original's norms make, so with others they would be better on paper alone.
    """
    for name, held in file.norms():
        if name in source.headers and "norm" in name:
            held, own = held.float().flatten(), source.read(name).float().flatten()
            if held.shape != own.shape or not torch.allclose(held, own, rtol=SAME, atol=SAME * float(own.abs().mean())):
                raise UnsupportedError(
                    f"{name} is not what it is in {source.name}: the file is of another model, or its weights were "
                    "scaled before they were quantized, as AWQ does, or its norms were learnt, as distill does"
                )
