"""Foreign on-disk formats, read and written one matrix at a time. One file per format; each calls `register`.

A reader converts a format's tensors to lowq's definition, w = (q - zeros) * scales, and keeps the codes bit for bit. A matrix
for which lowq has no scheme (permuted groups, 8-bit floats) is read as a dense matrix. A writer stores a quantized matrix
bit-exactly or raises an error with the nearest scheme that the format holds. No other code depends on a format's conventions.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lowq_packers.errors import DamagedError, SchemeError, UnsupportedError
from lowq_packers.layouts import PackedWeight
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme


class Header(Protocol):
    """Shape and dtype (safetensors name, such as "BF16") of one tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


Config = Mapping[str, Any]  # a config.json
Headers = Mapping[str, Header]


class Fetch(Protocol):
    """Full tensor name -> the stored tensor; with `index`, the slice at that index of its first dimension."""

    def __call__(self, name: str, index: int | None = None, /) -> torch.Tensor: ...


Tensors = dict[str, "torch.Tensor"]
WriteWords = Callable[[str, PackedWeight, Config], Tensors]


@dataclass(frozen=True)
class Matrix:
    """One (N, K) weight of a foreign checkpoint.

    name: its module, e.g. "model.layers.0.mlp.up_proj"; the dense tensor has this name + ".weight".
    parts: full names of the tensors that store it; the experts of a stack share them.
    read: decodes it from those tensors.
    stored: the storage in words, e.g. "4-bit g128 int zero".
    bits: bits of one code in the file.
    scheme: the scheme of the QuantizedTensor that `read` returns; None if it returns a dense (N, K) tensor.
    dtype: safetensors name of the dtype of the scales and of the dense tensor.
    check: reads only the small tensors; returns a line for each trap in them.
    """

    name: str
    shape: tuple[int, int]
    parts: tuple[str, ...]
    read: Callable[[Fetch], QuantizedTensor | torch.Tensor]
    stored: str
    bits: int
    scheme: Scheme | None
    dtype: str
    check: Callable[[Fetch], list[str]] = lambda fetch: []


@dataclass(frozen=True)
class Export:
    """The export of a format: the content of its checkpoints in addition to the tensors from `write`.

    rank: its position in lists of formats. embeddings: whether a packed embedding is supported. experts: whether packed experts
    are supported under their own names; those of a `stack` always are. library: the "format" in the files' metadata. whole:
    config.json in the form of its readers, from lowq's and whether the head is tied. other_files: further JSON files by name,
    from the result of `config`. one_file: whether it is a single file, which `interop` writes. extra: whether its readers
    support heads that predict further tokens. otherwise: why its readers would compute wrong numbers with a config; or None.
    towers: why its readers do not load the packed matrices of a vision tower, which are then written unpacked; or None.
    """

    rank: int
    embeddings: bool = False
    experts: bool = True
    library: str = "pt"
    whole: Callable[[Config, bool], dict[str, Any]] = lambda config, tied: dict(config)
    other_files: Callable[[Config], dict[str, Any]] = lambda section: {}
    one_file: bool = False
    extra: bool = True
    otherwise: Callable[[Config], str | None] = lambda config: None
    towers: Callable[[Config], str | None] = lambda config: None


class WrongGroup(str):
    """A reason of `Format.why_not` that a group of another size removes: `fact` alone, and `group`, the nearest size."""

    fact: str
    group: int

    def __new__(cls, fact: str, group: int) -> WrongGroup:
        reason = super().__new__(cls, f"{fact}; nearest: --group {group}")
        reason.fact, reason.group = fact, group
        return reason


