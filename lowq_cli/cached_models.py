"""The models in the cache and their short names, which `lowq ls` lists; commands and the Python API take them for a model.

Nothing heavy is imported, as the shell asks for these names at a press of Tab.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lowq_cli import state
from lowq_packers import home
from lowq_packers.errors import NotFoundError

KINDS = {"run": "runs/*", "import": "imports/*", "refined": "refined/*"}  # kind -> glob in the cache
MADE_OF = re.compile(r"(.+?)-[0-9a-f]{16}(?:-.*)?")  # the name of a model's folder in the cache; the group is its model's
DRAFTERS = ("auto", "ngram", "mtp", "none")  # what `--draft` takes besides models
OTHERS = ("demo", *DRAFTERS)  # arguments that mean something else, so that no short name is one of them


def holds(pattern: str) -> Iterator[Path]:
    """What the cache holds, without links, because lowq creates none there."""
    cache = home.cache_dir()
    for path in cache.glob(pattern):
        parts = path.relative_to(cache).parts
        if not any((cache / Path(*parts[: n + 1])).is_symlink() for n in range(len(parts))):
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
        with suppress(NotFoundError, OSError):  # no home, or a folder that this user cannot read
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
