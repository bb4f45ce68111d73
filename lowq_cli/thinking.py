"""Print answers: on a terminal with the model's thoughts in a paler colour, elsewhere thoughts to stderr, answer to stdout."""

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from lowq_cli import console

if TYPE_CHECKING:
    from lowq_cli.output.parts import Part


def parts(pieces: Iterable[str], marks: Any) -> "Iterator[Part]":
    """Split pieces of an answer into thoughts and text. marks: from `output.syntaxes.marks`, None if the model has none."""
    from lowq_cli.output.parts import Offered, Part
    from lowq_cli.output.read import Reader
    from lowq_cli.output.syntaxes import syntax_by  # 50 ms, for which an answer without thoughts does not wait

    if marks is None:
        yield from (Part("text", piece) for piece in pieces)
        return
    reader = Reader(syntax_by(marks["by"]), Offered(), marks["inside"])
    for piece in pieces:
        yield from reader.push(piece)
    yield from reader.push("", ended=True)


def split(text: str, marks: Any) -> tuple[str, str]:
    """(thoughts, answer) of a whole text."""
    texts = {"thought": "", "text": ""}
    for part in parts([text], marks):
        texts[part.kind] += part.text
    return texts["thought"], texts["text"]


def write(pieces: Iterable[str], marks: Any) -> bool:
    """Print an answer while it arrives. Returns whether Ctrl-C ended it."""
    interrupted, terminal, before = False, sys.stdout.isatty(), ""
    try:
        if marks is None:
            for piece in pieces:
                console.out(piece, end="")
            return False
        for part in parts(pieces, marks):
            if before == "thought" and part.kind == "text":
                console.thought("\n\n" if terminal else "\n", terminal)
            before = part.kind
            console.thought(part.text, terminal) if part.kind == "thought" else console.out(part.text, end="")
    except KeyboardInterrupt:
        interrupted = True
    return interrupted
