"""Passes requests from the event loop to the engine (in `lowq serve` a process, `engine_process`), and its events back."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from lowq_cli.serving.request import Done, Engine, Event, Request


def nothing(*_: object) -> None:
    """A callback that does nothing."""


class Live:
    """The engine requests of one HTTP request while they are answered. All methods must be called in the event loop.

    began: time of the submission (time.monotonic). first: time of the first token, 0 before it.
    """

    def __init__(self, hub: "Hub") -> None:
        self.hub = hub
        self.numbers: list[int] = []
        self.open: dict[int, int] = {}  # the engine's number -> index in this HTTP request
        self.came: dict[int, list[Event]] = {}  # index -> events not taken yet
        self.waiting: asyncio.Future[None] | None = None  # pending `take`; an asyncio.Event takes 3 us more per token
        self.left = False
        self.began, self.first = time.monotonic(), 0.0

    async def take(self) -> dict[int, list[Event]]:
        """All events since the last call, at least one: those of several steps for a slow reader. {} once the client left."""
        if not self.came and not self.left:
            self.waiting = asyncio.get_running_loop().create_future()
            await self.waiting
        events, self.came = self.came, {}
        return {} if self.left else events

    def leave(self) -> None:
        """Record that the client has left, and wake the pending `take`."""
        self.left = True
        self.wake()

    def wake(self) -> None:
        """Wake the pending `take`, if there is one."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def cancel(self, index: int) -> None:
        """Cancel one request."""
        number = self.numbers[index]
        if self.open.pop(number, None) is not None:
            self.hub.forget(number)
            self.hub.engine.cancel(number)

    def close(self) -> None:
        """Cancel all requests that have not ended."""
        for index in list(self.open.values()):
            self.cancel(index)


class Hub:
    """The receiver of an engine's events, which knows the open requests.

    Args:
        engine: an engine that is not started yet.
    Attributes:
        to_first, between: called with the seconds to a request's first token, and between two of its tokens.
        idle: called when the last open request has ended.
        answered: whether the engine has answered a request since its start, at least with one token.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.to_first: Callable[[float], object] = nothing
        self.between: Callable[[float], object] = nothing
        self.idle: Callable[[], object] = nothing
        self.answered = False
        self.lives: dict[int, tuple[Live, int]] = {}
        self.latest: dict[int, float] = {}

    def start(self, loop: asyncio.AbstractEventLoop, done: Done = lambda n, of: None) -> None:
        """Start the engine; its events are handled in `loop`. May be called from any thread."""

        def sink(batch: list[tuple[int, Event]]) -> None:
            with suppress(RuntimeError):  # the loop has ended, so the events are dropped
                loop.call_soon_threadsafe(self._spread, batch)

        self.engine.start(sink, done)

    def submit(self, requests: Sequence[Request]) -> Live:
        """Queue all requests, or none if one is refused. Raises what `Engine.submit` raises."""
        live = Live(self)
        try:
            for index, request in enumerate(requests):
                number = self.engine.submit(request)
                live.numbers.append(number)
                live.open[number] = index
                self.lives[number] = (live, index)
        except BaseException:
            live.close()
            raise
        return live

    def forget(self, number: int) -> None:
        """Remove a request; its further events are dropped."""
        self.lives.pop(number, None)
        self.latest.pop(number, None)
        if not self.lives:
            self.idle()

    def cancel_all(self) -> None:
        """Cancel all requests in the engine, which ends each with an event."""
        for number in list(self.lives):
            self.engine.cancel(number)

    def _spread(self, batch: list[tuple[int, Event]]) -> None:
        """Hand a step's events to the HTTP requests that they belong to."""
        now = time.monotonic()
        for number, event in batch:
            subscriber = self.lives.get(number)
            if subscriber is None:
                continue
            live, index = subscriber
            live.came.setdefault(index, []).append(event)
            live.wake()
            self.answered = self.answered or event.token is not None or event.read is not None
            if event.token is not None:
                before = self.latest.get(number)
                if before is None:
                    live.first = live.first or now
                    self.to_first(now - live.began)
                else:
                    self.between(now - before)
                self.latest[number] = now
            if event.finish_reason:
                live.open.pop(number, None)
                self.forget(number)
