"""quantize --device A,B: a tensor at a time on each, the same bytes as on one, refused where tensors depend on each other."""

import itertools
import threading

import pytest
import torch

from lowq_cli.devices import pick_devices
from lowq_cli.run import pipeline, transform
from lowq_packers.errors import UnsupportedError, UsageError

RECIPE = {"bits": 4, "group": 32, "method": "rtn", "shard_size": 1 << 20}


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "lowq.log"}


def test_names_of_devices():
    assert pick_devices("cpu") == (torch.device("cpu"),)
    assert pick_devices("cpu, cpu") == (torch.device("cpu"),) * 2
    assert pick_devices(torch.device("cpu")) == (torch.device("cpu"),)
    with pytest.raises(UsageError, match="does not exist"):
        pick_devices("cpu,")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="0 CUDA"):
            pick_devices("cuda:0,cuda:1")


@pytest.mark.gpu
def test_two_kinds_of_device_are_refused():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with pytest.raises(UsageError, match="two kinds"):
        pick_devices("cuda:0,cpu")


def test_the_same_bytes_and_as_many_tensors_at_once_as_devices(tmp_path, monkeypatch):
    pipeline.quantize("demo", tmp_path / "one", device="cpu", **RECIPE)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    real, calls, three_at_once = transform.quantize, itertools.count(), threading.Barrier(3, timeout=60)

    def waiting(*args):
        if next(calls) < 3:
            three_at_once.wait()
        return real(*args)

    monkeypatch.setattr(transform, "quantize", waiting)
    try:
        result = pipeline.quantize("demo", tmp_path / "three", device="cpu,cpu,cpu", **RECIPE)
    finally:
        torch.set_num_threads(before)
    assert not result["already_done"]
    assert files(tmp_path / "three") == files(tmp_path / "one")
    assert pipeline.quantize("demo", tmp_path / "three", device="cpu", **RECIPE)["already_done"], "one run, whatever the number"


def test_what_goes_one_tensor_after_another_wants_one_device(tmp_path):
    with pytest.raises(UsageError, match="name one device"):
        pipeline.quantize("demo", tmp_path / "out", bits=3, group=64, method="gptq", device="cpu,cpu")
    assert not (tmp_path / "out").exists()
