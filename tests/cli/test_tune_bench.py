"""lowq tune and lowq bench on a small checkpoint, as a person runs them."""

import json
import time

import pytest
import torch
from typer.testing import CliRunner

from lowq_cli import main
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.main import app
from lowq_cli.tuning import trial, tuner, tuning_plan
from lowq_kernels.dispatch import tuning, tuning_file
from lowq_kernels.dispatch.measure import Budget
from lowq_kernels.dispatch.sources import source_hash
from lowq_packers.errors import LowqError, UsageError
from lowq_packers.scheme import Scheme


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo model, quantized with the fastest method."""
    out = tmp_path_factory.mktemp("tune") / "demo"
    done = CliRunner().invoke(app, ["quantize", "demo", "--method", "rtn", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture(autouse=True)
def no_tables_left(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    yield
    tuning.forget()


def lowq(*args):
    """stdout as an object, stderr as text."""
    done = CliRunner().invoke(app, [*map(str, args), "--json"], catch_exceptions=True)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return json.loads(done.stdout), done.stderr


def test_shapes_are_those_the_decoder_multiplies(folder):
    shapes = {(s.N, s.K): s.count for s in tuning_plan.shapes_of(open_checkpoint(folder), torch.bfloat16)}
    assert shapes == {(512, 256): 6, (256, 256): 6, (1536, 256): 6, (256, 768): 6, (8192, 256): 1}


def test_tune_writes_winners_into_the_checkpoint_and_prints_a_summary(folder, monkeypatch):
    monkeypatch.setattr(trial, "race", lambda *_: [])  # tests/cli/test_tune_trial.py
    result, output = lowq("tune", folder, "--batch", "1,16", "--device", "cpu")
    assert {"gpu", "entries", "seconds"} <= set(result)
    assert result["complete"]
    machines = tuning_file.read_file(folder / tuning_file.FILE)
    assert [m["gpu"] for m in machines] == [result["gpu"]]
    assert len(machines[0]["entries"]) == result["entries"] == 5 * 2 * 2  # shapes, batch sizes, layouts
    assert "tuning 5 shapes for 2 batch sizes on" in output
    assert "wrote 20 entries" in output
    assert tuning.use(folder, torch.device("cpu")) == 20


def test_a_folder_that_may_not_be_written_is_refused_before_anything_is_measured(folder, monkeypatch):
    monkeypatch.setattr(tuner.os, "access", lambda *_: False)  # root may write everywhere
    done = CliRunner().invoke(app, ["tune", str(folder), "--device", "cpu"])
    assert isinstance(done.exception, UsageError)
    assert "tune a copy of the checkpoint" in str(done.exception)
    assert "tuning 5 shapes" not in done.stderr


def test_an_interruption_keeps_measurements(folder, monkeypatch):
    (folder / tuning_file.FILE).unlink(missing_ok=True)
    real = tuner.measure_all

    def interrupted(*args):
        result = real(*args)
        yield next(result)
        yield next(result)
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "measure_all", interrupted)
    result, output = lowq("tune", folder, "--batch", "1", "--device", "cpu")
    assert result["entries"] == 2
    assert not result["complete"]
    assert "interrupted" in output
    assert len(tuning_file.read_file(folder / tuning_file.FILE)[0]["entries"]) == 2
    assert CliRunner().invoke(app, ["tune", str(folder), "--batch", "1", "--device", "cpu"]).exit_code == 130


def test_an_interruption_before_any_measurement_is_not_a_usage_error(folder, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "compile_candidates", interrupted)
    assert main.main(["tune", str(folder)]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "lowq: interrupted; nothing was measured yet"


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--batch", "0"], "--batch"),
        (["--batch", "one"], "--batch"),
        (["--batch", ""], "--batch"),
        (["--budget", "0"], "--budget"),
        (["--budget", "nan"], "--budget nan"),
        (["--budget", "inf"], "--budget inf"),
        (["--device", "tpu"], "device"),
    ],
)
def test_tune_refuses_nonsense_in_one_line(folder, args, error):
    with pytest.raises(LowqError, match=error):
        lowq("tune", folder, *args)


def entry(M, layout="rowstream", kernel="dequant", us=9.0):
    return tuning_file.Entry(4, 64, "float", "bfloat16", layout, 256, 512, M, kernel, {}, us, source_hash(kernel))


def test_batch_sizes_that_one_kernel_takes_share_a_row(capsys):
    from lowq_cli.commands.tune import report

    report([entry(1), entry(4, us=20.0), entry(16, kernel="cpu/int4"), entry(64, us=30.0)], as_json=False)
    output = capsys.readouterr()
    assert [line.split()[4:] for line in output.out.splitlines() if "256x512" in line] == [
        ["1", "to", "4", "dequant", "9.0", "to", "20.0"],
        ["16", "cpu/int4", "9.0"],
        ["64", "dequant", "30.0"],
    ]
    report([entry(1), entry(4)], as_json=False)
    assert "nothing to choose" in capsys.readouterr().err


def test_a_cpus_memory_is_timed_in_pieces_short_enough_to_pass_undisturbed():
    from lowq_kernels.dispatch import timing

    seen = []
    assert timing.read_gbs(torch.device("cpu"), lambda calls: seen.extend(calls) or 1e3) == pytest.approx(timing.PIECE / 1e6)
    assert len(seen) * timing.PIECE == 256 << 20


def test_the_crossover_between_layouts_is_named():
    result = [entry(1, "cpu_int4", "cpu/int4", 5), entry(1, "rowstream", "dequant", 9)]
    result += [entry(16, "cpu_int4", "cpu/int4", 50), entry(16, "rowstream", "dequant", 20)]
    assert tuner.crossovers(result) == ["256x512 4-bit g64: cpu/int4 below M = 16, dequant from there"]
    assert tuner.crossovers(result[:2]) == []


def test_the_layout_that_lost_is_one_line():
    result = [entry(1, "cpu_int4", "cpu/int4", 5.0), entry(1, "rowstream", "dequant", 10.0)]
    result += [entry(16, "cpu_int4", "cpu/int4", 10.0), entry(16, "rowstream", "dequant", 50.0)]
    kept, lost = tuner.taken(result)
    assert [(e.M, e.layout) for e in kept] == [(1, "cpu_int4"), (16, "cpu_int4")]
    assert lost == ["layout rowstream: 2.0 to 5.0 times as long, so no shape takes it"]
    assert tuner.taken(result[:1]) == (result[:1], [])


@pytest.mark.parametrize("command", ["tune", "bench"])
def test_fp8_blocks_are_refused_in_one_line(command, tmp_path):
    lowq("quantize", "demo", "--format", "fp8", "--out", tmp_path / "fp8")
    with pytest.raises(LowqError, match="nothing to tune"):
        lowq(command, tmp_path / "fp8")


def test_bench_gives_a_row_per_shape_and_batch(tmp_path):
    picture = tmp_path / "speed.png"
    shape = ("--shape", "64x128", "--shape", "32x64", "--bits", "4", "--bits", "2", "--group", "32")
    result, _ = lowq("bench", *shape, "--batch", "1,4", "--device", "cpu", "--plot", picture)
    keys = {"N", "K", "M", "bits", "group", "kernel", "us", "gbs", "tflops", "roofline_pct", "cublas_us"}
    assert [(r["N"], r["bits"], r["M"]) for r in result["rows"]] == [
        (n, b, m) for n in (64, 32) for b in (4, 2) for m in (1, 4)
    ]
    assert all(keys <= set(r) and r["us"] > 0 for r in result["rows"])
    assert all(r["roofline_pct"] is None or 0 < r["roofline_pct"] < 110 for r in result["rows"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_takes_a_checkpoint_and_any_kernel(folder):
    result, output = lowq("bench", folder, "--batch", "1", "--device", "cpu", "--kernel", "all")
    assert {r["kernel"] for r in result["rows"]} >= {"cpu/int4", "dequant", "reference"}
    assert "shapes" in output


@pytest.mark.parametrize("name", ["cpu/int4", "dequant", "reference"])
def test_bench_times_the_kernel_that_is_named(name, monkeypatch):
    result, _ = lowq("bench", "--shape", "64x128", "--group", "32", "--batch", "1", "--device", "cpu", "--kernel", name)
    assert [r["kernel"] for r in result["rows"]] == [name]
    monkeypatch.setenv("LOWQ_KERNEL", name)
    result, _ = lowq("bench", "--shape", "64x128", "--group", "32", "--batch", "1", "--device", "cpu")
    assert [r["kernel"] for r in result["rows"]] == [name]


@pytest.mark.parametrize("asked", [("--op", "attend"), ("--kernel", "torch/attend")])
def test_bench_times_other_operations(asked):
    result, _ = lowq("bench", "--shape", "512x64", "--group", "32", "--batch", "2", "--device", "cpu", *asked)
    assert [(r["kernel"], r["M"], r["bits"], r["us"] > 0) for r in result["rows"]] == [("torch/attend", 2, 16, True)]
    result, _ = lowq("bench", "--shape", "512x64", "--group", "32", "--batch", "1", "--device", "cpu", "--kv", "fp8", *asked)
    assert [r["bits"] for r in result["rows"]] == [8]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--shape", "100x64", "--group", "32", "--op", "attend"], "attend takes --shape"),
        (["--shape", "64x64", "--group", "32", "--op", "fp8_product"], "no kernel takes"),
        (["--shape", "64x64", "--group", "32", "--op", "multiply"], "--op 'multiply'"),
        (["--op", "attend"], "needs --shape"),
        (["--shape", "64x64", "--group", "32", "--kv", "4"], "--kv needs --op attend"),
        (["--shape", "512x64", "--group", "32", "--op", "attend", "--kv", "5"], "--kv 5 must be one of"),
        (["--shape", "64x64", "--group", "32", "--kernel", "cuda/experts"], "cuda/experts .* runs on cuda, not on cpu"),
        (["--shape", "64x64", "--group", "32", "--kernel", "cuda/tile_mma"], "cuda/tile_mma .* runs on cuda, not on cpu"),
        (["--shape", "64"], "NxK"),
        (["--shape", "64x0"], "NxK"),
        (["--shape", "64x100"], "group"),
        (["--shape", "64x64", "--group", "many"], "group='many' is not a whole number"),
        (["--shape", "64x64", "--bits", "5", "--group", "32"], "bits=5"),
        (["--shape", "64x64", "--group", "32", "--kernel", "fastest"], "fastest"),
        (["--shape", "64x64", "--group", "32", "--plot", "no/such/folder/a.png"], "folder"),
        (["--bits", "4"], "--shape"),
    ],
)
def test_bench_refuses_nonsense_in_one_line(args, error):
    with pytest.raises(LowqError, match=error):
        lowq("bench", *args, "--device", "cpu")


def test_a_shape_for_a_channel_has_one_group():
    from lowq_cli.tuning.benching import parse_shape, shape_for

    assert shape_for("8x100", 4, "channel", torch.float16).scheme == Scheme(4, 100)
    with pytest.raises(UsageError, match="NxK"):
        parse_shape("8xx9")


class RacedSteps:
    """Steps of a model on a GPU: every race ends with the entries as they are, and takes a second of the budget."""

    reason = ""

    def __init__(self, clock, stop_at=0):
        self.clock, self.stop_at = clock, stop_at

    def race(self, M, entries, left):
        if self.stop_at == M:
            raise KeyboardInterrupt
        self.clock.started -= 1
        return [e for e in entries if e.M == M], 1000.0, 990.0


@pytest.mark.parametrize(("seconds", "stop_at", "raced"), [(60, 0, [1, 4, 16]), (1.5, 0, [1, 4]), (60, 4, [1])])
def test_batch_sizes_without_a_race_get_no_entry_and_are_named(seconds, stop_at, raced, capsys):
    from lowq_cli.commands.tune import race_batches
    from lowq_kernels.dispatch.measure import Budget

    clock = Budget(seconds)
    entries = [entry(M) for M in (1, 4, 16)]
    kept, stopped = race_batches(RacedSteps(clock, stop_at), (1, 4, 16), entries, clock)
    assert [e.M for e in kept] == raced
    assert stopped == ("interrupted" if stop_at else "")
    missed = [str(M) for M in (1, 4, 16) if M not in raced]
    assert ("tune --batch " + ",".join(missed) in capsys.readouterr().err) == bool(missed)


def test_kernels_are_measured_though_compiling_took_most_of_the_budget():
    def after(spent):
        return tuner.for_kernels(Budget(10.0, started=time.monotonic() - spent)).seconds

    assert after(1.0) == pytest.approx(4.0, abs=0.01)  # half of it all, compiling included
    assert after(7.7) == pytest.approx(0.575, abs=0.01)  # a quarter of the rest
    assert not Budget(after(12.0)).left
