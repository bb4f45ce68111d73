"""Checkpoints of other tools, opened as a model source whose weights are dense: decoded as they are read, one at a time.

`open_decoded` is `open_source` for whoever wants plain weights: checkpoints of every format in packers/formats, HQQ's qmodel.pt
and GGUF files come with the names, shapes and dtypes of the model they stand for.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lowq_cli.files.quant_config import METHOD
from lowq_cli.files.safetensors_io import DTYPES, ITEMSIZE, TORCH_NAMES, FileHeader, TensorHeader, read_json, viewed
from lowq_cli.files.shapes import check_shapes
from lowq_cli.files.source import Source, open_source
from lowq_cli.state import user_path
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError, library_errors
from lowq_packers.regular import opened

if TYPE_CHECKING:
    import torch

    from lowq_packers.formats import Fetch, Format, Matrix
    from lowq_packers.qtensor import QuantizedTensor

SECTIONS = ("quantization_config", "compression_config", "quantization", "gguf")  # of config.json, once the weights are plain
QMODEL = "qmodel.pt"
SLAB = 1 << 22  # weights dequantized at a time


def fetcher(source: Source) -> "Fetch":
    """A function from a full tensor name (and a place in its first dimension) to the tensor as stored, in fresh memory.

    U32 words come as int32. torch is imported by the first call: most formats are told from headers.
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
    """The matrices that stand where their first tensor is: one, or the experts of a stack."""
    at: dict[str, list[Matrix]] = {}
    for m in matrices:
        at.setdefault(m.parts[0], []).append(m)
    return at


def foreign_matrices(source: Source) -> "tuple[Format, list[Matrix]] | None":
    """The format of a source and its quantized weights; None where they are plain, or lowq's own.

    Raises UnsupportedError for a format that lowq does not read, DamagedError for one at odds with itself.
    """
    said = source.config.get("quantization_config")
    if isinstance(said, Mapping) and said.get("quant_method") == METHOD:
        return None
    from lowq_packers import formats

    fmt = formats.detect(source.config, source.headers)
    if fmt is None:
        if said is not None:
            method = said.get("quant_method", said.get("quant_type")) if isinstance(said, Mapping) else said
            known = ", ".join(f.title for f in formats.FORMATS.values())
            raise UnsupportedError(
                f"{source.name} is quantized as {method!r}; lowq opens {known}: give the model it was made from"
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
    kept = {n: h.shape for n, h in source.headers.items() if n not in parts}
    check_shapes(source.config, kept | {f"{m.name}.weight": m.shape for m in matrices})
    if not matrices:
        raise DamagedError(f"{source.name}: config.json says {fmt.title}, but no weight is packed so; fetch the model again")
    return fmt, matrices


def open_decoded(model: str | os.PathLike[str], headers_only: bool = False) -> Source:
    """`open_source`, with the weights of foreign quantized checkpoints dense. Raises as it does, and as the formats do."""
    raw = open_foreign(model, headers_only)
    try:
        found = foreign_matrices(raw)
    except BaseException:
        raw.close()
        raise
    return raw if found is None else _decoded(raw, *found)


def open_foreign(model: str | os.PathLike[str], headers_only: bool = False) -> Source:
    """`open_source`, for what it does not open too: a GGUF file, a folder with HQQ's qmodel.pt."""
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
    """A source in which every matrix is a dense tensor, where its first part was."""
    at = by_first_part(matrices)
    parts = {p for m in matrices for p in m.parts}
    headers, where, dense = {}, {}, {}
    for name, header in raw.headers.items():
        for m in at.get(name, ()):
            headers[f"{m.name}.weight"] = TensorHeader(m.shape, m.dtype)
            where[f"{m.name}.weight"], dense[f"{m.name}.weight"] = raw.where[name], m
        if name not in parts:
            headers[name], where[name] = header, raw.where[name]
    config = {k: v for k, v in raw.config.items() if k not in SECTIONS}
    return DecodedSource(raw.name, raw.folder, config, headers, raw.files, where, stored_as=form.name, raw=raw, dense=dense)


@dataclass
class DecodedSource(Source):
    """A source whose `dense` tensors are decoded from those of `raw`. The last one decoded stays in memory."""

    raw: Source = field(kw_only=True)
    dense: "dict[str, Matrix]" = field(kw_only=True)
    _last: "tuple[str, torch.Tensor] | None" = field(default=None, repr=False)

    @property
    def identity(self) -> str:  # type: ignore[override]
        """The stored checkpoint's: it names the bytes that are decoded."""
        return self.raw.identity

    @property
    def held_bytes(self) -> int:
        """The largest decoded tensor, and beside it the codes that it is made from."""
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
            self._last = None  # before the next is made: two large ones are never held
            self._last = name, dense(self.dense[name], fetcher(self.raw))
        return self._last[1]


def dense(m: "Matrix", fetch: "Fetch") -> "torch.Tensor":
    """(N, K) in the dtype that `m` promises. Raises DamagedError if it holds NaN or infinite values."""
    import torch

    dtype = getattr(torch, TORCH_NAMES[m.dtype])
    with torch.inference_mode():
        found = m.read(fetch)
        if not isinstance(found, torch.Tensor):
            out = torch.empty(found.shape, dtype=dtype)
            for rows, part in slabs(found):
                out[rows] = part.dequantize(dtype)
        else:
            out = found.to(dtype).contiguous()
        if not torch.isfinite(out).all():
            raise DamagedError(f"{m.name} holds NaN or infinite values; the model file is damaged")
    return out


def slabs(q: "QuantizedTensor") -> "Iterator[tuple[slice, QuantizedTensor]]":
    """A quantized matrix in runs of rows, few enough that their fp32 copies stay small."""
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
    """A folder that the hqq library saved. Nothing but tensors and numbers is unpickled. Raises as `open_source` does."""
    import torch

    from lowq_packers.formats.hqq import flatten

    config = read_json(folder / "config.json")
    path = folder / QMODEL
    refused = library_errors(UnsupportedError, f"{path} is no plain HQQ checkpoint, and lowq runs no pickled code")
    with refused, opened(path) as name_of_open:  # a truncated zip, a class that is not on torch's list, ...
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
