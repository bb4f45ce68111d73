"""What a GPU is stands in gpu.py alone; rows that contradict themselves are refused; every kernel compiles for every row."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowq_kernels import gpu
from lowq_kernels.decode import prompt8_cuda
from lowq_kernels.dispatch import registry, sources
from lowq_kernels.dispatch.registry import Call
from lowq_packers.layouts import LAYOUTS
from lowq_packers.scheme import Scheme

KERNELS = Path(gpu.__file__).resolve().parent
# SM counts of an H100 and multiples, its shared memory, capabilities written out
CONSTANTS = re.compile(r"\b(132|264|396|528|1056)\b|\b2?2[678] ?<< ?10\b|(?<!\w)\((8, [069]|9, 0|10, 0|12, [01])\)")


@pytest.mark.parametrize(
    "wrong",
    [
        {"sms": 0},
        {"smem_block": 229 << 10},
        {"clusters": (132, 67)},
        {"clusters": (130,)},
        {"tma": False},
        {"fp8": False},
        {"max_cluster": 1},
        {"split": 229 << 10},
    ],
    ids=str,
)
def test_a_row_that_contradicts_itself_is_refused(wrong):
    with pytest.raises(ValueError, match="contradict"):
        dataclasses.replace(gpu.HOPPER, **wrong)


def test_facts_of_gpus_stand_nowhere_else():
    """In code; comments may say what was measured where."""
    result = {}
    for path in (*KERNELS.rglob("*"), *(KERNELS.parent / "lowq_cli").rglob("*.py")):
        if path.suffix in (".py", ".cu", ".cuh"):
            code = re.sub(r'"{3}.*?"{3}', "", sources.code_of(path.read_text(), path.name), flags=re.S)
            if lines := [line for line in code.splitlines() if CONSTANTS.search(line)]:
                result[path.name] = lines
    assert set(result) == {"gpu.py"}, result


def test_a_gpu_newer_than_the_rows_is_like_the_newest_before_it_and_an_older_one_like_no_nvidia_gpu():
    newest, next_one = max(gpu.ROWS), (max(gpu.ROWS)[0], 9)
    assert gpu.row(next_one) == dataclasses.replace(gpu.ROWS[newest], capability=next_one)
    assert gpu.row(next_one).arch == f"sm_{newest[0]}9"
    assert not gpu.row((11, 0)).wgmma
    assert gpu.row((7, 5)) is gpu.OTHER


def test_amd_is_never_hopper(monkeypatch):
    """gfx942 reports (9, 4) and gfx90a (9, 0): neither has anything of Hopper."""
    amd = SimpleNamespace(name="gfx90a", multi_processor_count=104, L2_cache_size=8 << 20)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    gpu.capability.cache_clear()
    try:
        device = torch.device("cuda", 0)
        assert gpu.capability(device) == (0, 0)
        assert gpu.with_sizes(gpu.row((0, 0)), amd) == dataclasses.replace(gpu.OTHER, name="gfx90a", sms=104, l2=8 << 20)
        for layout in LAYOUTS:
            call = Call(16, 4096, 4096, Scheme(4, 128), layout, torch.float16, "cuda", gpu.capability(device))
            taken = [name for name, spec in registry.kernels().items() if spec.why_not(call) is None]
            assert not [name for name in taken if name.startswith("cuda/") or "wide" in name]
    finally:
        gpu.capability.cache_clear()


def test_sizes_are_the_drivers_where_a_gpu_is_present():
    """An H200 and an H100 PCIe are Hopper's row with their own sizes."""
    sizes = {"shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472, "L2_cache_size": 60 << 20}
    pcie = SimpleNamespace(name="NVIDIA H100 PCIe", multi_processor_count=114, **sizes)
    on = gpu.with_sizes(gpu.HOPPER, pcie)
    assert (on.sms, on.smem_block, on.l2, on.wgmma) == (114, gpu.HOPPER.smem_block, 60 << 20, True)
    assert on.clusters == (114, 57, 33, 25)
    assert gpu.here() == (gpu.with_sizes(gpu.row(gpu.capability(torch.device("cuda", 0))), torch.cuda.get_device_properties(0))
                          if torch.cuda.is_available() else gpu.HOPPER)  # fmt: skip


INSTANCES = {
    "tile_mma": lambda on: _mma(on),
    "tile_dequant": lambda on: ("tile_dequant.cu", "tile_dequant<4, 1, 128, true>"),
    "act_rows": lambda on: ("act_rows.cu", f"round_rows<0, {'false' if on.fp8 else 'true'}>"),
    "experts": lambda on: ("experts.cu", "experts<4, 1, 128, 1, 2, 6, 1, 2>"),
    "dense_mma": lambda on: ("dense_mma.cu", "dense_mma<1, 16, 2, 64, 1, 5>"),
    "attend": lambda on: ("attend.cu", "attend<1, 128, 128, 4, 0, 4, 8, 4, 64, 4>") if on.max_cluster > 1 else None,
    "route": lambda on: ("route.cu", "route<1, 1, 1, 4>") if on.max_cluster > 1 else None,
    "prompt": lambda on: ("prompt.cu", "attend_prompt<0, 128, 64, 3>") if on.wgmma else None,
    "prompt8": lambda on: ("prompt8.cu", f"attend_prompt8<0, true, {prompt8_cuda.STAGES}>") if on.wgmma else None,
    "int8_planes": lambda on: ("int8_planes.cu", "int8_planes<0, 2>"),
    "tile_wgmma": lambda on: _wgmma(on, "tile_wgmma", lambda m: (4, 0, 128, m.form(Scheme(4, 128)), m.CONFIGS[0])),
    "tile_int8x2": lambda on: _wgmma(on, "tile_int8x2", lambda m: (8, 2, 0, 128, True, m.CONFIGS[0])),
    "tile_wgmma8": lambda on: _wgmma(on, "tile_wgmma8", lambda m: (4, 0, True, 128, True, m.CONFIGS[0])),
    "fp8_gemm": lambda on: _fp8_gemm(on),
}


def _mma(on):
    from lowq_kernels.products.cuda import tile_mma

    call = Call(8, 4096, 4096, Scheme(4, 128), "tile", torch.float16, "cuda", on.capability)
    config = next(c for c in tile_mma.CONFIGS if registry.named("cuda/tile_mma").config_refuse(call, c) is None)
    cut = tile_mma.plan(call, config)
    return "tile_mma.cu", tile_mma.expression(call.scheme, 4096, torch.float16, config, cut.M_TILES, cut.copies, on.sms)


def _wgmma(on, name, arguments):
    from importlib import import_module

    module = import_module(f"lowq_kernels.products.cuda.{name}")
    return (f"{name}.cu", module.expression(*arguments(module))) if on.wgmma else None


def _fp8_gemm(on):
    from lowq_kernels.fp8 import gemm_wgmma

    return ("fp8_gemm.cu", gemm_wgmma.expression(gemm_wgmma.LARGE[0], 0, (2, 1))) if on.wgmma else None


@pytest.mark.parametrize("on", [g for c, g in gpu.ROWS.items() if c >= gpu.LEAST], ids=lambda g: g.arch)
def test_every_kernel_compiles_for_every_row_that_takes_it(on):
    """One instance of each source; test_cuda_compile.py has the others."""
    pytest.importorskip("lowq_kernels.cuda.nvrtc", reason="NVRTC is not installed")
    from machine_code import used

    entries = {p.name for p in KERNELS.rglob("*.cu")}
    assert {f"{name}.cu" for name in INSTANCES} == entries, "a source without an instance here"
    for instance in INSTANCES.values():
        if result := instance(on):
            assert used(*result, on.arch)["registers"] <= 255
