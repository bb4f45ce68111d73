"""A vision tower split into what depends on the image's size and what depends on its pixels, and recorded, for every family."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import pictured

from lowq_cli.engine.recorded_tower import RecordedTower, Recorder, Recording
from lowq_cli.engine.vision import Sight
from lowq_cli.hf.pictures import joined
from lowq_cli.hf.tower import Tower
from lowq_cli.hf.tower_program import trace
from lowq_packers.errors import UnsupportedError

CLOSE = {"cpu": 1e-5, "cuda": 5e-3}  # relative; fp32, and fp16 in batches of another size
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])


def tower_of(name, device="cpu"):
    return Tower(pictured.model(name).to(device, torch.float32 if device == "cpu" else torch.float16))


def off(found, wanted):
    """The norm of the difference, relative, of the features of one image; that of the worst layer."""
    pairs = zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def at_once(work):
    """Records nothing: the work is done again each time."""
    work()
    return work


def runner_of(name, device, **limits):
    tower = tower_of(name, device)
    return RecordedTower(tower, at_once if device == "cpu" else Recorder(tower.device), **limits)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("name", pictured.NAMES)
def test_a_recorded_tower_computes_what_transformers_computes(name, device):
    """Each time that sizes come: by transformers, traced, recorded, replayed; two sizes in turns, one and two images."""
    runner = runner_of(name, device)
    for seed in range(5):
        for shape in ((4, 5), (3, 2)):
            for count in (1, 2):
                images = [pictured.picture(name, 10 * seed + i, *shape) for i in range(count)]
                found = runner([p.inputs for p in images], images[0].rows)
                for p, features in zip(images, found, strict=True):
                    assert len(features[0]) == p.rows
                    assert off(features, runner.tower(p.inputs)) < CLOSE[device]
    assert runner.reason == ""
    assert all(isinstance(r, Recording) for r in runner.recordings.values())
    assert len(runner.recordings) in (2, 4)  # of families of one size, and of any


@pytest.mark.parametrize("name", pictured.NAMES)
def test_another_image_replayed_gives_other_features(name):
    """The control: the pixels of the image that was traced are nowhere kept."""
    runner = runner_of(name, "cpu")
    images = [pictured.picture(name, seed, 4, 5) for seed in range(5)]
    found = [runner([p.inputs], p.rows)[0] for p in images]
    assert all(off(found[3], features) > 1e-3 for i, features in enumerate(found) if i != 3)


def test_results_of_the_size_alone_are_not_computed_again():
    tower, p = tower_of("qwen2_5_vl"), pictured.picture("qwen2_5_vl", 1, 4, 5)
    with torch.inference_mode():
        there = tower.arguments(p.inputs)
        program, _ = trace(lambda: [tower.run(there)[0]], there["pixel_values"])
    called = {operation.function.overloadpacket for operation in program.operations}
    aten = torch.ops.aten
    assert {aten.matmul, aten.softmax} <= called
    assert not called & {aten.arange, aten.cumsum, aten.cos, aten.sin, aten.outer, aten.tensor, aten.repeat_interleave}


def test_a_program_frees_values_that_nothing_reads_any_more():
    tower, p = tower_of("gemma3"), pictured.picture("gemma3", 1)
    with torch.inference_mode():
        there = tower.arguments(p.inputs)
        program, _ = trace(lambda: [tower.run(there)[0]], there["pixel_values"])
    computed = {n for operation in program.operations for n in operation.results}
    freed = [n for operation in program.operations for n in operation.last]
    assert {*freed} == computed - {*program.outputs} | {0}
    assert len(freed) == len({*freed})


KINDS = {
    "written into a part of zeros": lambda x: [torch.zeros(4, 3).index_put_((torch.arange(3),), x * 2) + x.sum()],
    "added to ones": lambda x: [torch.ones(3, 3).add_(x)],
    "a view written into": lambda x: [written_view(x)],
    "chosen by a mask": lambda x: [x[torch.tensor([True, False, True])] * 2],
    "split": lambda x: [*x.split([1, 2])],
    "numbers of the host": lambda x: [x * float(torch.arange(4).sum()) + torch.tensor([1.0, 2.0, 3.0])],
}


def written_view(x):
    whole = torch.zeros(2, 3, 3)
    whole[1].add_(x)
    return whole.sum(0) + whole[1]


@pytest.mark.parametrize("run", KINDS.values(), ids=KINDS)
def test_programs_of_every_kind_of_operation(run):
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    with torch.inference_mode():
        program, made = trace(lambda: run(a), a)
        assert all(map(torch.equal, made, run(a)))
        for pixels in (b, a, b):
            assert all(map(torch.equal, program(pixels), run(pixels)))


ASKS = {
    "a number": lambda x: [x * float(x.sum())],
    "a choice": lambda x: [x if x.sum() > 0 else -x],
    "equal": lambda x: [x if torch.equal(x, x + 1) else -x],
    "a result of the size alone": lambda x: [torch.ones(3)],
}


@pytest.mark.parametrize("run", ASKS.values(), ids=ASKS)
def test_operations_that_read_values_of_pixels_have_no_program(run):
    x = torch.randn(3, 3)
    with torch.inference_mode(), pytest.raises(UnsupportedError, match="pixels"):
        trace(lambda: run(x), x)


@pytest.mark.parametrize("fails", ["trace", "record", "differs"])
def test_a_tower_that_cannot_be_recorded_runs_as_it_is(fails, monkeypatch):
    def record(work):
        if fails == "record":
            raise RuntimeError("operation not permitted when stream is capturing")
        work()
        return lambda: None  # the features of the image before

    runner = RecordedTower(tower_of("qwen3_vl"), record)
    if fails == "trace":
        run = runner.tower.run
        runner.tower.run = lambda there: run(
            {**there, "pixel_values": there["pixel_values"] * float(there["pixel_values"].sum())}
        )
    if fails == "differs":
        monkeypatch.setattr(Recording, "__call__", lambda self, pixels: [t + 1 for t in self.program(pixels)])
    for seed in range(5):
        p = pictured.picture("qwen3_vl", seed)
        assert off(runner([p.inputs], p.rows)[0], runner.tower(p.inputs)) < CLOSE["cpu"]
    wanted = {"trace": "asks for a value", "record": "not permitted", "differs": "other features"}[fails]
    assert wanted in runner.reason
    assert not runner.recordings


def test_few_recordings_are_kept_and_large_images_are_not_recorded():
    runner = runner_of("qwen3_vl", "cpu", most_rows=8, most=2)
    for h in (1, 2, 3, 4, 5):
        for seed in range(4):
            p = pictured.picture("qwen3_vl", seed, h, 2)
            runner([p.inputs], p.rows)
    assert [len(r.made[0]) for r in runner.recordings.values()] == [6, 8]


def test_images_of_one_size_run_together():
    """Those asked for and those that wait, in batches of powers of two within the limit, and each once."""
    tower, batches = tower_of("qwen3_vl"), []
    runner = RecordedTower(tower)

    def noted(images, rows):
        batches.append((len(images), rows))
        return runner(images, rows)

    sight = Sight(Path(), None, tower.device, tower.dtype, noted, together=24)
    a = [pictured.picture("qwen3_vl", seed) for seed in range(7)]
    b = [pictured.picture("qwen3_vl", seed, 5, 5) for seed in range(2)]
    found = sight.features([a[0], b[0], a[0], a[1]], [a[1], *a[2:6], b[1]])
    assert batches == [(4, 6), (1, 25)]
    assert off(sight.features([a[2]])[0], tower(a[2].inputs)) < CLOSE["cpu"]
    assert batches == [(4, 6), (1, 25)]
    for p, features in zip([a[0], b[0], a[0], a[1]], found, strict=True):
        assert off(features, tower(p.inputs)) < CLOSE["cpu"]
    sight.features([a[6], a[5], a[4]])
    assert batches == [(4, 6), (1, 25), (2, 6), (1, 6)]
    assert sight.computed == 8


def test_inputs_of_a_batch_are_those_of_its_images_side_by_side():
    levels = {"level_mean": torch.ones(1), "level_std": torch.ones(1)}
    images = [{"pixel_values": torch.full((2, 3), i), "image_grid_thw": torch.tensor([[1, 1, 2]]), **levels} for i in range(2)]
    both = joined(images)
    assert both["pixel_values"].tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
    assert both["image_grid_thw"].tolist() == [[1, 1, 2]] * 2
    assert both["level_mean"].tolist() == [1]
