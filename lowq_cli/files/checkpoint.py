"""Read a lowq folder: headers, config and shapes are checked against each other before they are used.

`open_checkpoint` does not read weights; `Checkpoint.check_values` reads them all. Kernels index by these shapes, and a kernel
with a wrong shape corrupts memory silently, so inconsistent files are refused here.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lowq_cli.files import packed_tensors
from lowq_cli.files.quant_config import Stored, expand_stored
from lowq_cli.files.safetensors_io import DTYPES, FLOATS, TensorHeader, check_file_name, read_json, torch_dtype, viewed
from lowq_cli.files.shapes import check_shapes
from lowq_cli.files.source import CONFIG, DEMO, REPORT, Source, open_source
from lowq_cli.files.storage import METHOD, method
from lowq_cli.state import as_argument, user_path
from lowq_packers.errors import DamagedError, LowqError, NotFoundError, SchemeError, UsageError, naming
from lowq_packers.layouts import DISK, PackedWeight, unpack
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor, plausible
from lowq_packers.regular import read_regular
from lowq_packers.scheme import Scheme

COMPANIONS = ("weight_scale", "weight_zero", "weight_table")
FIELDS: dict[str, Any] = {  # optional fields of a report
    **dict.fromkeys(("lowq", "run", "source", "device"), str),
    **dict.fromkeys(("recipe", "weights", "sha256"), dict),
    **dict.fromkeys(("files", "tensors"), list),
    **dict.fromkeys(("bpw", "quantized_bpw", "quantized_fraction", "source_bytes", "bytes"), int | float),
}
CHUNK = 1 << 24
UNUSABLE = {"scale": "NaN or infinite scales", "zero": "NaN or infinite zeros", "table": "NaN, infinite or negative factors"}


@dataclass(frozen=True)
class CheckpointTensor:
    """A packed matrix, shape (N, K), or a plain tensor (scheme None). nbytes counts scales and zeros too."""

    name: str  # without ".weight" if packed
    shape: tuple[int, ...]
    scheme: Scheme | None
    dtype: str  # safetensors dtype of the scales, or of a plain tensor
    nbytes: int
    layout: str = DISK  # layout of its words, if packed
    packed: CheckpointTensor | None = None  # the packed matrix that a plain tensor is unpacked from, if it is not stored

    @cached_property
    def params(self) -> int:
        """The number of weights that it represents."""
        return TensorHeader(self.shape, "U8").numel

    @property
    def bpw(self) -> float:
        """Bits stored per weight."""
        return 8 * self.nbytes / max(self.params, 1)


@dataclass(frozen=True)
class Checkpoint:
    """A lowq folder whose files are consistent."""

    source: Source
    tensors: tuple[CheckpointTensor, ...]
    report: dict[str, Any]  # lowq_report.json, or {} without one

    @property
    def folder(self) -> Path:
        """Where it is."""
        assert self.source.folder
        return self.source.folder

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return self.source.config

    @cached_property
    def schemes(self) -> dict[str, Scheme]:
        """Name -> scheme of every packed matrix."""
        return {t.name: t.scheme for t in self.tensors if t.scheme}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Name -> (N, K) of every packed matrix."""
        return {t.name: (t.shape[0], t.shape[1]) for t in self.tensors if t.scheme}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def bpw(self) -> float:
        """Bits per weight over everything, plain tensors included."""
        return 8 * self.nbytes / max(sum(t.params for t in self.tensors), 1)

    @property
    def quantized_fraction(self) -> float:
        """Share of the weights that are packed, 0 .. 1."""
        return sum(t.params for t in self.tensors if t.scheme) / max(sum(t.params for t in self.tensors), 1)

    def read_matrix(self, t: CheckpointTensor) -> QuantizedTensor:
        """One packed matrix of a checkpoint, unpacked to one byte per code."""
        return unpack(self.read_packed(t))

    def read_packed(self, t: CheckpointTensor) -> PackedWeight:
        """One packed matrix of a checkpoint, in its stored layout."""
        header = self.source.headers[f"{t.name}.weight"]
        return replace(self.read_companions(t), words=self.source.read(f"{t.name}.weight").reshape(header.shape))

    def read_companions(self, t: CheckpointTensor) -> PackedWeight:
        """A packed matrix without its words: only scales, zeros and table, a small part of its bytes."""
        assert t.scheme

        def read(leaf: str) -> torch.Tensor | None:
            name = f"{t.name}.{leaf}"
            return self.source.read(name).reshape(self.source.headers[name].shape) if name in self.source.headers else None

        scales, zeros, table = map(read, COMPANIONS)
        assert scales is not None
        for leaf, companion in zip(COMPANIONS, (scales, zeros, table), strict=True):
            self._check_values(t, leaf, companion)
        return PackedWeight(torch.empty(0), scales, zeros, t.scheme, t.shape[0], t.shape[1], t.layout, table=table)

    def _check_values(self, t: CheckpointTensor, leaf: str, companion: torch.Tensor | None) -> None:
        """Raise DamagedError for NaN or infinite scales, zeros or tables, or for factors that are not above 0."""
        if companion is None or not t.scheme:
            return
        role = leaf.removeprefix("weight_")
        if not plausible(companion, t.scheme, "finite" if role == "zero" else role):
            raise DamagedError(f"{t.name}.{leaf} in {self.folder} holds {UNUSABLE[role]}; quantize again")

    def read_plain(self, t: CheckpointTensor) -> torch.Tensor:
        """One tensor that is not packed, as stored, or unpacked in its dtype."""
        if t.packed is not None:
            return self.read_matrix(t.packed).dequantize().to(torch_dtype(t.dtype))
        header = self.source.headers[t.name]
        return viewed(self.source.read_raw(t.name, 0, header.nbytes), DTYPES[header.dtype], header.shape)

    def check_values(self, advance: Callable[[int, str], None] = lambda done, name: None) -> int:
        """Read every tensor, compare checksums with the report if there is one, and check that scales and zeros are finite.

        Returns the bytes read. advance: called after each tensor with the bytes read so far and its name.

        Raises DamagedError with the tensor's name, also if the report has no checksum of it.
        """
        checksums = {t["name"]: t["crc32"] for t in self.report.get("tensors", ())}  # validated by _check_report
        if unknown := [t.name for t in self.tensors if checksums and t.name not in checksums]:
            more = f" ({len(unknown)} such)" if len(unknown) > 1 else ""
            raise DamagedError(f"{unknown[0]} has no checksum in {REPORT}{more}, so it cannot be verified")
        done = 0
        for t in self.tensors:
            names = [f"{t.name}.weight", *(f"{t.name}.{c}" for c in COMPANIONS)] if t.scheme else [t.name]
            present = [n for n in names if n in self.source.headers]
            crcs = [_crc(self.source, n) for n in present]
            if checksums.get(t.name, crcs) != crcs:
                raise DamagedError(f"{t.name} in {self.folder} is not what lowq wrote (checksum); quantize again")
            for n in present[1:]:
                self._check_values(t, n.rpartition(".")[2], self.source.read(n))
            done += t.nbytes
            advance(done, t.name)
        return done

    def check_files(self) -> list[str]:
        """Compare config.json, tokenizer and other files with the report's hashes; returns the files without a hash.

        Raises DamagedError with the name of a file that was changed or added after lowq wrote the folder.
        """
        hashes = self.report.get("sha256")
        used = [self.folder / CONFIG, *self.source.companions()]
        if hashes is None:  # the report was written by an older lowq
            return [p.name for p in used]
        for path in used:
            if path.name not in hashes:
                raise DamagedError(f"{path} has no hash in {REPORT}: lowq did not write it")
        for name, digest in hashes.items():
            if sha256(read_regular(self.folder / check_file_name(name, REPORT))) != digest:
                raise DamagedError(f"{self.folder / name} is not what lowq wrote (hash)")
        return []


