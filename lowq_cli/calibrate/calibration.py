"""Calibrated quantization: walk the model layer by layer on a text and quantize each layer's linears for their inputs.

Two streams of hidden states go through the model: x through the original layers, x' through the quantized ones. The inputs
of a stage (linears that share an input: q/k/v, o, gate/up, down; see layer_walk.py) are measured with everything before it
quantized. One decoder layer is in memory at a time, with both streams. Each finished layer is saved in the folder
`lowq-calibrated-<run>` inside the output folder, so that a rerun continues after it; the pipeline then reads the rows from
there and writes the checkpoint as usual.
"""

import json
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from lowq_cli import quantizers
from lowq_cli.calibrate import curvature, scaling, texts
from lowq_cli.calibrate.end_to_end import AROUND, EndToEnd, polished
from lowq_cli.calibrate.file_matrix import Given, GivenCodes, GivenFile, better
from lowq_cli.calibrate.layer_file import load_errors, load_item, load_notes, load_tensor, save_item, valued
from lowq_cli.calibrate.layer_walk import Hidden, Layer
from lowq_cli.calibrate.learn import learn
from lowq_cli.calibrate.requirements import (
    ALONE_TOKENS,
    UNSEEN,
    CurvatureDone,
    LayerDone,
    MatrixDone,
    PassDone,
    learns_alone,
    rounds_both_sides,
    trains_table,
)
from lowq_cli.files.folder import staged
from lowq_cli.files.safetensors_io import FLOATS, TORCH_NAMES
from lowq_cli.files.source import STAGED, Source
from lowq_cli.plan.plan import Item, Plan
from lowq_cli.quantizers import FEW_TOKENS
from lowq_cli.quantizers.gptq import Moments
from lowq_cli.state import writing
from lowq_packers.atomic import write_whole
from lowq_packers.errors import UsageError
from lowq_packers.qtensor import QuantizedTensor

if TYPE_CHECKING:
    from lowq_cli.hf.layers import Others


