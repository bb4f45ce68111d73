"""Loads the models that requests wait for, one at a time, and unloads others to make room.

The next model is the one whose first request has waited longest. If the memory is too small for it, idle models are unloaded
first, starting with the least recently used, then busy ones: a draining model finishes its running requests and takes no new
ones. A request that comes for a draining model waits until it is loaded again, so every requested model gets its turn.

No waiting request is forgotten: which model is wanted follows from the requests that wait, and is stored nowhere else; after
an attempt to load a model none of its requests waits any longer, unless its offer changed meanwhile and it is loaded again.
"""

import asyncio
import gc
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from lowq_cli import console
from lowq_cli.serving.catalog import Offer
from lowq_cli.serving.http.metrics import Metrics
from lowq_cli.serving.http.place import Loading, Place, State
from lowq_cli.serving.http.served_model import ServedModel
from lowq_packers.errors import DoesNotFitError, log_error, one_line


class ModelLoads:
    """The loads and unloads of a server's models.

    Args:
        places: the models by name. load: begins to load a model; called in a thread.
        memory: max. bytes of all loaded models together, or None. metrics: the server's numbers.
    Attributes:
        check: called in a thread before others are unloaded for a model; raises what makes it certain that it cannot be loaded.
        prepare: called in a thread, at the start and after each load, to prepare the next one. say: writes to the log.
    """

    def __init__(
        self, places: dict[str, Place], load: Callable[[Offer], Loading] | None, memory: int | None, metrics: Metrics
    ) -> None:
        self.places, self.load, self.memory, self.metrics = places, load, memory, metrics
        self.check: Callable[[Offer], object] = lambda offer: None
        self.prepare: Callable[[], object] = lambda: None
        self.say: Callable[[str], None] = lambda line: None
        self.stopping = False
        self.work = asyncio.Event()  # set when a model may have become wanted
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to load wanted models, the pinned ones first."""
        self.work.set()
        self.task = asyncio.create_task(self._run())

    @property
    def ended(self) -> str:
        """Why no model is loaded any more: an error that nothing else has caught; "" while models are loaded."""
        if self.stopping or self.task is None or not self.task.done():
            return ""
        why = None if self.task.cancelled() else self.task.exception()
        return f"models are not loaded any more: {one_line(why) if why else 'the task was cancelled'}"

    def stop(self) -> None:
        """Load no more models, and end the process of one that is being loaded."""
        self.stopping = True
        for place in self.places.values():
            if place.loading is not None:
                asyncio.get_running_loop().run_in_executor(None, place.loading.stop)

    async def _run(self) -> None:
        await self._prepare()
        while True:
            await self.work.wait()
            self.work.clear()
            while not self.stopping and (place := self._next()) is not None:
                offer = place.offer
                try:
                    await self._bring(place)
                except Exception as e:  # any error fails this model and its waiting requests, not the other models
                    if place.offer is offer and not self.stopping:
                        self.failed(place, one_line(e))
                    else:
                        place.state, place.loading = State.ABSENT, None
                        self.drop_if_gone(place)

    def _next(self) -> Place | None:
        """The wanted model whose first request has waited longest; pinned models without a request come first."""
        due = [p for p in self.places.values() if p.due]
        return min(due, key=lambda p: p.waiting_since if p.waiters else 0.0, default=None)

    async def _bring(self, place: Place) -> None:
        """Make room for a model and load it."""
        ending = [p.task for p in self.places.values() if p.task and (p is place or p.state is not State.DRAINING)]
        await asyncio.gather(*ending)  # processes of engines that failed hold memory until they have ended
        await asyncio.to_thread(self.check, place.offer)
        await self._make_room(place)
        if not place.due or self.stopping:  # its requests have left meanwhile
            return
        assert self.load is not None
        place.state, offer, began = State.LOADING, place.offer, time.monotonic()
        self.say(f"loading {offer.name}")
        place.loading = await asyncio.to_thread(self.load, offer)
        if self.stopping:
            await asyncio.to_thread(place.loading.stop)
            return
        finish = partial(place.loading.finish, asyncio.get_running_loop(), lambda n, of: None)
        model = await asyncio.to_thread(finish)
        if place.gone or place.offer is not offer:  # the file of models was read again meanwhile
            place.state, place.loading = State.ABSENT, None
            await asyncio.to_thread(model.end, False)
            self.drop_if_gone(place)
            return
        place.ready(model)
        self.watch(place)
        self.say(f"{offer.name} is loaded, after {time.monotonic() - began:.1f} s")
        self.report(model)
        del model
        await self._prepare()

    async def _prepare(self) -> None:
        try:
            await asyncio.to_thread(self.prepare)
        except Exception as e:  # such as too many processes: the next load then starts its own process, or reports the error
            log_error("no process stands by for the next model", e)

    def report(self, model: ServedModel) -> None:
        """Write to the log which adapters a model could not take."""
        for name, refused in model.facts.refused.items():
            self.say(f"{model.name} is served without the adapter {name}: {refused.why}")

    def watch(self, place: Place) -> None:
        """Connect a model that is ready to the server's numbers."""
        model = place.model
        assert model is not None
        model.hub.to_first = self.metrics.first.labels(place.offer.name).observe
        model.hub.between = self.metrics.gap.labels(place.offer.name).observe
        model.hub.idle = place.settled
        self.metrics.watch(place.offer.name, model.engine, model.roofline)

    async def _make_room(self, place: Place) -> None:
        need = place.need
        victims: list[Place] = []
        while self.memory is not None:
            remaining = [p for p in self.places.values() if p.state in (State.READY, State.DRAINING) and p not in victims]
            if sum(p.cost for p in remaining) + need <= self.memory or not remaining:
                break
            draining = [p for p in remaining if p.state is State.DRAINING]
            free = [p for p in remaining if not p.offer.pin]
            if not draining and not free:
                has = f"{console.size(need)} do not fit next to the pinned models into {console.size(self.memory)}"
                raise DoesNotFitError(f"{has}; pin fewer models, or give the server more --memory")
            victims.append(min(draining or free, key=lambda p: (p.busy, p.used)))
        await asyncio.gather(*map(self.drain, victims))

    def drain(self, place: Place) -> asyncio.Task[None]:
        """Begin to unload a model; its running requests finish first."""
        if place.task is None:
            place.state, place.task = State.DRAINING, asyncio.create_task(self._drained(place))
        return place.task

    async def _drained(self, place: Place) -> None:
        assert place.model is not None
        while place.busy and not place.model.engine.closed:
            place.drained.clear()
            with suppress(TimeoutError):  # an engine that died reports no end of its requests
                async with asyncio.timeout(1.0):
                    await place.drained.wait()
        await self._end(place, not place.gone)
        place.state, place.task = State.ABSENT, None
        self.work.set()
        self.drop_if_gone(place)

    async def _end(self, place: Place, keep: bool) -> None:
        """End the process of a model. keep: keep its cache in host memory."""
        model = place.detach()
        assert model is not None
        leaving = [model]  # emptied by the thread, whose executor holds a call's arguments for a moment after its result
        del model
        try:
            try:
                self.metrics.leave(place.offer.name)
            finally:
                await asyncio.to_thread(lambda: leaving.pop().end(keep))
        except Exception as e:  # the model is unloaded all the same: what waits for it must not wait forever
            log_error(f"{place.offer.name} was unloaded with an error", e)
        await asyncio.to_thread(gc.collect)  # its objects refer to each other; with them a tokenizer and descriptors would stay

    def failed(self, place: Place, why: str) -> None:
        """Mark a model as failed: it cannot be loaded, or its engine ended by itself.

        An engine that had answered was sound: the next request loads its model at once.
        """
        if place.model is not None and place.model.hub.answered:
            place.state, place.why = State.ABSENT, why
        else:
            place.fail(why)
        if place.model is not None:
            place.task = asyncio.create_task(self._ended(place))
        place.loading = None
        self.say(f"{place.offer.name} failed: {why}")
        self.work.set()
        self.drop_if_gone(place)

    async def _ended(self, place: Place) -> None:
        await self._end(place, False)
        place.task = None

    def drop_if_gone(self, place: Place) -> None:
        """Forget a model that is not offered any more, once it is unloaded."""
        if place.gone and place.state in (State.ABSENT, State.FAILED):
            self.places.pop(place.offer.name, None)