@dataclass(frozen=True)
class Format:
    """One foreign format.

    matrices: a checkpoint's quantized weights (it may fetch small tensors; with fetch None it uses only headers). engines: the
    engines that serve such a checkpoint. notes: traps of the checkpoint's version.
    why_not: why the format cannot hold a scheme and shape, ending with the nearest one that it can hold (WrongGroup if only
    the group differs); or None.
    tables: lowq's tables that it holds; why_not is not called for other tables.
    write: the tensors of one matrix, by full name. write_words: the same from lowq's words (layout rowstream), in formats that
    store them unchanged. stack: for an expert's matrix (name, family), the stack of all experts that contains it, and its index
    in the stack; None if experts are stored separately. config: the fields of config.json for these schemes (kept: dense
    matrices). export: None if lowq only reads the format. claims: whether a checkpoint has this format; None: it has if its
    config.json names it as quant_method. check_values: raises SchemeError for scales, zeros or a table of a matrix (it does not
    read the words) that the format cannot hold, or only with `rounding`; None if it holds all values.
    """

    name: str
    title: str
    matrices: Callable[[Config, Headers, Fetch | None], list[Matrix]]
    engines: Callable[[Config, Sequence[Matrix]], list[str]]
    why_not: Callable[[Scheme, int, int], str | None] = lambda s, N, K: "lowq only reads it; nearest: --to compressed-tensors"
    write: Callable[[str, QuantizedTensor, Config], Tensors] | None = None
    config: Callable[[Mapping[str, Scheme], Mapping[str, tuple[int, int]], Sequence[str]], dict[str, Any]] | None = None
    notes: Callable[[Config, Headers], list[str]] = lambda config, headers: []
    stack: Callable[[str, str], tuple[str, int] | None] = lambda name, family: None
    export: Export | None = None
    write_words: WriteWords | None = None
    tables: tuple[str, ...] = ()
    claims: Callable[[Config, Headers], bool] | None = None
    check_values: Callable[[PackedWeight, str, bool], None] | None = None


FORMATS: dict[str, Format] = {}
FLOATS = ("F64", "F32", "F16", "BF16")
NO_WEIGHT = (  # leaves of a quantized module that change no weight
    *("bias", "input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale", "k_scale", "v_scale"),
    *("input_global_scale", "gate_up_proj_bias", "down_proj_bias"),
)
FUSED = {  # leaf of a module -> the fused module that engines make of it and its neighbours, whose name their rules match
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("w1", "w3"), "w13"),
}


def register(fmt: Format) -> Format:
    """Register a format by its name. Raises SchemeError on a second registration."""
    if fmt.name in FORMATS:
        raise SchemeError(f"format {fmt.name!r} is registered twice")

    def why_not(scheme: Scheme, N: int, K: int) -> str | None:
        if scheme.table and scheme.table not in fmt.tables:
            return f"{fmt.title} holds no values of the table {scheme.table}; nearest: --format lowq"
        return fmt.why_not(scheme, N, K)

    FORMATS[fmt.name] = checked = replace(fmt, why_not=why_not)
    return checked


def served_by(*engines: str) -> Callable[[Config, Sequence[Matrix]], list[str]]:
    """`Format.engines` for a format whose checkpoints are all served by these engines."""
    return lambda config, matrices: list(engines)


def get(name: str) -> Format:
    """The format of that name. Raises UnsupportedError with the list of the existing ones."""
    if name not in FORMATS:
        raise UnsupportedError(f"format {name!r} does not exist; use one of {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def check_used(matrices: Sequence[Matrix], headers: Headers) -> None:
    """Check that the tensors of quantized modules are used: raise UnsupportedError for a tensor that no matrix reads, and
    DamagedError for a weight that is not floats and has no scales.
    """
    used = {part for m in matrices for part in m.parts}
    names = {part.rpartition(".")[0] for part in used} | {m.name for m in matrices}
    for tensor in headers:
        stem, _, leaf = tensor.rpartition(".")
        if tensor not in used and leaf == "weight" and headers[tensor].dtype not in FLOATS:
            if scale := next((n for n in headers if n.startswith(f"{stem}.") and "scale" in n), None):
                raise UnsupportedError(f"{tensor} is {headers[tensor].dtype} with {scale}, which lowq does not read here")
            raise DamagedError(f"{tensor} is {headers[tensor].dtype}, and no other tensor or setting says what its codes mean")
        if tensor not in used and stem in names and leaf not in NO_WEIGHT:
            raise UnsupportedError(f"{tensor} belongs to a quantized weight, and lowq does not know what it does to it")


def detect(config: Config, headers: Headers) -> Format | None:
    """The format of a checkpoint; None for plain floats and for lowq's own format."""
    named, by_name = method(config), sorted(FORMATS.values(), key=lambda f: f.name)
    return next((f for f in by_name if (f.claims(config, headers) if f.claims else named == f.name)), None)


def method(config: Config) -> str | None:
    """The quant_method that a config.json names."""
    q = config.get("quantization_config")
    return str(q.get("quant_method")) if isinstance(q, Mapping) else None


for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")
_ranks = {f.name: f.export.rank for f in FORMATS.values() if f.export}
EXPORTED = tuple(sorted(_ranks, key=lambda name: _ranks[name]))  # formats that lowq writes, in the order to try them
