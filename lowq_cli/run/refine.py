"""Better codes inside another tool's quantized file, given the model it was made from: same format, schemes, scales and zeros.

The original is walked layer by layer on a text, as for gptq; each matrix gets the codes that gptq chooses on the file's own
grid, where the output's error is less with them than with the file's. All else is taken over as it is. What was found is
kept in the cache: the same call goes on behind the last layer that was finished, and where all were finds its result there.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from lowq_cli.calibrate.calibration import Calibration
from lowq_cli.calibrate.layer_file import load_item
from lowq_cli.files.checkpoint import Checkpoint, is_checkpoint, open_checkpoint
from lowq_cli.files.folder import check_free, new_folder
from lowq_cli.files.safetensors_writer import SafetensorsWriter, to_json
from lowq_cli.files.source import Source
from lowq_cli.interop import export_checks, exporter
from lowq_cli.interop.exported import Exported, Progress
from lowq_cli.interop.foreign import foreign_matrices, open_foreign
from lowq_cli.interop.importer import runnable
from lowq_cli.plan.plan import Plan
from lowq_cli.plan.recipe import NOT_CALIBRATED, Recipe
from lowq_cli.run.events import Event
from lowq_cli.run.pipeline import maker, run_hash, text_of
from lowq_cli.run.prepare import prepare
from lowq_cli.state import user_path, writing
from lowq_packers.errors import UnsupportedError, UsageError
from lowq_packers.formats import Format
from lowq_packers.home import cache_dir
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor

SAME = 2.0**-6  # relative difference of a norm's weights that another dtype explains


@dataclass(frozen=True)
class Refined:
    """What was written. matrices: that were looked at; better: of those, how many have other codes now."""

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
        self.format, path = _writable(checkpoint), user_path(checkpoint).resolve()
        self.out = Path(out or (f"{path.stem}-refined.gguf" if path.is_file() else f"{path.name}-refined"))
        self.found = open_checkpoint(runnable(checkpoint))
        self.kept = cache_dir() / "refined" / self.found.folder.name  # of the import: it says which file, and which lowq
        if not any(self.kept.parent.glob(f"{self.kept.name}-*")):
            check_free(self.out)  # before a text is written; where there is a result, the run says whether it is this one's
        export_checks.check(self.found, self.format)
        if odd := next((t for t in self.found.tensors if t.scheme and t.scheme.table), None):
            raise UnsupportedError(
                f"{odd.name} holds values of a table ({odd.scheme}); refine chooses codes of even steps only"
            )
        self.work = self.found.folder  # where the result waits for its export

    def run(self) -> Iterator[Event]:
        """Choose codes: the events of the text's writing and of the layers; none where an earlier call has done it.

        Raises UnsupportedError for another model, or weights that were scaled before they were quantized; and as `prepare`.
        """
        make, found = maker(self.model, self.device), self.found
        with found.source, prepare(self.model, self.recipe, self.out, self.device, make=make) as prepared:
            plan = _plan(prepared.plan, found)
            _check_same_model(found, prepared.source)
            text, plan = yield from text_of(prepared, plan)
            assert text
            on = torch.device(str(prepared.workers[0]))
            facts = f"{run_hash(prepared.source, plan, on, text)} {self.kept.name}"
            run = hashlib.sha256(facts.encode()).hexdigest()[:16]
            self.work = self.kept.with_name(f"{self.kept.name}-{run}")
            if is_checkpoint(self.work):
                return
            check_free(self.out)
            packed = {t.name: t for t in found.tensors if t.scheme}
            with new_folder(self.work, run) as made:
                calibration = Calibration(
                    prepared.source, plan, text, made, run, on, lambda name: found.read_matrix(packed[name])
                )
                yield from calibration.run()
                codes: dict[str, Callable[[], QuantizedTensor]] = {
                    i.name: partial(load_item, calibration.layer_of[i.name], i) for i in calibration.items.values()
                }
                _write(found, codes, made)
                calibration.close()

    def export(self, progress: Progress | None = None) -> Refined:
        """The result in the file's own format. It stays in the cache (`lowq rm`), so that the same call again finds it done."""
        done = exporter.export(self.work, self.format.name, self.out, progress=progress)
        with open_checkpoint(self.found.folder).source as old, open_checkpoint(self.work).source as new:
            names = [f"{name}.weight" for name in self.found.schemes]
            better = sum(not torch.equal(old.read(n), new.read(n)) for n in names)
        return Refined(done, len(names), better)


def _writable(checkpoint: str) -> Format:
    """The format of another tool's file. Raises UsageError, UnsupportedError."""
    with open_foreign(checkpoint) as source:
        read = foreign_matrices(source)
    if read is None:
        raise UsageError(
            f"{checkpoint} is no file that another tool quantized; for a model: lowq quantize MODEL --method learn"
        )
    fmt, matrices = read
    if fmt.export is None:
        raise UnsupportedError(f"lowq reads {fmt.title} but does not write it; quantize the original instead")
    if dense := [m.name for m in matrices if m.scheme is None]:
        raise UnsupportedError(
            f"{dense[0]} ({len(dense)} such) is stored as {fmt.title} that lowq reads but does not write; quantize the original"
        )
    return fmt


def _plan(plan: Plan, found: Checkpoint) -> Plan:
    """The original's plan with the file's schemes; what the file keeps, and heads and embeddings, is not touched."""
    items = []
    for i in plan.items:
        packed = next((t for t in found.tensors if t.name == i.name), None)
        scheme = packed.scheme if packed and i.scheme and i.kind not in NOT_CALIBRATED else None
        if scheme and packed and packed.shape != i.shape:
            raise UnsupportedError(
                f"{i.name} is {list(packed.shape)} in the file and {list(i.shape)} in the model; name its own"
            )
        items.append(replace(i, scheme=scheme, method=i.method if scheme else None))
    if not any(i.scheme for i in items):
        raise UnsupportedError(f"no weight of {plan.source} is quantized in the file; name the model that it was made from")
    return replace(plan, items=tuple(items))


def _check_same_model(found: Checkpoint, source: Source) -> None:
    """Raise UnsupportedError where norms are not the model's: another model, factors moved into its weights (AWQ), or learnt.

    Codes are chosen for the inputs that the original's norms make, so with others they would be better on paper alone.
    """
    for t in found.tensors:
        if t.scheme is None and t.name in source.headers and "norm" in t.name and len(t.shape) == 1:
            held, own = found.read_plain(t).float(), source.read(t.name).float()
            if held.shape != own.shape or not torch.allclose(held, own, rtol=SAME, atol=SAME * float(own.abs().mean())):
                raise UnsupportedError(
                    f"{t.name} is not what it is in {source.name}: the file is of another model, or its weights were "
                    "scaled before they were quantized, as AWQ does, or its norms were learnt, as distill does"
                )


def _write(found: Checkpoint, codes: dict[str, Callable[[], QuantizedTensor]], folder: Path) -> None:
    """The imported checkpoint once more, with other words where there are codes."""
    with SafetensorsWriter(folder) as shards:
        for t in found.tensors:
            if t.scheme is None:
                shards.add({t.name: found.read_plain(t)})
                continue
            p = found.read_packed(t)
            words = pack(codes[t.name]()).words if t.name in codes else p.words
            tensors = {"weight": words, "weight_scale": p.scales, "weight_zero": p.zeros}
            shards.add({f"{t.name}.{leaf}": x for leaf, x in tensors.items() if x is not None})
        shards.finish()
    with writing(folder):
        for name, raw in found.source.companion_files().items():
            (folder / name).write_bytes(raw)
        (folder / "config.json").write_bytes(to_json(found.config))
