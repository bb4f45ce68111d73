"""The server as a process: its socket, its signals, its end."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from lowq_cli.serving.http.app import LOOPBACK, Served, make_app
from lowq_packers.errors import LowqError, UsageError

SWITCH_S = 0.0005  # after so long a thread gives the interpreter to another that waits: who hears of a step's tokens
LIVE_S = 0.5  # between two looks at the speed


def listen(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises UsageError for an address that cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, proto)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as e:
        raise UsageError(f"cannot listen on {host} port {port}: {e.strerror}; choose another with --port or --host") from None
    return found


def url(bound: socket.socket) -> str:
    """Where the server is reached, from this machine."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def names(bound: socket.socket) -> tuple[str, ...]:
    """The names under which clients may come: any, unless only this machine can come at all."""
    host = bound.getsockname()[0]
    return LOOPBACK if host in LOOPBACK or host.startswith("127.") else ()


def serve(
    served: Served, bound: socket.socket, grace_s: float, ready: Callable[[], None], look: Callable[[], None] = lambda: None
) -> None:
    """Answer requests until SIGTERM or Ctrl-C; then finish those there are within `grace_s`. A second Ctrl-C ends at once.

    ready: called once requests are taken. look: called now and then while the server runs. Raises what the engine's start does,
    and LowqError where the engine ends by itself: what started the server can start it again.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what it says, we say, or is a client's doing
    config = uvicorn.Config(
        make_app(served), log_config=None, access_log=False, ws="none", lifespan="on", server_header=False,
        timeout_keep_alive=60, timeout_graceful_shutdown=int(grace_s) + 5,
    )  # fmt: skip
    before = {s: signal.signal(s, _nothing) for s in (signal.SIGTERM, signal.SIGINT)}  # uvicorn raises them again at its end
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        server = _Server(config, served, grace_s, ready, look)
        server.run(sockets=[bound])
        if server.ended:
            raise LowqError(server.ended)
    except SystemExit:
        if served.unstarted is None:
            raise
        raise served.unstarted from None
    finally:
        served.engine.stop(0)
        sys.setswitchinterval(interval)
        for number, handler in before.items():
            signal.signal(number, handler)


def _nothing(*_: object) -> None:
    """A signal that has been heard already."""


class _Server(uvicorn.Server):
    """Tells when it is ready, looks at the speed, and cancels what is left when the time for it is over."""

    def __init__(
        self, config: uvicorn.Config, served: Served, grace_s: float, ready: Callable[[], None], look: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.served, self.grace_s, self.ready, self.look = served, grace_s, ready, look
        self.ended = ""  # why the engine did, by itself

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if not self.should_exit:
            self.ready()
            self.looking = asyncio.create_task(self._look())

    async def shutdown(self, sockets: Any = None) -> None:
        """No new requests; a last moment for those there are."""
        loop = asyncio.get_running_loop()
        late = loop.call_later(self.grace_s, self.served.hub.cancel_all)
        await super().shutdown(sockets)
        late.cancel()

    async def _look(self) -> None:
        while not self.should_exit:
            self.look()
            self.ended = self.served.engine.closed
            if self.ended:
                self.should_exit = True
            await asyncio.sleep(LIVE_S)