@dataclass
class LayerResult:
    """What is saved of a layer: tensors by name, a note for each matrix whose method changed, matrices without scales, and
    each matrix's error. before: errors of a file's matrices as given. learning: quantized matrices that are trained next."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    unscaled: list[str] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    learning: dict[str, QuantizedTensor] = field(default_factory=dict)


class Calibration:
    """The calibrated part of one run: `run` quantizes the layers, `quantizer` then gives the results to the pipeline.

    Args:
        folder: the output folder. run_hash: identifies the run, so that only finished layers of the same run are reused.
        file: a file of another tool, whose matrices get better codes and scales in their present format.
    Raises:
        UnsupportedError: a family whose layers cannot be walked. UsageError: too short a text.
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        text: texts.Text,
        folder: Path,
        run_hash: str,
        device: torch.device,
        file: GivenFile | None = None,
    ) -> None:
        from lowq_cli.hf.layers import DecoderLayers
        from lowq_cli.hf.tokenizer import load_tokenizer

        self.device, self.source, self.text, self.recipe, self.file = device, source, text, plan.recipe, file
        self.embeddings = [i for i in plan.items if i.kind == "embedding" and i.scheme]
        self.blocks = DecoderLayers(source, device)
        self.items = {i.name: i for i in plan.items if i.method and quantizers.needs_text(i.method)}
        self.weights = sum(i.params for i in self.items.values())
        tokenizer = load_tokenizer(source)
        count = plan.recipe.tokens if text.ids is None else text.ids.numel()
        pictured = None
        if text.pairs:
            from lowq_cli.calibrate.pictures import Pictured

            pictured = Pictured(source, self.blocks.base, tokenizer, text, count, texts.window_of(self.blocks.model))
            self.blocks.pictures = pictured
        self.ids = pictured.ids if pictured else text.windows(tokenizer, count, self.blocks.model)
        self.later = text.later_windows(self.blocks.model)
        self.tokens = self.ids.numel()
        self.distills = any(quantizers.needs_distilling(str(i.method)) for i in self.items.values())
        if any(quantizers.needs_learning(str(i.method)) for i in self.items.values()):
            rows = self.blocks.model.get_input_embeddings().weight.shape[0]

            def with_unseen(windows: torch.Tensor, seed: int = 0) -> torch.Tensor:
                count = len(windows) // UNSEEN // texts.BATCH * texts.BATCH
                unseen = texts.random_token_windows(tokenizer, count, rows, windows.shape[1], seed)
                return torch.cat([windows, pictured.before(unseen) if pictured else unseen])

            self.ids, self.later = with_unseen(self.ids), [with_unseen(w, n) for n, w in enumerate(self.later, 1)]
        dtypes = {i.name: i.outputs[0][1].dtype for i in plan.items if i.scheme is None}
        self.stored = {name: _dtype(dtype) for name, dtype in dtypes.items() if dtype in FLOATS}
        self.folder = folder / (STAGED + run_hash)
        self.layer_of: dict[str, Path] = {}  # checkpoint name -> the file that holds its codes and scales
        self.rounded = 0  # number of matrices rounded so far
        self.notes: dict[str, str] = {}  # checkpoint name -> why it was not quantized as the recipe says
        self.errors: list[tuple[float, float]] = []  # output error of each matrix of `file`, before and after

    def run(self) -> Iterator[CurvatureDone | MatrixDone | LayerDone | PassDone]:
        """Quantize every layer that is not done yet, in order."""
        blocks = self.blocks
        for old in staged(self.folder.parent):
            if old != self.folder:
                shutil.rmtree(old)
        if self.folder.is_symlink():
            raise UsageError(f"{self.folder} is a symbolic link, and lowq does not write through links; remove it")
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        self.outputs = yield from self._curvature()
        x_ref, others = blocks.start(self.ids, texts.BATCH)
        tables = self._tables()
        x_quant = blocks.start(self.ids, texts.BATCH, tables)[0] if tables else [x.clone() for x in x_ref]
        for number in range(len(blocks)):
            began = time.monotonic()
            path = self._file(number)
            mine = {n: s for n, s in blocks.linears(number).items() if n in self.items}
            others_of_layer = {p: n for p, n in blocks.kept(number).items() if n in self.stored}
            self.layer_of |= dict.fromkeys([*mine, *others_of_layer.values()], path)
            done = path.is_file()
            error = 0.0
            with torch.no_grad(), blocks.layer(number) as module:
                layer = Layer(module, others[number], mine)
                if done:
                    scaling.repeat(layer, self._scaled(path, list(mine), others_of_layer))
                    for name in mine:
                        q = self.file.load(path, self.items[name]) if self.file else load_item(path, self.items[name])
                        layer.set(name, q.dequantize().to(self.device))
                    self.rounded += len(mine)
                else:
                    error = yield from self._quantize(layer, others_of_layer, x_ref, x_quant, path)
                if number + 1 < len(blocks) or self.distills:
                    layer.advance(x_ref, x_quant)
            notes, unscaled = load_notes(path)
            self.notes |= notes
            errors = load_errors(path) if self.file else []
            self.errors += errors
            before = sum(e for e, _ in errors) / max(len(errors), 1) if self.file else None
            yield LayerDone(number + 1, len(blocks), error, time.monotonic() - began, done, notes, unscaled, before)
        if self.distills:
            del x_quant
            yield from self._together(x_ref, others, tables)

    def _file(self, number: int) -> Path:
        """The path of a finished layer's file."""
        return self.folder / f"layer-{number:05d}.safetensors"

    def _curvature(self) -> Generator[CurvatureDone, None, curvature.Sides]:
        """The curvatures that `yaqa` needs for the unfinished layers, measured on the text without the random windows."""
        left = [i for i in range(len(self.blocks)) if not self._file(i).is_file()]
        names = {n for i in left for n in self.blocks.linears(i) if n in self.items and rounds_both_sides(self.items[n])}
        if not names:
            return {}
        text = self.ids[: self.tokens // self.ids.shape[1]]
        return (yield from curvature.output_moments(self.blocks, text, texts.BATCH, names))

    def _sides(self, names: list[str], rows: list[int]) -> dict[str, Any]:
        """The further arguments of a method for matrices that are stacked along their rows; rows: number of rows of each."""
        if not any(n in self.outputs for n in names):
            return {}
        return {"outputs": [H for n, k in zip(names, rows, strict=True) for H in self.outputs.get(n) or [torch.eye(k)]]}

    def _together(self, targets: Hidden, others: "list[Others]", tables: dict[str, torch.Tensor]) -> Iterator[PassDone]:
        """Train all layers together, from what each learned alone. targets: the original model's last hidden states."""
        files = {n: p for n, p in self.layer_of.items() if n in self.items}
        if not all(p.is_file() for p in (self.folder / AROUND, *map(polished, files.values()))):
            start = self.blocks.start(self.ids, texts.BATCH, tables)[0]
            dtypes = {n: _dtype(self.items[n].outputs[1][1].dtype) for n in files}
            tables_of = {i.source: _dtype(i.outputs[1][1].dtype) for i in self.embeddings if trains_table(i)}
            yield from EndToEnd(self.blocks, self.items, dtypes, files, self.stored | tables_of, len(start)).run(
                [self.ids, *self.later], start, targets, others, self.blocks.inside(tables), self.folder
            )
        self.layer_of = {n: polished(p) if p in files.values() else p for n, p in self.layer_of.items()}
        self.layer_of |= dict.fromkeys(valued(self.folder / AROUND), self.folder / AROUND)

    def _tables(self) -> dict[str, torch.Tensor]:
        """The embeddings as the checkpoint will hold them quantized, so that the layers see their errors and can compensate."""
        tables = {}
        for i in self.embeddings:
            assert i.scheme is not None
            W = self.source.read(i.source).reshape(i.shape).to(self.device)
            q = quantizers.get(str(i.method))(W, i.scheme, _dtype(i.outputs[1][1].dtype))
            tables[i.source] = q.dequantize()
        return tables

    def _quantize(
        self, layer: Layer, kept: dict[str, str], x_ref: Hidden, x_quant: Hidden, path: Path
    ) -> Generator[MatrixDone, None, float]:
        """Quantize a layer's linears stage by stage, save them and return the mean error. kept: see `DecoderLayers.kept`."""
        result = LayerResult()
        if any(quantizers.needs_scales(str(self.items[n].method)) for n in layer.spots):
            self._scale(layer, kept, x_quant, result)
        for name in layer.uncalled(x_ref):  # Jamba's dt_proj: the model multiplies by its dense weight without calling it
            self._without_inputs(layer, name, result)
        for stage in layer.stages(x_ref, x_quant):
            for names in self._joined(stage.names):
                (self._improve if self.file else self._round)(layer, names, stage.moments, result)
                for name in names:
                    self.rounded += 1
                    yield MatrixDone(name, self.rounded, len(self.items))
        dtypes = {n: _dtype(self.items[n].outputs[1][1].dtype) for n in result.learning}
        every = max(1, round(self.tokens / ALONE_TOKENS)) if self.distills else 1  # one batch in `every` is enough as a start
        for name, q in learn(layer, result.learning, dtypes, x_ref[::every], x_quant[::every]).items():
            result.tensors |= save_item(q, name, dtypes[name])
            layer.set(name, q.dequantize())
        with writing(path):
            facts = {"notes": [result.notes, result.unscaled], "errors": [*zip(result.before, result.errors, strict=False)]}
            write_whole(path, save(result.tensors, {name: json.dumps(fact) for name, fact in facts.items()}))
        return sum(result.errors) / max(len(result.errors), 1)

    def _scale(self, layer: Layer, kept: dict[str, str], x_quant: Hidden, result: LayerResult) -> None:
        """Move activation-aware scales between a layer's matrices before they are rounded."""
        schemes = {n: s for n in layer.spots if (s := self.items[n].scheme)}
        stored = {p: self.stored[n] for p, n in kept.items()}
        scaled = scaling.scale(layer, x_quant, schemes, stored, FEW_TOKENS)
        result.tensors |= {f"{n}.rows": t.cpu() for n, t in scaled.rows.items()}
        result.tensors |= {f"{n}.columns": t.cpu() for n, t in scaled.columns.items()}
        result.tensors |= {f"{kept[p]}.values": t.to(stored[p]).cpu() for p, t in scaled.kept.items()}
        result.unscaled = scaled.missing

    def _without_inputs(self, layer: Layer, name: str, result: LayerResult) -> None:
        """Quantize a matrix whose inputs are unknown."""
        item = self.items[name]
        assert item.scheme is not None
        dtype = _dtype(item.outputs[1][1].dtype)
        method = quantizers.default_method(item.scheme.bits, item.scheme.group_size, item.scheme.zero)
        result.notes[name] = f"{method}, because its layer does not call it, so its inputs are unknown"
        if self.file:
            result.tensors |= self._kept(layer, name, self.file.given(name).to(self.device))
            return
        W = layer.matrix(name, layer.original).contiguous()
        q = quantizers.get(method)(W, item.scheme, dtype)
        result.tensors |= save_item(q, name, dtype)
        layer.set(name, q.dequantize())

    def _improve(self, layer: Layer, names: list[str], moments: Moments, result: LayerResult) -> None:
        """Give a matrix of a file better codes and scales in its format, where enough tokens reach it."""
        assert self.file
        (name,), given = names, self.file.given(names[0]).to(self.device)
        W = layer.matrix(name, layer.original)
        result.before.append(_output_error(W, given.dequantize(), moments.second))
        given = better(W, given, moments)
        result.errors.append(_output_error(W, given.dequantize(), moments.second))
        result.tensors |= self._kept(layer, name, given)

    def _round(self, layer: Layer, names: list[str], moments: Moments, result: LayerResult) -> None:
        """Quantize matrices that share their inputs as one, and put each into the layer."""
        item = self.items[names[0]]
        assert item.scheme is not None
        dtype = _dtype(item.outputs[1][1].dtype)
        parts = [layer.matrix(n, layer.original) for n in names]
        W = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        sides = self._sides(names, [len(p) for p in parts])
        q = quantizers.get(str(item.method))(W, item.scheme, dtype, moments, **sides)
        if item.scheme.scale != "float":
            q = better(W, GivenCodes(q), moments).q
        at = 0
        for name, part in zip(names, parts, strict=True):
            rows, at = q.rows(at, at + len(part)), at + len(part)
            restored = rows.dequantize()
            result.errors.append(_output_error(part, restored, moments.second))
            result.tensors |= save_item(rows, name, dtype)
            layer.set(name, restored)
            if learns_alone(item, self.weights):
                result.learning[name] = rows

    def _kept(self, layer: Layer, name: str, given: Given) -> dict[str, torch.Tensor]:
        """Put a matrix of the file into the layer and return the tensors to save."""
        assert self.file
        layer.set(name, given.dequantize())
        return self.file.saved(name, given)

    def _joined(self, names: list[str]) -> Iterator[list[str]]:
        """The matrices of a stage in groups: those of one scheme that fit a slab go together (a third of the launches)."""
        alike: dict[tuple[object, ...], list[str]] = {}
        for name in names:
            item = self.items[name]
            alike.setdefault((item.method, item.scheme, item.outputs[1][1].dtype, item.kind), []).append(name)
        for group in alike.values():
            scheme = self.items[group[0]].scheme
            own_table = scheme and scheme.table_width  # each matrix has its own table, or its own factor of the table
            if not own_table and not self.file and sum(self.items[n].params for n in group) <= quantizers.GPTQ_SLAB:
                yield group
            else:
                yield from ([n] for n in group)

    def _scaled(self, path: Path, names: list[str], kept: dict[str, str]) -> scaling.Scaled:
        """The scales that were folded into a finished layer."""
        result = scaling.Scaled()
        for tensors, leaf, keys in (
            (result.rows, "rows", {n: n for n in names}),
            (result.columns, "columns", {n: n for n in names}),
            (result.kept, "values", kept),
        ):
            for key, name in keys.items():
                if (t := load_tensor(path, f"{name}.{leaf}")) is not None:
                    tensors[key] = t.to(self.device, torch.float32)
        return result

    def quantizer(self, item: Item) -> Callable[..., QuantizedTensor] | None:
        """The quantizer of one item, which returns rows of `run`'s results in order; None for an item that `run` skipped."""
        if item.name not in self.layer_of:
            return None
        q = load_item(self.layer_of[item.name], item)
        at = 0

        def next_rows(W: torch.Tensor, *_: object) -> QuantizedTensor:
            nonlocal at
            first, at = at, at + W.shape[0]
            return q.rows(first, at).to(W.device)

        return next_rows

    def factors(self, item: Item) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The factors of an item's rows (N,) and columns (K,) from before it was quantized; None where it was not scaled."""
        if item.name not in self.layer_of:
            return None, None
        path = self.layer_of[item.name]
        return load_tensor(path, f"{item.name}.rows"), load_tensor(path, f"{item.name}.columns")

    def facts(self) -> dict[str, Any]:
        """The text, for the report: the recipe's name for it, its hash, the tokens read, and the seed if the model wrote it."""
        seed = {"seed": self.recipe.calib_seed} if self.text.ids is not None else {}
        tokens = self.tokens + (0 if self.text.later is None else self.text.later.numel())
        return {"text": self.text.name, "hash": self.text.digest, "tokens": tokens, **seed}

    def values(self, item: Item) -> torch.Tensor | None:
        """The new values (same shape) of an unquantized tensor that scales were folded into or that was trained, and those
        from which a trained embedding is quantized; None for any other tensor."""
        name = item.name if item.scheme is None else item.source
        return load_tensor(self.layer_of[name], f"{name}.values") if name in self.layer_of else None

    def close(self) -> None:
        """Remove the files of finished layers, once the checkpoint holds them."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, TORCH_NAMES[name])


def _output_error(W: torch.Tensor, restored: torch.Tensor, second: torch.Tensor) -> float:
    error = W - restored
    return float(((error @ second) * error).sum() / ((W @ second) * W).sum().clamp(min=1e-30))
