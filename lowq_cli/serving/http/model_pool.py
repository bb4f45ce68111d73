"""The models of a server: each is loaded at its first request; if memory is short, the least recently used one is unloaded.

A model is absent, loading, ready, draining or failed. A request leases a ready model at once and waits for a model in any other
state. One model is loaded at a time, in the order in which requests first waited for them. If the memory is too small for the
next model, idle models are unloaded first, starting with the least recently used, then busy ones: a draining model finishes its
running requests and takes no new ones. A request that comes for a draining model waits until it is loaded again, so every
requested model gets its turn. If an engine ends by itself, only its model fails; the next request after a pause loads it again.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from lowq_cli.serving.catalog import Offer
from lowq_cli.serving.host_memory import HostMemory
from lowq_cli.serving.http.fields import shown
from lowq_cli.serving.http.metrics import COUNTERS, Metrics
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.served_model import ServedModel
from lowq_cli.serving.request import Done, Stats
from lowq_packers.errors import one_line

WAITING = 512  # max. requests waiting for models, all models together
WAIT_S = 300.0  # max. seconds that a request waits for its model
REFRESH_S = 2.0  # min. seconds between two scans of the disk for unknown names: bounds the cost of requests with made-up names
RETRY_S = 5  # Retry-After seconds for a client that waited WAIT_S, or found WAITING requests ahead of it
PAUSES = (1.0, 60.0)  # seconds from a failure to the next attempt: after the first failure, and the max. of the doubled ones
SOUND_S = 60.0  # seconds for which a model must have been ready before its failures count from zero again
PROCESS = 512 << 20  # estimated bytes of an engine's process besides weights and cache: torch, recorded passes, libraries


class State(StrEnum):
    """The state of a model."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Loading(Protocol):
    """A model that is being loaded in a separate process."""

    def finish(self, loop: asyncio.AbstractEventLoop, done: Done) -> ServedModel:
        """Block until the engine has started and return the model. Raises what loading raises."""
        ...

    def stop(self) -> None:
        """End the process, whatever its state."""
        ...


@dataclass(eq=False)
class Place:
    """An offered model and its state. All attributes belong to the event loop.

    used: time (time.monotonic) at which a request last began or ended. since: when it became ready. beginning: requests that
    lease it and are not queued yet. waiters: requests that wait for it. failures: failures in a row. again: time of the next
    attempt. cost: bytes that it takes, 0 if unknown. gone: whether it is not offered any more.
    """

    offer: Offer
    state: State = State.ABSENT
    model: ServedModel | None = None
    loading: Loading | None = None
    why: str = ""
    used: float = 0.0
    since: float = 0.0
    beginning: int = 0
    failures: int = 0
    again: float = 0.0
    cost: int = 0
    gone: bool = False
    known: dict[str, Any] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None  # the task that drains it
    waiters: dict[asyncio.Future[ServedModel], None] = field(default_factory=dict)
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def busy(self) -> bool:
        """Whether it has running or queued requests."""
        return self.beginning > 0 or (self.model is not None and bool(self.model.hub.lives))

    @property
    def closed(self) -> str:
        """Why its engine takes no more requests; "" while it does."""
        return self.model.engine.closed if self.state is State.READY and self.model is not None else ""

    def settled(self) -> None:
        """Record that a request has ended."""
        self.used = time.monotonic()
        if self.state is State.DRAINING and not self.busy:
            self.drained.set()


