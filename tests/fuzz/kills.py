"""Every command that writes, killed before its n-th change of the disk, stopped by signals, side by side, its source changed.

Then the same command again: it leaves the bytes of one that nothing disturbed, and nothing beside them.
"""

import io
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from _pytest.monkeypatch import MonkeyPatch

from lowq_cli.files.source import HEAD_NOTES
from lowq_packers.errors import LowqError, UsageError

CALLS = (
    *("pwrite", "write", "replace", "rename", "link", "fsync", "posix_fallocate", "ftruncate", "unlink", "rmdir", "mkdir"),
    "open",
)
SIGNALS = {"kill": signal.SIGKILL, "int": signal.SIGINT, "term": signal.SIGTERM, "hup": signal.SIGHUP}
SLOW = (
    "quantize learn",
    "quantize distill",
    "quantize --bpw",
    "quantize --max-kl",
    "quantize --calib self",
    "refine",
)  # seconds a run: stopped a quarter as often
TALK = [{"role": "user", "content": "x" * 9999}]
UNTOLD = ("lowq.log", "rate.json")  # files that tell times
TIMED = ("seconds", "speed", "out")  # fields of a draft head's notes that another run, or another folder, has otherwise
REQUESTS = [{"custom_id": f"r{i}", "url": "/v1/completions", "body": {"prompt": "x" * i}} for i in range(3)]


@dataclass(frozen=True)
class Command:
    """A command that writes below a folder. before: a command that runs there first, undisturbed."""

    name: str
    run: Callable[[Path], object]
    before: Callable[[Path], object] = lambda folder: None


def begin(command: Command, folder: Path) -> None:
    """An empty folder with a user's home folders, and the inputs of a command."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.environ["XDG_STATE_HOME"], os.environ["XDG_CACHE_HOME"] = str(folder / "state"), str(folder / "cache")
    tempfile.tempdir = str(folder / "tmp")  # where a stopped command may leave something, too
    (folder / "tmp").mkdir()
    command.before(folder)


def commands(valid: dict[str, Path], text: Path) -> list[Command]:
    """One of each kind: every method, fp8, budgets, own texts, exports, imports, tables, uploads, talks, heads, batches."""
    from lowq_cli.commands import chat
    from lowq_cli.interop.exporter import export
    from lowq_cli.interop.importer import runnable
    from lowq_cli.interop.serving import prepare
    from lowq_cli.plan.recipe import make_recipe
    from lowq_cli.run.pipeline import quantize
    from lowq_cli.run.refine import Refining
    from lowq_cli.tuning.tuner import save
    from lowq_packers.atomic import write_whole

    model, packed = valid["dense"], valid["packed"]
    calib = {"calib": str(text), "calib_tokens": 4096}

    def quantizing(name: str, **how: Any) -> Command:
        how = {"lm_head": "keep"} | ({} if {"format", "bpw", "max_kl"} & how.keys() else {"bits": 4, "group": 32}) | how

        def run(folder: Path) -> None:
            own = how.get("calib") == "self"
            with small(own):
                quantize(valid["speaking"] if own or "max_kl" in how else model, folder / "out", **how)

        return Command(name, run)

    def and_export(folder: Path) -> None:
        quantize(model, folder / "out", bits=4, group=32, method="rtn", zero="none", lm_head="keep")
        export(folder / "out", "compressed-tensors", folder / "exported")

    def refined(folder: Path) -> None:
        fixed = {"method": "gptq", "group": "channel", "dtype": "float32", "lm_head": "keep"}
        with small(False):
            refining = Refining(str(valid["theirs"]), str(model), make_recipe(**fixed, **calib), str(folder / "out"))
            list(refining.run())
            refining.export()

    def copied(folder: Path) -> None:
        shutil.copytree(packed, folder / "out")

    return [
        quantizing("quantize", method="rtn", shard_size=20_000),
        quantizing("quantize lsq", method="lsq"),
        quantizing("quantize gptq", method="gptq", **calib),
        quantizing("quantize awq", method="awq", **calib),
        quantizing("quantize learn", method="learn", **calib),
        quantizing("quantize distill", method="distill", **calib),
        quantizing("quantize --bpw", method="rtn", bpw=5.0, **calib),
        quantizing("quantize --max-kl", method="rtn", max_kl=1e-5, group=32, **calib),
        quantizing("quantize --format fp8", format="fp8"),
        quantizing("quantize --calib self", method="gptq", calib="self", calib_tokens=4096),
        Command("quantize --export", and_export),
        Command("refine", refined),
        Command("export, a folder", lambda folder: export(packed, "compressed-tensors", folder / "out")),
        Command("export, a file", lambda folder: export(packed, "gguf", folder / "out")),
        Command("generate: import", lambda folder: runnable(valid["gptq"])),
        Command("serve: export", lambda folder: prepare(packed, native=False)),
        Command("chat: /save", lambda folder: _saved(chat.save, TALK, folder / "talk.json")),
        Command("tune", lambda folder: save(folder / "out", torch.device("cpu"), entries()), copied),
        Command("push", lambda folder: pushed(folder / "out", folder / "hub"), copied),
        Command("draft train", lambda folder: drafted(valid["deep"], text, folder / "out", 0.0)),
        Command("draft train, one save", lambda folder: drafted(valid["deep"], text, folder / "out", 60.0)),
        Command("batch", lambda folder: answered(folder / "out"), requested),
        Command("one file", lambda folder: write_whole(folder / "out" / "table.json", b"x" * 10_000)),
    ]


@contextmanager
def small(own: bool) -> Iterator[None]:
    """Short windows of text, learnt from once; with `own` the model's own is written by few side by side, and a quick copy."""
    from lowq_cli.calibrate import learn, requirements, texts
    from lowq_cli.run import own_text, own_text_plan

    with MonkeyPatch.context() as patch:
        patch.setattr(texts, "WINDOW", 32)
        patch.setattr(texts, "BATCH", 2)
        patch.setattr(learn, "EPOCHS", 1)
        patch.setattr(requirements, "PASSES", 1)
        if own:
            patch.setattr(own_text_plan, "SIDE", {"cpu": 8})
            patch.setattr(own_text, "FEW", 1)
            patch.setattr(own_text_plan, "generating_bits", lambda *_: 8)
        yield


