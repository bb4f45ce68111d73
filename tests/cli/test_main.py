"""The command itself: help without torch in under 0.2 s, exit codes, one line per error, JSON on request."""

import io
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest
import typer

from lowq_cli import console, main
from lowq_cli.files.source import DEMO
from lowq_packers.errors import UsageError

LOWQ = Path(sys.executable).with_name("lowq")


def run(*args, **env):
    return subprocess.run([LOWQ, *args], capture_output=True, text=True, env={**os.environ, **env})


def cpu_seconds(*command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # bytecode is kept, as it is for users: compiling the sources anew takes 25 ms
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    assert subprocess.run(command, capture_output=True, env=env).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_is_quick():
    """Under 0.2 s of CPU time; on a slow or shared machine, no more than six bare starts of Python.

    On the machine this was written on 0.11 s and 0.03 s. Rich's help would be 0.17 s more, torch 2 s.
    """
    both = [(cpu_seconds(LOWQ, "--help"), cpu_seconds(sys.executable, "-c", "pass")) for _ in range(9)]
    ours, bare = map(min, zip(*both, strict=True))
    assert ours < max(0.2, 6 * bare), both


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["eval", "--bad"], "no such option: --bad; see: lowq eval --help"),
        (["--json"], "no such option: --json; see: lowq --help"),
        (["generate", "--temp", "0"], "Did you mean --temperature?"),
        (["quantize", "--bitz", "4"], "Did you mean --bits?"),
    ],
)
def test_only_an_option_that_looks_alike_is_what_was_meant(words, hint, capsys):
    """--bad and --act have two dashes and one letter in common."""
    assert main.main(words) == 2
    assert hint in capsys.readouterr().err


def test_every_command_but_chat_takes_json_and_all_take_quiet():
    """As the README promises."""
    names = sorted(path.stem for path in Path(main.__file__).with_name("commands").glob("[!_]*.py"))
    options = {name: {o for p in main._parser(name).commands[name].params for o in p.opts} for name in names}
    assert len(options) > 15
    assert [name for name in names if "--json" not in options[name]] == ["chat"]
    assert [name for name in names if "--quiet" not in options[name]] == []


@pytest.mark.parametrize("args", [["--help"], ["quantize", "--bitz"], ["quantise"]], ids=" ".join)
def test_help_and_typos_import_nothing_heavy(args):
    heavy = {
        "torch",
        "transformers",
        "rich",
        "lowq_cli.plan",
        "lowq_cli.run",
        "lowq_cli.files",
        "lowq_cli.interop",
        "lowq_packers.formats",
    }
    code = f"import sys, lowq_cli.main as m; m.main(sys.argv[1:]); sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code, *args], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["quantise"], "no such command 'quantise'. Did you mean 'quantize'? See: lowq --help"),
        (["info"], "no such command 'info'. Did you mean 'lowq inspect'? See: lowq --help"),
        (["quantize"], "missing argument"),
        (["quantize", "demo", "--bits", "four"], "invalid value for '--bits'"),
        (["eval", "--nope"], "no such option: --nope"),
        (["eval", "--againts", "demo"], "no such option: --againts. Did you mean --against? See: lowq eval --help"),
        (["generate", "--prompt"], "option '--prompt' requires an argument"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_mistyped_command_is_one_line_and_with_json_one_object(args, said, capsys):
    code, (out, err) = main.main(args), capsys.readouterr()
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert said in err
    assert "--help" in err
    main.main([args[0], "--json", *args[1:]])
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_a_bare_lowq_is_its_help():
    done = run()
    assert done.returncode in (0, 2)  # by Typer's release
    assert "Commands:" in done.stdout + done.stderr


def test_words_of_other_tools_lead_to_commands_that_exist():
    names = {c.name for c in main.app.registered_commands}
    assert not names & main.MEANT.keys()
    for line in main.MEANT.values():
        assert line.startswith("lowq --") or line.split()[1] in names


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ImportError("cannot load module more than once per process")])
def test_ctrl_c_before_a_command_begins_and_during_imports_is_one_line(error, capsys):
    """Typer ends without a message before a command begins; numpy refuses a second import after one that was interrupted."""

    def stop(value: str):
        raise error

    def early(option: Annotated[str, typer.Option(callback=stop)] = "") -> None:
        pass

    main.app.command("early")(early)
    try:
        assert main.main(["early"]) == 130
    finally:
        main.app.registered_commands.pop()
    assert capsys.readouterr().err == "lowq: interrupted\n"


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    """In every command: Typer itself would end the process without a word."""

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lowq_cli.interop.inspection.inspect_model", stopped)
    assert main.main(["inspect", "demo"]) == 130
    assert capsys.readouterr().err == "lowq: interrupted\n"
    monkeypatch.setattr("lowq_cli.interop.exporter.export", stopped)
    assert main.main(["export", "demo"]) == 130
    assert capsys.readouterr().err == "lowq: interrupted; run the same command again to continue\n"


