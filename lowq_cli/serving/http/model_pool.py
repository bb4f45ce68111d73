"""The models of a server: requests lease them, and each is loaded at its first request.

A model is absent, loading, ready, draining or failed. A request leases a ready model at once and waits for a model in any other
state: until it has it, until it cannot be loaded, until its client leaves, or for a limited time. `model_loads` loads what
requests wait for. If an engine ends by itself, only its model fails; the next request after a pause loads it again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from lowq_cli.serving.catalog import Offer
from lowq_cli.serving.http.fields import shown
from lowq_cli.serving.http.model_loads import ModelLoads
from lowq_cli.serving.http.model_reports import ModelReports
from lowq_cli.serving.http.place import Loading, Place, State
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.served_model import ServedModel
from lowq_cli.serving.request import Done

WAITING = 512  # max. requests waiting for models, all models together
WAIT_S = 300.0  # max. seconds that a request waits for its model
REFRESH_S = 2.0  # min. seconds between two scans of the disk for unknown names: bounds the cost of requests with made-up names


class ModelPool:
    """All models of a server.

    Args:
        offers: the models by name. default: the model of requests that name none.
        load: begins to load a model; called in a thread.
        memory: max. bytes of all loaded models together; None: no bound until `loads.memory` is set.
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
        self.default, self.keep_alive, self.only = default, keep_alive, only
        self.most_waiting, self.wait_s = waiting, wait_s
        self.reports = ModelReports(self.places)
        self.loads = ModelLoads(self.places, load, memory, self.reports.metrics)
        self.stopping = ""
        self.refresh: Callable[[], Mapping[str, Offer]] = lambda: {}  # called in a thread when a name is unknown
        self.refreshed = -REFRESH_S

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
        self.loads.report(model)

    async def start(self, done: Done) -> None:
        """Start the engines of adopted models and load the pinned ones. Raises what an engine's start raises."""
        loop = asyncio.get_running_loop()
        for place in self.places.values():
            if place.model is not None:
                await asyncio.to_thread(place.model.hub.start, loop, done)
                place.ready(place.model)
                self.loads.watch(place)
        self.loads.start()

    def close(self, why: str = "the server is stopping") -> None:
        """Take no more requests, and refuse those that wait for models."""
        self.stopping = self.stopping or why
        for place in self.places.values():
            place.refuse(Refusal(503, self.stopping, "server_error"))
        self.loads.stop()

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
            self.loads.failed(place, place.closed)
        if self.loads.load is not None and not place.busy and (place.mended() or place.overwritten):
            self.loads.drain(place)
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

    async def unload(self, name: str | None) -> bool:
        """Begin to unload a model, whose running requests finish first; False if it is pinned. Raises Refusal."""
        place = await self._place(name)
        if place.state is State.READY and not place.offer.pin:
            self.loads.drain(place)
        return not place.offer.pin

    async def _place(self, name: str | None) -> Place:
        place = self._named(name)
        if place is None and time.monotonic() > self.refreshed + REFRESH_S:
            self.refreshed = time.monotonic()
            self.update(await asyncio.to_thread(self.refresh))
            place = self._named(name)
        if place is None or place.gone:
            offered = self.reports.offered()
            has = ", ".join(map(shown, offered[:8])) + (", ..." if len(offered) > 8 else "")
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
            raise place.unloadable()
        if sum(len(p.waiters) for p in self.places.values()) >= self.most_waiting:
            line = f"{self.most_waiting} requests wait for models already; try again later"
            raise Refusal(503, line, "server_error")
        ready = place.wait()
        self.loads.work.set()
        gone = asyncio.create_task(_left(receive)) if receive is not None else None
        try:
            await asyncio.wait([w for w in (ready, gone) if w is not None], timeout=self.wait_s, return_when="FIRST_COMPLETED")
            if ready.done():
                return ready.result()
            if gone is not None and gone.done():
                raise ClientDisconnect
            line = f"the model {shown(place.offer.name)} could not be loaded within {self.wait_s:.0f} s; try again later"
            raise Refusal(503, line, "server_error")
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

    # ---- periodic work, and changes of the offers

    def look(self) -> str:
        """Mark models whose engine died as failed and unload idle ones; called periodically. Why the server ends, or ""."""
        if self.only:
            model = self.places[self.default].model
            return model.engine.closed if model is not None else self.loads.ended
        now = time.monotonic()
        for place in list(self.places.values()):
            if place.closed:
                self.loads.failed(place, place.closed)
            alive = self.keep_alive if place.offer.keep_alive is None else place.offer.keep_alive
            idle = place.state is State.READY and not place.busy and not place.offer.pin
            if idle and now > place.used + alive:
                self.loads.drain(place)
        self.loads.work.set()  # the pause of a pinned model that failed may have ended
        return self.loads.ended

    def update(self, offers: Mapping[str, Offer]) -> None:
        """Add these offers or replace those of the same name; a changed model is loaded again at its next request."""
        for name, offer in offers.items():
            place = self.places.get(name)
            if place is None:
                self.places[name] = Place(offer)
            elif place.offer != offer:
                place.offered_as(offer)
                if place.state is State.READY:
                    self.loads.drain(place)
        self.loads.work.set()  # an offer may be pinned now

    def replace_all(self, offers: Mapping[str, Offer], default: str) -> None:
        """Offer exactly these models; the others are unloaded once their running requests have ended.

        Models are loaded again if their files have changed, or those of adapters that they could not take.
        """
        self.default = default
        for name, place in list(self.places.items()):
            place.gone = name not in offers
            if place.gone:
                place.refuse(Refusal(404, f"the model {shown(name)} is not served any more", code="model_not_found"))
                if place.state is State.READY:
                    self.loads.drain(place)
                self.loads.drop_if_gone(place)
            elif place.outdated or place.mended(settled=False):
                self.loads.drain(place)
        self.update(offers)

    # ---- reports

    @property
    def one(self) -> ServedModel:
        """The default model, which is loaded."""
        model = self.places[self.default].model
        assert model is not None
        return model

    async def entry(self, name: str) -> dict[str, Any]:
        """The entry of one model in /v1/models. Raises Refusal."""
        place = await self._place(name)
        return next(one for one in self.reports.entries(place) if one["id"] == name)

    def entries(self) -> list[dict[str, Any]]:
        """The entries of all models in /v1/models, the default first."""
        return self.reports.models(self.default)

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


async def _left(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
