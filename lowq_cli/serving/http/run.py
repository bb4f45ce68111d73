"""The server as a process: its socket, its signals, its end."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import active_children
from typing import Any

import uvicorn

from lowq_cli.serving.engine_process import ENDS_S
from lowq_cli.serving.http.app import LOOPBACK, Served, make_app
from lowq_cli.serving.http.connections import ACCEPTS, IDLE_S, Connection, most_connections, sweep
from lowq_packers.errors import LowqError, UsageError, one_line

SWITCH_S = 0.0005  # after so long a thread gives the interpreter to another that waits: who hears of a step's tokens
LIVE_S = 0.5  # between two looks at the speed, and at connections
LISTEN = 1024  # connections that the system keeps until they are accepted
DRAIN_S = 5.0  # after the grace, that answers which were ended may take to be sent
LATE_S = 5.0  # after the engine's own end, that the rest of this process may take
SAID_S = 60.0  # between two lines that say the same


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; who comes before the server runs waits. Raises UsageError for an address that cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, proto)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(LISTEN)  # at once, so that of two servers on one port the second is told before it loads a model
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
    served: Served,
    bound: Sequence[socket.socket],
    grace_s: float,
    ready: Callable[[], None],
    look: Callable[[], None] = lambda: None,
    reload: Callable[[], None] = lambda: None,
) -> None:
    """Answer requests until SIGTERM or Ctrl-C; then finish those there are within `grace_s`. A second Ctrl-C ends at once.

    ready: called once requests are taken. look: called now and then while the server runs. reload: called at SIGHUP. Raises
    what the engine's start does, and LowqError where the engine ends by itself: what started the server can start it again.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what it says, we say, or is a client's doing
    config = uvicorn.Config(
        make_app(served), http=Connection, log_config=None, access_log=False, ws="none", lifespan="on", server_header=False,
        timeout_keep_alive=int(IDLE_S), timeout_graceful_shutdown=int(grace_s + DRAIN_S), backlog=ACCEPTS,
    )  # fmt: skip
    Connection.most = most_connections()
    before = {s: signal.signal(s, _nothing) for s in (signal.SIGTERM, signal.SIGINT)}  # uvicorn raises them again at its end
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        server = _Server(config, served, grace_s, ready, look, reload)
        served.stop = server.stop
        server.run(sockets=list(bound))
        if server.ended:
            raise LowqError(server.ended)
    except SystemExit:
        if served.unstarted is None:
            raise
        raise served.unstarted from None
    finally:
        served.models.stop()
        sys.setswitchinterval(interval)
        for number, handler in before.items():
            signal.signal(number, handler)


def notify(line: str) -> None:
    """Tell systemd how far the server is, where it started this process and wants to know (sd_notify)."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    if name.startswith(("/", "@")):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as talk:
            talk.connect("\0" + name[1:] if name[0] == "@" else name)
            talk.sendall(line.encode())


def _nothing(*_: object) -> None:
    """A signal that has been heard already."""


class _Server(uvicorn.Server):
    """Tells when it is ready, looks at the speed, and cancels what is left when the time for it is over."""

    def __init__(self, config: uvicorn.Config, served: Served, grace_s: float, *calls: Callable[[], None]) -> None:
        super().__init__(config)
        self.served, self.grace_s = served, grace_s
        self.ready, self.look, self.reload = calls
        self.ended = ""  # why the engine did, by itself
        self.complained = -SAID_S

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal: whatever hangs then, the process ends within a bound."""
        if not self.should_exit:
            late = threading.Timer(self.grace_s + DRAIN_S + ENDS_S + LATE_S, self._end_at_once)
            late.daemon = True
            late.start()
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        """As SIGTERM."""
        self.handle_exit(signal.SIGTERM, None)

    def _end_at_once(self) -> None:
        for engine in active_children():  # one that is stopped would not see that we are gone
            engine.kill()
        os._exit(1)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        asyncio.get_running_loop().set_exception_handler(self._complain)
        await super().startup(sockets)
        for s in sockets or []:
            s.listen(LISTEN)  # what is accepted at a time is another number
        if not self.should_exit:
            if hasattr(signal, "SIGHUP"):
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)
            self.ready()
            notify("READY=1")
            self.looking = asyncio.create_task(self._look())

    async def shutdown(self, sockets: Any = None) -> None:
        """No new requests; a last moment for those there are."""
        notify("STOPPING=1")
        loop = asyncio.get_running_loop()
        self.served.models.close()
        late = loop.call_later(self.grace_s, self.served.models.cancel_all)
        await super().shutdown(sockets)
        late.cancel()

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What goes wrong beside any request; a line a minute, as it may be a thousand times a second."""
        if loop.time() >= self.complained + SAID_S:
            self.complained = loop.time()
            self.served.log(f"{context['message']}: {one_line(context.get('exception') or Exception())}")

    async def _look(self) -> None:
        while not self.should_exit:
            self.look()
            sweep(self.server_state.connections)  # type: ignore[arg-type]  # they are ours
            self.ended = self.served.models.look()
            if self.ended or self.served.models.idle_s() > self.served.idle_s:
                self.should_exit = True
            await asyncio.sleep(LIVE_S)
