"""Export a lowq checkpoint to another tool's format: the weights are the same bit for bit, or the export is refused first.

Only a few matrices and a few output files of at most `SHARD` bytes are in memory at a time. Every matrix is
read back from its encoded tensors and compared before they are written; if a format has the same words as lowq, they are copied
and only the first and last rows are compared (`ENDS`). The output is written to a folder next to the target and
renamed when it is complete; after a kill, the same call continues after the last finished file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowq_cli.cached_models import called, model_path
from lowq_cli.files.checkpoint import Checkpoint, CheckpointTensor, is_checkpoint, open_checkpoint
from lowq_cli.files.folder import check_apart, check_room, new_folder, sweep, unfinished_bytes
from lowq_cli.files.safetensors_io import TensorHeader
from lowq_cli.files.safetensors_writer import SHARD, SafetensorsWriter, name_of, to_json
from lowq_cli.files.tensor_parallel import fused_name, fusion_problems, shard_problems
from lowq_cli.interop.export_checks import WRITTEN, as_held, check_all, described, first_that_holds, way_out
from lowq_cli.interop.exported import Exported, Progress, check_same, run_name, same_bytes
from lowq_cli.interop.foreign import DecodedSource, foreign_matrices, open_decoded, open_foreign
from lowq_cli.interop.importer import runnable, without_codes
from lowq_cli.memory import available_memory
from lowq_cli.plan import gguf_types, targets
from lowq_cli.state import as_argument, remember_export, source_of, user_path, was_exported, writing
from lowq_cli.workers import in_order, threads
from lowq_packers import formats
from lowq_packers.arch.towers import TOWERS
from lowq_packers.errors import LowqError, UnsupportedError, UsageError
from lowq_packers.formats import EXPORTED, Config, Format, Tensors
from lowq_packers.layouts import DISK, PackedWeight, unpack
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.tables import rows_of

WORKERS = 8  # max. matrices encoded at once
ENDS = 128  # rows compared at either end of a matrix: a multiple of the words of zeros packed along N
ENCODING = 24  # max. bytes per weight of a matrix that is encoded, read back and compared


def export(
    checkpoint: str | os.PathLike[str],
    to: str | None = None,
    out: str | os.PathLike[str] | None = None,
    check_tp: int | None = None,
    rounding: bool = False,
    progress: Progress | None = None,
    kind: str | None = None,
    file_bytes: int = SHARD,
) -> Exported:
    """Write `checkpoint` in the format `to` into the folder `out` (by default ./NAME-FORMAT; for gguf a file).

    Args:
        checkpoint: a folder written by lowq or another tool (imported into the cache first), or a name of `lowq ls`; with
            `kind`, any model.
        to: one of EXPORTED; None selects the first format that holds the checkpoint.
        check_tp: refuse a checkpoint that this many tensor-parallel ranks could not share.
        rounding: accept offsets -zeros * scales rounded to the scales' dtype (MLX, GGUF).
        progress: called with (percent done, name).
        kind: quantize to this mixture of GGUF's types, such as Q4_K_M; already quantized weights are rounded again.
        file_bytes: max. bytes of a safetensors file; a GGUF file is flushed to disk each time that this many were written.
    Raises:
        UsageError: unknown format, or `out` is not empty. UnsupportedError: weights that the format cannot hold, with the
        nearest scheme that it holds. NotFoundError, DamagedError: as `open_checkpoint`.
    """
    if to is not None and to not in EXPORTED:
        raise targets.no_such("--to", to, EXPORTED)
    checkpoint = model_path(checkpoint)
    if kind:
        if to not in (None, "gguf"):
            raise UsageError(f"--type {kind} is a mixture of GGUF's types; leave --to {to} out")
        return _quantized_gguf(checkpoint, kind, out, progress, file_bytes)
    there = user_path(checkpoint).exists()
    folder = runnable(checkpoint) if there else checkpoint
    dense, total, stored = without_codes(checkpoint) if folder != checkpoint else (0, 0, "")
    as_dense = (
        [f"{dense} of {total} quantized weights are written unpacked: lowq reads {stored} as dense matrices"] if dense else []
    )
    if dense and dense == total:
        name = to or "gguf"
        again = f"lowq quantize {as_argument(checkpoint)} --export {name}"
        raise UnsupportedError(
            f"{checkpoint}: lowq reads {stored} as dense matrices, so there are no codes to export; "
            f"take the model it was made from, or round once more: {again}"
        )
    opened = open_checkpoint(folder, f" --export {to}" if to else "")
    with opened.source:
        if check_tp is not None:
            _check_tp(opened, check_tp)
        with way_out(opened, to):
            to = to or first_that_holds(opened)
            fmt, whole = formats.get(to), opened
            opened = as_held(whole, fmt)
            check_all(opened, fmt, rounding)
            target = Path(out) if out else export_path(checkpoint, to)
            if WRITTEN[to].one_file:
                from lowq_cli.interop.gguf_export import export_gguf

                written = export_gguf(opened, target, rounding, progress, file_bytes=file_bytes)
                return replace(written, notes=(*written.notes, *as_dense, *_left_out(whole, opened, fmt)))
            run = run_name(opened, to, rounding)
            check_apart(target, opened.folder)
            if done := was_exported(target, run):
                sweep(target)
                config, read = _as_read(target)
            else:
                check_room(export_bytes(opened) - unfinished_bytes(target), target)
                with new_folder(target, run) as new:
                    _write(opened, fmt, new, rounding, progress, file_bytes)
                    config, read = _as_read(new)
                    remember_export(target, run, new)  # before the rename, so that a kill in between is harmless
        engines, notes = fmt.engines(config, read), fmt.notes(config, {})
        if "vLLM" in " ".join(engines) and (fused := fusion_problems(opened.schemes) or _factor_problems(opened)):
            engines = [e for e in engines if not e.startswith("vLLM")]
            notes.append(f"vLLM would refuse it, or run other weights: {fused[0]}")
        notes += as_dense + _left_out(whole, opened, fmt)
        size = sum(p.stat().st_size for p in target.glob("*.safetensors"))
        return Exported(str(target), to, size, len(opened.schemes), tuple(engines), tuple(notes), done)


def export_bytes(checkpoint: Checkpoint) -> int:
    """The least bytes of an export: codes, a scale per group, and the plain tensors; zeros differ by format."""
    packed = [(t.params, t.scheme) for t in checkpoint.tensors if t.scheme]
    scales = sum(n // (s.group_size * s.block_rows) * (1 if s.scale == "e4m3" else 2) for n, s in packed)
    return scales + sum(n * s.bits // 8 for n, s in packed) + sum(t.nbytes for t in checkpoint.tensors if not t.scheme)


def export_path(source: str | os.PathLike[str], to: str, out: str | os.PathLike[str] | None = None) -> Path:
    """Where an export of `source` is written. Raises UsageError for a GGUF file whose name does not end in .gguf."""
    one_file, name = WRITTEN[to].one_file, called(source)
    path = Path(out or (f"{name}.{to}" if one_file else f"{name}-{to}"))
    if one_file and path.suffix != f".{to}":
        raise UsageError(f"--out {path}: the name of a GGUF file ends in .gguf; use --out {as_argument(f'{path}.gguf')}")
    return path


def with_weights(model: str | os.PathLike[str]) -> Checkpoint:
    """Open a lowq checkpoint, or any model whose weights can be decoded. Raises as `open_checkpoint`, `open_decoded`."""
    if is_checkpoint(user_path(model)):
        return open_checkpoint(model)
    source = open_decoded(model)
    return Checkpoint(
        source, tuple(CheckpointTensor(n, h.shape, None, h.dtype, h.nbytes) for n, h in source.headers.items()), {}
    )


def mixture_path(model: str | os.PathLike[str], kind: str) -> Path:
    """The default path of a model as a GGUF file with a mixture of types."""
    return Path(f"{called(model).removesuffix('.gguf')}-{kind.upper()}.gguf")


def _quantized_gguf(
    model: str | os.PathLike[str], kind: str, out: str | os.PathLike[str] | None, progress: Progress | None, file_bytes: int
) -> Exported:
    """Export any model as a GGUF file with a mixture of types."""
    from lowq_cli.interop.gguf_export import export_gguf

    mixture, fmt, whole = gguf_types.get(kind), formats.get("gguf"), with_weights(model)
    with whole.source:
        stored = as_held(whole, fmt)
        written = export_gguf(stored, Path(out or mixture_path(model, kind)), False, progress, mixture, file_bytes)
        notes = _left_out(whole, stored, fmt)
        if stored.schemes or isinstance(stored.source, DecodedSource):
            source = source_of(stored.folder, stored.report)
            better = (
                f"; from the original: lowq quantize {as_argument(source)} --export gguf --type {kind.upper()}"
                if source
                else ""
            )
            notes.append(f"its weights were quantized before, and {kind.upper()} rounds them once more{better}")
        return replace(written, notes=(*written.notes, *notes))


def _factor_problems(checkpoint: Checkpoint) -> list[str]:
    """A line for each set of weights that engines fuse but whose scales have different factors; vLLM uses one for all."""
    factors: dict[str, dict[str, float]] = {}
    for t in checkpoint.tensors:
        if t.scheme and t.scheme.scale == "e4m3" and (fused := fused_name(t.name)):
            factors.setdefault(fused, {})[t.name] = float(checkpoint.source.read(f"{t.name}.weight_table")[0])
    odd = [fused for fused, of in factors.items() if len(set(of.values())) > 1]
    return [f"{fused} is made of weights with different factors, which must be one" for fused in odd]


def _left_out(whole: Checkpoint, stored: Checkpoint, fmt: Format) -> list[str]:
    notes, count = list[str](), len(whole.tensors) - len(stored.tensors)
    if count:
        notes.append(f"{count} tensors of heads that predict further tokens are left out: {fmt.title} has no place for them")
    unpacked = [t for t in stored.tensors if t.packed is not None]
    tables = [t for t in unpacked if not TOWERS.search(t.name)]
    if towers := len(unpacked) - len(tables):
        why, dtype = WRITTEN[fmt.name].towers(stored.config), unpacked[0].dtype
        notes.append(f"{towers} quantized weights of the vision tower are written unpacked, as {dtype}: {why}")
    notes += [f"{t.name} is written unpacked, as {t.dtype}: {fmt.title} holds no packed embedding" for t in tables]
    return notes


def _check_tp(checkpoint: Checkpoint, ranks: int) -> None:
    if ranks < 1:
        raise UsageError(f"--check-tp {ranks} must be at least 1")
    problems = shard_problems(checkpoint.config, checkpoint.schemes, checkpoint.shapes, ranks)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UnsupportedError(f"{ranks} tensor-parallel ranks cannot share this checkpoint: {problems[0]}{more}")


def _as_read(folder: Path) -> tuple[dict[str, Any], list[formats.Matrix]]:
    """The config of an export, and the tensors that the format's reader will find."""
    with open_foreign(folder) as source:
        read = foreign_matrices(source)
        return source.config, [] if read is None else read[1]


