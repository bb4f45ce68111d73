"""What the shell completes after an option or argument: words that lowq knows, and checkpoints that it wrote.

Nothing heavy is imported: a shell asks at every press of Tab. Folders and files complete too, as the shell does it by itself
where nothing here fits.
"""

import os
from collections.abc import Callable

Complete = Callable[[str], list[str]]


def words(*known: str) -> Complete:
    """A completion of one of these words."""
    return lambda incomplete: [w for w in known if w.startswith(incomplete)]


def checkpoints(incomplete: str) -> list[str]:
    """Checkpoints written by this user, below the working folder as a relative path, and folders that a path may go into."""
    from lowq_cli import state

    here = os.getcwd() + os.sep
    known = [str(k.checkpoint).removeprefix(here) for k in reversed(state.known())]
    return [name for name in dict.fromkeys((*known, *_folders(incomplete))) if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """What can be quantized: the bundled model, and folders."""
    return [name for name in ("demo", *_folders(incomplete)) if name.startswith(incomplete)]


def methods(incomplete: str) -> list[str]:
    """Methods of quantizing."""
    from lowq_cli import quantizers

    return [m for m in ("auto", *quantizers.methods()) if m.startswith(incomplete)]


def exports(incomplete: str) -> list[str]:
    """Formats that lowq writes."""
    from lowq_packers.formats import EXPORTED

    return words(*EXPORTED)(incomplete)


def engines(incomplete: str) -> list[str]:
    """Engines and formats that a checkpoint may be made for."""
    from lowq_cli.plan.targets import ENGINES

    return words(*ENGINES)(incomplete)


def types(incomplete: str) -> list[str]:
    """Mixtures of GGUF's types."""
    from lowq_cli.plan.gguf_types import MIXTURES

    return words(*MIXTURES)(incomplete.upper())


def _folders(incomplete: str) -> list[str]:
    """Folders that the path begun may mean; those that hold a model before those on the way to one."""
    parent = os.path.dirname(incomplete)
    try:
        found = [os.path.join(parent, e.name) for e in os.scandir(parent or ".") if e.is_dir() and not e.name.startswith(".")]
    except OSError:
        return []
    return sorted(found, key=lambda f: (not os.path.isfile(os.path.join(f, "config.json")), f))


devices = words("auto", "cpu", "cuda")
zeros = words("float", "int", "none")
bits = words("8", "4", "3", "2", "1")
acts = words("none", "int8", "fp8")
