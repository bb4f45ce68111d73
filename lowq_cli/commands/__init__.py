"""One file per verb: a function of the file's name. Nothing heavy is imported at a file's top."""

import os
import sys
from secrets import randbelow
from typing import Annotated

import typer

from lowq_cli import ranks

EXIT_INTERRUPTED = 130  # of a command that Ctrl-C ended


def _compute_with(threads: int | None) -> int | None:
    """Before torch is imported, which reads it; where it is, it is told."""
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)
    return threads


Threads = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", callback=_compute_with, help="CPU threads.  [default: the cores, or a container's share of them]"
    ),
]


def seed_or_random(given: int | None) -> int:
    """The seed that was asked for, or another one every time; 0 where several processes must draw alike."""
    return given if given is not None else 0 if ranks.world() > 1 else randbelow(1 << 31)


def unescaped(text: str) -> str:
    r"""A text from a command line, where \n and \t stand for a newline and a tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")
