"""A disk that fills up (here: a limit on the size of a file) ends a command in one line, and leaves nothing half-written."""

import json
import os
import re
import resource
import shutil
import sys
from collections import deque
from contextlib import contextmanager

import pytest

from lowq_cli import console, drawing, main
from lowq_cli.calibrate import requirements
from lowq_cli.files.safetensors_writer import SafetensorsWriter
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import output_folder, pipeline
from lowq_cli.run.prepare import prepare
from lowq_kernels.dispatch import tuning, tuning_file
from lowq_packers.errors import DoesNotFitError, UsageError


@contextmanager
def files_of_at_most(limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # Python does not see that only a part was written
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def run(capsys):
    """lowq with these arguments in this process, on a nearly full disk: its exit code and its output."""

    def run(*args, limit=1000):
        with files_of_at_most(limit):
            code = main.main([*map(str, args)])
        return code, capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    from lowq_cli.run.pipeline import quantize

    folder = tmp_path_factory.mktemp("full") / "packed"
    quantize("demo", folder, bits=4, group=32, method="rtn", device="cpu")
    return folder


def test_tune_leaves_the_table_that_was_there(run, packed):
    before = b'{"format": 1, "machines": []}'
    (packed / tuning_file.FILE).write_bytes(before)
    files = sorted(p.name for p in packed.iterdir())
    code, output = run("tune", packed, "--batch", "1", "--device", "cpu")
    tuning.forget()
    assert code == 4
    assert re.search(rf"lowq: the disk is full \(\S+/{tuning_file.FILE}\)", output)  # the trial's, which comes first
    assert (packed / tuning_file.FILE).read_bytes() == before
    assert sorted(p.name for p in packed.iterdir()) == files


def test_a_timeline_is_whole_or_not_there(run, tmp_path):
    code, output = run(
        "generate", "demo", "--device", "cpu", "--prompt", "x", "--max-new-tokens", "4", "--profile", tmp_path / "t.json"
    )
    assert code == 2
    assert "cannot be written: is the disk full?" in output
    assert "timeline:" not in output
    assert not list(tmp_path.iterdir())


def test_a_plot_is_whole_or_not_there(tmp_path):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    for name in ("plot.png", "plot.svg"):
        with files_of_at_most(100), pytest.raises(DoesNotFitError, match=f"the disk is full .*{name}"):
            drawing.save(drawing.figure(2, 2), tmp_path / name)
        assert not list(tmp_path.iterdir())
        drawing.save(drawing.figure(2, 2), tmp_path / name)
        (tmp_path / name).unlink()


def test_fp8_is_continued_like_any_other(run, tmp_path):
    command = ("quantize", "demo", "--format", "fp8", "--out", tmp_path / "out")
    code, output = run(*command, limit=2_000_000)
    assert code == 4
    assert output.endswith("make room and run the same command again\n")
    assert not (tmp_path / "out" / "config.json").exists()
    assert run(*command, limit=resource.RLIM_INFINITY)[0] == 0
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    "command",
    ["bench --shape 256x256", "compare demo demo", "quantize demo --bpw 4 --dry-run"],
    ids=lambda c: c.split()[0],
)
def test_a_plot_that_cannot_be_drawn_is_reported_before_the_work(command, tmp_path, capsys):
    """The work would have a result on stdout."""
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    for path, why in ((tmp_path / "x.xyz", "use .png, .svg or .pdf"), (tmp_path / "no" / "x.png", "there is no folder")):
        assert main.main([*command.split(), "--plot", str(path)]) == 2
        out, err = capsys.readouterr()
        assert why in err
        assert out == ""


def test_a_plot_that_the_system_refuses_is_one_line(tmp_path):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    (tmp_path / "p.png").mkdir()
    with pytest.raises(UsageError, match=r"p\.png cannot be written: Is a directory"):
        drawing.save(drawing.figure(1, 1), tmp_path / "p.png")