def _saved(save: Callable[[Any, str], None], messages: Any, path: Path) -> None:
    """/save, which never writes over a file: one that is there must be whole."""
    try:
        save(messages, str(path))
    except UsageError:
        assert json.loads(path.read_text()) == messages


def drafted(model: Path, text: Path, out: Path, save_s: float) -> None:
    """`lowq draft train` of 18 steps, with its state saved every 10 steps, or once at the end."""
    from lowq_cli.run.draft_training import train
    from lowq_cli.run.draft_training_plan import plan_training

    with small(False):
        for _ in train(*plan_training(str(model), str(out), 256, str(text), None, 0, "cpu"), save_s=save_s):
            pass


def unfinished(model: Path, text: Path, out: Path) -> None:
    """The folder of a training of `drafted` that ended after its first saved state."""
    from lowq_cli.files.source import HEAD_STATE
    from lowq_cli.run.draft_training import train
    from lowq_cli.run.draft_training_plan import plan_training

    with small(False):
        steps = train(*plan_training(str(model), str(out), 256, str(text), None, 0, "cpu"), save_s=0.0)
        while not (out / HEAD_STATE).exists():
            next(steps)
        steps.close()


def requested(folder: Path) -> None:
    """The requests that `answered` reads."""
    (folder / "out").mkdir()
    (folder / "out" / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in REQUESTS))


