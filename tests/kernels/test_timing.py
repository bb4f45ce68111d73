"""The protocol of timings: how many copies keep a weight out of the caches, and what percentages are percentages of."""

import pytest
import torch

from lowq_cli.tuning import examples
from lowq_kernels.dispatch.measure import copies, random_weight
from lowq_kernels.dispatch.timing import MAX_COPIES, MAX_CPU_COPIES, ROTATION_BYTES, Roofline, rotation
from lowq_kernels.dispatch.tuning import Shape
from lowq_packers.scheme import Scheme

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("nbytes", "cpu", "cuda"),
    [
        (0, MAX_CPU_COPIES, MAX_COPIES),
        (1 << 10, MAX_CPU_COPIES, MAX_COPIES),
        (1 << 20, 256, MAX_COPIES),
        (100 << 20, 3, 3),
        (ROTATION_BYTES, 1, 2),
        (1 << 34, 1, 2),
    ],
)
def test_copies_outgrow_the_caches(nbytes, cpu, cuda):
    assert (rotation(nbytes, "cpu"), rotation(nbytes, "cuda")) == (cpu, cuda)


def test_copies_are_memory_of_their_own():
    shape = Shape(1024, 1024, Scheme(4, 64), torch.bfloat16)
    weights = copies(random_weight(shape, "rowstream", CPU))
    assert len(weights) == rotation(weights[0].nbytes, "cpu")
    assert len({w.words.data_ptr() for w in weights}) == len({w.scales.data_ptr() for w in weights}) == len(weights)
    example = examples.product(shape, 1, CPU, None)
    dense = {call.args[1].data_ptr() for call in example.dense}
    assert len(dense) == len(example.dense) == rotation(2 * 1024 * 1024, "cpu")
    caches = examples.attend(Shape(512, 64, Scheme(4, 64), torch.bfloat16), 2, CPU, None).operands
    assert len({o[1].data_ptr() for o in caches}) == len(caches) == MAX_CPU_COPIES


def test_a_cpu_that_multiplies_for_longer_than_it_reads_has_no_percentage():
    cpu, gpu = Roofline("cpu", 10.0, 0.1), Roofline("NVIDIA H200", 4000.0, 700.0)
    assert cpu.percent(1e6, 1e6, 125.0) == pytest.approx(80.0)  # reads for 100 us, multiplies for 10
    assert cpu.percent(1e6, 1e9, 8000.0) is None
    assert gpu.percent(1e6, 7e11, 1250.0) == pytest.approx(80.0)