@pytest.mark.parametrize(
    "command", ["bench --shape 256x256 --batch 1 --device cpu", "compare demo demo --max-tokens 64 --new-tokens 2"]
)
def test_measurements_are_printed_before_a_plot_fails(command, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    for more in ([], ["--json"]):
        with files_of_at_most(100):
            assert main.main([*command.split(), "--plot", str(tmp_path / "p.png"), *more]) == 4
        out, err = capsys.readouterr()
        assert re.search(r"lowq: the disk is full \(.*p\.png", err.splitlines()[-1])
        assert json.loads(out)["rows"] if more else "tokens/s" in out or "roofline" in out


def test_the_report_of_a_table_that_could_be_written(run, packed, capsys):
    """The tests above fail because of the limit: without it the same command writes."""
    code, output = run("tune", packed, "--batch", "1", "--device", "cpu", limit=10_000_000)
    tuning.forget()
    assert code == 0, output
    assert json.loads((packed / tuning_file.FILE).read_text())["machines"]


LINES = (  # each prints tables, progress or a model's thoughts on stderr
    ("quantize", "demo", "--method", "rtn", "--device", "cpu", "--out", "OUT"),
    ("tune", "PACKED", "--batch", "1", "--device", "cpu"),
    ("export", "PACKED", "--to", "humming", "--out", "OUT"),
    ("eval", "demo", "--device", "cpu", "--max-tokens", "600"),
    ("generate", "demo", "--device", "cpu", "--prompt", "Once", "--max-new-tokens", "4"),
)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
@pytest.mark.parametrize("why", ["full", "ended"])
def test_progress_that_cannot_be_written_does_not_end_the_work(line, why, packed, tmp_path, monkeypatch, capsys):
    """As in `2> /full/log` and `2> >(head -1)`; the exit code is the work's."""
    folder = shutil.copytree(packed, tmp_path / "packed")
    words = [str({"OUT": tmp_path / "out", "PACKED": folder}.get(word, word)) for word in line]
    monkeypatch.setattr(sys, "stderr", full_file() if why == "full" else ended_reader())
    assert main.main(words) == 0
    tuning.forget()
    assert capsys.readouterr().out.strip()
    assert line[-1] != "OUT" or (tmp_path / "out" / "config.json").exists()


def full_file():
    return open("/dev/full", "w", buffering=1)


def ended_reader():
    """A stream into a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return open(writing, "w", buffering=1)


def test_thoughts_and_narrow_tables_do_not_end_the_work_either(monkeypatch):
    monkeypatch.setattr(sys, "stderr", full_file())
    console.thought("Hm.", terminal=False)
    console.stderr.cache_clear()
    monkeypatch.setenv("COLUMNS", "20")
    console.table("a title", ("name", ">a number"), [("a name of more than twenty columns", 10**18)])
    console.warn("a warning")
    with console.progress("work", 10) as advance:
        advance(5, "half")
    console.stderr.cache_clear()


@pytest.fixture
def nearly_full(monkeypatch):
    """Each disk has 100 kB free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 100_000))


