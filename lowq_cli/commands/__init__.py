"""One file per command: a function with the file's name. Nothing heavy is imported at a file's top.

This file has the options that several commands share, and the code that processes their values.
"""

import os
import sys
from typing import Annotated, Any

import typer

from lowq_cli import completion, ranks

EXIT_INTERRUPTED = 130  # exit code of a command that Ctrl-C ended


def _compute_with(threads: int | None) -> int | None:
    """Set the number of threads for torch's import, or in torch where it has been imported."""
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

KvCache = Annotated[
    str,
    typer.Option(
        "--kv",
        help="Store keys and values in 16 bits, fp8 or 4 bits: 1, 1/2 or 1/4 of the cache's memory.",
        autocompletion=completion.words("16", "fp8", "4"),
    ),
]

Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="NAME|FOLDER",
        help="Speculative decoding, the same text sooner: auto, ngram, mtp, none, or the folder of a draft head or model.",
        autocompletion=completion.drafts,
    ),
]


def _act(value: str | None) -> str | None:
    from lowq_packers.errors import UsageError
    from lowq_packers.scheme import ACTS

    if value not in (None, *ACTS, "auto"):
        raise UsageError(f"--act {value} must be one of {', '.join(ACTS)}, auto")
    return value


Activations = Annotated[
    str | None,
    typer.Option(
        "--act",
        callback=_act,
        help="Round activations while a prompt is read: none, int8, fp8, or auto (only in layers where that hardly changes "
        "the output).  [default: as the checkpoint says]",
        autocompletion=completion.words("none", "int8", "fp8", "auto"),
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", autocompletion=completion.devices)]
Temperature = Annotated[
    float | None,
    typer.Option(min=0.0, help="0 takes the likeliest token.  [default: generation_config.json's, else 0.7 with --top-p 0.95]"),
]
TemperatureOrGreedy = Annotated[
    float | None,
    typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.  [default: generation_config.json's, else 0]"),
]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens that together have this probability.")]
TopK = Annotated[int | None, typer.Option(min=0, help="Sample from this many likeliest tokens; 0: all.")]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed gives the same text.  [default: random]")]
NoThink = Annotated[bool, typer.Option("--no-think", help="Make a reasoning model answer at once, without thoughts.")]


def _time(value: str | None) -> str | None:
    """Check a time before anything is loaded. Raises UsageError."""
    if value is not None:
        from lowq_cli.serving.catalog import seconds

        seconds(value, "--keep-alive")
    return value


KeepAlive = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        callback=_time,
        help="Keep the model loaded for this long after its last use, such as 10m; lowq stop ends it.  [default: no]",
    ),
]
JudgeText = Annotated[str | None, typer.Option(help="UTF-8 text file. Default: a bundled sample of novels (56 kB).")]
JudgeTokens = Annotated[int | None, typer.Option(min=2, help="Read at most this many tokens of the text.")]


def option(help: str, complete: completion.Complete | None = None, metavar: str | None = None, *names: str) -> Any:
    """An option that is completed; `names` where they are not the parameter's."""
    return typer.Option(*names, help=help, metavar=metavar, autocompletion=complete)


def checkpoint_argument(help: str) -> Any:
    """A checkpoint, by default the last one written; `help` says what it may be."""
    return typer.Argument(metavar="CKPT", help=f"{help} Default: the last one written.", autocompletion=completion.checkpoints)


def seed_or_random(given: int | None) -> int:
    """The seed that was asked for, or another one every time; 0 where several processes must draw alike."""
    from secrets import randbelow  # the import takes 6 ms, which --help should not pay

    return given if given is not None else 0 if ranks.world() > 1 else randbelow(1 << 31)


def unescaped(text: str) -> str:
    r"""A text from a command line, where \n and \t stand for a newline and a tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


MixtureType = Annotated[
    str | None,
    option(
        "A GGUF file in one of llama.cpp's mixtures: Q2_K, Q3_K_M, Q4_K_S, Q4_K_M, Q5_K_M, Q6_K, Q8_0, IQ4_XS, ...",
        completion.types,
        "TYPE",
        "--type",
    ),
]
