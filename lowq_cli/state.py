"""What is remembered in the user's home between commands: the checkpoints that `quantize` wrote, and the exports."""

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
OWNER = "lowq-run"  # in an unfinished folder: whose it is
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
REMEMBERED = 100  # checkpoints, exports


def is_cached(path: Path) -> bool:
    """Whether a path lies in the user's cache folder."""
    try:
        return path.absolute().is_relative_to(cache_dir().absolute())
    except NotFoundError:
        return False


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into errors that say the way out."""
    try:
        yield
    except OSError as e:
        if full := disk_full(e, path):
            raise full from e
        cached = is_cached(path)
        way_out = "name another cache folder: XDG_CACHE_HOME=DIR" if cached else "use another --out"
        raise UsageError(f"cannot write to {path}: {e.strerror}; {way_out}") from e


def user_path(name: str | os.PathLike[str]) -> Path:
    """The path that a person named, its ~ replaced; ~ stays where it names no user of this machine."""
    try:
        return Path(name).expanduser()
    except RuntimeError:  # of pathlib, where ~NAME names no user
        return Path(name)


def as_argument(model: str | os.PathLike[str]) -> str:
    """A model as a command takes it in any working folder: a whole path, or the name of a hub's, quoted for a shell."""
    path = user_path(model)
    return shlex.quote(str(path.absolute()) if os.fspath(model) != "demo" and path.exists() else os.fspath(model))


@dataclass(frozen=True)
class Known:
    """A checkpoint that `quantize` wrote: its folder, the working folder it was written from ("" if unknown), when, and by
    which run ("" of an older lowq), which its report repeats. source: the model it was made from, as commands take it ("" if
    unknown).
    """

    checkpoint: Path
    where: str = ""
    time: float = 0.0
    run: str = ""
    source: str = ""


