"""lowq doctor on machines that are not this one: a device is asked for first, an error of one kernel is a row."""

from contextlib import contextmanager
from dataclasses import replace

import torch

import emulation
from lowq_cli import checkup
from lowq_kernels.dispatch import registry
from lowq_packers.layouts import LAYOUTS


def test_no_weight_is_packed_for_torchs_cpu_kernel_on_another_device():
    """`_convert_weight_to_int4pack_for_cpu` raises on a CUDA tensor. The meta device stands for CUDA: it shows what would be
    asked there, not that the kernels are right there (pytest -m gpu does)."""
    device, reasons = torch.device("meta"), {}
    for spec in registry.kernels().values():
        if "cuda" in spec.devices:  # as the reference, which takes every layout
            here = replace(spec, devices=("meta",))
            for layout in (name for name in spec.layouts if name in LAYOUTS):
                reasons.setdefault(layout, set()).add(checkup.try_kernel(here, layout, 8, device))
    assert reasons["cpu_int4"] == {(None, "layout cpu_int4 is only for cpu")}
    assert not any("is only for" in why for _, why in reasons["rowstream"])


def test_a_kernel_of_another_device_is_refused():
    spec = registry.kernels()["cpu/int4"]
    assert checkup.try_kernel(spec, "cpu_int4", 8, torch.device("meta")) == (None, "runs on cpu, not on meta")


@contextmanager
def failing(error):
    """The kernel `reference` raises an error."""

    def launch(*_):
        raise RuntimeError(error)

    with emulation.changed_kernels() as registered:
        registered["reference"] = replace(registered["reference"], launch=launch)
        yield


def test_an_error_of_one_kernel_is_a_row_and_the_others_are_still_checked():
    with failing("no such instruction\nat line 7"):
        result = {c.name: c for c in checkup.kernels()}
    assert not result["kernel reference"].ok
    assert "RuntimeError at" in result["kernel reference"].result
    assert "\n" not in result["kernel reference"].result
    assert result["kernel cpu/int4"].ok


def test_a_lost_gpu_is_one_row_and_no_kernel_is_blamed_for_it():
    with failing("CUDA error: an illegal memory access was encountered\nCompile with ..."):
        (result,) = checkup.products()
    assert (result.name, result.ok) == ("kernels", False)
    assert "illegal memory access" in result.result
    assert "CUDA_LAUNCH_BLOCKING=1" in result.fix
