"""The list of kernels and the choice among them.

A kernel file calls `@register(...)` on its launcher, `launch(x, p, bias, config) -> y` with x (M, K) contiguous, p a
PackedWeight, bias (N,) or None, y (M, N) in x's dtype. `select` asks, in order: LOWQ_KERNEL, the tables in `TABLES`
(a checkpoint's tuned entries, then those shipped for this GPU), then the rule (`prefers`, then `rank`). A kernel
that cannot take a call says why; when none can, the error lists every reason.
"""

import importlib
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

from lowq_kernels.activations import Act, rounded
from lowq_kernels.gpu import capability
from lowq_packers.errors import UnsupportedError
from lowq_packers.layouts import PackedWeight
from lowq_packers.scheme import BITS, ZERO_KINDS, Scheme, ZeroKind

Config = dict[str, int]
Launch = Callable[[torch.Tensor, PackedWeight, torch.Tensor | None, Config], torch.Tensor]
ANY_M = (1, 1 << 62)
LAST_RESORT = 1000  # a kernel of this rank is chosen only where no other is legal, preferred or not
FLOATS = (torch.float16, torch.bfloat16)
OPTIONAL_LIBRARIES = ("triton", "cuda")  # a kernel file may need these; any other missing import is a bug


@dataclass(frozen=True)
class Call:
    """What dispatch knows of one call: no tensor contents, so that it can be cached and asked ahead of time."""

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


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: what it takes, how it launches, when the rule prefers it."""

    name: str
    launch: Launch
    layouts: tuple[str, ...]
    devices: tuple[str, ...]
    bits: tuple[int, ...] = BITS
    dtypes: tuple[torch.dtype, ...] = FLOATS
    zeros: tuple[ZeroKind, ...] = ZERO_KINDS
    m_range: tuple[int, int] = ANY_M
    preferred_m: tuple[int, int] = ANY_M
    prefer: Callable[[Call], bool] = lambda call: True  # where preferred_m is not the whole story
    min_capability: tuple[int, int] = (0, 0)
    acts: tuple[Act, ...] = ("none",)  # how the kernel itself rounds activations
    reproduction: bool = False  # a paper's kernel: reached by name, never dispatched or tuned
    rank: int = 100  # the rule takes the lowest rank among kernels that prefer the call
    configs: tuple[Config, ...] = ({},)
    refuse: Callable[[Call], str | None] = lambda call: None  # further reasons, e.g. a group size it cannot tile
    config_refuse: Callable[[Call, Config], str | None] = lambda call, config: None
    default_config: Callable[[Call, list[Config]], Config] = lambda call, legal: legal[0]

    def why_not(self, call: Call) -> str | None:
        """The reason this kernel cannot take the call, or None."""
        if call.device not in self.devices:
            return f"runs on {'/'.join(self.devices)}, not on {call.device}"
        if call.layout not in self.layouts:
            return f"reads layout {'/'.join(self.layouts)}, the weight is {call.layout}"
        if call.scheme.bits not in self.bits:
            return f"takes {'/'.join(map(str, self.bits))} bits, not {call.scheme.bits}"
        if call.act not in self.acts:
            return f"takes activations as {'/'.join(self.acts)}, not {call.act}"
        if call.dtype not in self.dtypes:
            return f"takes {'/'.join(str(d).removeprefix('torch.') for d in self.dtypes)}, not {call.dtype}"
        if call.scheme.zero not in self.zeros:
            return f"takes zero {'/'.join(self.zeros)}, not {call.scheme.zero}"
        if not self.m_range[0] <= call.M <= self.m_range[1]:
            return f"takes M {self.m_range[0]} .. {self.m_range[1]}, not {call.M}"
        if call.device == "cuda" and call.capability < self.min_capability:
            return f"needs compute capability {self.min_capability}, this GPU has {call.capability}"
        if reason := self.refuse(call):
            return reason
        return None if self.legal_configs(call) else "no config of it fits this shape"

    def prefers(self, call: Call) -> bool:
        """Whether the rule counts this kernel as made for the call."""
        return self.preferred_m[0] <= call.M <= self.preferred_m[1] and self.prefer(call)

    def legal_configs(self, call: Call) -> list[Config]:
        """The configs that may run this call, in registration order."""
        return [c for c in self.configs if self.config_refuse(call, c) is None]


Choice = tuple[KernelSpec, Config]
KERNELS: dict[str, KernelSpec] = {}
skipped: dict[str, str] = {}  # kernel file -> the library it lacks here
TABLES: list[Callable[[Call], tuple[str, Config] | None]] = []  # asked in order before the rule
_choices: dict[Call, Choice] = {}


def register(name: str, **facts: object) -> Callable[[Launch], Launch]:
    """Decorate a launcher to make it a kernel; `facts` are KernelSpec's fields."""

    def add(launch: Launch) -> Launch:
        if name in KERNELS:
            raise ValueError(f"kernel {name!r} is registered twice")
        KERNELS[name] = KernelSpec(name=name, launch=launch, **facts)  # type: ignore[arg-type]
        return launch

    return add


