"""quantize --device A,B: a tensor at a time on each, the same bytes as on one, refused where tensors depend on each other."""

import itertools
import threading

import pytest
import torch
from folders import files

from lowq_cli import workers
from lowq_cli.devices import name_device, pick_device, pick_devices
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.quantizers import _slabs
from lowq_cli.run import budget, pipeline, transform
from lowq_packers.errors import UnsupportedError, UsageError

RECIPE = {"bits": 4, "group": 32, "method": "rtn", "shard_size": 1 << 20}


def test_names_of_devices():
    assert pick_devices("cpu") == (torch.device("cpu"),)
    assert pick_devices("cpu, cpu") == (torch.device("cpu"),) * 2
    assert pick_devices(torch.device("cpu")) == (torch.device("cpu"),)
    with pytest.raises(UsageError, match="does not exist"):
        pick_devices("cpu,")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="0 CUDA"):
            pick_devices("cuda:0,cuda:1")


@pytest.mark.parametrize("pick", [pick_device, name_device])
def test_a_cpu_has_one_number(pick):
    assert str(pick("cpu")) == "cpu"
    assert str(pick("cpu:0")) == "cpu:0"
    with pytest.raises(UsageError, match="device cpu:7 does not exist: torch has one CPU device; use --device cpu"):
        pick("cpu:7")


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["rtn", "lsq", "hqq"])
def test_the_number_of_workers_of_a_gpu_changes_no_byte(method, tmp_path, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setitem(_slabs.SLAB, "cuda", 1 << 15)  # several slabs a tensor
    monkeypatch.setitem(budget.SLAB, "cuda", 1 << 16)
    for count in (1, 4, 7):
        monkeypatch.setattr(workers, "GPU_WORKERS", count)
        pipeline.quantize("demo", tmp_path / str(count), device="cuda", **RECIPE | {"method": method})
    assert files(tmp_path / "1") == files(tmp_path / "4") == files(tmp_path / "7")


@pytest.mark.gpu
def test_two_kinds_of_device_are_refused():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with pytest.raises(UsageError, match="two kinds"):
        pick_devices("cuda:0,cpu")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one worker writes."""
    out = tmp_path_factory.mktemp("one") / "one"
    pipeline.quantize("demo", out, device="cpu", **RECIPE)
    return out


def test_the_same_bytes_and_as_many_tensors_at_once_as_devices(one, tmp_path, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    real, calls, three_at_once = transform.quantize_matrix, itertools.count(), threading.Barrier(3, timeout=60)

    def waiting(*args):
        if next(calls) < 3:
            three_at_once.wait()
        return real(*args)

    monkeypatch.setattr(transform, "quantize_matrix", waiting)
    try:
        result = pipeline.quantize("demo", tmp_path / "three", device="cpu,cpu,cpu", **RECIPE)
    finally:
        torch.set_num_threads(before)
    assert not result["already_done"]
    assert files(tmp_path / "three") == files(one)
    assert pipeline.quantize("demo", tmp_path / "three", device="cpu", **RECIPE)["already_done"], "one run, whatever the number"


def test_several_files_at_once_hold_the_same_bytes_and_are_finished_in_order(one, tmp_path):
    recipe = make_recipe(bits=4, group=32, method="rtn")
    with pipeline.prepare("demo", recipe, tmp_path / "three", device="cpu,cpu", shard_size=1 << 20) as prepared:
        events = list(pipeline.execute(prepared, files_at_once=3))
    done = [e for e in events if isinstance(e, pipeline.TensorDone)]
    shards = prepared.plan.shards
    assert len({s.name for s, _ in itertools.islice(pipeline.in_turn(shards, 3), 3)}) == 3, "by turns"
    assert next(pipeline.in_turn(shards[::-1], 3, large=1 << 20))[1].name == "model.embed_tokens"
    assert sorted(e.name for e in done) == sorted(i.name for i in prepared.plan.items)
    assert [e.name for e in events if isinstance(e, pipeline.ShardDone)] == [s.name for s in prepared.plan.shards]
    assert files(tmp_path / "three") == files(one)


@pytest.mark.parametrize("stop", [5, 20, 50])
def test_several_files_at_once_are_continued(one, tmp_path, stop):
    recipe = make_recipe(bits=4, group=32, method="rtn")
    with pipeline.prepare("demo", recipe, tmp_path / "three", device="cpu,cpu", shard_size=1 << 20) as prepared:
        events = pipeline.execute(prepared, files_at_once=3)
        for _ in itertools.islice(events, stop):
            pass
        events.close()
    resumed = list(pipeline.run("demo", recipe, tmp_path / "three", device="cpu,cpu", shard_size=1 << 20))
    assert any(e.resumed for e in resumed if isinstance(e, pipeline.TensorDone))
    assert files(tmp_path / "three") == files(one)


def test_methods_that_go_tensor_by_tensor_need_one_device(tmp_path):
    with pytest.raises(UsageError, match="name one device"):
        pipeline.quantize("demo", tmp_path / "out", bits=3, group=64, method="gptq", device="cpu,cpu")
    assert not (tmp_path / "out").exists()
