"""From the engine's thread to the event loop and back: who asked for which number, and what has come for them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from lowq_cli.serving.request import Done, Engine, Event, Request


def nothing(*_: object) -> None:
    """What is told where nobody listens."""


class Live:
    """The requests of one HTTP request, while they are answered. All methods belong to the event loop.

    began, first: when they were asked for, and when the first token came (time.monotonic); first is 0 before.
    """

    def __init__(self, hub: "Hub") -> None:
        self.hub = hub
        self.numbers: list[int] = []
        self.open: dict[int, int] = {}  # number -> index
        self.came: dict[int, list[Event]] = {}  # index -> events not taken yet
        self.waiting: asyncio.Future[None] | None = None  # who takes; an asyncio.Event costs 3 us a token more
        self.left = False
        self.began, self.first = time.monotonic(), 0.0

    async def take(self) -> dict[int, list[Event]]:
        """What has come since, at least one event: several steps at once for a slow reader. {} once the client left."""
        if not self.came and not self.left:
            self.waiting = asyncio.get_running_loop().create_future()
            await self.waiting
        found, self.came = self.came, {}
        return {} if self.left else found

    def leave(self) -> None:
        """The client has gone: wake who takes."""
        self.left = True
        self.wake()

    def wake(self) -> None:
        """Something has come for who takes, if somebody does."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def cancel(self, index: int) -> None:
        """No more of this one is wanted."""
        number = self.numbers[index]
        if self.open.pop(number, None) is not None:
            self.hub.forget(number)
            self.hub.engine.cancel(number)

    def close(self) -> None:
        """No more of any is wanted."""
        for index in list(self.open.values()):
            self.cancel(index)


class Hub:
    """The engine's sink, and the requests that wait for it.

    Args:
        engine: not started yet.
    Attributes:
        to_first, between: told the seconds to a request's first token, and those between two of its tokens.
        idle: called once nobody waits any more.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.to_first: Callable[[float], object] = nothing
        self.between: Callable[[float], object] = nothing
        self.idle: Callable[[], object] = nothing
        self.lives: dict[int, tuple[Live, int]] = {}
        self.latest: dict[int, float] = {}

    def start(self, loop: asyncio.AbstractEventLoop, done: Done = lambda n, of: None) -> None:
        """Start the engine; its events come to `loop`. From any thread."""

        def sink(batch: list[tuple[int, Event]]) -> None:
            with suppress(RuntimeError):  # the loop has ended: nobody listens
                loop.call_soon_threadsafe(self._spread, batch)

        self.engine.start(sink, done)

    def submit(self, requests: Sequence[Request]) -> Live:
        """Ask for all of them or for none. Raises what `Engine.submit` raises."""
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
        """Nobody waits for this one any more."""
        self.lives.pop(number, None)
        self.latest.pop(number, None)
        if not self.lives:
            self.idle()

    def cancel_all(self) -> None:
        """The server stops: whoever waits is told."""
        for number in list(self.lives):
            self.engine.cancel(number)

    def _spread(self, batch: list[tuple[int, Event]]) -> None:
        """A step's events to those who wait for them."""
        now = time.monotonic()
        for number, event in batch:
            found = self.lives.get(number)
            if found is None:
                continue
            live, index = found
            live.came.setdefault(index, []).append(event)
            live.wake()
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
