"""Calls as bare JSON at the start of an answer: those of Llama 3, and those that a grammar forces."""

from lowq_cli.output.json_text import call_object
from lowq_cli.output.parts import Parts
from lowq_cli.output.source import Source, Wait

PYTHON = "<|python_tag|>"


def read(source: Source, out: Parts) -> Wait[bool]:
    """Read the calls at the start of the text; returns False, with nothing consumed, if there are none."""
    source.mark()
    yield from source.blanks()
    yield from source.takes(PYTHON)
    listed = yield from source.takes("[")
    before = out.calls
    while True:
        yield from source.blanks()
        if not (yield from call_object(source, out)):
            break
        source.sure()
        yield from source.blanks()
        separator = yield from source.takes(*([","] if listed else [";", PYTHON]))
        if not separator and not (source.held.startswith("{") and not listed):
            break
    if out.calls == before:
        source.back()
        return False
    yield from source.takes("]")
    yield from source.blanks()
    return True
