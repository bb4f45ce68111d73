"""Improve the codes and scales in another tool's quantized file, given its original model; format and schemes stay the same.

The original runs layer by layer on a text, as for gptq. Each matrix gets the codes that gptq chooses on the file's existing
grid, and the best scales for them, if they lower the error of its output (calibrate/file_matrix.py). Everything else is copied
unchanged. Finished layers are in the cache until the result is exported: the same call resumes after the last one, and finds
an exported result by what is recorded about it.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from lowq_cli.calibrate.calibration import Calibration
from lowq_cli.files.folder import check_copies, check_free, new_folder
from lowq_cli.files.safetensors_io import read_json
from lowq_cli.files.source import Source
from lowq_cli.interop.exported import Exported, Progress
from lowq_cli.interop.exporter import export_path
from lowq_cli.plan.plan import Plan
from lowq_cli.plan.recipe import NOT_CALIBRATED, Recipe
from lowq_cli.run import refined_file
from lowq_cli.run.events import Event
from lowq_cli.run.pipeline import maker, run_hash, text_of
from lowq_cli.run.prepare import Prepared, prepare
from lowq_cli.run.refine_plan import RefinePlan, refine_plan
from lowq_cli.run.refined_file import RefinedFile
from lowq_cli.run.scaled_original import scaled_original
from lowq_cli.state import export_of, remember_export, user_path
from lowq_packers.atomic import write_whole
from lowq_packers.errors import UnsupportedError

NUMBERS = "numbers.json"  # the numbers of a `Refined`, next to a result that is not exported yet
COPIES = 2  # of the file in the cache at a time: its calibrated layers, and the result until it is exported
SAME = 2.0**-6  # max. relative difference of norm weights that rounding to another dtype explains


@dataclass(frozen=True)
class Refined:
    """The result. matrices: the number examined; better: the number of them with new codes or scales.

    before, after: mean over the examined matrices of the relative squared error of their outputs on the calibration text.
    """

    exported: Exported
    matrices: int
    better: int
    before: float
    after: float


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
        if path.is_file():
            export_path(path, "gguf", self.out)  # refuses another suffix
        self.cache_prefix = self.file.cache_prefix  # its name identifies the file and the version of lowq
        self.exported = export_of(self.out)[0].startswith(f"refined {self.cache_prefix.name}-")
        if not self.exported and not any(self.cache_prefix.parent.glob(f"{self.cache_prefix.name}-*")):
            check_free(self.out)  # before a text is generated; if results exist, `export` checks whether `out` is one of them
        self.work = self.cache_prefix  # holds the result until its export

    @contextmanager
    def prepared(self) -> Iterator[tuple[Prepared, Plan]]:
        """The original opened for the run, and the plan of the file's matrices. Raises as `prepare`, and UnsupportedError."""
        make = maker(self.model, self.device)
        with prepare(self.model, self.recipe, self.out, self.device, make=make) as prepared:
            yield prepared, _plan(prepared.plan, self.file)

    def run(self, show: Callable[[RefinePlan], object] | None = None) -> Iterator[Event]:
        """Choose codes; yields events of generating the text and of the layers, none if an earlier call has finished.

        show: called with the plan before anything is computed. Raises UnsupportedError for another model or learnt norms; and
        as `prepare`.
        """
        file = self.file
        with self.prepared() as (prepared, plan):
            source = _target(file, prepared.source)
            if show:
                show(refine_plan(prepared, plan, file, self.out))
            if not self.exported:
                check_copies(COPIES, file.nbytes, self.cache_prefix, self.out)
            text, plan = yield from text_of(prepared, plan)
            assert text
            on = torch.device(str(prepared.workers[0]))
            facts = f"{run_hash(source, plan, on, text)} {self.cache_prefix.name} scales"
            run = hashlib.sha256(facts.encode()).hexdigest()[:16]
            self.work = self.cache_prefix.with_name(f"{self.cache_prefix.name}-{run}")
            if file.is_done(self.work) or self.done:
                return
            check_free(self.out)
            file.start()
            with new_folder(self.work, run) as new:
                calibration = Calibration(source, plan, text, new, run, on, file)
                yield from calibration.run()
                loaders = {i.name: partial(file.load, calibration.layer_of[i.name], i) for i in calibration.items.values()}
                better = file.write(loaders, new)
                errors, count = calibration.errors, max(len(calibration.errors), 1)
                means = {"before": sum(e for e, _ in errors) / count, "after": sum(e for _, e in errors) / count}
                result = {"matrices": len(calibration.items), "better": better, **means}
                write_whole(new / NUMBERS, json.dumps(result).encode())
                calibration.close()

    @property
    def done(self) -> bool:
        """Whether an earlier run exported the same result to `out`, and it has not changed."""
        run, facts = export_of(self.out)
        return run == f"refined {self.work.name}" and bool(facts) and not self.file.is_done(self.work)

    def export(self, progress: Progress | None = None) -> Refined:
        """Write the result in the file's format, record it for the same call, and remove it from the cache."""
        if self.done:
            return recorded(self.out)
        done = Refined(self.file.export(self.work, self.out, progress), **read_json(self.work / NUMBERS))
        remember_export(self.out, f"refined {self.work.name}", self.out, asdict(done))
        shutil.rmtree(self.work, ignore_errors=True)
        return done


def recorded(out: Path) -> Refined:
    """The result that was recorded when `out` was exported."""
    facts = export_of(out)[1]
    exported = facts["exported"] | {"out": str(out), "already_done": True}
    exported |= {name: tuple(exported[name]) for name in ("engines", "notes")}
    return Refined(**{**facts, "exported": Exported(**exported)})


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
