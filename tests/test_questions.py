"""Three questions that a newcomer asks, answered by the files that docs/inside.md names."""

import dataclasses
import json

import pytest
import torch

from lowq_cli.run import output_folder, pipeline
from lowq_kernels import gpu
from lowq_kernels.dispatch import policy, registry, tuning
from lowq_kernels.dispatch.registry import Call
from lowq_packers.scheme import Scheme


def call_of(N, K, capability=gpu.HOPPER.capability):
    """A product of 16 rows by 2 bits."""
    return Call(16, N, K, Scheme(2, 128), "tile", torch.float16, "cuda", capability)


def test_where_does_a_weights_bytes_get_written(tmp_path, monkeypatch):
    """In `ShardFile.write` of run/output_folder.py: all bytes of the weight files but their headers pass it."""
    passed, write = [], output_folder.ShardFile.write

    def counted(file, tensor, offset, content):
        passed.append(memoryview(content).nbytes)
        write(file, tensor, offset, content)

    monkeypatch.setattr(output_folder.ShardFile, "write", counted)
    pipeline.quantize("demo", tmp_path / "out", method="rtn", device="cpu")
    (path,) = (tmp_path / "out").glob("*.safetensors")
    assert sum(passed) == path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.skipif("cuda/tile_mma" not in registry.kernels(), reason="NVRTC is not installed")
@pytest.mark.parametrize(("N", "K", "wanted"), [(4096, 4096, "cuda/tile_mma"), (28672, 4096, "cuda/tile_int8x2")])
def test_a_row_of_the_policy_picks_the_kernel_at_16_rows_for_2_bits(N, K, wanted, monkeypatch):
    """`registry.select`, by the rows "prefer" of tuned/h100.json, and then by rank: without the row it is another."""
    call, file = call_of(N, K), policy.file_for(gpu.of(gpu.HOPPER.capability))
    spec, _ = registry.select(call)
    assert spec.name == wanted
    assert tuning.chosen_by(call) == "shipped"
    rows = [row for row in file["prefer"] if row["kernel"] != wanted]
    monkeypatch.setattr(policy, "file_for", lambda on: {**file, "prefer": rows})
    registry.forget_choices()
    try:
        assert registry.select(call)[0].name != wanted
    finally:
        registry.forget_choices()


@pytest.mark.skipif("cuda/tile_mma" not in registry.kernels(), reason="NVRTC is not installed")
def test_how_do_i_add_blackwell(monkeypatch):
    """A row of gpu.py and a file in tuned/: both are found, and the CUDA kernels run that need nothing of Hopper's."""
    new = dataclasses.replace(gpu.row((10, 0)), name="NVIDIA B300", capability=(10, 3), sms=160)
    monkeypatch.setitem(gpu.ROWS, (10, 3), new)
    shipped = policy.files()
    own = {**json.loads(json.dumps(shipped[0])), "gpu": new.name, "capability": [10, 3], "sms": 160, "measured": []}
    monkeypatch.setattr(policy, "files", lambda: (*shipped, own))
    caches = (gpu.row, policy.file_for, tuning.shipped)
    for cached in caches:
        cached.cache_clear()
    try:
        assert gpu.of((10, 3)) == new
        assert policy.file_for(new) is own
        assert registry.select(call_of(4096, 4096, (10, 3)))[0].name == "cuda/tile_mma"
        assert "needs wgmma (Hopper)" in registry.named("cuda/tile_wgmma").why_not(call_of(4096, 4096, (10, 3)))
    finally:
        for cached in caches:
            cached.cache_clear()
