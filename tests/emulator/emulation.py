"""Helpers of tests of emulated sources: a skip where they cannot run, and a simulated Hopper GPU."""

import dataclasses
import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from lowq_kernels import gpu
from lowq_kernels.dispatch import registry
from lowq_kernels.modules.stack import Stack
from lowq_packers.layouts import PackedWeight, pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme
from lowq_packers.tables import signed, to_bytes

EMPTY = torch.empty
LEFT = (float("nan"), 20.0)  # see `left_over`


@dataclasses.dataclass(frozen=True)
class Case:
    """One product by a config: its values, or its place in CONFIGS; sms: of the GPU that the emulator stands in for."""

    config: Any
    bits: int
    dtype: torch.dtype
    group: int
    zero: str
    M: int
    N: int
    K: int
    sms: int = 132
    bias: bool = False

    def __str__(self) -> str:
        config = self.config if isinstance(self.config, int) else "-".join(map(str, self.config))
        kind = f"b{self.bits}-{'fp16' if self.dtype == torch.float16 else 'bf16'}-g{self.group}-{self.zero}"
        flags = (f.name for f in dataclasses.fields(self) if getattr(self, f.name) is True)
        return "-".join((f"c{config}", kind, f"{self.M}x{self.N}x{self.K}", f"sms{self.sms}", *flags))


def require(kernel: str, compiler: bool = True) -> None:
    """Skip the module that calls this where `kernel`'s launcher does not import or, with `compiler`, there is no g++."""
    if compiler and shutil.which("g++") is None:
        pytest.skip("no g++", allow_module_level=True)
    pytest.importorskip("cuda.pathfinder", reason="the CUDA extra is not installed")
    registry.load_kernels()
    if kernel not in registry.KERNELS:
        pytest.skip("NVRTC is not installed, and without it our launchers do not import", allow_module_level=True)


def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.empty, filled with NaN: an output that a kernel leaves unwritten shows."""
    t = EMPTY(*args, **kwargs)
    return t.fill_(float("nan")) if t.is_floating_point() else t.fill_(0x5A)


def weight(
    N: int,
    K: int,
    bits: int,
    group: int,
    zero: str = "float",
    dtype: torch.dtype = torch.bfloat16,
    g: torch.Generator | None = None,
    tables: int = 1,
) -> QuantizedTensor:
    """A random weight on the CPU; group 0: a row is one group; of values from a table, so many of its own where it has any."""
    g, s = g or torch.Generator().manual_seed(bits), Scheme.of(bits, group or K, zero)
    codes = torch.randint(0, s.levels, (N, K), dtype=torch.uint8, generator=g, device="cpu")
    scales = torch.rand(N, s.groups(K), generator=g, device="cpu") * 0.009 + 0.001
    if s.table:
        scales *= 10  # of values around 1, where codes are around 8
        if signed(s):
            scales[:, ::2] *= -1
        own = torch.rand(tables, s.table_width, generator=g, device="cpu") + 0.1 if s.table_width else None
        return QuantizedTensor.of(s, codes, scales.to(dtype) if s.scale == "float" else to_bytes(scales, s.scale), None, own)
    zeros = (torch.rand(scales.shape, generator=g, device="cpu") * (s.levels - 1)).to(dtype)
    zeros = None if zero == "none" else zeros.round() if zero == "int" else zeros
    return QuantizedTensor.of(s, codes, scales.to(dtype), zeros)


def stack(E: int, N: int, K: int, *scheme: Any, tables: int = 1) -> tuple[Stack, torch.Tensor]:
    """(E random weights packed side by side, the weights (E, N, K) in fp32) on torch's default device.

    scheme: bits, group, zero and dtype, as `weight` takes them. Values from tables come with a bias.
    """
    made = [weight(N, K, *scheme, torch.Generator().manual_seed(N + e), tables=tables) for e in range(E)]
    packed, device = [pack(q, "tile") for q in made], torch.get_default_device()
    fields = {f: [getattr(p, f) for p in packed] for f in ("words", "scales", "zeros", "table")}
    leaves: dict[str, Any] = {f: None if ts[0] is None else torch.stack(ts).to(device) for f, ts in fields.items()}
    g = torch.Generator().manual_seed(E)
    bias = torch.randn(E, N, generator=g, device="cpu").to(device, scheme[3]) if packed[0].scheme.table else None
    held = Stack(**leaves, bias=bias, aux=None, scheme=packed[0].scheme, N=N, K=K, layout="tile")
    return held, torch.stack([q.dequantize().float() for q in made]).to(device)


def operands(case: Any, device: str) -> tuple[torch.Tensor, PackedWeight, torch.Tensor | None, QuantizedTensor]:
    """(x, packed weight, bias, the weight) of a case on a device; a row of x is 40 times as large as the others."""
    g = torch.Generator().manual_seed(case.bits)
    q = weight(case.N, case.K, case.bits, case.group, case.zero, case.dtype, g)
    x = (torch.randn(case.M, case.K, generator=g) + 0.1).to(case.dtype)
    x[case.M // 2] *= 40
    bias = torch.linspace(-1, 1, case.N).to(case.dtype) if case.bias else None
    p = pack(q, "tile")
    zeros = None if p.zeros is None else p.zeros.to(device)
    p = dataclasses.replace(p, words=p.words.to(device), scales=p.scales.to(device), zeros=zeros)
    return x.to(device), p, None if bias is None else bias.to(device), q


def error(y: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return float((y.double() - truth.double()).norm() / truth.double().norm())


def left_over(value: float, slots: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """Keys or values that other texts left in some slots, (slots, 1): of both signs, so that one has a score far above others.

    A first run of a prompt finds another prompt's keys behind its own, a second run those of its own answer.
    """
    return value * (1.0 - 2 * (torch.arange(slots, device=device)[:, None] % 2))


def twice(launch: Callable[[], Any]) -> Any:
    """The result of a launch (one or several tensors), checked to be the same with threads in reverse order and late wgmma."""
    import simt

    result = []
    for order in (1, -1):
        with mock.patch.object(simt.Kernel, "order", order):
            result.append(launch())
    pairs = [result] if isinstance(result[0], torch.Tensor) else zip(*result, strict=True)
    for a, b in pairs if not simt.Kernel.recording else ():
        same = torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        assert same, "the order of the threads changes the result"
    return result[0]


def sampled(cases: Iterable[Any], every: int = 2, left: int = 1) -> list[Any]:
    """Cases of one kind as values of `parametrize`; the `left`-th of each `every` in turn is a case of `make test-all`."""
    return [pytest.param(c, marks=[pytest.mark.more] * (i % every == left)) for i, c in enumerate(cases)]


def selected(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values of the parameter `name` in the tests of this file that will run."""
    items = [i for i in request.session.items if getattr(i, "module", None) is request.module and hasattr(i, "callspec")]
    return [i.callspec.params[name] for i in items if name in i.callspec.params]


