"""The folders and files on this disk that lowq wrote and remembers: checkpoints, exports, unfinished output, and the cache."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lowq_cli import cached_models, state
from lowq_cli.cached_models import contents, saying
from lowq_cli.files.folder import BusyError, busy, discard, held, left
from lowq_cli.files.locks import is_held
from lowq_cli.files.source import CONFIG, HEAD, HEAD_NOTES, HEAD_STATE
from lowq_cli.files.weight_files import SINGLE
from lowq_cli.run import output_folder
from lowq_packers.atomic import sweep
from lowq_packers.errors import NotFoundError, UsageError
from lowq_packers.regular import open_regular

# Kind -> glob in the cache: checkpoints, then the folders of what quantizing generated and measured, one place each.
CACHED = {**cached_models.KINDS, "export": "exports/*/*"}
CACHED |= {"own text": "own-text", "sensitivity": "sensitivity", "search": "bounds", "tokenizer": "tokenizers"}
UNFINISHED, EXPORT = "unfinished", "export"
PARTIAL = re.compile(r"(.+)\.[0-9a-f]{12}\.partial")  # the name of an unfinished folder; the group is its final name


@dataclass(frozen=True)
class Holding:
    """A folder or file that lowq wrote. kind: checkpoint, export, unfinished or, in the cache, one of CACHED. time: its last
    change, in seconds since 1970. target: the final name of an unfinished folder. short: a name that `named` accepts.
    """

    path: Path
    kind: str
    nbytes: int
    time: float
    target: str = ""
    short: str = ""

    @property
    def cached(self) -> bool:
        """Whether it is in the cache."""
        return state.is_cached(self.path)

    @property
    def will_be(self) -> Path:
        """Its path, or its final path if it is unfinished, with links resolved."""
        path = self.path.resolve()
        return path.with_name(self.target) if self.target else path

    @property
    def age_s(self) -> float:
        """Seconds since it was written."""
        return max(0.0, time.time() - self.time)


def holdings(say: Callable[[str], object] = lambda line: None) -> list[Holding]:
    """All holdings, the newest first, with different short names: paths relative to the working folder, and in the cache
    `cached_models.names`, else the last part of the path. say: called with a line that names what cannot be read."""
    here, names = Path.cwd(), cached_models.names()

    def short(path: Path) -> str:
        outside = path.relative_to(here) if path.is_relative_to(here) else path
        return names.get(path) or (path.name if state.is_cached(path) else str(outside))

    unread = list[str]()
    found = sorted((*_remembered(unread.append), *_cached(unread.append)), key=lambda h: -h.time)
    if unread:
        say(f"not everything is listed: {'; '.join(dict.fromkeys(unread))}")
    return [replace(h, short=short(h.path)) for h in found]


def _remembered(say: Callable[[str], object]) -> Iterator[Holding]:
    """Holdings outside of the cache: folders with the run's id in their report or journal, and unchanged exports."""
    for file in (state.LAST, state.EXPORTS):
        with saying(say):
            (state.state_dir() / file).stat()
            os.close(open_regular(state.state_dir() / file))
    folders = dict[Path, str]()
    with saying(say):
        folders = {k.checkpoint: k.run for k in state.known()}
    for folder, run in folders.items():
        with saying(say):
            mark = "" if folder.is_symlink() or folder.is_file() or not contents(folder) else output_folder.run_in(folder)
            if mark and run in ("", mark):
                yield _holding(folder, "checkpoint" if (folder / CONFIG).is_file() else UNFINISHED)
    for target in state.begun():
        with saying(say):
            if target not in folders and target.is_dir() and not target.is_symlink() and output_folder.run_in(target):
                yield _holding(target, "checkpoint" if (target / CONFIG).is_file() else UNFINISHED)
            if target.parent.is_dir():
                for folder, _ in left(target):
                    yield _holding(folder, UNFINISHED, target.name)
    for out in state.exported():
        with saying(say):
            if state.export_of(out)[0]:
                yield _holding(out, EXPORT)


