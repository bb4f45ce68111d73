"""The parts of an answer as blocks, each of one kind, as the newer interfaces have them."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

from lowq_cli.serving.http.answers import Answer


@dataclass
class Block:
    """One block. number: its place in the answer. name, id: of a call. text: thoughts, text, or a call's arguments."""

    kind: Literal["thought", "text", "call"]
    number: int
    name: str = ""
    id: str = ""
    text: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """A call's as an object; empty where they were cut, or are none."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


Change = tuple[Block, Literal["begun", "more", "ended"], str]


async def blocks(answer: Answer) -> AsyncIterator[Change]:
    """Blocks as they begin, grow by a text, and end. Raises what `Answer.pieces` does."""
    now: Block | None = None
    number = 0
    async for _, piece in answer.pieces():
        for part in piece.parts:
            kind: Any = "call" if part.kind == "arguments" else part.kind
            if now is None or part.kind == "call" or now.kind != kind:
                if now is not None:
                    yield now, "ended", ""
                now = Block(kind, number, part.text if kind == "call" else "", part.id)
                number += 1
                yield now, "begun", ""
            if part.kind != "call":
                now.text += part.text
                yield now, "more", part.text
    if now is not None:
        yield now, "ended", ""


async def whole_blocks(answer: Answer) -> list[Block]:
    """All of them, once the answer has ended."""
    return [block async for block, change, _ in blocks(answer) if change == "ended"]