def answered(folder: Path) -> None:
    """`lowq batch` of the requests in a folder, whose model answers each by an echo."""
    import asyncio

    from lowq_cli.commands import batch
    from lowq_cli.serving.http import batch_file, opening

    async def echo(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    def answer(_: Any, lines: Any, answers: Any) -> dict[str, int]:
        return asyncio.run(batch_file.run(echo, lines, 1, answers.write, lambda: ""))

    before = signal.getsignal(signal.SIGTERM)
    with MonkeyPatch.context() as patch:
        patch.setattr(batch, "_answer", answer)
        patch.setattr(batch.console, "say", lambda *_: None)
        patch.setattr(opening, "Opening", lambda *_: SimpleNamespace(stop=lambda: None))  # it starts an engine's process
        patch.setattr(batch_file, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="0" * 32)))
        try:
            batch.batch(str(folder / "requests.jsonl"), "demo", device="cpu")
        finally:
            signal.signal(signal.SIGTERM, before)


def entries() -> list[Any]:
    """Plausible results of a measurement of kernels."""
    from lowq_kernels.dispatch.tuning_file import Entry

    return [
        Entry(4, 32, "none", "bfloat16", "rowstream", 128, 128, M, "reference", {}, 10.0 * M, "0" * 12, ()) for M in (1, 2, 4)
    ]


class Hub:
    """The hub, as far as `push` asks it: a folder that takes files whole."""

    folder = Path()

    def create_repo(self, repo: str, **_: Any) -> str:
        return f"https://hub/{repo}"

    def upload_folder(self, folder_path: str, allow_patterns: list[str], **_: Any) -> None:
        from lowq_packers.atomic import write_whole

        for path in sorted(Path(folder_path).iterdir()):
            if any(path.match(p) for p in allow_patterns):
                write_whole(self.folder / path.name, path.read_bytes())

    def upload_file(self, path_or_fileobj: bytes, path_in_repo: str, **_: Any) -> None:
        from lowq_packers.atomic import write_whole

        write_whole(self.folder / path_in_repo, path_or_fileobj)


def pushed(checkpoint: Path, hub: Path) -> None:
    """`lowq push` to a folder."""
    import huggingface_hub

    from lowq_cli.interop.publish import publish

    with MonkeyPatch.context() as patch:
        patch.setattr(Hub, "folder", hub)
        patch.setattr(huggingface_hub, "HfApi", Hub)
        patch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
        publish(checkpoint, "me/model")


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    result = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file() or p.is_symlink()}
    return {
        n: b"" if p.is_symlink() and not p.exists() else _timeless(p)
        for n, p in result.items()
        if p.name not in UNTOLD and not n.startswith("state/")
    }


def _timeless(path: Path) -> bytes:
    """A file's contents; of a draft head's notes without the time."""
    if path.name != HEAD_NOTES:
        return path.read_bytes()
    return json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in TIMED}).encode()