def _cached(say: Callable[[str], object]) -> Iterator[Holding]:
    """What the cache holds."""
    for kind, pattern in CACHED.items():
        for path in cached_models.holds(pattern, say):
            if named := PARTIAL.fullmatch(path.name):
                yield _holding(path, UNFINISHED, named[1])
            else:
                yield _holding(path, kind)


def _holding(path: Path, kind: str, target: str = "") -> Holding:
    files = []
    for p in (path, *path.rglob("*")):
        with suppress(OSError):  # another process has just removed it, or this user may not see it
            files += [p.lstat()] if not p.is_dir() or p.is_symlink() else []
    changed = max((f.st_mtime for f in files), default=0) or path.lstat().st_mtime
    return Holding(path, kind, sum(f.st_size for f in files), changed, target)


def named(names: list[str], cached: bool, say: Callable[[str], object]) -> list[Holding]:
    """The holdings that these paths or last parts of paths name, and with `cached` all holdings in the cache. say: as of
    `holdings`.

    Raises NotFoundError for a name that matches no holding, UsageError for an ambiguous one.
    """
    every = holdings(say)
    chosen = [h for h in every if cached and h.cached]
    for name in names:
        given = state.user_path(name).absolute()
        path = given.resolve()
        if given.is_symlink():
            raise UsageError(f"{name} is a link to {path}; name that")
        mine = [h for h in every if path in (h.path.resolve(), h.will_be)]
        mine = mine or [h for h in every if name.rstrip("/") == h.short]
        mine = mine or [h for h in every if name.rstrip("/") in (h.path.name, h.will_be.name)]
        if not mine:
            raise NotFoundError(f"{name} is not in the list of what lowq wrote (lowq ls); remove it yourself")
        if len({h.will_be for h in mine}) > 1:
            raise UsageError(f"{name} may be {' or '.join(str(h.path) for h in mine)}; give the whole path")
        chosen += [h for h in mine if h not in chosen]
    return chosen


def _remove_head(folder: Path) -> None:
    """Delete a draft head that was trained for a checkpoint; files that lowq did not write stay."""
    if folder.is_symlink() or not folder.is_dir():
        return
    names = (CONFIG, SINGLE, HEAD_NOTES, HEAD_STATE)
    for name in names:
        sweep(folder / name)
    if (folder / HEAD_NOTES).is_file() or (folder / HEAD_STATE).is_file():
        for name in names:
            (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def _remove_export(out: Path) -> None:
    """Delete an export, all of whose files are as they were written, or raise UsageError if one has changed by now."""
    if not state.export_of(out)[0]:
        raise UsageError(f"{out} has changed since it was listed; remove it yourself")
    for file in [out] if out.is_file() else out.iterdir():
        file.unlink()
    if out.is_dir():
        out.rmdir()


def _remove_tree(folder: Path) -> None:
    """Delete a folder of the cache. Raises BusyError if another process is writing one of the folders in it."""
    if taken := next((p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink() and is_held(p)), None):
        raise busy(taken)
    shutil.rmtree(folder)


def remove(holding: Holding) -> list[str]:
    """Delete the files that lowq wrote in it. Returns the names of other files, which stay.

    Raises UsageError if the system forbids it, or another process is writing there.
    """
    try:
        if PARTIAL.fullmatch(holding.path.name):
            with held(holding.path):
                discard(holding.path)
        elif not holding.cached and holding.kind == EXPORT:
            _remove_export(holding.path)
        elif not holding.cached:
            _remove_head(holding.path / HEAD)
            return output_folder.remove(holding.path)
        elif holding.path.is_dir():
            with held(holding.path):
                _remove_tree(holding.path)
        else:
            holding.path.unlink()
    except BusyError:
        raise UsageError(f"another lowq is writing to {holding.path}; wait for it") from None
    except OSError as e:
        raise UsageError(f"{holding.path} cannot be removed: {e.strerror or e}") from None
    return []
