"""The models in the cache and their short names, which `lowq ls` lists; commands and the Python API take them for a model.

Nothing heavy is imported, as the shell asks for these names at a press of Tab.
"""

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lowq_cli import state
from lowq_packers import home
from lowq_packers.errors import LowqError, NotFoundError

KINDS = {"run": "runs/*", "import": "imports/*", "refined": "refined/*"}  # kind -> glob in the cache
MADE_OF = re.compile(r"(.+?)-[0-9a-f]{16}(?:-.*)?")  # the name of a model's folder in the cache; the group is its model's
DRAFTERS = ("auto", "ngram", "mtp", "none")  # what `--draft` takes besides models
OTHERS = ("demo", *DRAFTERS)  # arguments that mean something else, so that no short name is one of them


@contextmanager
def saying(say: Callable[[str], object]) -> Iterator[None]:
    """Call `say` with what cannot be read inside, and why, instead of raising an error; not with what does not exist."""
    try:
        yield
    except LowqError as e:  # such as no home, or another user's
        say(str(e))
    except OSError as e:
        path = Path(e.filename or ".")
        nearest = next(p for p in (path, *path.parents) if os.path.lexists(p))
        if e.errno != errno.ENOENT or not os.path.exists(nearest):  # a link to nothing
            say(f"{path} ({e.strerror})")


def contents(folder: Path) -> list[Path]:
    """What a folder holds. Raises OSError, also where its names can be read and nothing else of what it holds."""
    return [folder / name for name in os.listdir(f"{folder}/.")]


def holds(pattern: str, say: Callable[[str], object] = lambda line: None) -> Iterator[Path]:
    """What the cache holds, without links, because lowq creates none there. say: called with each place that is left out."""
    with saying(say):
        yield from _matching(home.cache_dir(), pattern.split("/"), say)


def _matching(folder: Path, parts: Sequence[str], say: Callable[[str], object]) -> Iterator[Path]:
    with saying(say):
        for path in contents(folder):
            if parts[0] not in ("*", path.name):
                continue
            if path.is_symlink():
                say(f"{path} (a link, which is not followed)")
            elif parts[1:]:
                yield from _matching(path, parts[1:], say)
            else:
                yield path


def model_name(folder: Path) -> str:
    """What a user calls a model: its folder's name, in the cache without what tells versions apart. It is none of OTHERS."""
    made_of = MADE_OF.fullmatch(folder.name)
    if made_of is None or made_of[1] in OTHERS or not state.is_cached(folder):
        return folder.name
    kind = folder.parent.name
    return made_of[1] + "-refined" * (kind == "refined") if f"{kind}/*" in KINDS.values() else folder.name


def called(model: str | os.PathLike[str]) -> str:
    """`model_name` of a path as a user gives it, which may be a link, or lead through one."""
    path = Path(model).absolute()
    return model_name(path if state.is_cached(path) else path.resolve())


def names() -> dict[Path, str]:
    """Folder -> name of each whole model in the cache, the newest first by its config.json, which is written last.

    The names differ: `model_name` for the newest one, else the folder's, as also where the working folder holds something of
    that name, which commands would take instead. What cannot be read is left out.
    """
    written, taken = dict[Path, float](), set[str]()
    for pattern in KINDS.values():
        with suppress(OSError):  # a model that is removed meanwhile
            for path in holds(pattern):
                config = path / "config.json"
                if path.suffix != ".partial" and os.path.isfile(config):
                    written[path] = config.stat().st_mtime
    with suppress(NotFoundError, OSError):
        taken |= {path.name for path in home.cache_dir().iterdir()}
    taken |= {path.name for path in written}
    result = {}
    for path in sorted(written, key=lambda p: (-written[p], p.name)):
        name = model_name(path)
        result[path] = path.name if name in taken or os.path.lexists(name) else name
        taken.add(name)
    return result


def model_path(model: str | os.PathLike[str]) -> str:
    """The folder of the model in the cache that has this short name, or whose folder has it; any other name as it is."""
    name = state.name_of(model)
    if not name or "/" in name or name in OTHERS or state.user_path(name).exists():
        return name
    return next((str(path) for path, short in names().items() if name in (short, path.name)), name)
