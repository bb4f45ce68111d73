"""Every command that writes, killed before its n-th change of the disk, stopped by signals, side by side, its source changed.

Then the same command again: it leaves the bytes of one that nothing disturbed, and nothing beside them.
"""

import io
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from lowq_packers.errors import LowqError

CALLS = (
    *("pwrite", "write", "replace", "rename", "link", "fsync", "posix_fallocate", "ftruncate", "unlink", "rmdir", "mkdir"),
    "open",
)
SIGNALS = {"kill": signal.SIGKILL, "int": signal.SIGINT, "term": signal.SIGTERM, "hup": signal.SIGHUP}
UNTOLD = ("lowq.log",)  # a file that tells times


@dataclass(frozen=True)
class Command:
    """Something that writes `out` below a folder."""

    name: str
    run: Callable[[Path], object]


def commands(valid: dict[str, Path], text: Path) -> list[Command]:
    """One of each kind: runs with and without a text, fp8, budgets, folders and files of other formats, imports, tables."""
    from lowq_cli.interop.exporter import export
    from lowq_cli.interop.importer import runnable
    from lowq_cli.run.pipeline import quantize
    from lowq_packers.atomic import write_whole

    model, packed = valid["dense"], valid["packed"]
    how = {"bits": 4, "group": 32, "lm_head": "keep"}
    calib = {"calib": str(text), "calib_tokens": 4096}

    def importing(folder: Path) -> object:
        os.environ["XDG_CACHE_HOME"] = str(folder / "out")
        return runnable(valid["gptq"])

    return [
        Command("quantize", lambda folder: quantize(model, folder / "out", method="rtn", shard_size=20_000, **how)),
        Command(
            "quantize gptq",
            lambda folder: quantize(model, folder / "out", method="gptq", **calib, **how),
        ),
        Command("quantize fp8", lambda folder: quantize(model, folder / "out", format="fp8")),
        Command("export folder", lambda folder: export(packed, "compressed-tensors", folder / "out")),
        Command("export file", lambda folder: export(packed, "gguf", folder / "out")),
        Command("import", importing),
        Command("one file", lambda folder: write_whole(folder / "out" / "table.json", b"x" * 10_000)),
    ]


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    found = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file() or p.is_symlink()}
    return {n: p.read_bytes() for n, p in found.items() if p.name not in UNTOLD and not n.startswith("state/")}


@contextmanager
def acting(act: Callable[[int, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Inside, `act` runs in the place of every call that changes the disk (or opens a file)."""
    saved = {name: getattr(os, name) for name in CALLS}
    opened = io.open
    number = iter(range(1 << 60))

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **how: act(next(number), name, call, args, how)

    for name, call in saved.items():
        setattr(os, name, wrap(name, call))
    io.open = wrap("io.open", opened)  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, call in saved.items():
            setattr(os, name, call)
        io.open = opened


def calls_of(command: Command, folder: Path) -> int:
    """How many such calls a whole run makes."""
    seen = [0]

    def act(number: int, name: str, call: Callable[..., Any], args: tuple[Any, ...], how: dict[str, Any]) -> Any:
        seen[0] = number + 1
        return call(*args, **how)

    with acting(act):
        command.run(folder)
    return seen[0]


def in_child(work: Callable[[], object]) -> int:
    """Run in a process of its own; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in ("term", "hup"):
            signal.signal(SIGNALS[name], signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        work()
        code = 0
    except LowqError:
        code = 2
    except KeyboardInterrupt:
        code = 130
    finally:
        os._exit(code)


def stopped_at(command: Command, folder: Path, at: int, by: str) -> int:
    """Run in a child that gets a signal at its `at`-th call, in the midst of it where it writes. Its wait status."""

    def act(number: int, name: str, call: Callable[..., Any], args: tuple[Any, ...], how: dict[str, Any]) -> Any:
        if number == at:
            if name in ("pwrite", "write") and len(args[1]) > 1:
                call(args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:])
            os.kill(os.getpid(), SIGNALS[by])
            if by == "kill":
                time.sleep(60)
        return call(*args, **how)

    def work() -> None:
        with acting(act):
            command.run(folder)

    return os.waitpid(in_child(work), 0)[1]


def tried(command: Command, folder: Path, wanted: dict[str, bytes], calls: int, rng: Random, by: str) -> str:
    """Stop a run once to three times, run it again to its end: what is wrong then, or ""."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    at = [rng.randrange(calls) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    for n in at:
        stopped_at(command, folder, n, by)
    try:
        command.run(folder)
    except Exception as e:
        return f"{command.name}, {by} at {at}: the rerun ends in {type(e).__name__}: {e}"
    return differences(wanted, files(folder), f"{command.name}, {by} at {at}")


def differences(wanted: dict[str, bytes], found: dict[str, bytes], what: str) -> str:
    """What a folder has too much, too little or otherwise; "" if nothing."""
    if left := sorted(found.keys() - wanted.keys()):
        return f"{what}: left {left[0]}"
    if lost := sorted(wanted.keys() - found.keys()):
        return f"{what}: lost {lost[0]}"
    return next((f"{what}: {n} has other bytes" for n in wanted if wanted[n] != found[n]), "")


def side_by_side(command: Command, folder: Path, wanted: dict[str, bytes]) -> str:
    """Two processes at once: one is done, the other too or refused; then one more, which finds it done."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    pids = [in_child(lambda: command.run(folder)) for _ in range(2)]
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    if codes not in ([0, 0], [0, 2]):
        return f"{command.name}: two at once end in {codes}"
    return differences(wanted, files(folder), f"{command.name}, two at once")


def source_changed(valid: dict[str, Path], folder: Path, rng: Random) -> str:
    """A run killed, its source edited, the same command: refused, or with --fresh what the new source gives."""
    from safetensors.torch import load_file, save_file

    from lowq_cli.run.pipeline import quantize

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    model = shutil.copytree(valid["dense"], folder / "model")
    how = {"bits": 4, "group": 32, "lm_head": "keep", "method": "rtn", "shard_size": 20_000}
    command = Command("quantize", lambda to: quantize(model, to / "out", **how))
    stopped_at(command, folder, rng.randrange(30, 120), "kill")
    found = load_file(model / "model.safetensors")
    save_file({n: t * 2 for n, t in found.items()}, model / "model.safetensors", metadata={"format": "pt"})
    refused = False
    try:
        command.run(folder)
    except LowqError:
        refused = True
        quantize(model, folder / "out", fresh=True, **how)
    quantize(model, folder / "new", **how)
    said = differences(files(folder / "new"), files(folder / "out"), "source changed after a kill")
    return said and f"{said} (refused first: {refused})"
