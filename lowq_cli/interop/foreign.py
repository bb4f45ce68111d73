"""Open other tools' checkpoints as a model source with dense weights, which are decoded as they are read, one at a time.

`open_decoded` is `open_source` with dense weights: checkpoints of every format in packers/formats, HQQ's qmodel.pt
and GGUF files get the names, shapes and dtypes of the model that they represent.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lowq_cli.files.safetensors_io import DTYPES, ITEMSIZE, TORCH_NAMES, FileHeader, TensorHeader, read_json, viewed
from lowq_cli.files.shapes import check_shapes
from lowq_cli.files.source import Source, open_source
from lowq_cli.files.storage import METHOD, method, method_of_others
from lowq_cli.state import user_path
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError, library_errors
from lowq_packers.regular import opened

if TYPE_CHECKING:
    import torch

    from lowq_packers.formats import Fetch, Format, Matrix
    from lowq_packers.qtensor import QuantizedTensor

# Fields that the config.json of dense weights does not have.
QUANT_SECTIONS = ("quantization_config", "compression_config", "quantization", "gguf")
QMODEL = "qmodel.pt"
SLAB = 1 << 22  # max. weights dequantized at a time


def fetcher(source: Source) -> "Fetch":
    """A function from a full tensor name (and an index of its first dimension) to the stored tensor, in new memory.

    U32 words are returned as int32. The first call imports torch: most formats are recognised from headers alone.
    """

    def fetch(name: str, index: int | None = None, /) -> "torch.Tensor":
        header = source.headers.get(name)
        if header is None:
            raise NotFoundError(f"{source.name} has no tensor {name}")
        if header.dtype not in DTYPES:
            raise UnsupportedError(f"{name} has dtype {header.dtype}, which torch does not have")
        shape, nbytes = header.shape, header.nbytes
        if index is not None:
            shape, nbytes = shape[1:], nbytes // shape[0]
        kind = "int32" if header.dtype == "U32" else DTYPES[header.dtype]
        return viewed(source.read_raw(name, (index or 0) * nbytes, nbytes), kind, shape)

    return fetch


def by_first_part(matrices: "Iterable[Matrix]") -> "dict[str, list[Matrix]]":
    """First tensor -> the matrices that begin there: one, or the experts of a stack."""
    at: dict[str, list[Matrix]] = {}
    for m in matrices:
        at.setdefault(m.parts[0], []).append(m)
    return at


def foreign_matrices(source: Source) -> "tuple[Format, list[Matrix]] | None":
    """The format of a source and its quantized weights; None if they are dense, or in lowq's format.

    Raises UnsupportedError for a format that lowq does not read, DamagedError for contradictory tensors.
    """
    if method(source.config) == METHOD:
        return None
    from lowq_packers import formats

    fmt = formats.detect(source.config, source.headers)
    if fmt is None:
        if (q := source.config.get("quantization_config")) is not None:
            named = method_of_others(source.name, q)
            known = ", ".join(f.title for f in formats.FORMATS.values())
            raise UnsupportedError(
                f"{source.name} is quantized as {named!r}; lowq opens {known}: give the model it was made from"
            )
        if coded := next((n for n, h in source.headers.items() if n.endswith(".weight") and h.dtype[0] in "IU"), None):
            raise UnsupportedError(
                f"{coded} is {source.headers[coded].dtype}, and config.json does not say what its codes mean"
            )
        return None
    fetch = None if source.folder is None else fetcher(source)
    matrices = fmt.matrices(source.config, source.headers, fetch)
    formats.check_used(matrices, source.headers)
    parts = {part for m in matrices for part in m.parts}
    dense_shapes = {n: h.shape for n, h in source.headers.items() if n not in parts}
    check_shapes(source.config, dense_shapes | {f"{m.name}.weight": m.shape for m in matrices})
    if not matrices:
        raise DamagedError(f"{source.name}: config.json says {fmt.title}, but no weight is packed so; fetch the model again")
    return fmt, matrices


def stays_packed(source: Source) -> bool:
    """Whether another tool quantized a source of `open_foreign`, and most of its codes are kept by an import.

    A GGUF file's config says nothing of it: there the types of the tensors decide, since Q2_K to Q6_K become dense.
    """
    if any(source.config.get(section) for section in QUANT_SECTIONS if section != "gguf"):
        return True
    if not (packed := foreign_matrices(source)):
        return False
    sizes = [(m.scheme is not None, math.prod(m.shape)) for m in packed[1]]
    return 2 * sum(size for kept, size in sizes if kept) > sum(size for _, size in sizes)


def coded_types(source: Source) -> str:
    """The types of the tensors of a GGUF file that are quantized, such as "Q4_K, Q6_K"; "" for other sources."""
    if not (stored := source.config.get("gguf")):
        return ""
    from lowq_packers.formats.gguf import PLAIN

    return ", ".join(sorted({tensor["type"] for tensor in stored.values()} - PLAIN.keys()))


def open_decoded(model: str | os.PathLike[str], headers_only: bool = False) -> Source:
    """`open_source`, with the weights of other tools' checkpoints decoded. Raises as `open_source` and the formats do."""
    raw = open_foreign(model, headers_only)
    try:
        packed = foreign_matrices(raw)
    except BaseException:
        raw.close()
        raise
    return raw if packed is None else _decoded(raw, *packed)


