"""Shell completions of options and arguments: words that lowq knows, and checkpoints that it wrote.

Nothing heavy is imported, as the shell runs this at every press of Tab. If nothing here matches, the shell itself completes
folders and files.
"""

import os
from collections.abc import Callable

Complete = Callable[[str], list[str]]


def words(*known: str) -> Complete:
    """A completion function for these words."""
    return lambda incomplete: [w for w in known if w.startswith(incomplete)]


def checkpoints(incomplete: str) -> list[str]:
    """Checkpoints that this user wrote (relative paths below the working folder), and folders through which a path can lead."""
    from lowq_cli import state

    here = os.getcwd() + os.sep
    known = [str(k.checkpoint).removeprefix(here) for k in reversed(state.known())]
    return [name for name in dict.fromkeys((*known, *_folders(incomplete))) if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Models to quantize: the bundled model, and folders."""
    return [name for name in ("demo", *_folders(incomplete)) if name.startswith(incomplete)]


def methods(incomplete: str) -> list[str]:
    """Quantization methods."""
    from lowq_cli import quantizers

    return [m for m in ("auto", *quantizers.methods()) if m.startswith(incomplete)]


def exports(incomplete: str) -> list[str]:
    """Export formats."""
    from lowq_packers.formats import EXPORTED

    return words(*EXPORTED)(incomplete)


def engines(incomplete: str) -> list[str]:
    """Engines and formats for `--for`."""
    from lowq_cli.plan.targets import TARGETS

    return words(*TARGETS)(incomplete)


def types(incomplete: str) -> list[str]:
    """Mixtures of GGUF types."""
    from lowq_cli.plan.gguf_types import MIXTURES

    return words(*MIXTURES)(incomplete.upper())


def _folders(incomplete: str) -> list[str]:
    """Folders that match the incomplete path; folders with a model come before other folders."""
    parent = os.path.dirname(incomplete)
    try:
        folders = [os.path.join(parent, e.name) for e in os.scandir(parent or ".") if e.is_dir() and not e.name.startswith(".")]
    except OSError:
        return []
    return sorted(folders, key=lambda f: (not os.path.isfile(os.path.join(f, "config.json")), f))


devices = words("auto", "cpu", "cuda")
zeros = words("float", "int", "none")
bits = words("8", "4", "3", "2", "1")
acts = words("none", "int8", "fp8")
