"""Part of peers.py: EXL3 by exllamav3's own quantizer, with the two CUDA kernels that it needs.

The package's own extension (some 200 files) is mostly what it decodes with. Here its Python (modules/quant/exl3_lib) is
imported from an unpacked wheel without the rest of the package; its trellis search is compiled by nvcc behind C functions: the
default codebook ("mul1") at 2, 2.5, 3, 3.5, 4 and 5 bits. 1.6.5 was measured.
"""

import ctypes
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch

from lowq_cli.calibrate import texts

LAUNCHER = """
#include <cstdint>
#include "quant/quantize_tiles_kernel.cuh"
#include "quant/quantize_tiles_frac_kernel.cuh"
using Kernel = void (*)(const float*, float*, uint16_t*, half*, uint16_t*, const half2*);

static Kernel kernel_of(int K, int half_bit) {
    if (half_bit && K == 2) return quantize_tiles_frac_kernel<2, 0xaaaau>;
    if (half_bit && K == 3) return quantize_tiles_frac_kernel<3, 0xaaaau>;
    if (!half_bit && K == 2) return quantize_tiles_kernel<2, 2>;
    if (!half_bit && K == 3) return quantize_tiles_kernel<3, 2>;
    if (!half_bit && K == 4) return quantize_tiles_kernel<4, 2>;
    if (!half_bit && K == 5) return quantize_tiles_kernel<5, 2>;
    return nullptr;
}

extern "C" int quantize_tiles(int K, int half_bit, const float* in, float* out, uint16_t* codes, half* costs,
                              uint16_t* history, int tiles, int at_once, cudaStream_t stream) {
    Kernel kernel = kernel_of(K, half_bit);
    if (!kernel) return -1;
    int shared = 256 * 2 + (half_bit ? 32 * 4 + 128 : 2 * (65536 >> K) * 2 + 64 + 128);
    if (int e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)) return e;
    for (int64_t t = 0; t < tiles; t += at_once) {
        int some = tiles - t < at_once ? tiles - t : at_once;
        kernel<<<some, 512, shared, stream>>>(in + 256 * t, out + 256 * t, codes + 256 * t, costs, history, nullptr);
    }
    return cudaGetLastError();
}
"""
STATUS = ("SUCCESS", "NOT_INITIALIZED", "ALLOC_FAILED", "INVALID_VALUE", "ARCH_MISMATCH", "MAPPING_ERROR", "EXECUTION_FAILED",
          "INTERNAL_ERROR", "NOT_SUPPORTED", "LICENSE_ERROR")  # fmt: skip
STUBS = {  # of headers that the kernels' own name and need nothing of
    "cublas_v2.h": f"#pragma once\nenum cublasStatus_t {{{', '.join(f'CUBLAS_STATUS_{name}' for name in STATUS)}}};\n",
    "c10/util/Exception.h": "#pragma once\n#define TORCH_CHECK(...)\n",
}


