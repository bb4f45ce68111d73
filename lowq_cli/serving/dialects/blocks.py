"""Groups the parts of an answer into blocks of one kind, for the APIs /v1/messages and /v1/responses."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

from lowq_cli.output.json_text import as_object
from lowq_cli.serving.http.answers import Answer


@dataclass
class Block:
    """One block. number: its index in the answer. name, id: of a call. text: thoughts, text, or JSON of a call's arguments."""

    kind: Literal["thought", "text", "call"]
    number: int
    name: str = ""
    id: str = ""
    text: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call as an object; {} if their JSON is incomplete or not an object."""
        return as_object(self.text)


Change = tuple[Block, Literal["begun", "more", "ended"], str]


async def blocks(answer: Answer) -> AsyncIterator[Change]:
    """Yield each block when it begins, for each new text, and when it ends. Raises what `Answer.pieces` does."""
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
    """All blocks, once the answer has ended."""
    return [block async for block, change, _ in blocks(answer) if change == "ended"]