@cache
def load_kernels() -> None:
    """Import every kernel file below this package once. Only a missing optional library is forgiven."""
    package = importlib.import_module("lowq_kernels")
    for info in pkgutil.walk_packages(package.__path__, "lowq_kernels."):
        try:
            importlib.import_module(info.name)
        except ModuleNotFoundError as e:
            library = (e.name or "").split(".")[0]
            if library not in OPTIONAL_LIBRARIES:
                raise
            skipped[info.name.removeprefix("lowq_kernels.")] = library


def kernels() -> dict[str, KernelSpec]:
    """Every kernel that can be imported here, by name."""
    load_kernels()
    return KERNELS


def dispatched() -> list[KernelSpec]:
    """The kernels among which dispatch chooses: all but reproductions."""
    return [s for s in kernels().values() if not s.reproduction]


def refusals(call: Call) -> dict[str, str]:
    """Kernel name -> why it cannot take this call, for those that cannot."""
    return {s.name: why for s in dispatched() if (why := s.why_not(call))}


def named(kernel: str) -> KernelSpec:
    """The kernel of that name. Raises UnsupportedError naming those that there are."""
    if kernel not in kernels():
        raise UnsupportedError(f"no kernel is called {kernel!r}; there are {', '.join(sorted(kernels()))}")
    return kernels()[kernel]


def forced(kernel: str | None = None) -> KernelSpec | None:
    """The kernel that a layer (`kernel`), else LOWQ_KERNEL, asks for by name, or None. Raises UnsupportedError for no name."""
    name = kernel or os.environ.get("LOWQ_KERNEL")
    return named(name) if name else None


def select(call: Call, kernel: str | None = None) -> Choice:
    """The kernel and config for a call. Raises UnsupportedError with every kernel's reason when none can take it.

    `kernel` (or LOWQ_KERNEL) forces one by name and fails aloud if it cannot.
    """
    if spec := forced(kernel):
        if why := spec.why_not(call):
            raise UnsupportedError(f"kernel {spec.name} was asked for by name but {why}")
        return spec, spec.default_config(call, spec.legal_configs(call))
    if call not in _choices:
        _choices[call] = _choose(call)
    return _choices[call]


def forget_choices() -> None:
    """Drop cached choices; call after `TABLES` or a table's contents changed."""
    _choices.clear()
    _rounds_itself.cache_clear()


def _choose(call: Call) -> Choice:
    load_kernels()  # tuning.py, which fills TABLES, is found by it
    for table in TABLES:
        entry = table(call)
        if entry is not None:
            spec = next((s for s in dispatched() if s.name == entry[0]), None)
            if spec is not None and spec.why_not(call) is None and entry[1] in spec.legal_configs(call):
                return spec, entry[1]
    legal = [s for s in dispatched() if s.why_not(call) is None]
    if not legal:
        reasons = "; ".join(f"{k}: {why}" for k, why in refusals(call).items())
        raise UnsupportedError(f"no kernel takes M={call.M} N={call.N} K={call.K} {call.scheme} on {call.device}: {reasons}")
    best = min(legal, key=lambda s: (s.rank >= LAST_RESORT, not s.prefers(call), s.rank, s.name))
    return best, best.default_config(call, best.legal_configs(call))


@lru_cache(4096)
def _rounds_itself(call: Call, kernel: str | None) -> bool:
    """Whether a kernel takes activations as this call has them: the forced one, a table's, or any that the rule counts as made
    for it."""
    load_kernels()  # tuning.py, which fills TABLES, is found by it
    for table in TABLES if kernel is None else ():
        if (entry := table(call)) and (spec := kernels().get(entry[0])):
            return spec.why_not(call) is None
    return any(
        s.why_not(call) is None
        for s in kernels().values()
        if s.name == kernel or (kernel is None and not s.reproduction and s.rank < LAST_RESORT and s.prefers(call))
    )


def multiplied(call: Call, kernel: str | None = None) -> Call:
    """The call as its kernel meets it: without an `act` where x is rounded before."""
    inside = call.act == "none" or _rounds_itself(call, kernel or os.environ.get("LOWQ_KERNEL"))
    return call if inside else replace(call, act="none")


def matmul(
    x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None = None, kernel: str | None = None, act: Act = "none"
) -> torch.Tensor:
    """x (M, K) @ dequantize(p)^T + bias -> (M, N) in x's dtype, by the kernel that `select` chooses.

    act: round each row of x to 8 bits: inside a kernel that multiplies such, else here, for the kernels that do not.
    """
    if act != "none" and not _rounds_itself(Call.of(x, p, act), kernel or os.environ.get("LOWQ_KERNEL")):
        x, act = rounded(x, act), "none"
    spec, config = select(Call.of(x, p, act), kernel)
    return spec.launch(x.contiguous(), p, bias, config)