def build(wheel: Path, out: Path, arch: str = "sm_90") -> Path:
    """Compile the kernels of an unpacked wheel into a shared library in the folder `out`."""
    for name, text in STUBS.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    (out / "exl3.cu").write_text(LAUNCHER)
    include = [f"-I{out}", f"-I{wheel / 'exllamav3' / 'exllamav3_ext'}"]
    flags = ["-O3", "--use_fast_math", "-std=c++17", f"-arch={arch}", "-w", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run(["nvcc", *flags, *include, "-o", str(out / "exl3.so"), str(out / "exl3.cu")], check=True)
    return out / "exl3.so"


class Extension:
    """What the quantizer calls of exllamav3's extension."""

    def __init__(self, library: Path) -> None:
        self.lib = ctypes.CDLL(str(library))

    def quantize_tiles_scratch(self, *_: object) -> tuple[bool, int]:
        """The kernel for every GPU; of the other one's scratch nothing is used."""
        return False, 0

    def quantize_tiles(self, *given: Any) -> None:
        """given: tiles, what is written, scratch, bits, and more."""
        self._run(*given[:6], half=0)

    def quantize_tiles_frac(self, *given: Any) -> None:
        """The same with half a bit more."""
        self._run(*given[:6], half=1)

    def _run(self, tiles: torch.Tensor, out: torch.Tensor, codes: Any, costs: Any, history: Any, K: int, *, half: int) -> None:
        at = [ctypes.c_void_p(t.data_ptr()) for t in (tiles, out, codes, costs, history)]
        stream = ctypes.c_void_p(torch.cuda.current_stream(tiles.device).cuda_stream)
        if failed := self.lib.quantize_tiles(K, half, *at, len(tiles), min(len(costs), len(history)), stream):
            raise RuntimeError(f"exl3: CUDA error {failed}")


def quantizer(wheel: Path, library: Path) -> Any:
    """exllamav3's module that quantizes, over `Extension`."""
    root = wheel / "exllamav3"
    for name in (
        "exllamav3",
        "exllamav3.util",
        "exllamav3.modules",
        "exllamav3.modules.quant",
        "exllamav3.modules.quant.exl3_lib",
    ):
        package = types.ModuleType(name)  # its own __init__ would import the whole of it
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    vars(sys.modules["exllamav3.util"])["cuda_sync_active"] = torch.cuda.synchronize
    held = types.ModuleType("exllamav3.ext")
    vars(held)["exllamav3_ext"] = Extension(library)
    sys.modules["exllamav3.ext"] = held
    for name, used in {"memory": ("free_mem", "list_gpu_tensors"), "tensor": ("save_tensor_image",)}.items():
        module = types.ModuleType(f"exllamav3.util.{name}")  # for messages and pictures, and imports more
        for function in used:
            setattr(module, function, lambda *_: None)
        sys.modules[module.__name__] = module
    import exllamav3.modules.quant.exl3_lib.quantize as found

    return found


def bits_per_weight(rate: float, shapes: list[torch.Size]) -> float:
    """Of matrices (N, K): the trellis, and a scale in fp16 per row and per column."""
    weights = sum(N * K for N, K in shapes)
    return rate + 16 * sum(N + K for N, K in shapes) / weights


@torch.no_grad()
def quantize(model: Any, ids: torch.Tensor, rate: float, found: Any) -> None:
    """Every linear of each decoder layer in turn, as its converter does by default: moments behind the quantized layers before.

    What it does besides and is done here too: gate and up are scaled by output channel unless their sensitivities tell not to.
    """
    for number, layer in enumerate(model.model.layers):
        moments, sensitive = measured(model, layer, ids)
        for name, m in layer.named_modules():
            if isinstance(m, torch.nn.Linear):
                args = {
                    "seed": number + 1, "K": int(rate) if rate == int(rate) else rate, "mul1": True, "no_pack": True,
                    "devices": [m.weight.device], "device_ratios": None, "debug_dir": "", "apply_out_scales": None,
                    "out_sensitivity": sensitive.get(name),
                }  # fmt: skip
                restored, *_ = found.quantize_exl3(m.weight.data.T.contiguous(), moments[name], args, True)
                m.weight.data.copy_(restored.T)


def measured(model: Any, layer: Any, ids: torch.Tensor) -> tuple[dict[str, dict], dict[str, torch.Tensor]]:
    """Linear's name -> moments of its input as the quantizer takes them, one object for those that share it; sensitivities."""
    shared = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
    linears = {n: m for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
    sums = {n: torch.zeros(m.in_features, m.in_features, device=m.weight.device) for n, m in linears.items()}
    outputs: dict[str, torch.Tensor] = {}
    slopes: dict[str, torch.Tensor] = {}

    def count(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        if name.rpartition(".")[2] not in shared:
            rows = x.flatten(0, -2)
            sums[name].addmm_(rows.T, rows)
        outputs[name.rpartition(".")[2]] = y

    hooks = [m.register_forward_hook(lambda _, x, y, n=n: count(n, x[0], y)) for n, m in linears.items()]
    for batch in ids.split(4 * texts.BATCH):
        model.model(batch.to(model.device), use_cache=False)
        g, u = outputs["gate_proj"], outputs["up_proj"]
        s = torch.sigmoid(g)
        for name, slope in {"mlp.up_proj": g * s, "mlp.gate_proj": s * (1 + g * (1 - s)) * u}.items():
            slopes[name] = slopes.get(name, 0) + slope.square().flatten(0, -2).double().sum(0)
    for hook in hooks:
        hook.remove()
    energy = layer.mlp.down_proj.weight.square().sum(0)
    found: dict[str, dict] = {}
    for n in linears:
        head, dot, last = n.rpartition(".")
        if last not in shared:
            found[n] = {"H": sums[n], "count": ids.numel(), "finalized": False, "device": sums[n].device, "first_key": n}
    for n in linears:
        head, dot, last = n.rpartition(".")
        found[n] = found[head + dot + shared.get(last, last)]
    return found, {n: (s / ids.numel() * energy).float() for n, s in slopes.items()}
