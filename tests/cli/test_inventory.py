"""lowq run, ls and rm: a model is quantized into the cache once, ls lists it, and rm removes nothing else."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from lowq_cli import completion, console, inventory, main, state
from lowq_cli.files import folder
from lowq_cli.files.source import nearby
from lowq_cli.serving.catalog import Config, gather, given_name

SHORT = ("--max-new-tokens", "4", "--device", "cpu", "--temperature", "0")


@pytest.fixture
def lowq(tmp_path, monkeypatch, capsys, own_cache):
    """A function: run the command in a home of its own; (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def run(*args):
        return main.main([*map(str, args)]), *capsys.readouterr()

    return run


def test_run_quantizes_once_and_does_not_become_the_last_checkpoint(lowq, tmp_path):
    code, out, err = lowq("run", "demo", "Once upon a time", *SHORT)
    assert code == 0, err
    assert out.strip()
    assert "into the cache" in err
    again = lowq("run", "demo", "Once upon a time", *SHORT)
    assert again[:2] == (0, out)
    assert "into the cache" not in again[2]
    assert state.known() == []
    (run,) = inventory.holdings()
    assert (run.kind, run.path.parent) == ("run", tmp_path / "cache" / "lowq" / "runs")
    assert run.nbytes > 5e6
    assert lowq("run", run.path, "Once upon a time", *SHORT)[:2] == (0, out)
    assert lowq("run", "demo", "--prompt", "Once upon a time", *SHORT)[:2] == (0, out)


def test_run_keeps_the_codes_of_a_gguf_file_that_lowq_packs(lowq, demo_gguf, tmp_path):
    """A file's name need not be UTF-8."""
    path = tmp_path / os.fsdecode(b"caf\xe9.gguf")
    shutil.copy(demo_gguf, path)
    code, out, err = lowq("run", path, "Once upon a time", *SHORT)
    assert code == 0, err
    assert "rounded once more" not in err
    assert [h.kind for h in inventory.holdings() if h.kind in ("run", "import")] == ["import"]
    assert lowq("generate", path, "Once upon a time", *SHORT)[:2] == (0, out)
    code, _, err = lowq("run", path, "Once upon a time", *SHORT, "--recipe", "best")  # asked for: quantized
    assert code == 0, err
    assert "rounded once more" in err


def test_json_names_a_path_that_is_not_utf8_so_that_it_can_be_opened(lowq, tmp_path):
    out = tmp_path / os.fsdecode(b"caf\xe9")
    code, printed, err = lowq("quantize", "demo", "--method", "rtn", "--out", out, "--json")
    assert code == 0, err
    printed.encode()  # no lone surrogate: a pipe in UTF-8 would replace it
    assert Path(json.loads(printed)["out"]).is_dir()
    code, printed, err = lowq("inspect", out, "--json")
    assert code == 0, err
    assert Path(json.loads(printed)["path"]).is_dir()
    code, _, err = lowq("quantize", "demo", "--export", "gguf", "--out", out.with_suffix(".gguf"), "--json")
    assert code == 0, err


def test_run_says_that_it_rounds_a_gguf_file_once_more(lowq, tmp_path):
    """Types that lowq does not pack would take 16 bits of memory for each weight."""
    assert lowq("export", "demo", "--type", "Q4_K_M", "--out", tmp_path / "demo.gguf")[0] == 0
    code, _, err = lowq("run", tmp_path / "demo.gguf", "Once upon a time", *SHORT)
    assert code == 0, err
    assert "is quantized already (Q4_K, Q6_K) and is rounded once more" in err
    assert "run" in [h.kind for h in inventory.holdings()]


def written(folder, run="0123456789abcdef"):
    """A folder with what lowq leaves in one: a config, and a report that names the run."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "lowq_report.json").write_text(json.dumps({"run": run, "files": ["config.json", "lowq_report.json"]}))
    return folder


def test_rm_removes_only_listed_checkpoints(lowq, tmp_path):
    mine, stranger = written(tmp_path / "mine"), written(tmp_path / "stranger")
    state.remember(mine)
    imported = written(tmp_path / "cache" / "lowq" / "imports" / "model-1")
    exported = written(tmp_path / "cache" / "lowq" / "exports" / "awq" / "model-2")
    result = json.loads(lowq("ls", "--json")[1])
    assert {(Path(h["path"]).name, h["kind"]) for h in result["holdings"]} == {
        ("mine", "checkpoint"), ("model-1", "import"), ("model-2", "export")}  # fmt: skip
    assert result["bytes"] == 3 * sum(p.stat().st_size for p in stranger.iterdir())
    code, _, err = lowq("rm", "stranger", "--yes")
    assert (code, "not in the list of what lowq wrote" in err) == (3, True)
    code, _, err = lowq("rm", "mine")
    assert (code, "add --yes" in err) == (2, True)
    (tmp_path / "link").symlink_to(mine)
    code, _, err = lowq("rm", "link", "--yes")
    assert (code, f"link is a link to {mine}; name that" in " ".join(err.split())) == (2, True)
    assert stranger.is_dir()
    assert mine.is_dir()
    assert lowq("rm", "mine", "--yes")[0] == 0
    assert lowq("rm", "--cached", "--yes")[0] == 0
    assert [p.exists() for p in (mine, imported, exported, stranger)] == [False, False, False, True]
    assert lowq("ls")[2] == "nothing yet; lowq quantize demo writes a checkpoint\n"


def test_what_quantizing_generated_and_measured_is_listed_and_removed(lowq, tmp_path):
    """Calibration texts, sensitivities, and the trials of a search, which are whole checkpoints."""
    cache = tmp_path / "cache" / "lowq"
    written(cache / "bounds" / "0123" / "4567")
    for file in ("own-text/0123/text-00000.safetensors", "sensitivity/0123.json", "tokenizers/m-0123/tokenizer.json"):
        (cache / file).parent.mkdir(parents=True)
        (cache / file).write_text("x" * 1000)
    (cache / "cubin").mkdir()  # compiled kernels stay
    rows = json.loads(lowq("ls", "--json")[1])["holdings"]
    kinds = {"own-text": "own text", "sensitivity": "sensitivity", "bounds": "search", "tokenizers": "tokenizer"}
    assert {Path(h["path"]).name: h["kind"] for h in rows} == kinds
    assert min(h["bytes"] for h in rows) > 50
    assert lowq("rm", "own-text", "--yes")[0] == 0
    assert not (cache / "own-text").exists()
    assert lowq("rm", "--cached", "--yes")[0] == 0
    assert not kinds.keys() & {p.name for p in cache.iterdir()}
    assert (cache / "cubin").is_dir()


@pytest.mark.parametrize("to", ["gguf", "compressed-tensors"])
def test_exports_outside_of_the_cache_are_listed_and_removed_while_unchanged(to, demo4, lowq, tmp_path):
    out = tmp_path / "my.gguf" if to == "gguf" else tmp_path / "mine"
    for _ in range(2):
        assert lowq("export", demo4, "--to", to, "--out", out)[0] == 0
        (row,) = json.loads(lowq("ls", "--json")[1])["holdings"]
        assert (row["path"], row["kind"], row["bytes"] > 1e6) == (str(out), "export", True)
        code, _, err = lowq("rm", out.name)
        assert (code, f"removing {out} (export, " in err) == (2, True)
        assert lowq("rm", out.name, "--yes")[0] == 0
        assert not out.exists()
    assert lowq("export", demo4, "--to", to, "--out", out)[0] == 0
    (out / "notes.txt" if out.is_dir() else out).write_text("somebody's own words")
    assert json.loads(lowq("ls", "--json")[1])["holdings"] == []
    code, _, err = lowq("rm", out.name, "--yes")
    assert (code, "not in the list of what lowq wrote" in err, out.exists()) == (3, True, True)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_rm_asks_in_a_terminal(lowq, tmp_path, monkeypatch):
    mine = written(tmp_path / "mine")
    state.remember(mine)
    monkeypatch.setattr("sys.stdin", Terminal("n\ny\n"))
    assert lowq("rm", "mine")[0] == 2
    assert mine.is_dir()
    assert lowq("rm", "mine")[0] == 0
    assert not mine.exists()


RUN = "from lowq_cli.main import run; run()"
STRANGE = {  # what a person may have put where lowq once wrote a checkpoint
    "files of their own": lambda p: (p.mkdir(), (p / "mine.txt").write_text("thesis")),
    "another model": lambda p: (p.mkdir(), (p / "config.json").write_text("{}"), (p / "model.safetensors").write_text("w")),
    "a report that is none": lambda p: (p.mkdir(), (p / "lowq_report.json").write_text("[]"), (p / "mine.txt").write_text("x")),
    "another run's checkpoint": lambda p: written(p, "fedcba9876543210"),
    "an empty folder": lambda p: p.mkdir(),
    "a file": lambda p: p.write_text("x"),
    "a link to a folder": lambda p: p.symlink_to(written(p.with_name("elsewhere"))),
}


@pytest.mark.parametrize("put", STRANGE.values(), ids=STRANGE)
def test_rm_leaves_files_that_replaced_a_checkpoint(lowq, tmp_path, put):
    mine = written(tmp_path / "mine")
    state.remember(mine, "0123456789abcdef")
    shutil.rmtree(mine)
    put(mine)
    before = {p: p.read_bytes() if p.is_file() else None for p in sorted(mine.rglob("*"))}
    assert lowq("rm", "mine", "--yes")[0] in (2, 3)
    assert {p: p.read_bytes() if p.is_file() else None for p in sorted(mine.rglob("*"))} == before
    assert mine.exists()
    assert "mine" not in lowq("ls")[1]


def test_rm_leaves_a_persons_files_in_a_checkpoint(lowq, tmp_path):
    assert lowq("quantize", "demo", "--method", "rtn", "--out", "kk", "--quiet")[0] == 0
    (tmp_path / "kk" / "notes").mkdir()
    (tmp_path / "kk" / "notes" / "mine.txt").write_text("thesis")
    code, _, err = lowq("rm", "kk", "--yes")
    assert (code, "stays" in err) == (0, True)
    assert [str(p.relative_to(tmp_path / "kk")) for p in sorted((tmp_path / "kk").rglob("*"))] == ["notes", "notes/mine.txt"]
    assert json.loads(lowq("ls", "--json")[1])["holdings"] == []


@pytest.mark.parametrize("at", ["exports/link", "exports", "runs/link", "runs", "exports/awq/link"])
def test_rm_of_the_cache_follows_no_link(lowq, tmp_path, at):
    cache, outside = tmp_path / "cache" / "lowq", tmp_path / "outside"
    written(outside / "sub")
    (cache / at).parent.mkdir(parents=True, exist_ok=True)
    (cache / at).symlink_to(outside)
    assert lowq("rm", "--cached", "--yes")[0] == 0
    assert (outside / "sub" / "config.json").is_file()
    assert lowq("ls")[1] == ""


def replaced(by):
    """A function: put something else in the place of a folder or file."""

    def put(path):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        by(path)

    return put


UNREADABLE = {  # what happened to a folder or file
    "forbidden": lambda path: path.chmod(0),
    "names only": lambda path: path.chmod(0o444),
    "no names": lambda path: path.chmod(0o111),
    "a file": replaced(lambda path: path.write_text("x")),
    "a link to nothing": replaced(lambda path: path.symlink_to("/nowhere")),
    "a link to itself": replaced(lambda path: path.symlink_to(path)),
}
HELD = {  # what is listed -> the place that remembers it
    "cache/lowq/runs/mine-0123456789abcdef": "cache",
    "cache/lowq/imports/other-0123456789abcdef": "cache",
    "cache/lowq/exports/awq/exported-0123456789abcdef": "cache",
    "cache/lowq/own-text": "cache",
    "far/known": "state/lowq/last.json",
    "far/exported": "state/lowq/exports.json",
}
PLACES = sorted({str(p) for path in HELD for p in (Path(path), *Path(path).parents)} - {".", "far"} | {"far", *HELD.values()})
PLACES += ["state", "state/lowq", "far/exported/config.json"]
CASES = [(place, how) for place, how in product(PLACES, UNREADABLE) if not (place.endswith("json") and how == "a file")]


@pytest.mark.parametrize(("place", "how"), CASES)
def test_what_cannot_be_read_is_named_and_the_rest_is_listed(place, how, monkeypatch, capsys):
    """As a user whom permissions bind, which they do not bind root."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        here = Path(folder)
        monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
        monkeypatch.setenv("XDG_STATE_HOME", str(here / "state"))
        monkeypatch.chdir("/")
        for path in HELD:
            written(here / path)
        state.remember(here / "far" / "known", "0123456789abcdef")
        state.begin(here / "far" / "begun")
        state.remember_export(here / "far" / "exported", "a run", here / "far" / "exported")
        assert main.main(["ls", "--json"]) == 0  # and imports what another user may not read
        assert {h["path"] for h in json.loads(capsys.readouterr().out)["holdings"]} == {str(here / path) for path in HELD}
        console.warn("")
        for path in (here, *here.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        UNREADABLE[how](here / place)
        capsys.readouterr()
        before = os.geteuid()
        try:
            if before == 0:
                os.seteuid(65534)
            code, (out, err) = main.main(["ls", "--json"]), capsys.readouterr()
            refused, said = main.main(["rm", "--cached"]), capsys.readouterr().err
            offered, served, begun = completion.checkpoints(""), gather(Config()), state.run_of(str(here / "far/known"), None)
        finally:
            os.seteuid(before)
            if not (here / place).is_symlink():
                (here / place).chmod(0o755)
        assert (code, refused, begun) == (0, 2, None), err
        listed = {str(Path(h["path"]).relative_to(here)) for h in json.loads(out)["holdings"]}
        known = {path for path, by in HELD.items() if not f"{by}/".startswith(f"{place}/")}
        assert {path for path in known if not f"{path}/".startswith(f"{place}/") and not place.startswith(path)} <= listed
        removed = place in ("far", "far/known", "far/exported") and how.startswith("a ")  # which is nothing to tell
        if {*HELD} - listed and not removed:
            assert err.count("warning: not everything is listed: ") == said.count("warning: not everything is listed: ") == 1
            assert place in err.replace("\n", "")
        assert {offer.path for offer in served.values()} <= {str(here / path) for path in listed}
        assert ("other" in offered) == ("cache/lowq/imports/other-0123456789abcdef" in listed) or place.endswith("cdef")


def test_a_model_beside_a_forbidden_folder_is_found_and_proposed(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        monkeypatch.setenv("XDG_STATE_HOME", folder)
        mine, forbidden = written(Path(folder) / "models" / "mine"), written(Path(folder) / "models" / "forbidden")
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (mine.parent / "to-nothing").symlink_to("/nowhere")
        forbidden.chmod(0)
        before = os.geteuid()
        try:
            if before == 0:
                os.seteuid(65534)
            assert [*gather(Config(), [str(mine.parent)])] == ["mine"]
            assert nearby(f"{mine.parent}/mime") == f"did you mean {mine}?"
        finally:
            os.seteuid(before)
            forbidden.chmod(0o755)


def interrupted(command, at, tmp_path):
    """Start a command, and end it by Ctrl-C once it has written a file that matches."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *command],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell's children ignore Ctrl-C
    )
    while process.poll() is None and not [p for p in tmp_path.rglob(at) if p.stat().st_size]:
        time.sleep(0.01)
    for seconds in (20, 20, 60):  # as a person presses it again: Python may drop the one that comes inside a finalizer
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            assert process.wait(seconds) == 130, process.stderr.read()
            return
    process.kill()
    raise AssertionError("three times Ctrl-C did not end it")


def test_an_interrupted_run_is_listed_and_removed(lowq, tmp_path):
    interrupted(["quantize", "demo", "--method", "gptq", "--calib", "bundled", "--out", "m1d"], "lowq-journal.jsonl", tmp_path)
    (result,) = json.loads(lowq("ls", "--json")[1])["holdings"]
    assert (result["path"], result["kind"]) == (str(tmp_path / "m1d"), "unfinished")
    code, _, err = lowq("generate", "--prompt", "a")
    assert code == 3, err  # it is not a checkpoint that other commands can use
    assert lowq("rm", "m1d", "--yes")[0] == 0
    assert not (tmp_path / "m1d").exists()


def test_an_interrupted_export_is_listed_and_removed(lowq, tmp_path):
    assert lowq("quantize", "demo", "--method", "rtn", "--out", "kk", "--quiet")[0] == 0
    target = tmp_path / "there" / "kk-hqq"
    with suppress(KeyboardInterrupt), folder.unfinished(target, "a run") as partial:
        (partial / "weights").write_bytes(bytes(100))
        raise KeyboardInterrupt
    result = [h for h in json.loads(lowq("ls", "--json")[1])["holdings"] if h["kind"] == "unfinished"]
    assert [h["path"] for h in result] == [str(partial)]
    assert lowq("rm", str(target), "--yes")[0] == 0
    assert [p.name for p in target.parent.iterdir()] == []


def test_a_model_is_not_written_into_itself(lowq, tmp_path):
    shutil.copytree(Path(main.__file__).parent / "demo", tmp_path / "st")
    before = sorted((tmp_path / "st").rglob("*"))
    assert lowq("quantize", "demo", "--method", "rtn", "--out", "kk", "--quiet")[0] == 0
    for command in ("quantize st --out st/sub", "quantize st --out st/a/b", "export kk --to humming --out kk/sub"):
        code, _, err = lowq(*command.split())
        assert (code, "the folder of the model itself" in " ".join(err.split())) == (2, True), err
    assert sorted((tmp_path / "st").rglob("*")) == before
    assert not (tmp_path / "kk" / "sub").exists()


WRITTEN = {"runs/a": "runs/a", "bounds/b": "bounds", "imports/c.0123456789ab.partial": "imports/c"}  # folder -> name for rm


@pytest.mark.parametrize("written", WRITTEN)
def test_what_another_process_writes_into_the_cache_is_not_removed(lowq, tmp_path, written):
    cache = tmp_path / "cache" / "lowq"
    for name in WRITTEN:
        (cache / name).mkdir(parents=True)
        (cache / name / "file").write_text("x")
    with folder.held(cache / written):
        code, _, err = lowq("rm", cache / WRITTEN[written], "--yes")
        assert code == 2, err
        assert "another lowq is writing to " in err
        assert (cache / written / "file").exists()
    assert lowq("rm", "--cached", "--yes")[0] == 0
    assert inventory.holdings() == []


# folder in the cache -> its name, where each is the newest of its name
NAMED = {
    "imports/mine-3e99a31c43c99cdb-0.1.0": "mine",
    "imports/Qwen3-8B-GPTQ-0123456789abcdef-0.2.1.dev3": "Qwen3-8B-GPTQ",
    "imports/sha-0123456789abcdef0-0123456789abcdef-0.1.0": "sha-0123456789abcdef0",
    "imports/demo-0123456789abcdef-0.1.0": "demo-0123456789abcdef-0.1.0",  # `demo` is the bundled model
    "runs/mine-lowq-4b-g64-2974-1cff70ec45aeda6e": "mine-lowq-4b-g64-2974",
    "refined/mine-3e99a31c43c99cdb-0.1.0-0123456789abcdef": "mine-refined",
    "imports/named-otherwise": "named-otherwise",
}


@pytest.fixture
def cached(lowq, tmp_path):
    for name in NAMED:
        written(tmp_path / "cache" / "lowq" / name)
    return tmp_path / "cache" / "lowq"


def older(folder):
    """What `written` makes, as of an hour ago."""
    for path in (*written(folder).iterdir(), folder):
        os.utime(path, (time.time() - 3600,) * 2)


def test_models_in_the_cache_have_the_same_short_names_in_ls_rm_and_a_server(lowq, cached):
    older(cached / "imports" / "mine-ffffffffffffffff-0.0.9")
    names = {str(cached / path): name for path, name in NAMED.items()}
    names[str(cached / "imports" / "mine-ffffffffffffffff-0.0.9")] = "mine-ffffffffffffffff-0.0.9"
    rows = json.loads(lowq("ls", "--json")[1])["holdings"]
    assert {row["path"]: row["name"] for row in rows} == names
    assert {offer.path: name for name, offer in gather(Config()).items()} == names
    for path, name in names.items():
        code, _, err = lowq("rm", name)
        assert (code, f"removing {path} (" in " ".join(err.split())) == (2, True), err
    assert lowq("rm", "mine", "--yes")[0] == 0  # and the older one takes the name
    assert json.loads(lowq("ls", "--json")[1])["holdings"][-1]["name"] == "mine"


def test_a_checkpoint_outside_of_the_cache_keeps_its_name(lowq, cached, tmp_path):
    older(tmp_path / "mine")
    state.remember(tmp_path / "mine")
    for here in (tmp_path, cached):
        os.chdir(here)
        rows = {row["path"]: row["name"] for row in json.loads(lowq("ls", "--json")[1])["holdings"]}
        assert len(set(rows.values())) == len(rows) == len(NAMED) + 1
        offers = gather(Config())
        assert offers["mine"].path == str(tmp_path / "mine")
        assert offers["mine-3e99a31c43c99cdb-0.1.0"].path == str(cached / "imports" / "mine-3e99a31c43c99cdb-0.1.0")
        assert len(offers) == len(rows)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "config.json").write_text("{}")
    folders = gather(Config(), [str(tmp_path / "models")])
    assert folders["mine"].path == str(tmp_path / "models" / "mine")
    assert len(folders) == len(rows) + 1


def test_commands_take_the_short_name_of_a_model_in_the_cache(lowq, demo4, tmp_path):
    """Where no folder has it."""
    assert lowq("export", demo4, "--to", "gptq", "--out", tmp_path / "far" / "mine")[0] == 0
    code, out, err = lowq("generate", tmp_path / "far" / "mine", "Once upon a time", *SHORT)
    assert code == 0, err
    (imported,) = (h for h in inventory.holdings() if h.kind == "import")
    assert imported.short == "mine" == given_name(str(imported.path))
    assert lowq("generate", "mine", "Once upon a time", *SHORT)[:2] == (0, out)
    assert lowq("run", "mine", "Once upon a time", *SHORT)[:2] == (0, out)
    assert lowq("generate", imported.path.name, "Once upon a time", *SHORT)[:2] == (0, out)
    assert json.loads(lowq("inspect", "mine", "--json")[1])["path"] == str(imported.path)
    assert lowq("compare", "mine", "min", "--device", "cpu")[0] == 3
    shutil.copytree(demo4, tmp_path / "mine")  # a folder of that name comes first
    assert json.loads(lowq("inspect", "mine", "--json")[1])["path"] == "mine"
