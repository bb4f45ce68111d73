"""The list of everything that runs as a kernel, and the choice among them.

A kernel file calls `@register(...)` on its launcher. Of a product that is `launch(x, p, bias, config) -> y` with x (M, K)
contiguous, p a PackedWeight, bias (N,) or None, y (M, N) in x's dtype; the other operations (`Op`) say theirs where their call
is defined. A weight's layout is chosen first (layouts.py), and with it the kernels that can read it. Then `select` asks, in
order: LOWQ_KERNEL, the tables in `TABLES` (a checkpoint's tuned entries, then those shipped for this GPU), then the rule
(`prefers`, then `rank`). A kernel that cannot take a call says why; when none can, the error lists every reason. LOWQ_KERNEL
takes several names, separated by commas: each forces the operation that it computes, and the layout of weights loaded later.
"""

import importlib
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, ClassVar, Literal, Protocol

import torch

from lowq_kernels.activations import Act, act_of, rounded
from lowq_kernels.gpu import capability
from lowq_packers.errors import UnsupportedError
from lowq_packers.layouts import PackedWeight
from lowq_packers.scheme import BITS, ZERO_KINDS, Scheme, ZeroKind
from lowq_packers.scheme import TABLES as TABLE_KINDS

Config = dict[str, int]
Op = Literal[
    "product", "fp8_product", "dense", "folded", "attend", "attend_rows", "prompt", "latent", "delta", "mamba2", "short_conv",
    "route", "experts",
]  # fmt: skip
Launch = Callable[..., torch.Tensor]  # the operands of its operation, then the config
ANY_M = (1, 1 << 62)
ANY_TABLE = ("", *TABLE_KINDS)
LAST_RESORT = 1000  # a kernel of this rank is chosen only if no other kernel can take the call
NAMED = 3  # max. kernels that a message names when they refuse for one reason
FLOATS = (torch.float16, torch.bfloat16)
GPU_FOLDERS = ("products.triton", "products.cuda", "fp8", "decode", "gptq", "cuda")  # Triton alone takes 0.3 s
OPTIONAL_LIBRARIES = ("triton", "cuda")  # libraries that a kernel file may lack; any other missing import is a bug


