"""Reads request bodies with limits on the size and time of each, and on the bytes of all together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from lowq_cli.serving.http.refusal import Refusal

LISTENS = 8  # a body that is too long is read up to this multiple of the limit, so that its sender reads the refusal


class Bodies:
    """The bodies in memory.

    Args:
        longest: max. bytes of a body. seconds: max. seconds to read it. together: max. bytes of all bodies, each counted from
            its first byte until its request is queued. Above it the largest incomplete body is refused, the oldest of equals:
            a normal client sends megabytes in a moment, and the few bytes of a slow one do not matter.
    """

    def __init__(self, longest: int, seconds: float, together: int) -> None:
        self.longest, self.seconds, self.together = longest, seconds, together
        self.held = 0
        self.reading: dict[asyncio.Timeout, int] = {}  # -> bytes so far, the oldest first
        self.crowded_out: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[bytes]:
        """A request's body, counted until the block is left. Raises Refusal."""
        body = bytearray()
        try:
            yield await self._read(request, body)
        finally:
            self.held -= len(body)

    async def _read(self, request: Request, body: bytearray) -> bytes:
        limit, length = asyncio.timeout(self.seconds), 0
        self.reading[limit] = 0
        try:
            async with limit:
                async for piece in request.stream():
                    length += len(piece)
                    if length <= self.longest:
                        body += piece
                        self.held += len(piece)
                        if limit in self.reading:
                            self.reading[limit] = length
                        if self.held > self.together:
                            self._make_room(limit)
                    elif length > LISTENS * self.longest:
                        break
        except TimeoutError:
            if limit in self.crowded_out:
                raise _crowded() from None
            raise Refusal(408, f"the body took longer than {self.seconds:.0f} s") from None
        finally:
            self.reading.pop(limit, None)
            self.crowded_out.discard(limit)
        if length > self.longest:
            raise Refusal(413, f"the body is larger than {self.longest >> 20} MiB")
        return bytes(body)

    def _make_room(self, own: asyncio.Timeout) -> None:
        """Refuse the largest incomplete body; raises Refusal if that is the caller's."""
        largest = max(self.reading, key=self.reading.__getitem__, default=own)
        if largest is own:
            raise _crowded()
        del self.reading[largest]
        self.crowded_out.add(largest)
        largest.reschedule(asyncio.get_running_loop().time())


def _crowded() -> Refusal:
    return Refusal(429, "too many request bodies at once; try again", "rate_limit_error", code="rate_limit_exceeded")
