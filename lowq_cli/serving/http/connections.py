"""Limits of connections: their number, and the seconds without a whole request or without reading an answer.

Each connection takes a file descriptor before it sends anything, and a client that held all of them would block all others.
The limit is therefore below the number of descriptors, and at the limit a new connection replaces the longest idle one.
"""

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lowq_cli.serving.http.refusal import RETRY_AFTER, Refusal

try:
    import resource
except ModuleNotFoundError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

MOST = 1024  # max. connections: twice the max. of waiting requests
SPARE = 128  # file descriptors kept free of connections: for the process itself, and for connections not counted yet
ACCEPTS = 16  # max. connections accepted at a time, before the loop serves the existing ones
HEAD_S = 10.0  # max. seconds from a connection to its first whole request head
IDLE_S = 60.0  # max. seconds from a response to the next whole request head
UNREAD_S = 60.0  # max. seconds for which a client may not read while the send buffers are full


def most_connections() -> int:
    """The max. number of connections under the limit of file descriptors, after raising that limit if allowed."""
    if resource is None:
        return MOST
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised, most = limits(soft, hard)
    if raised != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return most


def limits(soft: int, hard: int) -> tuple[int, int]:
    """(soft limit of file descriptors, max. number of connections under it), from a process's limits; below 0: unlimited."""
    needed = MOST + SPARE
    if 0 <= soft < needed:
        soft = needed if hard < 0 else min(hard, needed)
    return soft, MOST if soft < 0 else min(MOST, max(soft - SPARE, soft // 4, 1))


class Connection(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """uvicorn's protocol with these limits. `sweep` has to be called periodically."""

    most = MOST

    def connection_made(self, transport: Any) -> None:
        """Take a free place, or that of the longest idle connection; without either the first request is refused."""
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
        """Close the connection if a time limit has passed. now: the loop's time."""
        if self.unread and now > self.unread + UNREAD_S:
            self.transport.abort()
        elif not self.busy and now > self.due and not self.transport.is_closing():
            if self.begun:
                self._say(Refusal(408, "no whole request came in time"))
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
        if not self.placed:  # only now: a client that has not sent its request yet would lose the response
            line = f"{self.most} requests are open already; try again later"
            self._say(Refusal(503, line, "server_error", retry=RETRY_AFTER))
            self.transport.close()
            return
        self.begun = True
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Start the time to the next request after a response was sent."""
        self.due, self.begun = self.loop.time() + IDLE_S, False
        super().on_response_complete()

    def eof_received(self) -> None:
        """Handle a client that sends no more; before a response is written, a full and a half close look the same."""
        if self.busy and not self.cycle.response_started:
            self._say(Refusal(400, "the connection was closed on your side before the answer; keep it open until then"))
        super().eof_received()

    def pause_writing(self) -> None:
        """Note the time at which the client stopped reading."""
        self.unread = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        self.unread = 0.0
        super().resume_writing()

    def _say(self, why: Refusal) -> None:
        body = json.dumps(why.body).encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in why.headers.items())
        head = f"HTTP/1.1 {why.status} {HTTPStatus(why.status).phrase}\r\nContent-Type: application/json\r\n{more}"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)


def sweep(connections: set[Connection]) -> None:
    """Close all connections that have passed a time limit."""
    now = asyncio.get_running_loop().time()
    for connection in list(connections):
        connection.sweep(now)