class ModelPool:
    """All models of a server.

    Args:
        offers: the models by name. default: the model of requests that name none.
        load: begins to load a model; called in a thread.
        memory: max. bytes of all loaded models together; None: no bound until `memory` is set.
        keep_alive: seconds without a request after which a model is unloaded.
        only: the server has this one model: it is never unloaded, and the server ends when its engine ends.
        waiting: max. requests that wait for models. wait_s: max. seconds that one waits.
    """

    def __init__(
        self,
        offers: Mapping[str, Offer],
        default: str,
        load: Callable[[Offer], Loading] | None = None,
        memory: int | None = None,
        keep_alive: float = float("inf"),
        only: bool = False,
        waiting: int = WAITING,
        wait_s: float = WAIT_S,
    ) -> None:
        self.places = {name: Place(offer) for name, offer in offers.items()}
        self.default, self.load, self.memory, self.keep_alive, self.only = default, load, memory, keep_alive, only
        self.most_waiting, self.wait_s = waiting, wait_s
        self.host: HostMemory | None = None  # holds cache blocks that the models' caches have no room for
        self.metrics = Metrics(self.host_bytes)
        self.created = int(time.time())
        self.wanted: dict[Place, None] = {}  # models to load, in the order in which requests asked for them
        self.work = asyncio.Event()
        self.manager: asyncio.Task[None] | None = None
        self.stopping = ""
        self.refresh: Callable[[], Mapping[str, Offer]] = lambda: {}  # called in a thread when a name is unknown
        self.refreshed = -REFRESH_S
        self.prepare: Callable[[], object] = lambda: None  # called in a thread after each load, to prepare the next
        self.say: Callable[[str], None] = lambda line: None

    @classmethod
    def of_one(cls, model: ServedModel, **how: Any) -> "ModelPool":
        """The pool of a server with one model, which is loaded already."""
        pool = cls({model.name: Offer(model.name, model.name, pin=True)}, model.name, only=True, **how)
        pool.adopt(model)
        return pool

    # ---- the start and the end

    def adopt(self, model: ServedModel) -> None:
        """Add a model that was loaded before the server runs; `start` starts its engine."""
        place = self.places[model.name]
        place.model, place.state = model, State.LOADING
        place.cost = _cost(model)

    async def start(self, done: Done) -> None:
        """Start the engines of adopted models and load the pinned ones. Raises what an engine's start raises."""
        loop = asyncio.get_running_loop()
        for place in self.places.values():
            if place.model is not None:
                await asyncio.to_thread(place.model.hub.start, loop, done)
                self._is_ready(place)
        self.manager = asyncio.create_task(self._manage())
        for place in self.places.values():
            if place.offer.pin and place.state is State.ABSENT:
                self._want(place)

    def close(self, why: str = "the server is stopping") -> None:
        """Take no more requests, and refuse those that wait for models."""
        self.stopping = self.stopping or why
        for place in self.places.values():
            self._tell(place, Refusal(503, self.stopping, "server_error"))
            if place.loading is not None:
                asyncio.get_running_loop().run_in_executor(None, place.loading.stop)

    def cancel_all(self) -> None:
        """Cancel all running and queued requests."""
        for place in self.places.values():
            if place.model is not None:
                place.model.hub.cancel_all()

    def stop(self) -> None:
        """End all engines. May be called from any thread once the event loop has ended."""
        from concurrent.futures import ThreadPoolExecutor

        ends: list[Callable[[], object]] = [partial(p.model.end, False) for p in self.places.values() if p.model is not None]
        ends += [p.loading.stop for p in self.places.values() if p.loading is not None]
        with ThreadPoolExecutor(max(1, len(ends))) as pool:
            list(pool.map(lambda end: end(), ends))

    # ---- requests

    @asynccontextmanager
    async def lease(self, name: str | None, receive: Receive | None = None) -> AsyncIterator[ServedModel]:
        """The loaded model called `name`, or the default; it stays loaded until the block is left and its requests have ended.

        receive: the client's ASGI receive; shows that it left while the model is loaded. Raises Refusal, ClientDisconnect.
        """
        place = await self._place(name)
        if place.closed and not self.only:
            self._failed(place, place.closed)
        if place.state is State.READY and place.model is not None:
            model = place.model
            place.beginning += 1
        else:
            model = await self._wait(place, receive)
        try:
            yield model
        finally:
            place.beginning -= 1
            place.settled()

    async def _place(self, name: str | None) -> Place:
        place = self._named(name)
        if place is None and time.monotonic() > self.refreshed + REFRESH_S:
            self.refreshed = time.monotonic()
            self.update(await asyncio.to_thread(self.refresh))
            place = self._named(name)
        if place is None or place.gone:
            has = ", ".join(map(shown, list(self._offered())[:8])) + (", ..." if len(self.places) > 8 else "")
            line = f"the model {shown(name)} is not served here; this server has {has}"
            raise Refusal(404, line, param="model", code="model_not_found")
        return place

    def _named(self, name: str | None) -> Place | None:
        """The model with this name, alias or adapter; None if there is none."""
        if (place := self.places.get(self.default if name is None else name)) is not None:
            return place
        return next((p for p in self.places.values() if name in p.offer.others and not p.gone), None)

    async def _wait(self, place: Place, receive: Receive | None) -> ServedModel:
        """Wait until the model is ready and return it, counted in `beginning`. Raises Refusal, ClientDisconnect."""
        if self.stopping:
            raise Refusal(503, self.stopping, "server_error")
        if place.state is State.FAILED and time.monotonic() < place.again:
            raise _unloadable(place)
        if sum(len(p.waiters) for p in self.places.values()) >= self.most_waiting:
            line = f"{self.most_waiting} requests wait for models already; try again later"
            raise Refusal(503, line, "server_error", retry=RETRY_S)
        ready: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        place.waiters[ready] = None
        self._want(place)
        gone = asyncio.create_task(_left(receive)) if receive is not None else None
        try:
            await asyncio.wait([w for w in (ready, gone) if w is not None], timeout=self.wait_s, return_when="FIRST_COMPLETED")
            if ready.done():
                return ready.result()
            if gone is not None and gone.done():
                raise ClientDisconnect
            line = f"the model {shown(place.offer.name)} could not be loaded within {self.wait_s:.0f} s; try again later"
            raise Refusal(503, line, "server_error", retry=RETRY_S)
        except BaseException:
            if ready.done() and not ready.cancelled() and ready.exception() is None:
                place.beginning -= 1
                place.settled()
            raise
        finally:
            place.waiters.pop(ready, None)
            ready.cancel()
            if gone is not None:
                gone.cancel()

    # ---- loading

    def _want(self, place: Place) -> None:
        self.wanted.setdefault(place)
        self.work.set()

    async def _manage(self) -> None:
        """The task that loads the wanted models, one after another."""
        while True:
            await self.work.wait()
            self.work.clear()
            while self.wanted and not self.stopping:
                place = next(iter(self.wanted))
                del self.wanted[place]
                if place.waiters or (place.offer.pin and place.state is State.ABSENT):
                    try:
                        await self._bring(place)
                    except Exception as e:  # any error fails this model and its waiting requests, not the other models
                        self._failed(place, one_line(e))

    async def _bring(self, place: Place) -> None:
        """Make room for a model and load it."""
        if place.task is not None:
            await place.task
        if place.state in (State.READY, State.LOADING) or place.gone:
            return
        await self._make_room(place)
        assert self.load is not None
        place.state, began = State.LOADING, time.monotonic()
        self.say(f"loading {place.offer.name}")
        place.loading = await asyncio.to_thread(self.load, place.offer)
        if self.stopping:
            await asyncio.to_thread(place.loading.stop)
            return
        finish = partial(place.loading.finish, asyncio.get_running_loop(), lambda n, of: None)
        place.model = await asyncio.to_thread(finish)
        place.cost, place.loading = _cost(place.model), None
        self._is_ready(place)
        await asyncio.to_thread(self.prepare)
        self.say(f"{place.offer.name} is loaded, after {time.monotonic() - began:.1f} s")

    async def _make_room(self, place: Place) -> None:
        need = _need(place)
        victims: list[Place] = []
        while self.memory is not None:
            remaining = [p for p in self.places.values() if p.state in (State.READY, State.DRAINING) and p not in victims]
            if sum(p.cost for p in remaining) + need <= self.memory or not remaining:
                break
            draining = [p for p in remaining if p.state is State.DRAINING]
            free = [p for p in remaining if not p.offer.pin]
            if not draining and not free:
                raise MemoryError(f"it takes {need} bytes, and what is pinned leaves less of {self.memory}")
            victims.append(min(draining or free, key=lambda p: (p.busy, p.used)))
        await asyncio.gather(*map(self._drain, victims))

    def _drain(self, place: Place) -> asyncio.Task[None]:
        """Begin to unload a model; its running requests finish first."""
        if place.task is None:
            place.state, place.task = State.DRAINING, asyncio.create_task(self._drained(place))
        return place.task

    async def _drained(self, place: Place) -> None:
        model = place.model
        assert model is not None
        while place.busy and not model.engine.closed:
            place.drained.clear()
            with suppress(TimeoutError):  # an engine that died reports no end of its requests
                async with asyncio.timeout(1.0):
                    await place.drained.wait()
        place.model, ending = None, asyncio.to_thread(model.end, not place.gone)
        del model
        self.metrics.leave(place.offer.name)
        await ending
        del ending
        await asyncio.to_thread(gc.collect)  # its objects refer to each other; with them a tokenizer and descriptors would stay
        place.state, place.task = State.ABSENT, None
        if place.waiters:
            self._want(place)
        self._drop_if_gone(place)

    def _is_ready(self, place: Place) -> None:
        model = place.model
        assert model is not None
        model.hub.to_first = self.metrics.first.labels(place.offer.name).observe
        model.hub.between = self.metrics.gap.labels(place.offer.name).observe
        model.hub.idle = place.settled
        self.metrics.watch(place.offer.name, model.engine, model.roofline)
        place.state, place.why, place.known = State.READY, "", model.shown()
        place.used = place.since = time.monotonic()
        for ready in list(place.waiters):
            if not ready.done():
                ready.set_result(model)
                place.beginning += 1
        place.waiters.clear()

    def _failed(self, place: Place, why: str) -> None:
        """Mark a model as failed: it cannot be loaded, or its engine ended by itself."""
        if place.state is State.READY and time.monotonic() > place.since + SOUND_S:
            place.failures = 0
        model, place.model, place.loading = place.model, None, None
        if model is not None:
            self.metrics.leave(place.offer.name)
            loop = asyncio.get_running_loop()
            ended = loop.run_in_executor(None, model.end, False)
            ended.add_done_callback(lambda _: loop.run_in_executor(None, gc.collect))  # as in `_drained`
        place.state, place.why = State.FAILED, why
        place.again = time.monotonic() + min(PAUSES[1], PAUSES[0] * 2**place.failures)
        place.failures += 1
        self.say(f"{place.offer.name} failed: {why}")
        self._tell(place, _unloadable(place))

    @staticmethod
    def _tell(place: Place, why: Refusal) -> None:
        for ready in list(place.waiters):
            if not ready.done():
                ready.set_exception(why)
        place.waiters.clear()

    # ---- periodic work

    def look(self) -> str:
        """Mark models whose engine died as failed and unload idle ones; called periodically. Why the server ends, or ""."""
        if self.only:
            return self.one.engine.closed
        now = time.monotonic()
        for place in list(self.places.values()):
            if place.closed:
                self._failed(place, place.closed)
            alive = self.keep_alive if place.offer.keep_alive is None else place.offer.keep_alive
            idle = place.state is State.READY and not place.busy and not place.offer.pin
            if idle and now > place.used + alive:
                self._drain(place)
        return ""

    def update(self, offers: Mapping[str, Offer]) -> None:
        """Add these offers or replace those of the same name; a changed model is loaded again at its next request."""
        for name, offer in offers.items():
            place = self.places.get(name)
            if place is None:
                self.places[name] = Place(offer)
            elif place.offer != offer:
                place.offer, place.cost, place.known = offer, 0, {}
                if place.state is State.READY:
                    self._drain(place)

    def replace_all(self, offers: Mapping[str, Offer], default: str) -> None:
        """Offer exactly these models; the others are unloaded once their running requests have ended."""
        self.default = default
        for name, place in list(self.places.items()):
            place.gone = name not in offers
            if place.gone:
                self._tell(place, Refusal(404, f"the model {shown(name)} is not served any more", code="model_not_found"))
                if place.state is State.READY:
                    self._drain(place)
                self._drop_if_gone(place)
        self.update(offers)

    def _drop_if_gone(self, place: Place) -> None:
        if place.gone and place.state in (State.ABSENT, State.FAILED):
            self.places.pop(place.offer.name, None)

    # ---- reports

    @property
    def one(self) -> ServedModel:
        """The default model, which is loaded."""
        model = self.places[self.default].model
        assert model is not None
        return model

    def _offered(self) -> Iterable[str]:
        return (name for name, place in self.places.items() if not place.gone)

    async def shown(self, name: str) -> dict[str, Any]:
        """The entry of one model in /v1/models. Raises Refusal."""
        place = await self._place(name)
        return next(one for one in self._with_adapters(place) if one["id"] == name)

    def all_shown(self) -> list[dict[str, Any]]:
        """The entries of all models in /v1/models, the default first."""
        names = sorted(self._offered(), key=lambda n: n != self.default)
        return [one for n in names for one in self._with_adapters(self.places[n])]

    def _with_adapters(self, place: Place) -> list[dict[str, Any]]:
        base = self._shown(place)
        return [base, *({**base, "id": name, "parent": base["id"]} for name in place.offer.others)]

    def _shown(self, place: Place) -> dict[str, Any]:
        known = place.model.shown() if place.model is not None else place.known or place.offer.published()
        head = {"id": place.offer.name, "object": "model", "created": self.created, "owned_by": "lowq"}
        bytes_ = _need(place)
        more = {"state": place.state.value, "loaded": place.state is State.READY, "bytes": bytes_, "pinned": place.offer.pin}
        more |= {"kv_host_bytes": self.host_bytes(place.offer.name)} if self.host is not None else {}
        return {**head, **known, **more} | ({"error": place.why} if place.why else {})

    def host_bytes(self, name: str) -> int:
        """Bytes of a model's cache blocks in host memory, whether it is loaded or not."""
        place = self.places.get(name)
        if place is not None and place.model is not None:
            return place.model.engine.stats().host_bytes
        return 0 if self.host is None else self.host.kept_bytes(name)

    def stats(self) -> Stats:
        """The sum of all engines' numbers; counters only grow; `waiting` includes requests that wait for a model."""
        counts = [w.now() for w in self.metrics.watched.values()]
        names = [n for n, _, _ in COUNTERS] + ["running", "waiting", "blocks", "blocks_used"]
        total = Stats(**{n: sum(getattr(s, n) for s in counts) for n in names})
        return replace(total, waiting=total.waiting + sum(len(p.waiters) for p in self.places.values()))

    def idle_s(self) -> float:
        """Seconds since the last request ended; 0 while one is running or waiting."""
        if any(p.busy or p.waiters for p in self.places.values()):
            return 0.0
        return time.monotonic() - max(p.used for p in self.places.values())

    def not_ready(self) -> str:
        """Why requests are not answered now, or "": the server stops, a pinned model is not ready, or an engine is stalled."""
        if self.stopping:
            return self.stopping
        for name, place in self.places.items():
            if place.model is not None and (why := place.model.engine.closed or place.model.engine.stats().stalled):
                return why if self.only else f"{name}: {why}"
            if place.offer.pin and place.state is not State.READY:
                return f"{name}: {place.state}" + (f", {place.why}" if place.why else "")
        return ""


def _cost(model: ServedModel) -> int:
    return model.facts.weight_bytes + model.engine.limits.cache_bytes + PROCESS


def _need(place: Place) -> int:
    """Bytes that a model takes; before its first load, an estimate from the size of its files."""
    return place.cost or place.offer.weight_bytes() + PROCESS


def _unloadable(place: Place) -> Refusal:
    line = f"the model {shown(place.offer.name)} is not loaded: {place.why}"
    return Refusal(503, line, "server_error", retry=max(1, round(place.again - time.monotonic() + 0.5)))


async def _left(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
