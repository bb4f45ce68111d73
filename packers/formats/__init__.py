"""Foreign on-disk formats, read and written one matrix at a time. One file per format; each calls `register`.

A reader turns what a format stores into lowq's one definition, w = (q - zeros) * scales, with the codes bit for bit as they
were; what lowq has no scheme for (permuted groups, 8-bit floats) is read as a dense matrix. A writer stores a quantized
matrix bit-exactly or refuses, naming the nearest scheme that the format holds. Conventions end here and go no further in.
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
    """Full tensor name -> the tensor as stored; with `index`, that one of its first dimension."""

    def __call__(self, name: str, index: int | None = None, /) -> torch.Tensor: ...


Tensors = dict[str, "torch.Tensor"]
WriteWords = Callable[[str, PackedWeight, Config], Tensors]


@dataclass(frozen=True)
class Matrix:
    """One (N, K) weight of a foreign checkpoint.

    name: its module, e.g. "model.layers.0.mlp.up_proj"; the dense tensor would be this + ".weight".
    parts: full names of the tensors that it is stored in; the experts of a stack share theirs.
    read: decodes it from those tensors.
    stored: what the file holds, in words, e.g. "4-bit g128 int zero".
    bits: of one code in the file.
    scheme: of the QuantizedTensor that `read` returns; None where it returns a dense (N, K) tensor.
    dtype: safetensors name of the scales' dtype, and of the dense tensor.
    check: reads the small tensors only; a line for each trap found in them.
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
    """That lowq writes a format, and what a checkpoint in it holds besides the matrices that `write` makes.

    rank: its place where formats are listed. embeddings: whether a packed embedding may be among them. experts: whether
    experts may, under their own names; those of a `stack` always may. library: whose the files are, in their metadata.
    whole: the fields of config.json as its readers know them, from ours and whether the head is the embedding. beside: other
    JSON files, by name, from what `config` says. one_file: it is one file, which `interop` writes. extra: whether its readers
    take heads that predict further tokens. otherwise: why its readers would compute other numbers with a config; or None.
    """

    rank: int
    embeddings: bool = False
    experts: bool = True
    library: str = "pt"
    whole: Callable[[Config, bool], dict[str, Any]] = lambda config, tied: dict(config)
    beside: Callable[[Config], dict[str, Any]] = lambda section: {}
    one_file: bool = False
    extra: bool = True
    otherwise: Callable[[Config], str | None] = lambda config: None


@dataclass(frozen=True)
class Format:
    """One foreign format.

    matrices: a checkpoint's quantized weights (small tensors may be fetched to tell; with fetch None, only headers). engines:
    who serves such a checkpoint. notes: traps of the version found.
    why_not: the reason the format cannot hold a scheme and shape, ending in the nearest one that it can; or None.
    tables: the tables of lowq's that it holds; why_not need not ask about others.
    write: tensors of one matrix, by full name. write_words: the same of lowq's words (layout rowstream), in formats that hold
    them as they are. stack: for an expert's matrix (name, family), the stack that holds it with those
    of the other experts, and its place there; None where it stands alone. config: what config.json needs for these schemes
    (kept: dense matrices). export: None where lowq only reads it. claims: whether a checkpoint is in this format; None: where
    its config.json names it as quant_method. check_values: raises SchemeError for scales, zeros or a table of a matrix (its
    words are not looked at) that the format does not hold, or not without `rounding`; None where it holds all.
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
FUSED = {  # leaf of a module -> the module that engines make of it and its neighbours, whose name their rules see
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("w1", "w3"), "w13"),
}


def register(fmt: Format) -> Format:
    """Make a format known by its name. Raises SchemeError on a second registration."""
    if fmt.name in FORMATS:
        raise SchemeError(f"format {fmt.name!r} is registered twice")

    def why_not(scheme: Scheme, N: int, K: int) -> str | None:
        if scheme.table and scheme.table not in fmt.tables:
            return f"{fmt.title} holds no values of the table {scheme.table}; nearest: --format lowq"
        return fmt.why_not(scheme, N, K)

    FORMATS[fmt.name] = made = replace(fmt, why_not=why_not)
    return made


def served_by(*engines: str) -> Callable[[Config, Sequence[Matrix]], list[str]]:
    """`Format.engines` of a format all of whose checkpoints these serve."""
    return lambda config, matrices: list(engines)


def get(name: str) -> Format:
    """The format of that name. Raises UnsupportedError naming the ones that exist."""
    if name not in FORMATS:
        raise UnsupportedError(f"format {name!r} does not exist; use one of {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def check_used(matrices: Sequence[Matrix], headers: Headers) -> None:
    """Raise UnsupportedError for a tensor of a quantized module that no part of its weight is read from, and DamagedError for a
    weight of codes that nothing says the meaning of.
    """
    used = {part for m in matrices for part in m.parts}
    names = {part.rpartition(".")[0] for part in used} | {m.name for m in matrices}
    for tensor in headers:
        stem, _, leaf = tensor.rpartition(".")
        if tensor not in used and leaf == "weight" and headers[tensor].dtype not in FLOATS:
            if scale := next((n for n in headers if n.startswith(f"{stem}.") and "scale" in n), None):
                raise UnsupportedError(f"{tensor} is {headers[tensor].dtype} with {scale}, which lowq does not read here")
            raise DamagedError(f"{tensor} is {headers[tensor].dtype}, and nothing beside it says what its codes mean")
        if tensor not in used and stem in names and leaf not in NO_WEIGHT:
            raise UnsupportedError(f"{tensor} is beside a quantized weight, and lowq does not know what it does to it")


def detect(config: Config, headers: Headers) -> Format | None:
    """The format that a checkpoint is in; None for plain floats (and for lowq's own)."""
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
EXPORTED = tuple(sorted(_ranks, key=lambda name: _ranks[name]))  # formats that lowq writes, the first to try first