@contextmanager
def acting(act: Callable[[int, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Inside, `act` runs in the place of every call that changes the disk (or opens a file)."""
    saved = {name: getattr(os, name) for name in CALLS}
    opened = io.open
    number = iter(range(1 << 60))

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **how: act(next(number), name, call, args, how)

    class Raw(io.FileIO):
        """A file whose writes `act` sees, too: a buffered file writes without `os`."""

        def write(self, content: Any) -> int:
            return int(act(next(number), "buffered", lambda _, part: io.FileIO.write(self, part), (self, content), {}))

        def truncate(self, size: int | None = None) -> int:
            return int(act(next(number), "truncate", io.FileIO.truncate, (self, size), {}))

    def opening(file: Any, mode: str = "r", *args: Any, **how: Any) -> Any:
        if mode in ("wb", "ab"):
            return io.BufferedWriter(Raw(file, mode))
        return opened(file, mode, *args, **how)

    for name, call in saved.items():
        setattr(os, name, wrap(name, call))
    io.open = wrap("io.open", opening)  # type: ignore[assignment]
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
            # after a part of a write and Python's own signal, a buffered file goes on with the rest when it is closed
            if name in ("pwrite", "write", *["buffered"] * (by == "kill")) and len(args[1]) > 1:
                call(args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:])
            os.kill(os.getpid(), SIGNALS[by])
            if by == "kill":
                time.sleep(60)
        return call(*args, **how)

    def work() -> None:
        with acting(act):
            command.run(folder)

    return os.waitpid(in_child(work), 0)[1]


def tried(command: Command, folder: Path, wanted: dict[str, bytes], at: list[int], by: str) -> str:
    """Stop a run at each of these calls in turn, then run it to its end: the fault found then, or ""."""
    begin(command, folder)
    for n in at:
        stopped_at(command, folder, n, by)
    try:
        command.run(folder)
    except Exception as e:
        return f"{command.name}, {by} at {at}: the rerun ends in {type(e).__name__}: {e}"
    return differences(wanted, files(folder), f"{command.name}, {by} at {at}")


def differences(wanted: dict[str, bytes], found: dict[str, bytes], what: str) -> str:
    """The files that a folder has too many, lacks, or has with other contents; "" if none."""
    if left := sorted(found.keys() - wanted.keys()):
        return f"{what}: left {left[0]}"
    if lost := sorted(wanted.keys() - found.keys()):
        return f"{what}: lost {lost[0]}"
    return next((f"{what}: {n} has other bytes" for n in wanted if wanted[n] != found[n]), "")


def side_by_side(command: Command, folder: Path, wanted: dict[str, bytes]) -> str:
    """Two processes at once: one is done, the other too or refused; then one more, which finds it done."""
    begin(command, folder)
    pids = [in_child(lambda: command.run(folder)) for _ in range(2)]
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    if codes not in ([0, 0], [0, 2]):
        return f"{command.name}: two at once end in {codes}"
    return differences(wanted, files(folder), f"{command.name}, two at once")


CHANGING = (
    "quantize",
    "quantize gptq",
    "export",
    "draft train",
)  # an import's folder is named by its source: another one is another folder


def source_changed(valid: dict[str, Path], text: Path, folder: Path, rng: Random, only: str | None = None) -> tuple[str, str]:
    """A run killed, its source edited, the same command: refused, or with --fresh the new source's result.

    The command, and what was wrong or "".
    """
    from safetensors.torch import load_file, save_file

    from lowq_cli.interop.exporter import export
    from lowq_cli.run.pipeline import quantize

    name = rng.choice(CHANGING) if only is None else only
    begin(Command(name, print), folder)
    sources = {"export": "packed", "draft train": "deep"}
    model = shutil.copytree(valid[sources.get(name, "dense")], folder / "model")
    (model / "lowq_report.json").unlink(missing_ok=True)

    def run(out: Path, fresh: bool = False) -> None:
        if name == "export":
            export(model, "compressed-tensors", out)
        elif name == "draft train":
            drafted(model, text, out, 0.0)
        else:
            how = {"method": "gptq", "calib": str(text), "calib_tokens": 4096} if "gptq" in name else {"method": "rtn"}
            with small(False):
                quantize(model, out, bits=4, group=32, lm_head="keep", shard_size=20_000, fresh=fresh, **how)

    stopped_at(Command(name, lambda to: run(to / "out")), folder, rng.randrange(5, 90), "kill")
    for path in model.glob("*.safetensors"):
        result = {n: t * 2 if t.is_floating_point() else t for n, t in load_file(path).items()}
        save_file(result, path, metadata={"format": "pt"})
    refused = False
    try:
        run(folder / "out")
    except LowqError:
        refused = True
        if name in sources:  # killed when all was there: what another source gave is not written over
            shutil.rmtree(folder / "out", ignore_errors=True)
        run(folder / "out", fresh=True)
    run(folder / "new")
    output = differences(files(folder / "new"), files(folder / "out"), f"{name}, source changed after a kill")
    left = [p.name for p in folder.iterdir() if p.name not in ("model", "out", "new", "state", "cache", "tmp")]
    left += [f"tmp/{p.name}" for p in (folder / "tmp").iterdir()]
    return name, (output and f"{output} (refused first: {refused})") or (f"{name}: left {left[0]}" if left else "")
