"""Shell completions of options and arguments: words that lowq knows, and checkpoints that it wrote.

Nothing heavy is imported, as the shell runs this at every press of Tab. If nothing here matches, the shell itself completes
folders and files.
"""

import io
import os
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress

Complete = Callable[[str], list[str]]
ASKED = "_LOWQ_COMPLETE"  # Typer's scripts for shells set this variable when Tab is pressed


def words(*known: str) -> Complete:
    """A completion function for these words."""
    return lambda incomplete: [w for w in known if w.startswith(incomplete)]


def checkpoints(incomplete: str) -> list[str]:
    """Checkpoints that this user wrote (relative paths below the working folder), models in the cache by their short names, and
    folders through which a path can lead."""
    return _matching(incomplete, *_written(), *_folders(incomplete))


def models(incomplete: str) -> list[str]:
    """All models: the bundled one, those of `checkpoints`, and GGUF files."""
    return _matching(incomplete, "demo", *_written(), *_folders(incomplete, ".gguf"))


def originals(incomplete: str) -> list[str]:
    """Models to quantize: the bundled one, folders, and GGUF files."""
    return _matching(incomplete, "demo", *_folders(incomplete, ".gguf"))


def quantized(incomplete: str) -> list[str]:
    """What other tools have quantized: folders and GGUF files."""
    return _matching(incomplete, *_folders(incomplete, ".gguf"))


def drafts(incomplete: str) -> list[str]:
    """Drafters: what `--draft` calls by a word, and models."""
    from lowq_cli.cached_models import DRAFTERS

    return _matching(incomplete, *DRAFTERS, *_written(), *_folders(incomplete))


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


def _matching(incomplete: str, *names: str) -> list[str]:
    """The names that begin so, without those that a shell cannot show and hand back: of several lines, not UTF-8, and for zsh
    with quotes, which Typer's script for it does not keep."""
    lost = "'\"\\" if os.environ.get(ASKED) == "complete_zsh" else ""
    return [n for n in dict.fromkeys(names) if n.startswith(incomplete) and n.isprintable() and not set(lost) & set(n)]


def _written() -> list[str]:
    """Checkpoints and models in the cache, as commands take them."""
    from lowq_cli import cached_models, state
    from lowq_packers.errors import NotFoundError

    known = list[str]()
    with suppress(OSError, NotFoundError):  # no working folder, no home
        here = os.getcwd() + os.sep
        known = [str(k.checkpoint).removeprefix(here) for k in reversed(state.known())]
    return [*known, *cached_models.names().values()]


def _folders(incomplete: str, *suffixes: str) -> list[str]:
    """Folders that match the incomplete path, and files with these suffixes; folders with a model come first."""
    parent = os.path.dirname(incomplete)
    try:
        paths = [os.path.join(parent, name) for name in os.listdir(parent or ".") if not name.startswith(".")]
    except OSError:
        return []
    found = [path for path in paths if path.endswith(suffixes) or os.path.isdir(path)]
    return sorted(found, key=lambda f: (not os.path.isfile(os.path.join(f, "config.json")), f))


def answer(complete: Callable[[str], object]) -> tuple[str, int]:
    """What `complete` prints for the shell that asks, given the command, and its exit code, which fish looks at.

    Without errors and warnings, which would stand in the line that is typed. In bash, names are quoted as the word is that they
    complete; it makes three words of --draft=NAME, which Typer does not."""
    from lowq_cli import console

    given, at = os.environ.get("COMP_WORDS", ""), int(os.environ.get("COMP_CWORD", "0"))
    typed = re.sub(r"(?<=\n)(--[\w-]+\n)=(\n|$)", r"\1", given)
    at -= given.count("\n") - typed.count("\n")
    os.environ |= {"COMP_WORDS": typed, "COMP_CWORD": str(at)}
    printed, code = io.StringIO(), 0
    try:
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            complete("".join((typed or os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:2]))
    except SystemExit as e:
        code = int(e.code or 0)
    except Exception as e:  # any error costs the completion, and is shown where somebody asks for it
        if os.environ.get("LOWQ_DEBUG"):
            console.fail(f"{type(e).__name__}: {e}")
    if os.environ[ASKED] != "complete_bash":
        return printed.getvalue(), code
    mark = "".join(typed.split("\n")[at : at + 1])[:1]
    return "\n".join(_quoted(name, mark) for name in printed.getvalue().split("\n")), code


def _quoted(name: str, mark: str) -> str:
    """A name as bash reads it in a word that begins with this mark."""
    special = {"'": r"(')", '"': r'(["$`\\])'}.get(mark, r"([^\w./+,%-])")
    return re.sub(special, r"'\\''" if mark == "'" else r"\\\1", name)


devices = words("auto", "cpu", "cuda")
zeros = words("float", "int", "none")
bits = words("8", "4", "3", "2", "1")
acts = words("none", "int8", "fp8")
