"""Tuned times and other work on the machine: takes turns, keeps the least, and writes nothing that makes whole steps slower."""

import json
import shutil

import pytest
import torch

from lowq_cli import main
from lowq_cli.run.pipeline import quantize
from lowq_cli.tuning import trial, tuner
from lowq_kernels.dispatch import measure, tuning
from lowq_kernels.dispatch.tuning_file import FILE, Entry, Machine, write_file

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(short_demo, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "demo"
    quantize(short_demo, out=out, bits=4, group=64, method="rtn")
    return out


@pytest.fixture
def folder(made, own_cache, tmp_path):
    shutil.copytree(made, tmp_path / "demo")
    yield tmp_path / "demo"
    tuning.forget()


def run(capsys, *words):
    return main.main([*map(str, words)]), capsys.readouterr().err


def entries_of_the_slowest(folder):
    """The table after a stalled measurement: the slowest kernel first for every shape, in the layout of the files."""
    from lowq_cli.tuning import tuning_plan

    opened = tuning_plan.open_packed(str(folder))
    shapes = tuning_plan.shapes_of(opened, tuner.compute_dtype(opened, CPU))
    result = []
    for s in shapes:
        for layout, us in (("rowstream", 10.0), ("cpu", 9000.0)):
            place = (s.scheme.bits, s.scheme.group_size, s.scheme.kind, "bfloat16", layout, s.N, s.K)
            result.append(Entry(*place, 1, "dequant", {}, us, measure.source_hash("dequant"), (), "none"))
    return result


def test_entries_of_a_stalled_measurement_are_not_written(folder, monkeypatch, capsys):
    bad = entries_of_the_slowest(folder)
    lost = trial.race(folder, CPU, bad, [1])
    assert [t.M for t in lost] == [1]
    assert lost[0].lost, lost
    write_file(folder / FILE, Machine.here(CPU), bad)  # an earlier tune's, which would stay in force

    def measured(shapes, *_):
        return [(next(s for s in shapes if (s.N, s.K) == (e.N, e.K)), e) for e in bad]

    monkeypatch.setattr(tuner, "measure_all", measured)
    code, err = run(capsys, "tune", folder, "--batch", "1", "--device", "cpu")
    assert code == 0, err
    assert "steps are slower with the entries, so none is kept" in err
    assert [m["entries"] for m in json.loads((folder / FILE).read_text())["machines"]] == [[]]


@pytest.mark.parametrize(
    ("times", "stays"),
    [
        ([(1, 400.0, 300.0), (64, 9000.0, 8000.0)], True),
        ([(1, 400.0, 400.0 * trial.SLOWER)], True),
        ([(1, 400.0, 401.0 * trial.SLOWER)], False),
        ([(1, 400.0, 300.0), (64, 9000.0, 90_000.0)], False),
        ([], True),
    ],
)
def test_a_table_is_kept_where_no_batch_size_loses_by_it(times, stays):
    entry = Entry(4, 64, "float", "bfloat16", "cpu", 64, 128, 1, "cpu/packed", {}, 30.0, "", (), "none")
    assert trial.kept([entry], [trial.Trial(*t) for t in times]) == ([entry] if stays else [])


def test_good_entries_are_written(folder, capsys):
    code, err = run(capsys, "tune", folder, "--batch", "1", "--device", "cpu")
    assert code == 0, err
    assert "ms a step without the entries" in err
    for line in err.splitlines():
        if "so no shape takes it" in line:
            layout = line.split()[1].rstrip(":")
            assert not [x for x in err.splitlines() if f" {layout} " in x and "-bit g" in x], (
                "the summary contradicts its table"
            )
    if "none is kept" not in err:
        assert json.loads((folder / FILE).read_text())["machines"][0]["entries"]


def test_kernels_take_turns_and_the_least_counts(monkeypatch):
    shape = tuning.Shape(64, 128, tuner.Scheme(4, 64, "float"), torch.bfloat16)
    asked, times = [], iter([5.0, 900.0, 900.0, 4.0, 900.0, 900.0] * 20)

    def timed(spec, config, x, weights, *_):
        asked.append(weights[0].layout)
        return next(times)

    monkeypatch.setattr(measure, "_time", timed)
    (first, *_) = entries = list(measure.measure(shape, [1], CPU, measure.Budget()))
    layouts = list(dict.fromkeys(asked))
    turns = [b for a, b in zip([None, *asked], asked, strict=False) if a != b]
    assert turns == layouts * measure.CPU_ROUNDS if len(layouts) > 1 else asked
    assert all(e.us < 900 for e in entries), entries
    assert first.M == 1


def test_a_layout_used_by_some_shapes_is_not_reported_as_slower():
    def entry(N, layout, us):
        return Entry(4, 64, "float", "bfloat16", layout, N, 128, 1, "cpu/packed", {}, us, "", (), "none")

    entries = [entry(64, "cpu", 1.0), entry(64, "rowstream", 2.0), entry(96, "cpu", 6.0), entry(96, "rowstream", 2.0)]
    kept, lost = tuner.taken(entries)
    assert {(e.N, e.layout) for e in kept} == {(64, "cpu"), (96, "rowstream")}
    assert not [line for line in lost if "no shape takes it" in line]
    assert len(lost) == 2


def test_a_busy_machine_is_reported(folder, monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 99.0, 99.0))
    out = folder.parent / "q"
    assert "load 99.0 on" in run(capsys, "tune", folder, "--batch", "1", "--budget", "5", "--device", "cpu")[1]
    assert "on a quiet machine; this one is not" in run(capsys, "quantize", "demo", "--out", out)[1]