@pytest.mark.parametrize("more", [("--to", "gguf", "--round"), ("--to", "humming"), ("--type", "Q4_K_M")], ids=" ".join)
def test_an_export_is_refused_before_the_work(more, packed, tmp_path, nearly_full, capsys):
    out = tmp_path / ("out" if "humming" in more else "out.gguf")
    assert main.main(["export", str(packed), *more, "--out", str(out), "--json"]) == 4
    assert_refused(capsys.readouterr(), out, "make room, or use another --out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line", [("export", "PACKED", "--to", "humming"), ("quantize", "demo", "--method", "rtn")], ids=lambda v: v[0]
)
def test_a_file_system_that_does_not_count_its_bytes_is_not_full(line, packed, tmp_path, monkeypatch):
    """As some network file systems, which say 0 of 0 bytes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    words = [str(packed) if word == "PACKED" else word for word in line]
    assert main.main([*words, "--out", str(tmp_path / "out")]) == 0


def assert_refused(printed, where, way_out):
    last = printed.err.splitlines()[-1]
    assert re.fullmatch(rf"lowq: needs [\d.]+ MB of disk, {re.escape(str(where))} has 100\.0 kB free; {way_out}", last), last
    assert "%" not in printed.err  # no progress was made


def test_an_interrupted_exports_bytes_count(packed, tmp_path, monkeypatch, capsys):
    """What is written already needs no more room."""
    out = tmp_path / "out"
    code = main.main(["export", str(packed), "--to", "humming", "--out", str(out)])
    assert code == 0
    whole = sum(p.stat().st_size for p in out.iterdir())
    free = shutil._ntuple_diskusage(10**9, 10**9, whole // 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with monkeypatch.context() as patch:  # a second export is interrupted when most of it is written
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**9))
        patch.setattr(SafetensorsWriter, "finish", lambda self: self._flush() or _interrupt())
        assert main.main(["export", str(packed), "--to", "humming", "--out", str(tmp_path / "again")]) == 130
    assert main.main(["export", str(packed), "--to", "humming", "--out", str(tmp_path / "third")]) == 4
    assert main.main(["export", str(packed), "--to", "humming", "--out", str(tmp_path / "again")]) == 0


def _interrupt():
    raise KeyboardInterrupt


def test_refine_is_refused_before_the_work(demo_gguf, own_cache, tmp_path, monkeypatch, nearly_full, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    out = tmp_path / "better.gguf"
    line = ["refine", str(demo_gguf), "--model", "demo", "--calib", "bundled", "--calib-tokens", "4096", "--out", str(out)]
    assert main.main([*line, "--device", "cpu"]) == 4
    assert_refused(capsys.readouterr(), out, "make room, or use another --out")
    assert not out.exists()


def test_a_calibrated_mixture_is_refused_before_the_work(own_cache, tmp_path, monkeypatch, nearly_full, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    out = tmp_path / "mixture.gguf"
    line = ["quantize", "demo", "--type", "Q4_K_M", "--calib", "bundled", "--calib-tokens", "4096", "--out", str(out)]
    assert main.main([*line, "--device", "cpu"]) == 4
    assert_refused(capsys.readouterr(), out, "make room, or use another --out")
    assert not out.exists()


def test_an_import_is_refused_before_the_work(demo_gguf, own_cache, nearly_full, capsys):
    assert main.main(["generate", str(demo_gguf), "--prompt", "Once", "--device", "cpu"]) == 4
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"needs [\d.]+ MB of disk, .*imports.* has 100\.0 kB free; make room, or name another cache folder", last)


def test_quantize_with_an_export_needs_room_for_both(tmp_path, monkeypatch, capsys):
    checkpoint = 8_000_000  # the demo's at 4 bits is 6.9 MB, and its export about as large again
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, checkpoint))
    monkeypatch.chdir(tmp_path)
    line = ["quantize", "demo", "--method", "rtn", "--device", "cpu"]
    assert main.main([*line, "--export", "gguf"]) == 4
    assert re.search(r"has 8\.0 MB free; make room, use fewer bits, or use another --out$", capsys.readouterr().err.strip())
    assert not list(tmp_path.iterdir())
    assert main.main(line) == 0


def test_calibrated_layers_need_room_next_to_the_checkpoint(tmp_path, monkeypatch):
    """They lie on the disk with a byte for each code until the checkpoint is whole."""
    seen = []
    parts = lambda: sum(p.stat().st_size for p in tmp_path.rglob("*layer-*.safetensors"))  # noqa: E731
    finish = output_folder.OutputFolder.finish
    monkeypatch.setattr(output_folder.OutputFolder, "finish", lambda self, config: seen.append(parts()) or finish(self, config))
    recipe = make_recipe(bits=4, method="gptq", calib="bundled", calib_tokens=4096)
    with prepare("demo", recipe, tmp_path / "out", "cpu") as prepared:
        needed = prepared.budget.disk_bytes
        deque(pipeline.execute(prepared), maxlen=0)
        planned = requirements.layers_bytes(prepared.plan)
    assert planned <= seen[0] <= planned * 1.02 + 100_000
    assert needed == prepared.plan.nbytes + planned
