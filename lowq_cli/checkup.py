"""The checks of `lowq doctor`: each one tests one thing and reports the result and the fix."""

import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from lowq_kernels import gpu
from lowq_kernels.activations import STEPS, rounded
from lowq_kernels.dispatch import policy, registry
from lowq_kernels.fp8.matmul import WIDENED
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.products.cpu import native
from lowq_packers import fp8
from lowq_packers.errors import device_lost, log_error, one_line
from lowq_packers.layouts import LAYOUTS, PackedWeight, pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

N, K, GROUP = 80, 256, 64  # a product so small that every kernel is checked in a second; N is not a multiple of any tile
AT_ONCE = 8  # kernels to compile in parallel: one by one, about sixty kernels took 46 s on the host of an H200
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float32: 1e-4}  # relative Frobenius error


@dataclass(frozen=True)
class Check:
    """The result of one check. ok: True if it works, False if broken, None if absent but not needed. fix: advice, or empty."""

    name: str
    ok: bool | None
    result: str
    fix: str = ""


def checkup() -> list[Check]:
    """All checks, in display order."""
    return [*_libraries(), *_devices(), *_kernel_files(), *products()]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _libraries() -> Iterator[Check]:
    yield Check("python", True, f"{platform.python_version()} on {platform.machine()}")
    for package in ("torch", "transformers", "safetensors"):
        installed = _installed(package)
        yield Check(package, installed is not None, installed or "missing", "" if installed else f"pip install {package}")
    installed = _installed("triton")
    yield Check("triton", True if installed else None, installed or "not installed: no Triton kernels")
    if any(name.startswith("cuda/") for name in registry.kernels()):
        yield Check("nvrtc", True, f"{_installed('nvidia-cuda-nvrtc') or 'found'}: CUDA C++ kernels can be compiled")
    else:
        fix = "pip install cuda-pathfinder nvidia-cuda-nvrtc" if torch.cuda.is_available() else ""
        yield Check("nvrtc", None, "not installed: no CUDA C++ kernels", fix)


def _devices() -> Iterator[Check]:
    refusal = native.why_not()
    whose = f"own kernels with {native.isa()[1]}" if refusal is None else f"torch's kernels: {refusal}"
    yield Check("cpu", True if refusal is None else None, f"{(n := torch.get_num_threads())} thread{'s' * (n > 1)}, {whose}")
    if not torch.cuda.is_available():
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        yield Check("gpu", None, f"none ({why}): everything runs on the CPU, slower")
        return
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        free = torch.cuda.mem_get_info(i)[0]
        line = f"{p.name}, compute capability {p.major}.{p.minor}, {free / 1e9:.1f} of {p.total_memory / 1e9:.1f} GB free"
        here = gpu.here(i)
        tested = here.capability >= gpu.LEAST
        untested = ": runs only Triton's portable kernels, which were never tested on this GPU"
        yield Check(f"gpu {i}", tested or None, line if tested else line + untested)
        fp8 = "tensor cores multiply fp8" if here.fp8 else "no fp8 tensor cores: fp8 falls back to 16 bits"
        yield Check(f"gpu {i} fp8", here.fp8 or None, fp8)
        file = policy.file_for(here)
        exact = policy.made_for(file, here)
        rule = f"configs of the CUDA kernels are chosen by {file['file']}, {file['origin']}"
        yield Check(
            f"gpu {i} table",
            exact or None,
            rule if exact else f"{rule}: nothing ships for this architecture",
            "" if exact else "lowq tune measures a checkpoint's shapes here",
        )


def _kernel_files() -> Iterator[Check]:
    registry.kernels()
    for name, library in sorted(registry.skipped.items()):
        yield Check(f"kernel file {name}", None, f"skipped: {library} is not installed")


def products() -> Iterator[Check]:
    """The checks of the kernels, up to one that makes the GPU unusable: after it all further ones would fail too."""
    try:
        yield from kernels()
        yield _fp8()
    except RuntimeError as e:  # `try_kernel` does not catch the loss of a GPU
        if not device_lost(e):
            raise
        fix = "CUDA_LAUNCH_BLOCKING=1 LOWQ_DEBUG=1 lowq doctor shows the kernel; please report it"
        yield Check("kernels", False, f"the GPU was lost during these trials: {one_line(e)}", fix)


