"""What a connection may take: its place among a bounded number, and time without a whole request or without reading an answer.

A client costs a file descriptor before it has said a word, and whoever holds all of them ends the service for everybody. So
there are fewer places than descriptors, and one that asks for nothing gives its place to the next.
"""

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lowq_cli.serving.http.refusal import Refusal

try:
    import resource
except ModuleNotFoundError:  # no such limit on this system
    resource = None  # type: ignore[assignment]

MOST = 1024  # connections: twice the requests that wait at most
SPARE = 128  # file descriptors that are none: those of the process itself, and those accepted before their places are counted
ACCEPTS = 16  # connections that are accepted before the loop looks at those it has
HEAD_S = 10.0  # from a connection to its first whole head
IDLE_S = 60.0  # from an answer to the next whole head
UNREAD_S = 60.0  # that an answer may lie unread with its buffers full


def most_connections() -> int:
    """The places there are, under the limit of file descriptors, which is raised if it may be."""
    if resource is None:
        return MOST
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST + SPARE
    if 0 <= soft < wanted:
        soft = wanted if hard < 0 else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MOST if soft < 0 else min(MOST, max(soft - SPARE, soft // 4, 1))


class Connection(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """Uvicorn's, within those bounds. `sweep` is called now and then."""

    most = MOST

    def connection_made(self, transport: Any) -> None:
        """Take a place: a free one, that of the connection that has asked for nothing for longest, or none."""
        super().connection_made(transport)
        self.due, self.unread, self.begun = self.loop.time() + HEAD_S, 0.0, False
        self.placed = True
        if len(self.connections) <= self.most:
            return
        idle = [c for c in self.connections if c is not self and not c.busy and not c.transport.is_closing()]
        if idle:
            min(idle, key=lambda c: c.due).transport.close()
        self.placed = bool(idle)

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def sweep(self, now: float) -> None:
        """End the connection if its time is over. now: the loop's."""
        if self.unread and now > self.unread + UNREAD_S:
            self.transport.abort()
        elif not self.busy and now > self.due and not self.transport.is_closing():
            if self.begun:
                self._say(Refusal(408, "no whole request came in time"))
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Something came."""
        if not self.placed:  # told now: who is told before it has asked loses the line with the connection
            self._say(Refusal(503, f"{self.most} requests come at once; try again later", "server_error"))
            self.transport.close()
            return
        self.begun = True
        super().data_received(data)

    def on_response_complete(self) -> None:
        """An answer has been sent."""
        self.due, self.begun = self.loop.time() + IDLE_S, False
        super().on_response_complete()

    def eof_received(self) -> None:
        """The client sends no more: it has left, or half of it has, which nobody can tell apart before an answer is written."""
        if self.busy and not self.cycle.response_started:
            self._say(Refusal(400, "the connection was closed on your side before the answer; keep it open until then"))
        super().eof_received()

    def pause_writing(self) -> None:
        """The client does not read."""
        self.unread = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client reads."""
        self.unread = 0.0
        super().resume_writing()

    def _say(self, why: Refusal) -> None:
        body = json.dumps(why.body).encode()
        head = f"HTTP/1.1 {why.status} {HTTPStatus(why.status).phrase}\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)


def sweep(connections: set[Connection]) -> None:
    """End all connections whose time is over."""
    now = asyncio.get_running_loop().time()
    for connection in list(connections):
        connection.sweep(now)
