"""Import another tool's quantized checkpoint as a lowq one, with the same codes, scales and zeros, so that commands can run it.

It is written once into the user's cache folder and reused from there. Weights without a lowq scheme (8-bit floats,
permuted groups) are written dense.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from lowq_cli import console, state
from lowq_cli.files.checkpoint import is_checkpoint
from lowq_cli.files.family_tensors import linear_weights
from lowq_cli.files.folder import being_written, check_room, new_folder, sweep
from lowq_cli.files.quant_config import compact
from lowq_cli.files.safetensors_writer import SafetensorsWriter, to_json
from lowq_cli.files.source import Source
from lowq_cli.files.storage import FP8, in_blocks, storage
from lowq_cli.files.waiting import wait
from lowq_cli.interop.foreign import QUANT_SECTIONS, by_first_part, dense, fetcher, foreign_matrices, open_foreign
from lowq_cli.state import name_of, writing
from lowq_packers import home
from lowq_packers.arch.config import NotPlain
from lowq_packers.atomic import replacing
from lowq_packers.errors import DamagedError, UnsupportedError, UsageError
from lowq_packers.formats import Fetch, Matrix
from lowq_packers.layouts import pack
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor, plausible
from lowq_packers.regular import read_regular

# In quantization steps. bfloat16 rounds 4-bit zeros by at most 0.03, adding 0.1% to a group's error; 8-bit zeros by 0.5, 27%.
NOTE_ZERO_ERROR = 0.1


def runnable(model: str | os.PathLike[str]) -> str:
    """`model` itself, or for another tool's quantized checkpoint the lowq folder in the cache that it was imported into.

    Prints a line about the import to stderr, and another if rounding of its zeros matters. Raises as
    `open_foreign` and the formats do.
    """
    name = name_of(model)
    if is_checkpoint(state.user_path(name)):
        return name
    with open_foreign(name) as source:
        packed = foreign_matrices(source)
        if packed is None:
            return name
        fmt, matrices = packed
        if fmt.name == FP8 and runs_in_fp8(source):
            return name
        target = cached(source)
        for note in source.notes:
            console.say(f"note: {note}")
        while not _is_whole(target) and (others := being_written(target)):
            wait(others[0])
        if _is_whole(target):
            copy_new(source, target)
        else:
            console.say(f"{name} is {fmt.title}; importing it into {target}")
            off = import_checkpoint(source, matrices, target)
            if off >= NOTE_ZERO_ERROR:
                console.say(
                    f"note: its zeros have more digits than bfloat16 has; a model running in that has weights up to {off:.2f} "
                    f'of a step off, lowq.load(..., dtype="float32") none'
                )
    return str(target)


def without_codes(model: str | os.PathLike[str]) -> tuple[int, int, str]:
    """How many of another tool's quantized weights an import writes dense, of how many, and how those are stored."""
    with open_foreign(model) as source:
        packed = foreign_matrices(source)
    matrices = [m for m in packed[1] if m.bits < 16] if packed else []
    dense = [m for m in matrices if m.scheme is None]
    return len(dense), len(matrices), ", ".join(sorted({m.stored for m in dense}))


def runs_in_fp8(source: Source) -> bool:
    """Whether fp8 kernels can run it directly; for unknown families, transformers decides."""
    if source.folder is None:
        return False
    try:
        storage(source.config["quantization_config"], source.headers)
    except UnsupportedError:
        return False
    weights = in_blocks(source.headers)
    with suppress(NotPlain):
        return weights.keys() <= linear_weights(source.config, len(source.headers))
    from lowq_cli.hf.skeleton import Skeleton, build

    return Skeleton(build(source.config)).are_linears(weights)


def cached(source: Source, kind: str = "imports") -> Path:
    """The cache folder for files made from a checkpoint, one for each checkpoint and version of lowq."""
    stem = re.sub(r"[^\w.-]+", "-", Path(source.name).name) or "model"
    return home.cache_dir() / kind / f"{stem}-{source.identity}-{version('lowq')}"


def import_checkpoint(source: Source, matrices: list[Matrix], target: Path) -> float:
    """Write `source` as a lowq checkpoint into the folder `target`, one matrix in memory at a time.

    Returns the max. number of quantization steps by which bfloat16 rounds a zero.
    """
    at = by_first_part(matrices)
    parts = {p for m in matrices for p in m.parts}
    dense_names = [n.removesuffix(".weight") for n in source.headers if n.endswith(".weight") and n not in parts]
    dense_names += [m.name for m in matrices if m.scheme is None]
    schemes = {m.name: m.scheme for m in matrices if m.scheme}
    config = {k: v for k, v in source.config.items() if k not in QUANT_SECTIONS}
    if schemes:
        config["quantization_config"] = compact(schemes, dense_names)
    fetch, off = fetcher(source), 0.0
    coded = sum(m.shape[0] * m.shape[1] * (m.scheme.bits if m.scheme else 16) // 8 for m in matrices)
    check_room(coded + sum(h.nbytes for name, h in source.headers.items() if name not in parts), target)
    try:
        with new_folder(target) as folder, SafetensorsWriter(folder) as shards:
            for name in source.headers:
                for m in at.get(name, ()):
                    tensors = _imported(m, fetch)
                    shards.add(tensors)
                    if (zeros := tensors.get(f"{m.name}.weight_zero")) is not None:
                        off = max(off, float((zeros - zeros.bfloat16()).abs().max()))
                if name not in parts:
                    shards.add({name: fetch(name)})
            shards.finish()
            with writing(folder):
                for name, raw in source.companion_files().items():
                    (folder / name).write_bytes(raw)
                (folder / "config.json").write_bytes(to_json(config))
    except UsageError:
        if not _is_whole(target):  # otherwise another process has finished it
            raise
    return off


def copy_new(source: Source, target: Path) -> None:
    """Copy tokenizer files that were added to the model's folder or changed since the import or export into `target`.

    Remains of a process that was killed while renaming `target` are removed.
    """
    sweep(target)
    with writing(target):
        for name, raw in source.companion_files().items():
            if not (target / name).exists() or read_regular(target / name) != raw:
                with replacing(target / name) as partial:  # complete before other processes see it
                    partial.write_bytes(raw)


def _is_whole(folder: Path) -> bool:
    """Whether an import has finished: it has a config.json, lowq's or (if nothing is packed) a plain one."""
    return (folder / "config.json").is_file()


def _imported(m: Matrix, fetch: Fetch) -> dict[str, torch.Tensor]:
    """The tensors of one matrix in a lowq checkpoint. Scales and zeros have the same dtype: fp32 if the zeros need it."""
    if m.scheme is None:
        return {f"{m.name}.weight": dense(m, fetch)}
    q = m.read(fetch)
    assert isinstance(q, QuantizedTensor)
    assert q.scheme == m.scheme
    p = pack(q)
    wide = p.zeros is not None and p.zeros.dtype != p.scales.dtype
    scales = p.scales.float() if wide else p.scales
    companions = [(p.zeros, "finite"), (p.scales, "scale"), (p.table, "table")]
    if not all(plausible(t, p.scheme, role) for t, role in companions if t is not None):
        raise DamagedError(f"{m.name} holds NaN or infinite scales; the model file is damaged")
    tensors = {f"{m.name}.weight": p.words, f"{m.name}.weight_scale": scales.contiguous()}
    if p.table is not None:
        tensors[f"{m.name}.weight_table"] = p.table.contiguous()
    if p.zeros is not None:
        tensors[f"{m.name}.weight_zero"] = (p.zeros.float() if wide else p.zeros).contiguous()
    return tensors
