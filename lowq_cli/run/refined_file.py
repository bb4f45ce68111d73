"""Another tool's quantized file whose codes and scales are being improved: a folder of safetensors, or a GGUF file.

Both return matrices as stored (calibrate/file_matrix.py), accept better ones, and leave the rest of the file unchanged.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from lowq_cli.calibrate.file_matrix import Given, GivenBlocks, GivenCodes, GivenFile
from lowq_cli.calibrate.layer_file import load_item, load_tensor, save_item
from lowq_cli.files.checkpoint import Checkpoint, CheckpointTensor, is_checkpoint, open_checkpoint
from lowq_cli.files.folder import check_free, sweep, unfinished
from lowq_cli.files.safetensors_writer import SafetensorsWriter, to_json
from lowq_cli.interop import export_checks, exporter
from lowq_cli.interop.exported import Exported, Progress
from lowq_cli.interop.foreign import fetcher, foreign_matrices, open_foreign
from lowq_cli.interop.gguf_export import ENGINES
from lowq_cli.interop.importer import cached, runnable
from lowq_cli.plan.plan import Item
from lowq_cli.state import remember_export, user_path, was_exported, writing
from lowq_packers.atomic import publish
from lowq_packers.errors import UnsupportedError, UsageError
from lowq_packers.formats import gguf
from lowq_packers.formats._gguf_blocks import BLOCK_KINDS, read_blocks, write_blocks
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.regular import open_regular
from lowq_packers.scheme import Scheme

COPIED = 1 << 24  # bytes copied at a time
RESULT = "model.gguf"
Load = Callable[[], Given]


class RefinedFile(GivenFile, Protocol):
    """A quantized file. matrices: name -> shape and scheme (for blocks without a lowq scheme, one with as many groups)."""

    matrices: dict[str, tuple[tuple[int, int], Scheme]]
    cache_prefix: Path  # prefix of the folders that hold results until export, without the run's name
    nbytes: int

    def kind(self, name: str) -> str:
        """The type of a matrix, in the format's words."""

    def start(self) -> None:
        """Write what the run needs of the file besides its matrices into the cache; called before the first layer."""

    def norms(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The one-dimensional weights that the file holds unquantized."""

    def write(self, loads: Mapping[str, Load], folder: Path) -> int:
        """Write a copy of the file into a folder, with the matrices of `loads` replaced; returns how many of these changed."""

    def is_done(self, work: Path) -> bool:
        """Whether a folder holds a complete result."""

    def export(self, work: Path, out: Path, progress: Progress | None) -> Exported:
        """Write the result in the file's format."""


def opened(checkpoint: str, path: Path) -> RefinedFile:
    """Open the file. Raises UsageError: not quantized by another tool; UnsupportedError: a format that lowq cannot write."""
    with open_foreign(checkpoint) as source:
        read = foreign_matrices(source)
    if read is None:
        raise UsageError(f"{checkpoint} is not a checkpoint of another tool; for a model: lowq quantize MODEL --method learn")
    fmt, matrices = read
    if fmt.export is None:
        raise UnsupportedError(f"lowq reads {fmt.title} but does not write it; quantize the original instead")
    if fmt.name == "gguf":
        return GgufFile(path)
    if dense := [m.name for m in matrices if m.scheme is None]:
        raise UnsupportedError(
            f"{dense[0]} ({len(dense)} such) is stored as {fmt.title} that lowq reads but does not write; quantize the original"
        )
    return FolderFile(checkpoint, fmt.name)


class FolderFile:
    """A folder. `start` imports it into the cache as a lowq checkpoint, whose improved copy is exported."""

    def __init__(self, checkpoint: str, form: str) -> None:
        self.checkpoint, self.form, self.raw = checkpoint, form, open_foreign(checkpoint)
        self.cache_prefix, self.fetch = cached(self.raw, "refined"), fetcher(self.raw)
        _, matrices = foreign_matrices(self.raw) or (None, [])
        tensors = tuple(CheckpointTensor(m.name, m.shape, m.scheme, m.dtype, 0) for m in matrices)
        export_checks.check(Checkpoint(self.raw, tensors, {}), export_checks.formats.get(form))
        self.read = {m.name: m.read for m in matrices}
        self.parts = {part for m in matrices for part in m.parts}
        self.matrices = {m.name: (m.shape, m.scheme) for m in matrices if m.scheme}
        self.nbytes = sum(p.stat().st_size for p in user_path(checkpoint).iterdir() if p.suffix in (".safetensors", ".pt"))

    def kind(self, name: str) -> str:
        """As `RefinedFile` says."""
        return str(self.matrices[name][1])

    def start(self) -> None:
        """As `RefinedFile` says."""
        self.imported = open_checkpoint(runnable(self.checkpoint))

    def norms(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `RefinedFile` says."""
        return ((n, self.fetch(n)) for n, h in self.raw.headers.items() if n not in self.parts and len(h.shape) == 1)

    def given(self, name: str) -> Given:
        """A matrix as the file stores it."""
        q = self.read[name](self.fetch)
        assert isinstance(q, QuantizedTensor)
        return GivenCodes(q)

    def saved(self, name: str, given: Given) -> dict[str, torch.Tensor]:
        """As `GivenFile` says."""
        assert isinstance(given, GivenCodes)
        return save_item(given.q, name, torch.float32)

    def load(self, path: Path, item: Item) -> Given:
        """As `GivenFile` says."""
        return GivenCodes(load_item(path, item))

    def write(self, loads: Mapping[str, Load], folder: Path) -> int:
        """As `RefinedFile` says."""
        changed = 0
        with SafetensorsWriter(folder) as shards:
            for t in self.imported.tensors:
                if t.scheme is None:
                    shards.add({t.name: self.imported.read_plain(t)})
                    continue
                p = self.imported.read_packed(t)
                if t.name in loads:
                    given = loads[t.name]()
                    assert isinstance(given, GivenCodes)
                    old, p = p, replace(pack(given.q), scales=given.q.scales.to(p.scales.dtype), zeros=p.zeros, table=p.table)
                    changed += not (torch.equal(old.words, p.words) and torch.equal(old.scales, p.scales))
                companions = {"scale": p.scales, "zero": p.zeros, "table": p.table}
                leaves = {f"{t.name}.weight_{leaf}": x for leaf, x in companions.items() if x is not None}
                shards.add({f"{t.name}.weight": p.words, **leaves})
            shards.finish()
        with writing(folder):
            for name, raw in self.imported.source.companion_files().items():
                (folder / name).write_bytes(raw)
            (folder / "config.json").write_bytes(to_json(self.imported.config))
        return changed

    def is_done(self, work: Path) -> bool:
        """As `RefinedFile` says."""
        return is_checkpoint(work)

    def export(self, work: Path, out: Path, progress: Progress | None) -> Exported:
        """As `RefinedFile` says."""
        return exporter.export(work, self.form, out, progress=progress)


class GgufFile:
    """A GGUF file: only the improved tensors' bytes change. Tensors of types that lowq only reads stay unchanged, as does the
    file of a tower next to it."""

    def __init__(self, path: Path) -> None:
        self.path, self.raw = path, open_foreign(path)
        self.cache_prefix, self.nbytes = cached(self.raw, "refined"), path.stat().st_size
        written = [k for k, s in gguf.SCHEMES.items() if gguf.type_for(s) == k]
        stored = {n.removesuffix(".weight"): facts for n, facts in self.raw.config["gguf"].items() if self._has(n)}
        self.facts = {n: f for n, f in stored.items() if f["type"] in BLOCK_KINDS or f["type"] in written}
        self.matrices = {n: ((f["shape"][0], f["shape"][1]), _scheme(f["type"])) for n, f in self.facts.items()}

    def kind(self, name: str) -> str:
        """As `RefinedFile` says."""
        return str(self.facts[name]["type"])

    def start(self) -> None:
        """As `RefinedFile` says: nothing."""

    def _has(self, name: str) -> bool:
        """Whether a tensor of the model is in this file."""
        return self.raw.where[name] == self.path.name

    def norms(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `RefinedFile` says."""
        headers = [(n, h) for n, h in self.raw.headers.items() if self._has(n)]
        return ((n, self.raw.read(n)) for n, h in headers if len(h.shape) == 1 and n.removesuffix(".weight") not in self.facts)

    def given(self, name: str) -> Given:
        """A matrix as the file stores it, with its rows in Hugging Face's order."""
        whole = self.raw.headers[f"{name}.weight"].nbytes
        return self._read(name, torch.frombuffer(self.raw.read_raw(f"{name}.weight", 0, whole), dtype=torch.uint8))

    def saved(self, name: str, given: Given) -> dict[str, torch.Tensor]:
        """As `GivenFile` says: the bytes as stored in the file."""
        given = given.to("cpu")
        if isinstance(given, GivenBlocks):
            return {f"{name}.raw": write_blocks(given.blocks.each(self._permuted(name, inverse=False))).flatten()}
        assert isinstance(given, GivenCodes)
        q, order = given.q, self._permuted(name, inverse=False)
        zeros = None if q.zeros is None else order(q.zeros)
        return {f"{name}.raw": gguf.encode(QuantizedTensor.of(q.scheme, order(q.W_q), order(q.scales), zeros), name).flatten()}

    def load(self, path: Path, item: Item) -> Given:
        """As `GivenFile` says."""
        raw = load_tensor(path, f"{item.name}.raw")
        assert raw is not None
        return self._read(item.name, raw)

    def _read(self, name: str, raw: torch.Tensor) -> Given:
        (N, K), kind, order = self.matrices[name][0], self.facts[name]["type"], self._permuted(name, inverse=True)
        if kind in BLOCK_KINDS:
            return GivenBlocks(read_blocks(raw, kind, N, K, name).each(order))
        q = gguf.decode(raw, kind, N, K, name)
        zeros = None if q.zeros is None else order(q.zeros)
        return GivenCodes(QuantizedTensor.of(q.scheme, order(q.W_q), order(q.scales), zeros))

    def _permuted(self, name: str, inverse: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        heads = self.facts[name]["heads"]
        if heads is None:
            return lambda t: t
        return lambda t: gguf.permute_heads(t, heads, inverse).contiguous()

    def write(self, loads: Mapping[str, Load], folder: Path) -> int:
        """As `RefinedFile` says."""
        changed = 0
        with writing(folder), open(folder / f"{RESULT}.part", "wb") as file:
            _copy(self.path, file.write)
            for name, load in loads.items():
                header, raw = self.raw.headers[f"{name}.weight"], self.saved(name, load())[f"{name}.raw"].numpy().data
                changed += raw != self.raw.read_raw(f"{name}.weight", 0, header.nbytes)
                file.seek(header.offset)
                file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.rename(folder / f"{RESULT}.part", folder / RESULT)
        return changed

    def is_done(self, work: Path) -> bool:
        """As `RefinedFile` says."""
        return (work / RESULT).is_file()

    def export(self, work: Path, out: Path, progress: Progress | None) -> Exported:
        """As `RefinedFile` says."""
        run, done = f"refined {work.name}", Exported(str(out), "gguf", self.nbytes, len(self.matrices), ENGINES, ())
        if was_exported(out, run):
            sweep(out)
            return replace(done, already_done=True)
        check_free(out)
        with unfinished(out, run) as folder, writing(out), open(folder / "file", "wb") as file:
            _copy(work / RESULT, file.write)
            file.flush()
            os.fsync(file.fileno())
            remember_export(out, run, folder / "file")
            publish(folder / "file", out)
        return done


def _scheme(kind: str) -> Scheme:
    """The scheme of a GGUF type in a plan: its lowq scheme, or for types without one, a scheme with as many groups."""
    return gguf.SCHEMES.get(kind) or Scheme(8, BLOCK_KINDS[kind].sub, "none")


def _copy(path: Path, write: Callable[[bytes], object]) -> None:
    with open(open_regular(path), "rb") as file:
        for part in iter(partial(file.read, COPIED), b""):
            write(part)
