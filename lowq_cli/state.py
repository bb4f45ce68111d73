"""State in the user's home that commands share: the checkpoints that `quantize` wrote, and the exports."""

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowq_cli import console
from lowq_packers.atomic import alone, write_whole
from lowq_packers.errors import LowqError, NotFoundError, UsageError, disk_full
from lowq_packers.home import cache_dir, state_dir
from lowq_packers.regular import MAX_CONFIG, read_text

LAST = "last.json"
EXPORTS = "exports.json"
RUNS = "runs.json"
DEMO = Path(__file__).parent / "demo"
OWNER = "lowq-run"  # a file in an unfinished folder: the run that writes it
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
REMEMBERED = 100  # max. number of remembered checkpoints, and of exports


def is_cached(path: Path) -> bool:
    """Whether a path is in the user's cache folder."""
    try:
        return path.absolute().is_relative_to(cache_dir().absolute())
    except NotFoundError:
        return False


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert errors of the operating system to errors that name the way out."""
    try:
        yield
    except OSError as e:
        if full := disk_full(e, path):
            raise full from e
        raise UsageError(f"cannot write to {path}: {e.strerror}; {another_place(path)}") from e


def another_place(path: Path) -> str:
    """How a user has files written elsewhere than to `path`."""
    if is_cached(path):
        return "name another cache folder: XDG_CACHE_HOME=DIR"
    with suppress(NotFoundError):
        if path.absolute().is_relative_to(state_dir().absolute()):
            return "name another state folder: XDG_STATE_HOME=DIR"
    return "use another --out"


def name_of(model: str | os.PathLike[str]) -> str:
    """A path or name as text. Raises UsageError for anything else, such as a model that is loaded already."""
    if not isinstance(model, (str, os.PathLike)):
        raise UsageError(f"a {type(model).__name__} is not a path or a name; give a folder, a hub id, or demo")
    return os.fspath(model)


def user_path(name: str | os.PathLike[str]) -> Path:
    """The user's path with ~ expanded; ~NAME stays if this machine has no such user. Raises UsageError as `name_of`."""
    name = name_of(name)
    try:
        return Path(name).expanduser()
    except RuntimeError:  # pathlib's error if ~NAME is not a user
        return Path(name)


def as_argument(model: str | os.PathLike[str]) -> str:
    """A model as a command argument for any working folder: an absolute path or a hub id, quoted for a shell."""
    path = user_path(model)
    return shlex.quote(str(path.absolute()) if os.fspath(model) != "demo" and path.exists() else os.fspath(model))


@dataclass(frozen=True)
class Known:
    """A checkpoint that `quantize` wrote: its folder or GGUF file, the working folder of that command ("" if unknown), the
    time, and the id of the run, which is also in its report ("" of a file, or from an older lowq). source: the model it was
    made from, as a command argument ("" if unknown).
    """

    checkpoint: Path
    where: str = ""
    time: float = 0.0
    run: str = ""
    source: str = ""


