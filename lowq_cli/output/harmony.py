"""gpt-oss: every message has a channel: analysis for thoughts, final for the answer, commentary to a function for a call."""

import re

from lowq_cli.output.parts import Parts
from lowq_cli.output.source import ARGUMENTS, NAME, Say, Source, Wait

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
TO = re.compile(r"to=(?:functions\.)?([\w.-]{1,64})")
LONGEST_HEAD = 512  # max. characters of a message's head


class Harmony:
    """The syntax of gpt-oss. Channels also mark thoughts, so there is no separate section."""

    tags = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
    openers: tuple[str, ...] = ()
    form = (CHANNEL, "commentary to=functions.", NAME, " ", CONSTRAIN, "json", MESSAGE, ARGUMENTS)

    def read(self, source: Source, out: Parts) -> Wait[None]:
        """Read one message."""
        head: list[str] = []
        source.mark()
        yield from source.blanks()
        if not (yield from source.takes(START, CHANNEL)):
            source.back()
            if not source.held and not source.ended:
                return
            yield from self._body(source, out.text)  # without a head: the text is the answer
            return
        source.sure()
        tag = yield from source.until((MESSAGE, *ENDS), head.append)
        if tag != MESSAGE:
            return
        text = "".join(head)[:LONGEST_HEAD]
        to = TO.search(text)
        channel = text.rpartition(CHANNEL)[2].strip()
        if to and out.call(to[1]):
            yield from self._body(source, out.arguments)
        else:
            out.thinking = channel.startswith("analysis")
            yield from self._body(source, out.thought if out.thinking else out.text)
            out.thinking = False

    @staticmethod
    def _body(source: Source, say: Say) -> Wait[None]:
        tag = yield from source.until((START, CHANNEL, *ENDS), say)
        if tag in (START, CHANNEL):
            source.held = tag + source.held


HARMONY = Harmony()
FINAL = f"{CHANNEL}final{MESSAGE}"  # the beginning of an answer without thoughts