def _crc(source: Source, name: str) -> int:
    crc, size = 0, source.headers[name].nbytes
    for at in range(0, size, CHUNK):
        crc = zlib.crc32(source.read_raw(name, at, min(CHUNK, size - at)), crc)
    return crc


def open_checkpoint(path: str | os.PathLike[str], more: str = "") -> Checkpoint:
    """Open a lowq folder and check it without reading weights.

    more: further options of the `quantize` command that is suggested for a model that is not quantized.
    Raises NotFoundError (no folder, or an unfinished run), UsageError (a model that is not quantized),
    UnsupportedError (another format or version), DamagedError (inconsistent files).
    """
    folder = DEMO if os.fspath(path) == "demo" else user_path(path)
    if not folder.is_dir():
        raise NotFoundError(
            f"no folder {folder}; make a checkpoint with: lowq quantize MODEL --out {shlex.quote(str(folder.absolute()))}"
        )
    source = open_source(str(folder.absolute()))
    q = source.config.get("quantization_config")
    if q is None:
        raise UsageError(f"{os.fspath(path)} is a model that is not quantized; run: lowq quantize {as_argument(path)}{more}")
    if not isinstance(q, dict):
        raise DamagedError(f"{folder}/config.json: quantization_config must be a table")
    names = [n.removesuffix(".weight") for n in source.headers if n.endswith(".weight")]
    try:
        with naming(folder / CONFIG):
            tensors = _tensors(source, expand_stored(q, names))
        check_shapes(source.config, {f"{t.name}.weight" if t.scheme else t.name: t.shape for t in tensors})
    except SchemeError as e:
        raise DamagedError(f"{folder}: {e}") from None
    report = read_json(folder / REPORT) if (folder / REPORT).is_file() else {}
    _check_report(source, report)
    return Checkpoint(source, tensors, report)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a folder's config.json declares a lowq checkpoint, intact or not."""
    try:
        return method(read_json(Path(path) / "config.json")) == METHOD
    except LowqError:
        return False