def kernels() -> Iterator[Check]:
    """Compare a small product of each kernel that dispatch can choose here with the definition; compile them in parallel."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    specs = list(registry.kernels().values())
    cases = [(spec, layout, bits, device) for spec in specs for layout in spec.layouts for bits in spec.bits]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(lambda case: try_kernel(*case), cases))
    for spec in specs:
        name, tried = spec.name, [result for case, result in zip(cases, results, strict=True) if case[0] is spec]
        done = [t for t in tried if t[0] is not None]
        wrong = [why for ok, why in done if not ok]
        if done:
            yield Check(f"kernel {name}", not wrong, wrong[0] if wrong else f"right in {len(done)} cases on {device.type}")
        else:
            yield Check(f"kernel {name}", None, f"not for this machine: {tried[0][1]}")


def _fp8() -> Check:
    """Compare a layer with fp8 weights with the definition, on the code path of this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    g = torch.Generator().manual_seed(0)
    w = fp8.quantize(torch.randn(N, K, generator=g), (128, 128))
    x = torch.randn(3, K, generator=g).to(device, torch.bfloat16)
    scheme = Scheme.in_blocks(w.block)
    layer = QuantLinear.from_packed(PackedWeight(w.q.to(device), w.scales.to(device), None, scheme, N, K, scheme.table))
    layer.set_act("fp8")
    truth = fp8.quantize(x, (1, 128)).dequantize() @ w.dequantize().t().to(device)
    error = float((layer(x).float() - truth).norm() / truth.norm())
    path = "no FP8 hardware: weights are widened to 16 bits while loading" if layer.layout == WIDENED else "multiplied as fp8"
    return Check("fp8 weights", error <= TOLERANCE[torch.bfloat16], f"{path}; relative error {error:.1e} on {device.type}")


def try_kernel(spec: registry.KernelSpec, layout: str, bits: int, device: torch.device) -> tuple[bool | None, str]:
    """(whether the kernel is correct on this device, or None if it does not support it; the result or error in words)."""
    try:
        return _try(spec, layout, bits, device)
    except Exception as e:  # an error of the compiler, the launch or the product: shown in this kernel's row
        log_error(f"{spec.name} at {bits} bits, layout {layout}", e)
        if device_lost(e):
            raise
        return False, f"{type(e).__name__} at {bits} bits, layout {layout}: {(str(e).splitlines() or [''])[0]}"


def _try(spec: registry.KernelSpec, layout: str, bits: int, device: torch.device) -> tuple[bool | None, str]:
    if device.type not in spec.devices:  # checked before packing: torch packs cpu_int4 only on a CPU
        return None, f"runs on {'/'.join(spec.devices)}, not on {device.type}"
    if LAYOUTS[layout].device not in (None, device.type):
        return None, f"layout {layout} is only for {LAYOUTS[layout].device}"
    zeros = "none" if "float" not in spec.zeros else "float"
    g = torch.Generator().manual_seed(bits)
    W_q = torch.randint(0, 1 << bits, (N, K), generator=g).to(torch.uint8)
    scales = torch.rand(N, K // GROUP, generator=g) * 0.01 + 0.001
    z = None if zeros == "none" else torch.rand(N, K // GROUP, generator=g) * ((1 << bits) - 1)
    dtype = torch.bfloat16 if torch.bfloat16 in spec.dtypes else spec.dtypes[0]
    q = QuantizedTensor(W_q, scales.to(dtype), None if z is None else z.to(dtype), bits, GROUP).to(device)
    if why := LAYOUTS[layout].why_not(q.scheme, N, K):
        return None, why
    p = pack(q, layout)
    M = max(1, spec.m_range[0], 0 if spec.acts[0] == "none" else STEPS + 1)  # with fewer rows activations are not rounded
    x = torch.randn(M, K, generator=g).to(device, dtype)
    if why := spec.why_not(registry.Call.of(x, p, spec.acts[0])):
        return None, why
    y = registry.matmul(x, p, kernel=spec.name, act=spec.acts[0]).float()
    truth = rounded(x, spec.acts[0]).float() @ q.dequantize().t()
    error = float((y - truth).norm() / truth.norm())
    return error <= TOLERANCE[dtype], f"relative error {error:.1e} at {bits} bits, layout {layout}"
