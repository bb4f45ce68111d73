"""What lowq has written on this disk and knows of: checkpoints of `quantize`, and what is in the cache."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from lowq_cli import state
from lowq_packers import home
from lowq_packers.errors import NotFoundError, UsageError

CACHED = {"runs": "*", "imports": "*", "refined": "*", "exports": "*/*"}  # folder of the cache -> where its checkpoints are


@dataclass(frozen=True)
class Holding:
    """A folder that lowq wrote. kind: checkpoint or, in the cache, one of CACHED. time: of its last change, in s since 1970."""

    path: Path
    kind: str
    nbytes: int
    time: float

    @property
    def short(self) -> str:
        """What `named` takes for it: its path from the working folder if it is below that, of the cache's the last part."""
        here = self.path.relative_to(Path.cwd()) if self.path.is_relative_to(Path.cwd()) else self.path
        return str(here) if self.kind == "checkpoint" else self.path.name

    @property
    def age_s(self) -> float:
        """Seconds since it was written."""
        return max(0.0, time.time() - self.time)


def holdings() -> list[Holding]:
    """Everything, the newest first."""
    found = [_holding(k.checkpoint, "checkpoint") for k in state.known()]
    for kind, pattern in CACHED.items():
        folders = (home.cache_dir() / kind).glob(pattern)
        found += [_holding(p, kind.rstrip("s")) for p in folders if p.is_dir()]
    return sorted(found, key=lambda h: -h.time)


def _holding(path: Path, kind: str) -> Holding:
    files = [p.stat() for p in path.rglob("*") if p.is_file()]
    return Holding(path, kind, sum(f.st_size for f in files), max((f.st_mtime for f in files), default=path.stat().st_mtime))


def named(names: list[str], cached: bool) -> list[Holding]:
    """The holdings that these paths or last parts of paths name, and with `cached` all that are in the cache.

    Raises NotFoundError for one that is none of lowq's, UsageError for one that may be several.
    """
    every = holdings()
    found = [h for h in every if cached and h.kind != "checkpoint"]
    for name in names:
        given = state.user_path(name).absolute()
        path = given.resolve()
        if given.is_symlink():
            raise UsageError(f"{name} is a link to {path}; name that")
        mine = [h for h in every if h.path.resolve() == path] or [h for h in every if h.path.name == name.rstrip("/")]
        if not mine:
            raise NotFoundError(f"{name} is nothing that lowq wrote and remembers (lowq ls lists that); remove it yourself")
        if len(mine) > 1:
            raise UsageError(f"{name} may be {' or '.join(str(h.path) for h in mine)}; give the whole path")
        found += [h for h in mine if h not in found]
    return found


def remove(holding: Holding) -> None:
    """Delete the folder. Raises UsageError where that is not allowed."""
    try:
        shutil.rmtree(holding.path)
    except OSError as e:
        raise UsageError(f"{holding.path} cannot be removed: {e.strerror}") from None
