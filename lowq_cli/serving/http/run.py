"""The server as a process: its socket, its signals, its shutdown."""

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

SWITCH_S = 0.0005  # seconds until a thread yields the interpreter to a waiting one, as the receiver of a step's tokens
LIVE_S = 0.5  # seconds between two checks of the speed, the connections and the models
LISTEN = 1024  # max. connections that the system queues until they are accepted
DRAIN_S = 5.0  # max. seconds after the grace period for sending the ends of cancelled answers
LATE_S = 5.0  # max. seconds after the engine's end until this process ends
SAID_S = 60.0  # min. seconds between two log lines of `_complain`


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; clients that connect before the server runs wait. Raises UsageError if it cannot listen there."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(LISTEN)  # before a model is loaded: a second server on the same port fails at once
    except OSError as e:
        raise UsageError(f"cannot listen on {host} port {port}: {e.strerror}; choose another with --port or --host") from None
    return sock


def url(bound: socket.socket) -> str:
    """The server's URL for clients on this machine."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def names(bound: socket.socket) -> tuple[str, ...]:
    """The allowed Host names: those of the loopback if the socket is bound to it, otherwise any, which is ()."""
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
    """Answer requests until SIGTERM or Ctrl-C; then finish open ones within `grace_s` seconds. A second Ctrl-C ends at once.

    ready: called once requests are taken. look: called every LIVE_S seconds while the server runs. reload: called at SIGHUP.
    Raises what the engine's start raises, and LowqError if the engine ends by itself, so that a supervisor can restart it.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # our own log reports the same, or a client caused it
    config = uvicorn.Config(
        make_app(served), http=Connection, log_config=None, access_log=False, ws="none", lifespan="on", server_header=False,
        timeout_keep_alive=int(IDLE_S), timeout_graceful_shutdown=int(grace_s + DRAIN_S), backlog=ACCEPTS,
    )  # fmt: skip
    Connection.most = most_connections()
    before = {s: signal.signal(s, _nothing) for s in (signal.SIGTERM, signal.SIGINT)}  # uvicorn re-raises them at its end
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
    """Send a state to systemd (sd_notify) if it started this process and set NOTIFY_SOCKET."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    if name.startswith(("/", "@")):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as talk:
            talk.connect("\0" + name[1:] if name[0] == "@" else name)
            talk.sendall(line.encode())


def _nothing(*_: object) -> None:
    """Ignore a signal that uvicorn has handled already."""


class _Server(uvicorn.Server):
    """uvicorn's server, with callbacks, periodic checks, and open requests cancelled at the end of the grace period."""

    def __init__(self, config: uvicorn.Config, served: Served, grace_s: float, *calls: Callable[[], None]) -> None:
        super().__init__(config)
        self.served, self.grace_s = served, grace_s
        self.ready, self.look, self.reload = calls
        self.ended = ""  # why the engine ended by itself
        self.complained = -SAID_S

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to shut down at a signal; a timer ends the process even if something hangs."""
        if not self.should_exit:
            late = threading.Timer(self.grace_s + DRAIN_S + ENDS_S + LATE_S, self._end_at_once)
            late.daemon = True
            late.start()
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        """Shut down as at SIGTERM."""
        self.handle_exit(signal.SIGTERM, None)

    def _end_at_once(self) -> None:
        for engine in active_children():  # a process stopped by a signal would not notice that its parent is gone
            engine.kill()
        os._exit(1)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        asyncio.get_running_loop().set_exception_handler(self._complain)
        await super().startup(sockets)
        for s in sockets or []:
            s.listen(LISTEN)  # uvicorn has set the backlog to ACCEPTS, the number it accepts at a time
        if not self.should_exit:
            if hasattr(signal, "SIGHUP"):
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)
            self.ready()
            notify("READY=1")
            self.looking = asyncio.create_task(self._look())

    async def shutdown(self, sockets: Any = None) -> None:
        """Take no new requests; finish open ones within the grace period."""
        notify("STOPPING=1")
        loop = asyncio.get_running_loop()
        self.served.models.close()
        late = loop.call_later(self.grace_s, self.served.models.cancel_all)
        await super().shutdown(sockets)
        late.cancel()

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error outside of any request; one line a minute, because it may occur a thousand times a second."""
        if loop.time() >= self.complained + SAID_S:
            self.complained = loop.time()
            self.served.log(f"{context['message']}: {one_line(context.get('exception') or Exception())}")

    async def _look(self) -> None:
        while not self.should_exit:
            try:
                self._check()
            except Exception as e:  # a mistake of ours in one check must not end all later ones
                self._complain(asyncio.get_running_loop(), {"message": "a periodic check failed", "exception": e})
            await asyncio.sleep(LIVE_S)

    def _check(self) -> None:
        self.look()
        sweep(self.server_state.connections)  # type: ignore[arg-type]  # all are `Connection`s
        self.ended = self.served.models.look()
        if self.ended or self.served.models.reports.idle_s() > self.served.idle_s:
            self.should_exit = True