def known(say: Callable[[str], object] = lambda line: None) -> list[Known]:
    """The existing checkpoints that this user wrote, the newest last. say: called with a message if the list is damaged.

    Raises NotFoundError if this user has no home.
    """
    path = state_dir() / LAST
    try:
        if not path.exists():
            return []
        table = json.loads(read_text(path, MAX_CONFIG))
        rows = table["known"] if "known" in table else [{"checkpoint": table["checkpoint"]}]  # the second form: an older lowq
        entries = [
            Known(
                Path(r["checkpoint"]),
                str(r.get("where", "")),
                float(r.get("time", 0)),
                str(r.get("run", "")),
                str(r.get("source", "")),
            )
            for r in rows
        ]
    except (OSError, LowqError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # or another structure
        say(f"the list of checkpoints in {path} cannot be read; the next one that is written begins it anew")
        return []
    return [k for k in entries if _is_there(k.checkpoint)]


def _is_there(checkpoint: Path) -> bool:
    """Whether a checkpoint still exists; one that this user may not see at the moment is not forgotten."""
    try:
        return checkpoint.is_dir() or (checkpoint.suffix == ".gguf" and checkpoint.is_file())
    except PermissionError:
        return True


def source_of(checkpoint: Path, report: Mapping[str, Any]) -> str | None:
    """The model that a checkpoint was made from, as a command argument; None if it is unknown or no longer exists.

    The report of a local model contains only its name, without the path, because other machines may see the report.
    """
    folder, named = checkpoint.resolve(), report.get("source")
    mine = next((k.source for k in known() if k.checkpoint == folder and k.run == report.get("run", "")), "")
    if mine and (not os.path.isabs(mine) or Path(mine).exists()):
        return mine
    return named if isinstance(named, str) and (named == "demo" or HUB_ID.fullmatch(named)) else None


def remember(checkpoint: Path, run: str = "", source: str = "") -> None:
    """Record `checkpoint`, written by `run` from `source`, as the last one. A read-only or missing home is not an error."""
    folder = checkpoint.resolve()
    source = str(user_path(source).resolve()) if source and user_path(source).exists() else source
    try:
        state_dir().mkdir(parents=True, exist_ok=True)
        with alone(state_dir()):
            others = [k for k in known(console.say) if k.checkpoint != folder][1 - REMEMBERED :]
            _write([*others, Known(folder, str(Path.cwd()), time.time(), run, source)], [b for b in begun() if b != folder])
    except (OSError, NotFoundError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        console.say(f"note: could not remember this checkpoint for later commands ({why})")


def begin(target: Path) -> None:
    """Record that a run writes `target`, so that `lowq ls` finds it after an interruption. Without a home, nothing happens."""
    folder = target.parent.resolve() / target.name
    if is_cached(folder):  # `ls` always lists the cache
        return
    with suppress(OSError, LowqError):
        state_dir().mkdir(parents=True, exist_ok=True)
        with alone(state_dir()):
            _write(known(), [*(b for b in begun() if b != folder), folder][-REMEMBERED:])


def begun() -> list[Path]:
    """The outputs that runs of this user began and did not finish, the newest last; some may no longer exist."""
    try:
        paths = json.loads(read_text(state_dir() / LAST, MAX_CONFIG)).get("begun", [])
        return [Path(p) for p in paths if isinstance(p, str)]
    except (LowqError, ValueError, TypeError, AttributeError, RecursionError):  # no file, or another structure
        return []


def _write(rows: list[Known], begun: list[Path]) -> None:
    """Write the list of known checkpoints and unfinished outputs."""
    plain = [{**asdict(k), "checkpoint": str(k.checkpoint)} for k in rows]
    write_whole(state_dir() / LAST, json.dumps({"known": plain, "begun": [*map(str, begun)]}).encode())


def checkpoint_or_last(given: str | None) -> str:
    """`given`, or the last checkpoint written from this working folder, or the last of all (named on stderr).

    Raises NotFoundError when there is none.
    """
    if given is not None:
        return given
    checkpoints = known(console.say)
    if not checkpoints:
        raise NotFoundError("no checkpoint was given, and lowq has not written one on this machine; run: lowq quantize demo")
    here = [k for k in checkpoints if k.where == str(Path.cwd())]
    last = (here or checkpoints)[-1]
    elsewhere = f" (written from {last.where}; none was from here)" if last.where and not here else ""
    console.say(f"using {last.checkpoint}{elsewhere}")
    return str(last.checkpoint)


def was_exported(out: Path, run: str) -> bool:
    """Whether `out` is the unchanged output of the export `run`, by the size and time of its files."""
    return export_of(out)[0] == run


def export_of(out: Path) -> tuple[str, dict[str, Any]]:
    """The run that wrote `out` and the facts recorded with it; ("", {}) if it is unknown or `out` has changed since."""
    run, stamp, *facts = _exports().get(str(out.absolute()), ["", None])
    return (run, facts[0] if facts else {}) if stamp == _stamp(out) else ("", {})


def exported() -> list[Path]:
    """The exports outside of the cache, the newest last; some may have changed by now, or no longer exist."""
    return [out for out in map(Path, _exports()) if not is_cached(out) and not os.path.islink(out)]


def remember_export(out: Path, run: str, written: Path, facts: Mapping[str, Any] | None = None) -> None:
    """Record an export's output `written`, which will be renamed to `out`, so that repeating the command does no work.

    facts: plain values about it, for `export_of`. Without a home, nothing is recorded.
    """
    with suppress(OSError, NotFoundError), alone(state_dir()):
        rows = {**_exports(), str(out.absolute()): [run, _stamp(written), *([facts] if facts else [])]}
        write_whole(state_dir() / EXPORTS, json.dumps(dict(list(rows.items())[-REMEMBERED:])).encode())


def run_of(model: str, recipe: str | None) -> str | None:
    """The cached checkpoint that `lowq run` made from a local folder or the bundled model, if neither has changed since."""
    folder = DEMO if model == "demo" else user_path(model)
    if not os.path.isdir(folder):
        return None
    checkpoint, *stamps = _runs().get(f"{folder.resolve()} {recipe or ''}", [""])
    try:
        same = stamps == [_stamp(folder), _stamp(Path(checkpoint))]
    except OSError:  # some of it cannot be read: what opens it says so
        return None
    return str(checkpoint) if checkpoint and same else None


def remember_run(model: str, recipe: str | None, checkpoint: str) -> None:
    """Record the checkpoint that `lowq run` made from a model, so that the next run need not read the model.

    Without a home, nothing is recorded.
    """
    folder = DEMO if model == "demo" else user_path(model)
    named = recipe is None or recipe.isalnum()  # a recipe file can change
    if not folder.is_dir() or not named or not is_cached(Path(checkpoint)) or run_of(model, recipe):
        return
    with suppress(OSError, NotFoundError), alone(state_dir()):
        rows = {**_runs(), f"{folder.resolve()} {recipe or ''}": [checkpoint, _stamp(folder), _stamp(Path(checkpoint))]}
        write_whole(state_dir() / RUNS, json.dumps(dict(list(rows.items())[-REMEMBERED:])).encode())


def _runs() -> dict[str, Any]:
    try:
        entries = json.loads(read_text(state_dir() / RUNS, MAX_CONFIG))
    except (LowqError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _exports() -> dict[str, Any]:
    try:
        entries = json.loads(read_text(state_dir() / EXPORTS, MAX_CONFIG))
    except (LowqError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _stamp(out: Path) -> list[list[str | int]]:
    """Name, size and modification time of every file of a folder except OWNER; for a single file its size and time."""
    if not out.is_dir():
        return [["", out.stat().st_size, out.stat().st_mtime_ns]] if out.is_file() else []
    files = sorted(f for f in out.iterdir() if f.name != OWNER)
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