class AnyCall(Protocol):
    """What dispatch knows of a call of any operation: no tensor contents, so that choices can be cached and made ahead of time.

    Each is a frozen dataclass. M: rows, of x or of a batch.
    """

    op: ClassVar[Op]

    @property
    def M(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> str: ...
    @property
    def capability(self) -> tuple[int, int]: ...


@dataclass(frozen=True)
class Call:
    """A product by a packed weight: y (M, N) = x (M, K) @ dequantize(p)^T."""

    op: ClassVar[Op] = "product"
    M: int
    N: int
    K: int
    scheme: Scheme
    layout: str
    dtype: torch.dtype
    device: str
    capability: tuple[int, int] = (0, 0)
    act: Act = "none"

    @classmethod
    def of(cls, x: torch.Tensor, p: PackedWeight, act: Act = "none") -> "Call":
        """The call y = x @ p^T, x (M, K), its rows rounded to 8 bits by the kernel where `act` says so."""
        return cls(x.shape[0], p.N, p.K, p.scheme, p.layout, x.dtype, x.device.type, capability(x.device), act)

    def __str__(self) -> str:
        """How error messages describe the call."""
        return f"M={self.M} N={self.N} K={self.K} {self.scheme} on {self.device}"


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: the calls it takes, its launcher, when the rule prefers it."""

    name: str
    launch: Launch
    op: Op = "product"
    devices: tuple[str, ...] = ("cuda",)
    layouts: tuple[str, ...] = ()  # of a product, like bits and zeros
    bits: tuple[int, ...] = BITS
    zeros: tuple[ZeroKind, ...] = ZERO_KINDS
    tables: tuple[str, ...] = ("",)  # "": w = (q - zero) * scale; with a table's name, whatever its scales are
    acts: tuple[Act, ...] = ("none",)  # how the kernel itself rounds activations
    dtypes: tuple[torch.dtype, ...] = FLOATS
    m_range: tuple[int, int] = ANY_M
    preferred_m: tuple[int, int] = ANY_M
    prefer: Callable[[Any], bool] = lambda call: True  # beyond preferred_m; unless set, a low rank goes first everywhere
    min_capability: tuple[int, int] = (0, 0)
    rank: int = 100  # the rule chooses the lowest rank among kernels that prefer the call
    configs: tuple[Config, ...] = ({},)
    refuse: Callable[[Any], str | None] = lambda call: None  # further reasons, e.g. a group size it cannot tile
    config_refuse: Callable[[Any, Config], str | None] = lambda call, config: None
    default_config: Callable[[Any, list[Config]], Config] = lambda call, legal: legal[0]
    # (call, device): compile and load what the call launches; of kernels that an engine's passes at its start do not launch
    load: Callable[[Any, torch.device], None] | None = None

    def why_not(self, call: AnyCall) -> str | None:
        """Why this kernel cannot take the call, or None."""
        if call.op != self.op:
            return f"computes {self.op}, not {call.op}"
        if call.device not in self.devices:
            return f"runs on {'/'.join(self.devices)}, not on {call.device}"
        if isinstance(call, Call) and (reason := self._no_such_weight(call)):
            return reason
        if call.dtype not in self.dtypes:
            return f"takes {'/'.join(str(d).removeprefix('torch.') for d in self.dtypes)}, not {call.dtype}"
        if not self.m_range[0] <= call.M <= self.m_range[1]:
            return f"takes M {self.m_range[0]} .. {self.m_range[1]}, not {call.M}"
        if call.device == "cuda" and call.capability < self.min_capability:
            return f"needs compute capability {self.min_capability}, this GPU has {call.capability}"
        if reason := self.refuse(call):
            return reason
        return None if self.legal_configs(call) else "no config of it fits this shape"

    def _no_such_weight(self, call: Call) -> str | None:
        if call.layout not in self.layouts:
            return f"reads layout {'/'.join(self.layouts)}, the weight has layout {call.layout}"
        if call.scheme.bits not in self.bits:
            return f"takes {'/'.join(map(str, self.bits))} bits, not {call.scheme.bits}"
        if call.act not in self.acts:
            return f"takes activations as {'/'.join(self.acts)}, not {call.act}"
        if call.scheme.zero not in self.zeros:
            return f"takes zeros of kind {'/'.join(self.zeros)}, not {call.scheme.zero}"
        if call.scheme.table not in self.tables:
            known, given = (("/".join(t or "evenly spaced values" for t in ts)) for ts in (self.tables, (call.scheme.table,)))
            return f"takes {known}, not {given}"
        return None

    def prefers(self, call: AnyCall) -> bool:
        """Whether the rule counts this kernel as made for the call."""
        return self.preferred_m[0] <= call.M <= self.preferred_m[1] and self.prefer(call)

    def legal_configs(self, call: AnyCall) -> list[Config]:
        """The configs that may run this call, in registration order."""
        return [c for c in self.configs if self.config_refuse(call, c) is None]


def configs_of(keys: Sequence[str], rows: Iterable[Sequence[int]]) -> tuple[Config, ...]:
    """Configs from rows of numbers in the order of `keys`."""
    return tuple(dict(zip(keys, row, strict=True)) for row in rows)


Choice = tuple[KernelSpec, Config]
KERNELS: dict[str, KernelSpec] = {}  # of all operations
skipped: dict[str, str] = {}  # kernel file -> the library it lacks here
TABLES: list[Callable[[Any], tuple[str, Config] | None]] = []  # for products: asked in order, before the rule
_choices: dict[tuple[str, AnyCall, str | None], tuple[AnyCall, Choice]] = {}
# The folder of the checkpoint whose model is computing: only its tuning table answers. "": every checkpoint's table does.
scope: ContextVar[str] = ContextVar("scope", default="")


def register(name: str, **facts: object) -> Callable[[Launch], Launch]:
    """Decorate a launcher to make it a kernel; `facts` are KernelSpec's fields."""

    def add(launch: Launch) -> Launch:
        if name in KERNELS:
            raise ValueError(f"kernel {name!r} is registered twice")
        KERNELS[name] = KernelSpec(name=name, launch=launch, **facts)  # type: ignore[arg-type]
        return launch

    return add


@cache
def load_kernels(device: str = "") -> None:
    """Import every kernel file below this package once; for "cpu" without files named *_triton and those of GPU_FOLDERS, but
    for files named *_cpu. Ignores only a missing library."""
    package = importlib.import_module("lowq_kernels")
    for info in pkgutil.walk_packages(package.__path__, "lowq_kernels."):
        for_gpus = info.name.endswith("_triton") or info.name.removeprefix("lowq_kernels.").startswith(GPU_FOLDERS)
        if device == "cpu" and for_gpus and not info.name.endswith("_cpu"):
            continue
        try:
            importlib.import_module(info.name)
        except ModuleNotFoundError as e:
            library = (e.name or "").split(".")[0]
            if library not in OPTIONAL_LIBRARIES:
                raise
            skipped[info.name.removeprefix("lowq_kernels.")] = library


def kernels(op: Op = "product", device: str = "") -> dict[str, KernelSpec]:
    """Every kernel of an operation that can be imported here, by name; on a "cpu" perhaps only those for it."""
    load_kernels(device)
    return {name: s for name, s in KERNELS.items() if s.op == op}


def refusals(call: AnyCall) -> dict[str, str]:
    """Kernel name -> why it cannot take this call, for those of its operation that cannot."""
    return {s.name: why for s in kernels(call.op).values() if (why := s.why_not(call))}


def named(kernel: str) -> KernelSpec:
    """The kernel of that name, of any operation. Raises UnsupportedError naming those that there are."""
    load_kernels()
    if kernel not in KERNELS:
        raise UnsupportedError(f"unknown kernel {kernel!r}; the kernels are {', '.join(sorted(KERNELS))}")
    return KERNELS[kernel]


@lru_cache(16)
def _named_in(text: str) -> dict[Op, str]:
    """Operation -> the kernel that LOWQ_KERNEL names for it."""
    return {named(name).op: name for name in filter(None, map(str.strip, text.split(",")))}


def forced(kernel: str | None = None, op: Op = "product") -> KernelSpec | None:
    """The kernel that a layer (`kernel`), else LOWQ_KERNEL, asks for by name for an operation, or None.

    Raises UnsupportedError for a name that there is not, or one of another operation.
    """
    name = kernel or _name_from_environment(op)
    if name and named(name).op != op:
        raise UnsupportedError(f"kernel {name} was requested but computes {named(name).op}, not {op}")
    return named(name) if name else None


def _name_from_environment(op: Op) -> str | None:
    text = os.environ.get("LOWQ_KERNEL")
    return _named_in(text).get(op) if text else None


def select(call: AnyCall, kernel: str | None = None) -> Choice:
    """The kernel and config for a call; under an `act` that no kernel multiplies, those for x rounded before.

    `kernel` (or LOWQ_KERNEL) forces a kernel by name; if it cannot take the call, that is an error.
    Raises UnsupportedError with every kernel's reason when none can take it.
    """
    return resolve(call, kernel)[1]


def _grouped(reasons: Mapping[str, str]) -> str:
    """Kernel -> why it refuses, as text: kernels with one reason together, the most (those of another device) last."""
    kernels_of: dict[str, list[str]] = {}
    for name, why in sorted(reasons.items()):
        kernels_of.setdefault(why, []).append(name)
    listed = sorted(kernels_of.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{', '.join(names) if len(names) <= NAMED else f'{len(names)} kernels'}: {why}" for why, names in listed)


def find(call: AnyCall) -> Choice | None:
    """As `select`, but None if no kernel takes the call, for operations with another path. A forced kernel still raises."""
    try:
        return select(call)
    except UnsupportedError:
        if _name_from_environment(call.op):
            raise
        return None


def after_rounding(call: Call, kernel: str | None = None) -> Call:
    """The call as its kernel receives it: without an `act` if x is rounded first."""
    return resolve(call, kernel)[0]  # type: ignore[return-value]


def resolve(call: AnyCall, kernel: str | None) -> tuple[AnyCall, Choice]:
    """The call as its kernel receives it, and the choice; cached."""
    kernel = kernel or _name_from_environment(call.op)
    key = scope.get(), call, kernel
    resolved = _choices.get(key)
    if resolved is None:
        resolved = _choices[key] = _forced(call, kernel) if kernel else _choose(call)
    return resolved


def forget_choices() -> None:
    """Drop cached choices; call after `TABLES` or a table's contents changed."""
    _choices.clear()


@contextmanager
def asking(*tables: Callable[[Any], tuple[str, Config] | None]) -> Iterator[None]:
    """Inside, products ask these tables instead of those in `TABLES`."""
    before = list(TABLES)
    TABLES[:] = tables
    forget_choices()
    try:
        yield
    finally:
        TABLES[:] = before
        forget_choices()


def _forced(call: AnyCall, kernel: str) -> tuple[AnyCall, Choice]:
    spec = named(kernel)
    if isinstance(call, Call) and call.act not in spec.acts:
        call = replace(call, act="none")
    if why := spec.why_not(call):
        raise UnsupportedError(f"kernel {kernel} was requested but {why}")
    return call, (spec, spec.default_config(call, spec.legal_configs(call)))


def _choose(call: AnyCall) -> tuple[AnyCall, Choice]:
    rounds = isinstance(call, Call) and call.act != "none"
    # load_kernels also imports tuning.py, which fills TABLES
    legal = {s.name: s for s in kernels(call.op, call.device).values() if s.why_not(call) is None}
    for table in TABLES if isinstance(call, Call) else ():
        if entry := table(call):
            name, config = entry
            if name in legal and config in legal[name].legal_configs(call):
                return call, (legal[name], config)
            if rounds and name in kernels():  # measured: a kernel of 16 bits behind a rounding of x is faster
                legal = {}
                break
    if rounds:
        legal = {name: s for name, s in legal.items() if s.rank < LAST_RESORT and s.prefers(call)}
        if not legal:
            return _choose(replace(call, act="none"))  # type: ignore[type-var]
    if not legal:
        raise UnsupportedError(f"no kernel takes {call}: {_grouped(refusals(call))}")
    best = min(legal.values(), key=lambda s: (s.rank >= LAST_RESORT, not s.prefers(call), s.rank, s.name))
    return call, (best, best.default_config(call, best.legal_configs(call)))


def matmul(
    x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None = None, kernel: str | None = None, act: Act = "none"
) -> torch.Tensor:
    """x (M, K) @ dequantize(p)^T + bias -> (M, N) in x's dtype, by the kernel that `select` chooses.

    act: round each row of x to 8 bits, where rows are many (`act_of`): inside a kernel that multiplies such, else here, for the
        kernels that do not.
    """
    if not x.shape[0]:
        return x.new_empty(0, p.N)
    act = act_of(act, x.shape[0])
    call = Call.of(x, p, act)
    resolved, (spec, config) = resolve(call, kernel)
    if act != "none" and resolved != call:
        x = rounded(x, act)
    return spec.launch(x.contiguous(), p, bias, config)