NAMING_A_MODEL = [
    "quantize {}", "quantize {} --format fp8", "generate {} --prompt x", "chat {}", "eval demo --against {}", "compare demo {}",
]  # fmt: skip


@pytest.mark.parametrize("args", NAMING_A_MODEL)
def test_a_missing_model_is_reported_before_torch_is_imported(tmp_path, args):
    code = "import sys, lowq_cli.main as m; code = m.main(sys.argv[1:]); sys.exit(99 if 'torch' in sys.modules else code)"
    line = args.format(tmp_path / "nothing").split()
    done = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True)
    assert done.returncode == 3
    assert "nothing" in done.stderr


@pytest.mark.parametrize("command", ["generate {} --prompt x", "chat {}"])
def test_sampling_out_of_range_is_reported_before_the_model_is_loaded(command, tmp_path, capsys):
    """A model without a tokenizer, which loading would find out."""
    folder = shutil.copytree(DEMO, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*"))
    command = [*command.format(folder).split(), "--device", "cpu"]
    assert main.main(command) == 3
    assert "has no tokenizer" in capsys.readouterr().err
    assert main.main([*command, "--top-p", "2"]) == 2
    assert "top_p=2.0 must be" in capsys.readouterr().err


@pytest.mark.parametrize("args", [*NAMING_A_MODEL, "quantize demo --out {}", "push a/b --ckpt {}"])
def test_a_name_that_the_system_refuses_is_a_line(args, capsys):
    """One too long was an internal error."""
    assert main.main(args.format("x" * 300).split()) == 2
    assert capsys.readouterr().err.endswith(": File name too long\n")


@pytest.mark.parametrize("name", ["none.gguf", "none.safetensors"])
def test_a_file_name_is_not_taken_for_a_hub_id(name):
    done = run("inspect", name)
    assert done.returncode == 3
    assert f"no folder {name}, and that is not a hub id either" in done.stderr


@pytest.mark.parametrize("reader", ["true", "head -1"])
def test_a_closed_reader_is_not_an_error(reader):
    line = f"{LOWQ} inspect demo --tensors | {reader} > /dev/null; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(line, shell=True, executable="/bin/bash").returncode == 0


@pytest.mark.parametrize("command", [c.name for c in main.app.registered_commands])
def test_every_command_has_help_with_examples(command, capsys):
    assert main.main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Examples:" in out
    assert f"lowq {command}" in out


def test_errors_are_one_line_and_an_exit_code(tmp_path):
    done = run("inspect", str(tmp_path / "nothing"))
    assert done.returncode == 3
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    debug = run("--debug", "inspect", str(tmp_path / "nothing"))
    assert "Traceback" in debug.stderr


def test_errors_with_json_are_one_object(tmp_path):
    done = run("inspect", str(tmp_path / "nothing"), "--json")
    assert json.loads(done.stdout)["exit_code"] == done.returncode == 3


def test_without_checkpoints_the_error_names_a_command(tmp_path):
    done = run("generate", "--prompt", "x", XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 3
    assert "lowq quantize demo" in done.stderr


def test_doctor_finds_this_machine_well():
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["ok"]
    names = {c["name"] for c in report["checks"]}
    assert {"torch", "cpu", "kernel cpu/int4", "kernel dequant", "kernel reference"} <= names


def test_help_at_80_columns_is_whole():
    listed = run("--help", COLUMNS="80", TERMINAL_WIDTH="80").stdout
    table = listed.split("Commands:")[1]
    assert "..." not in table
    assert max(map(len, listed.splitlines())) <= 80
    for command in main.app.registered_commands:
        (line,) = (row for row in table.splitlines() if row.startswith(f"  {command.name} "))
        assert len(line.split()) > 3, line
    page = run("quantize", "--help", COLUMNS="80", TERMINAL_WIDTH="80").stdout
    assert max(map(len, page.splitlines())) <= 80
    assert "\n    lowq quantize demo\n" in page, "an example is a line of its own"


def test_a_full_disk_behind_stdout_is_one_line():
    for args in (["inspect", "demo"], ["inspect", "demo", "--json"], ["--version"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run([LOWQ, *args], stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 4
        assert done.stderr == "lowq: the disk is full; make room and run the same command again\n"


def test_a_command_ends_without_taking_torch_apart(tmp_path):
    """The output is flushed, handlers registered with atexit run, and no module is destroyed."""
    code = """import atexit, sys, lowq_cli.main as m
class Left:
    def __del__(self):
        print("destroyed")
sys.left = Left()
atexit.register(lambda: print("handler"))
sys.argv = ["lowq", "inspect", "demo", "--json"]
m.run()"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    result, handler = done.stdout.splitlines()
    assert json.loads(result)["model_type"] == "llama"
    assert handler == "handler"


def test_transformers_does_not_import_hqq():
    """Where it is installed: it brings all of inductor."""
    code = """import atexit, sys, lowq_cli.main as m
atexit.register(lambda: print("torch._inductor.lowering" in sys.modules))
sys.argv = ["lowq", "eval", "demo", "--max-tokens", "600", "--json"]
m.run()"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[1:] == ["False"]


def test_an_error_after_the_result_prints_no_second_object(monkeypatch, capsys):
    def late(*_):
        console.out_json({"found": 1})
        raise UsageError("the plot cannot be written")

    monkeypatch.setattr("lowq_cli.interop.inspection.inspect_model", late)
    for _ in range(2):  # each run has one, whatever the one before it in this process did
        assert main.main(["inspect", "demo", "--json"]) == 2
        out, err = capsys.readouterr()
        assert json.loads(out) == {"found": 1}
        assert err == "lowq: the plot cannot be written\n"


def test_a_package_that_is_missing_is_named():
    """As after `pip install --no-deps`: it was an internal error, to be reported."""
    code = "import sys; sys.modules['uvicorn'] = None; import lowq_cli.main as m; sys.exit(m.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, "serve", "demo", "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "lowq: uvicorn is not installed, which lowq needs here; install it with pip"


@pytest.mark.parametrize("command", ["chat demo", "rm nothing", "rm --cached", "generate demo", "run demo"])
def test_a_closed_stdin_is_an_empty_one(command, tmp_path):
    """Python has None for it, whose `isatty` was an internal error."""
    line = f"{LOWQ} {command} --device cpu <" if "rm" not in command else f"{LOWQ} {command} <"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)} if "rm" in command else None
    closed, empty = (
        subprocess.run(["bash", "-c", line + end], capture_output=True, text=True, env=env) for end in ("&-", "/dev/null")
    )
    assert (closed.returncode, closed.stdout) == (empty.returncode, empty.stdout), closed.stderr
    assert "internal error" not in closed.stderr


def test_closed_streams_leave_their_numbers_to_no_file():
    code = "from lowq_cli import main; main._open_streams(); print(open(__file__).fileno() > 2, file=open('/dev/fd/9', 'w'))"
    line = f"{sys.executable} -c {shlex.quote(code.replace('__file__', repr(__file__)))} 9>&1 <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", line], capture_output=True, text=True).stdout == "True\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_stream_is_not_an_internal_error(closed):
    """Python has None for it: a line for stderr would go to stdout, and flushing it would be an internal error."""
    done = subprocess.run(["bash", "-c", f"{LOWQ} doctor --json {closed}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if closed == ">&-":
        assert "next: lowq run demo" in done.stderr
    else:
        assert json.loads(done.stdout)["ok"]


def test_characters_outside_stdouts_encoding_become_question_marks():
    code = "from lowq_cli import console, main; main._open_streams(); console.out('caf\\u00e9 \\ud800')"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "caf? ?\n", done.stderr


def test_bytes_that_are_not_utf8_are_one_line():
    for args, stdin in ((["--prompt", b"caf\xe9"], b""), (["--prompt", "-"], b"caf\xe9")):
        done = subprocess.run([LOWQ, "generate", "demo", *args], capture_output=True, input=stdin)
        assert done.returncode == 2
        assert done.stderr.decode() == "lowq: the prompt is not UTF-8 text; convert it, or check the locale\n"


def test_a_bare_lowq_in_a_terminal_keeps_the_lines_of_its_help():
    """It was filled into one paragraph."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    with redirect_stderr(Terminal()) as screen, redirect_stdout(screen):
        main.main([])
    shown = screen.getvalue().splitlines()
    assert "Commands:" in shown
    assert any(line.startswith("  quantize  ") for line in shown)
    assert len(shown) < 24, "a terminal's lines, with one for the prompt"
    assert max(map(len, shown)) <= 80
    assert all(any(line.startswith(f"  {c.name} ") for line in shown) for c in main.app.registered_commands)


def test_a_dry_run_writes_its_plan_to_stdout_and_quiet_leaves_the_result(tmp_path):
    done = run("quantize", "demo", "--dry-run", "--embedding", "keep", XDG_STATE_HOME=str(tmp_path))
    assert "bits per weight" in done.stdout
    assert "by lsq, on" in done.stdout
    assert "--embedding 8 would make the whole" in done.stdout
    assert "bits per weight" not in done.stderr
    quiet = run("generate", "demo", "--prompt", "Once", "--max-new-tokens", "2", "--device", "cpu", "--quiet")
    assert quiet.stdout.strip()
    assert quiet.stderr == ""


def test_the_version_is_that_of_the_package():
    import lowq

    assert run("--version").stdout == f"lowq {lowq.__version__}\n"


def test_tritons_digest_is_computed_during_torchs_import_with_a_gpu(monkeypatch):
    from lowq_cli import devices

    cache = pytest.importorskip("triton.runtime.cache", reason="a CPU's torch brings no Triton")
    asked = threading.Event()
    monkeypatch.setattr(cache, "triton_key", asked.set)
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: SimpleNamespace(cuDeviceGet=lambda *_: 1))
    for there, expected in ((0, False), (1, True)):
        monkeypatch.setattr(devices, "gpus", lambda there=there: there)
        devices.make_context(0, 0)
        assert asked.wait(60 if expected else 0.1) == expected


@pytest.mark.parametrize("command", ["ls", "quantize demo --dry-run", "generate demo --prompt Once", "run demo 'Once upon'"])
def test_a_working_folder_that_was_deleted_is_one_line(command, tmp_path):
    """torch's libraries end a process there, with a message of their own; other commands had an internal error."""
    line = f"mkdir gone; cd gone; rmdir ../gone; {LOWQ} {command}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        3,
        "lowq: the working folder does not exist any more; change to another one (cd)\n",
    )
    assert main.main(["quantize", "--help"]) == 0


EACH_HELP = """
from lowq_cli import main
for command in ((), *((name,) for name in main.ORDER)):
    print("\\0", *command, sep="")
    assert main.main([*command, "--help"]) == 0
"""


@pytest.mark.parametrize("columns", [40, 46, 52, 60, 79])
def test_help_fits_a_narrow_terminal(columns):
    """Of `lowq` and of each of its commands."""
    line, env = [sys.executable, "-P", "-c", EACH_HELP], {**os.environ, "COLUMNS": str(columns)}
    done = subprocess.run(line, capture_output=True, text=True, env=env, check=True)
    pages = [page.partition("\n") for page in done.stdout.split("\0")[1:]]
    assert [name for name, _, _ in pages] == ["", *main.ORDER]
    assert [line for _, _, page in pages for line in page.splitlines() if len(line) > columns] == []
    for name, _, page in pages:
        assert f"Usage: lowq {name}".strip() in page
        assert min(len(line.strip()) for line in page.splitlines() if "--help" in line) > 20, name  # its text is next to it