def open_foreign(model: str | os.PathLike[str], headers_only: bool = False) -> Source:
    """`open_source`, which also opens a GGUF file and a folder with HQQ's qmodel.pt."""
    folder = user_path(model)
    if folder.suffix == ".gguf" and folder.is_file():
        from lowq_cli.interop.gguf_source import open_gguf

        return open_gguf(os.fspath(model), folder, headers_only)
    if folder.name == QMODEL and folder.is_file():
        folder = folder.parent
    if (folder / QMODEL).is_file() and not list(folder.glob("*.safetensors")):
        return _open_qmodel(os.fspath(model), folder)
    return open_source(model, headers_only)


def _decoded(raw: Source, form: "Format", matrices: "list[Matrix]") -> "DecodedSource":
    """A source in which every matrix is a dense tensor, at the position of its first part."""
    at = by_first_part(matrices)
    parts = {p for m in matrices for p in m.parts}
    headers, where, dense = {}, {}, {}
    for name, header in raw.headers.items():
        for m in at.get(name, ()):
            headers[f"{m.name}.weight"] = TensorHeader(m.shape, m.dtype)
            where[f"{m.name}.weight"], dense[f"{m.name}.weight"] = raw.where[name], m
        if name not in parts:
            headers[name], where[name] = header, raw.where[name]
    config = {k: v for k, v in raw.config.items() if k not in QUANT_SECTIONS}
    return DecodedSource(raw.name, raw.folder, config, headers, raw.files, where, raw.notes, form.name, raw=raw, dense=dense)


@dataclass
class DecodedSource(Source):
    """A source whose `dense` tensors are decoded from the tensors of `raw`. The last decoded tensor stays in memory."""

    raw: Source = field(kw_only=True)
    dense: "dict[str, Matrix]" = field(kw_only=True)
    _last: "tuple[str, torch.Tensor] | None" = field(default=None, repr=False)

    @property
    def identity(self) -> str:  # type: ignore[override]
        """The identity of the stored checkpoint, whose bytes are decoded."""
        return self.raw.identity

    @property
    def held_bytes(self) -> int:
        """The bytes of the largest decoded tensor and its codes."""
        return max((self.headers[n].nbytes + self.headers[n].numel for n in self.dense), default=0)

    def read(self, name: str, first: int = 0, count: int | None = None) -> "torch.Tensor":
        """As `Source.read`."""
        if name not in self.dense:
            return self.raw.read(name, first, count)
        flat = self._tensor(name).flatten()
        return flat[first : None if count is None else first + count].clone()

    def read_raw(self, name: str, first: int, nbytes: int) -> bytearray:
        """As `Source.read_raw`."""
        if name not in self.dense:
            return self.raw.read_raw(name, first, nbytes)
        import torch

        raw = self._tensor(name).flatten().view(torch.uint8)[first : first + nbytes]
        return bytearray(raw.numpy().tobytes())

    def close(self) -> None:
        """Close the files."""
        self._last = None
        self.raw.close()

    def _tensor(self, name: str) -> "torch.Tensor":
        if self._last is None or self._last[0] != name:
            self._last = None  # freed first, so that two large tensors are never in memory together
            self._last = name, dense(self.dense[name], fetcher(self.raw))
        return self._last[1]