def _write(
    checkpoint: Checkpoint, fmt: Format, folder: Path, rounding: bool, progress: Progress | None, file_bytes: int
) -> None:
    """Write weights, index, companions and config of one export."""
    (modules, section), export = described(checkpoint, fmt), WRITTEN[fmt.name]
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"} | section
    config = export.whole(config, not any(t.name.startswith("lm_head") for t in checkpoint.tensors))
    done, total = 0, sum(t.params for t in checkpoint.tensors)

    def made(t: CheckpointTensor) -> tuple[CheckpointTensor, Tensors]:
        name, members = modules.get(t.name, (t.name, []))
        if members and name not in finished:
            parts = [encoded(fmt, name, checkpoint.read_packed(m), {**config, "round": rounding}) for m in members]
            return t, _stacked(parts) if name != t.name else parts[0]
        return t, {} if t.scheme or t.name in shards.done else {t.name: checkpoint.read_plain(t)}

    with (
        SafetensorsWriter(folder, export.library, file_bytes) as shards,
        in_order(checkpoint.tensors, made, _workers(checkpoint), ahead=1) as results,
    ):
        plain = {
            t.name for t in checkpoint.tensors if not t.scheme
        }  # a finished bias does not mean that its matrix is finished
        finished = {name.rpartition(".")[0] for name in shards.done - plain}
        for t, tensors in results:
            if tensors:
                shards.add(tensors)
            done += t.params
            if progress:
                progress(100 * done // total, t.name)
        shards.finish()
    with writing(folder):
        for name, raw in checkpoint.source.companion_files().items():
            (folder / name).write_bytes(raw)
        for name, content in {**export.other_files(section), "config.json": config}.items():
            (folder / name).write_bytes(to_json(content))


def _workers(checkpoint: Checkpoint) -> int:
    """The number of matrices encoded at once, limited by threads, and by memory if all were as large as the largest."""
    room = available_memory() or 0
    largest = max(t.params for t in checkpoint.tensors)
    return max(1, min(threads(), WORKERS, room // (ENCODING * largest)))


def _stacked(parts: list[Tensors]) -> Tensors:
    """Stack each of the experts' tensors."""
    return {n: torch.stack([p[n].view(torch.uint8) for p in parts]).view(t.dtype) for n, t in parts[0].items()}


def encoded(fmt: Format, name: str, p: PackedWeight, config: Mapping[str, Any]) -> Tensors:
    """The encoded tensors of one matrix, read back and compared. Raises UnsupportedError if the format cannot hold them."""
    assert fmt.write
    if fmt.write_words is None or p.layout != DISK or p.N <= 2 * ENDS:
        return _encoded(fmt, name, unpack(p), config)
    tensors = _held(fmt.write_words, name, p, config)
    for first, last in ((0, ENDS), ((p.N - 1) // ENDS * ENDS, p.N)):
        zeros, table = None if p.zeros is None else p.zeros[first:last], rows_of(p.table, p.N, first, last)
        part = replace(p, words=p.words[first:last], scales=p.scales[first:last], zeros=zeros, N=last - first, table=table)
        for n, t in _encoded(fmt, name, unpack(part), config).items():
            if t.dim() == 2 and not same_bytes(t, tensors[n][-len(t) :] if first else tensors[n][: len(t)]):  # 1-D: shape
                raise AssertionError(f"{n} ({p.scheme}) does not match its encoded codes")
    return tensors


def _held(write: Callable[[str, Any, Config], Tensors], name: str, weight: object, config: Config) -> Tensors:
    """The tensors made by a format's `write`. Raises UnsupportedError if the format cannot hold the values."""
    try:
        return {n: t.contiguous() for n, t in write(name, weight, config).items()}
    except LowqError as e:
        raise UnsupportedError(f"cannot export {e}") from None


def _encoded(fmt: Format, name: str, q: QuantizedTensor, config: Mapping[str, Any]) -> Tensors:
    """The tensors of one matrix encoded from its codes, read back and compared in full."""
    assert fmt.write
    tensors = _held(fmt.write, name, q, config)
    headers = {n: TensorHeader(tuple(t.shape), name_of(t)) for n, t in tensors.items()}

    def fetch(tensor: str, index: int | None = None, /) -> torch.Tensor:
        assert index is None
        t = tensors[tensor]
        return t.view(torch.int32) if t.dtype == torch.uint32 else t

    (matrix,) = fmt.matrices(config, headers, fetch)
    check_same(matrix.read(fetch), q, name, bool(config.get("round")))
    return tensors