def _tensors(source: Source, schemes: dict[str, Stored]) -> tuple[CheckpointTensor, ...]:
    """Every tensor of the folder, scales and zeros with their matrix. Raises DamagedError if one contradicts its scheme."""
    tensors = []
    for name, header in source.headers.items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "weight" and stem in schemes:
            tensors.append(_packed(source, stem, schemes[stem]))
        elif leaf in COMPANIONS:
            if stem not in schemes:
                raise DamagedError(f"{name} is there, but quantization_config has no scheme for {stem}")
        elif leaf == "weight" and header.dtype not in FLOATS:
            raise DamagedError(f"{name} is {header.dtype}, but quantization_config has no scheme for it")
        else:
            tensors.append(CheckpointTensor(name, header.shape, None, header.dtype, header.nbytes))
    return tuple(tensors)


def _packed(source: Source, name: str, how: Stored) -> CheckpointTensor:
    """One packed matrix. Its scales determine N and K, and the shape of its words must agree."""
    leaves = {leaf: h for leaf in ("weight", *COMPANIONS) if (h := source.headers.get(f"{name}.{leaf}"))}
    scales = leaves.get("weight_scale")
    groups = scales.shape[1] if scales and len(scales.shape) > 1 else 1
    N, K = packed_tensors.rows(how, leaves["weight"].shape), groups * how.scheme.group_size
    why = packed_tensors.misfit(name, how, N, K, source.headers) if N and K else f"{name} has no rows, or no groups"
    if not why and len({h.dtype for leaf, h in leaves.items() if leaf in COMPANIONS[:2]}) > 1:
        why = f"{name}.weight_zero is {leaves['weight_zero'].dtype}, its scales are {leaves['weight_scale'].dtype}"
    if why:
        raise DamagedError(f"{why}; config.json and weights do not belong together, quantize again")
    assert scales
    return CheckpointTensor(name, (N, K), how.scheme, scales.dtype, sum(h.nbytes for h in leaves.values()), how.layout)


def _is_line(line: Any) -> bool:
    """Whether a report's entry for one tensor is well-formed."""
    if not isinstance(line, dict) or not isinstance(line.get("name"), str):
        return False
    crcs = line.get("crc32")
    texts = all(isinstance(line.get(k), str | None) for k in ("kind", "scheme", "method", "note"))
    return (
        texts and isinstance(crcs, list) and set(map(type, crcs)) <= {int} and type(line.get("rel_error", 0.0)) in (float, int)
    )


def sha256(content: bytes) -> str:
    """The scheme as reports spell it."""
    return hashlib.sha256(content).hexdigest()


def _check_report(source: Source, report: dict[str, Any]) -> None:
    """Raise DamagedError unless the weight files are those that the report describes."""
    listed = report.get("weights", {})
    tensors = report.get("tensors", [])
    odd = [k for k, kind in FIELDS.items() if k in report and not isinstance(report[k], kind)]
    if not odd and isinstance(tensors, list):
        odd = [f"tensors[{i}]" for i, t in enumerate(tensors) if not _is_line(t)][:1]
    if not odd:
        odd = [k for k in ("files",) if not all(isinstance(v, str) for v in report.get(k) or ())]
        odd += [k for k in ("sha256",) if not all(isinstance(v, str) for v in (report.get(k) or {}).values())]
    if odd:
        raise DamagedError(f"{source.folder}/{REPORT} is malformed ({odd[0]}); remove it, or quantize again")
    for name, facts in listed.items():
        header = source.files.get(name)
        if header is None:
            raise DamagedError(f"{source.folder} lacks {name}, which {REPORT} lists")
        if facts != {"bytes": header.size, "header_crc32": header.crc}:
            raise DamagedError(f"{source.folder}/{name} is not the file that lowq wrote ({REPORT}); quantize again")