def dense(m: "Matrix", fetch: "Fetch") -> "torch.Tensor":
    """The matrix (N, K) in the dtype of `m`. Raises DamagedError if it holds NaN or infinite values."""
    import torch

    dtype = getattr(torch, TORCH_NAMES[m.dtype])
    with torch.inference_mode():
        matrix = m.read(fetch)
        if not isinstance(matrix, torch.Tensor):
            out = torch.empty(matrix.shape, dtype=dtype)
            for rows, part in slabs(matrix):
                out[rows] = part.dequantize(dtype)
        else:
            out = matrix.to(dtype).contiguous()
        if not torch.isfinite(out).all():
            raise DamagedError(f"{m.name} holds NaN or infinite values; the model file is damaged")
    return out


def slabs(q: "QuantizedTensor") -> "Iterator[tuple[slice, QuantizedTensor]]":
    """Split a quantized matrix into runs of rows whose fp32 copies stay small."""
    step = max(1, SLAB // q.shape[1])
    for i in range(0, q.shape[0], step):
        last = min(i + step, q.shape[0])
        yield slice(i, last), q.rows(i, last)


@dataclass
class TensorSource(Source):
    """A source whose tensors are in memory."""

    tensors: "dict[str, torch.Tensor]" = field(kw_only=True)

    def read(self, name: str, first: int = 0, count: int | None = None) -> "torch.Tensor":
        """As `Source.read`."""
        return self.tensors[name].flatten()[first : None if count is None else first + count].clone()

    def read_raw(self, name: str, first: int, nbytes: int) -> bytearray:
        """As `Source.read_raw`."""
        import torch

        raw = self.tensors[name].contiguous().flatten().view(torch.uint8)[first : first + nbytes]
        return bytearray(raw.numpy().tobytes())


def _open_qmodel(name: str, folder: Path) -> TensorSource:
    """Open a folder saved by the hqq library. Only tensors and numbers are unpickled. Raises as `open_source` does."""
    import torch

    from lowq_packers.formats.hqq import flatten

    config = read_json(folder / "config.json")
    path = folder / QMODEL
    refused = library_errors(UnsupportedError, f"{path} is not a plain HQQ checkpoint, and lowq does not run pickled code")
    with refused, opened(path) as name_of_open:  # e.g. a truncated zip, or a class not on torch's list
        loaded = torch.load(name_of_open, map_location="cpu", weights_only=True, mmap=True)
    tensors = flatten(loaded) if isinstance(loaded, Mapping) else {}
    names = {getattr(torch, t): s for s, t in DTYPES.items()}
    headers: dict[str, TensorHeader] = {}
    for tensor, value in tensors.items():
        if value.dtype not in names or ITEMSIZE.get(names[value.dtype]) is None:
            raise UnsupportedError(f"{path}: {tensor} has dtype {value.dtype}, which lowq does not read")
        headers[tensor] = TensorHeader(tuple(value.shape), names[value.dtype])
    if not headers:
        raise DamagedError(f"{path} holds no tensors")
    files = {QMODEL: FileHeader(path, headers, path.stat().st_size, 0)}
    return TensorSource(name, folder, config, headers, files, dict.fromkeys(headers, QMODEL), tensors=tensors)