def known(said: Callable[[str], object] = lambda line: None) -> list[Known]:
    """The checkpoints written by this user that are still there, the newest last. said: told where the list is damaged.

    Raises NotFoundError: no home.
    """
    path = state_dir() / LAST
    try:
        if not path.exists():
            return []
        table = json.loads(read_text(path, MAX_CONFIG))
        rows = table["known"] if "known" in table else [{"checkpoint": table["checkpoint"]}]  # the latter: an older lowq's
        found = [
            Known(
                Path(r["checkpoint"]),
                str(r.get("where", "")),
                float(r.get("time", 0)),
                str(r.get("run", "")),
                str(r.get("source", "")),
            )
            for r in rows
        ]
    except (LowqError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # no JSON, or of another shape
        said(f"the list of checkpoints in {path} cannot be read; the next one that is written begins it anew")
        return []
    return [k for k in found if k.checkpoint.is_dir()]


def source_of(checkpoint: Path, report: Mapping[str, Any]) -> str | None:
    """The model that a checkpoint was made from, as commands take it here; None where it is not known, or gone.

    The report of a local model says its name alone, which other machines may see.
    """
    folder, named = checkpoint.resolve(), report.get("source")
    mine = next((k.source for k in known() if k.checkpoint == folder and k.run == report.get("run", "")), "")
    if mine and (not os.path.isabs(mine) or Path(mine).exists()):
        return mine
    return named if isinstance(named, str) and (named == "demo" or HUB_ID.fullmatch(named)) else None


def remember(checkpoint: Path, run: str = "", source: str = "") -> None:
    """Note `checkpoint`, written by `run` from `source`, as the last one; a home that is read-only or not there is no error."""
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
    """Note that `target` is begun, so that `lowq ls` finds what an interrupted run leaves; without a home it will not."""
    folder = target.parent.resolve() / target.name
    if is_cached(folder):  # where `ls` looks anyway
        return
    with suppress(OSError, LowqError):
        state_dir().mkdir(parents=True, exist_ok=True)
        with alone(state_dir()):
            _write(known(), [*(b for b in begun() if b != folder), folder][-REMEMBERED:])


def begun() -> list[Path]:
    """What runs of this user have begun to write and not finished, the newest last; some are gone since."""
    try:
        found = json.loads(read_text(state_dir() / LAST, MAX_CONFIG)).get("begun", [])
        return [Path(p) for p in found if isinstance(p, str)]
    except (LowqError, ValueError, TypeError, AttributeError, RecursionError):  # no file, or JSON of another shape
        return []


def _write(rows: list[Known], begun: list[Path]) -> None:
    """Set down the known checkpoints, and what is begun."""
    plain = [{**asdict(k), "checkpoint": str(k.checkpoint)} for k in rows]
    write_whole(state_dir() / LAST, json.dumps({"known": plain, "begun": [*map(str, begun)]}).encode())


def checkpoint_or_last(given: str | None) -> str:
    """`given`, or the last checkpoint written from this working folder, or the last of all (named on stderr).

    Raises NotFoundError when there is none.
    """
    if given is not None:
        return given
    found = known(console.say)
    if not found:
        raise NotFoundError("no checkpoint given, and none known that was written on this machine; run: lowq quantize demo")
    here = [k for k in found if k.where == str(Path.cwd())]
    last = (here or found)[-1]
    elsewhere = f" (written from {last.where}; none was from here)" if last.where and not here else ""
    console.say(f"using {last.checkpoint}{elsewhere}")
    return str(last.checkpoint)


def was_exported(out: Path, run: str) -> bool:
    """Whether `out` is what the export `run` wrote there, no file changed since by its size and time."""
    return _exports().get(str(out.absolute())) == [run, _stamp(out)]


def remember_export(out: Path, run: str, made: Path) -> None:
    """Note what an export wrote, `made`, which becomes `out`, so that the same command again finds it done.

    Without a home it will not.
    """
    with suppress(OSError, NotFoundError), alone(state_dir()):
        rows = {**_exports(), str(out.absolute()): [run, _stamp(made)]}
        write_whole(state_dir() / EXPORTS, json.dumps(dict(list(rows.items())[-REMEMBERED:])).encode())


def run_of(model: str, recipe: str | None) -> str | None:
    """The checkpoint in the cache that `lowq run` made of a folder here, or of the bundled model, neither changed since."""
    folder = DEMO if model == "demo" else user_path(model)
    if not folder.is_dir():
        return None
    made, *stamps = _runs().get(f"{folder.resolve()} {recipe or ''}", [""])
    if not made or stamps != [_stamp(folder), _stamp(Path(made))]:
        return None
    return str(made)


def remember_run(model: str, recipe: str | None, made: str) -> None:
    """Note what `lowq run` made of a model, so that the next run need not look at it; without a home it will not."""
    folder = DEMO if model == "demo" else user_path(model)
    named = recipe is None or recipe.isalnum()  # a file may change
    if not folder.is_dir() or not named or not is_cached(Path(made)) or run_of(model, recipe):
        return
    with suppress(OSError, NotFoundError), alone(state_dir()):
        rows = {**_runs(), f"{folder.resolve()} {recipe or ''}": [made, _stamp(folder), _stamp(Path(made))]}
        write_whole(state_dir() / RUNS, json.dumps(dict(list(rows.items())[-REMEMBERED:])).encode())


def _runs() -> dict[str, Any]:
    try:
        found = json.loads(read_text(state_dir() / RUNS, MAX_CONFIG))
    except (LowqError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _exports() -> dict[str, Any]:
    try:
        found = json.loads(read_text(state_dir() / EXPORTS, MAX_CONFIG))
    except (LowqError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _stamp(out: Path) -> list[list[str | int]]:
    """Name, size and time of change of every file of a folder, but for its OWNER; of a file the last two."""
    if not out.is_dir():
        return [["", out.stat().st_size, out.stat().st_mtime_ns]] if out.is_file() else []
    files = sorted(f for f in out.iterdir() if f.name != OWNER)
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