@contextmanager
def built_at_once() -> Iterator[None]:
    """Inside this context launches are recorded, not run; then all their instances are built, those of one source at once."""
    import simt

    simt.Kernel.recording = True
    try:
        yield
    finally:
        simt.Kernel.recording = False
    simt.build_all(list(simt.Kernel.wanted))


@contextmanager
def without_a_gpu(module: ModuleType, launches: Callable[[], object]) -> Iterator[None]:
    """Inside, where there is no GPU, `module`'s launchers run as in `hopper`, with the kernels of `launches` built at once."""
    if torch.cuda.is_available():
        yield
        return
    with hopper(module):
        with built_at_once():
            launches()
        yield


@contextmanager
def defect(module: ModuleType, file: str, good: str, bad: str, *more: tuple[str, str]) -> Iterator[None]:
    """Inside, `module` launches the source `file` with `bad` in the place of `good`, its includes written out; one must."""
    import simt
    from lowq_kernels.cuda import nvrtc

    source = re.sub(r'#include "(fold|split_int8)\.cuh"', lambda m: nvrtc.sources()[f"{m[1]}.cuh"], nvrtc.sources()[file])
    for text, wrong in dict([(good, bad), *more]).items():
        assert text in source
        source = source.replace(text, wrong)
    name = f"{hashlib.sha256(source.encode()).hexdigest()[:16]}-{file}"  # the copy's, as build_all takes it
    (Path(simt.build_folder().name) / name).write_text(simt.host_source(source))

    planted: list[Any] = []

    def kernel(asked: str, *rest: Any, **how: Any) -> Any:
        made = simt.Kernel(name if asked == file else asked, *rest, **how)
        planted.extend([made] if asked == file else [])
        return made

    forget(module)
    with mock.patch.object(module, "Kernel", kernel):
        yield
    forget(module)
    assert any(made.launches for made in planted), f"{bad!r} was not launched"


def forget(*modules: ModuleType) -> None:
    """Drop the kernels that launchers hold."""
    for module in modules:
        for name in ("_kernel", "_prepared", "prepared"):
            if hasattr(module, name):
                getattr(module, name).cache_clear()


@contextmanager
def installed(on: gpu.Gpu) -> Iterator[None]:
    """Inside, every GPU is this one."""
    with mock.patch.object(gpu, "here", return_value=on), mock.patch.object(gpu, "of", return_value=on):
        yield


@contextmanager
def sms(n: int) -> Iterator[None]:
    """Inside this context every GPU is a Hopper with this number of SMs."""
    clusters = tuple(c * n // gpu.HOPPER.sms for c in gpu.HOPPER.clusters)
    with installed(dataclasses.replace(gpu.HOPPER, sms=n, clusters=clusters)):
        yield


@contextmanager
def changed_kernels() -> Iterator[dict[str, registry.KernelSpec]]:
    """Inside this context kernels may be registered and removed; afterwards the registry is restored."""
    registry.load_kernels()
    before = dict(registry.KERNELS)
    registry.forget_choices()
    try:
        yield registry.KERNELS
    finally:
        registry.KERNELS.clear()
        registry.KERNELS.update(before)
        registry.forget_choices()


@contextmanager
def hopper(*modules: ModuleType) -> Iterator[None]:
    """Inside, launchers of `modules` run emulated, behind CPU tensors on a GPU of capability 9.0, and empty tensors are NaN."""
    import simt  # needs what `require` asks for
    from lowq_kernels.cuda import driver

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(driver, "tensor_map", simt.tensor_map))
        for module in modules:
            patches.enter_context(mock.patch.object(module, "Kernel", simt.Kernel))
            if hasattr(module, "tensor_map"):
                patches.enter_context(mock.patch.object(module, "tensor_map", simt.tensor_map))
        patches.enter_context(mock.patch.object(registry, "capability", return_value=(9, 0)))
        patches.enter_context(mock.patch("torch.empty", poisoned))
        forget(*modules)
        yield
    forget(*modules)
