"""A model that a server offers: its state, the requests that wait for it, and the pause after a failure."""

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from lowq_cli.engine.model_record import file_facts
from lowq_cli.running import model_path
from lowq_cli.serving.catalog import Offer
from lowq_cli.serving.http.fields import shown
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.served_model import ServedModel
from lowq_cli.serving.request import Done

PAUSES = (1.0, 60.0)  # seconds from a failure to the next attempt: after the first failure, and the max. of the doubled ones
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

    used: time (time.monotonic) at which a request last began or ended. beginning: requests that lease it and are not queued
    yet. waiters: requests that wait for it. waiting_since: when the first came. failures: failures in a row. again: time of
    the next attempt. cost: bytes that it takes, 0 if unknown. gone: whether it is not offered any more.
    """

    offer: Offer
    state: State = State.ABSENT
    model: ServedModel | None = None
    loading: Loading | None = None
    why: str = ""
    used: float = 0.0
    beginning: int = 0
    failures: int = 0
    again: float = 0.0
    cost: int = 0
    gone: bool = False
    known: dict[str, Any] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None  # the task that unloads it, or ends the process of a model that failed
    waiters: dict[asyncio.Future[ServedModel], None] = field(default_factory=dict)
    waiting_since: float = 0.0
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def busy(self) -> bool:
        """Whether it has running or queued requests."""
        return self.beginning > 0 or (self.model is not None and bool(self.model.hub.lives))

    @property
    def closed(self) -> str:
        """Why its engine takes no more requests; "" while it does."""
        return self.model.engine.closed if self.state is State.READY and self.model is not None else ""

    def mended(self, settled: bool = True) -> bool:
        """Whether files of an adapter that its model could not take have changed since it was loaded."""
        refused = {} if self.model is None or self.state is not State.READY else self.model.facts.refused
        return any(one.changed(settled) for one in refused.values())

    @property
    def outdated(self) -> bool:
        """Whether files of the model have changed since it was loaded."""
        model = self.model if self.state is State.READY else None
        return model is not None and bool(model.facts.files) and model.facts.files != file_facts(model_path(self.offer.path))

    @property
    def overwritten(self) -> bool:
        """Whether weights that a CPU computes with, in mapped pages, were written over in place since they were loaded.

        Takes 2 us for each file. A file that was replaced as a whole is harmless: its former pages stay as they are.
        """
        model = self.model if self.state is State.READY else None
        if model is None or model.facts.device != "cpu":
            return False
        for path, size, changed_ns, inode in model.facts.files:
            if path.endswith(".safetensors"):
                with suppress(OSError):
                    now = os.stat(path)
                    if now.st_ino == inode and (now.st_size, now.st_mtime_ns) != (size, changed_ns):
                        return True
        return False

    @property
    def due(self) -> bool:
        """Whether it is to be loaded: requests wait for it, or it is pinned, and no pause after a failure is left."""
        idle = self.state is State.ABSENT or (self.state is State.FAILED and time.monotonic() >= self.again)
        return bool(self.waiters) or (self.offer.pin and idle and not self.gone)

    @property
    def need(self) -> int:
        """Bytes that it takes: those of its last load, or an estimate from its files, which may have been replaced since."""
        return max(self.cost, self.offer.weight_bytes() + PROCESS)

    def wait(self) -> asyncio.Future[ServedModel]:
        """A place in the queue: a future that gets the model, counted in `beginning`, or an error."""
        if not self.waiters:
            self.waiting_since = time.monotonic()
        ready: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        self.waiters[ready] = None
        return ready

    def ready(self, model: ServedModel) -> None:
        """Hand the model, which is loaded, to the requests that wait for it."""
        self.model, self.loading, self.cost = model, None, model.facts.weight_bytes + model.engine.limits.cache_bytes + PROCESS
        self.state, self.why, self.known = State.READY, "", model.shown()
        self.used = time.monotonic()
        for ready in list(self.waiters):
            if not ready.done():
                ready.set_result(model)
                self.beginning += 1
        self.waiters.clear()

    def refuse(self, why: Refusal) -> None:
        """Refuse the requests that wait for it."""
        for ready in list(self.waiters):
            if not ready.done():
                ready.set_exception(why)
        self.waiters.clear()

    def detach(self) -> ServedModel | None:
        """Take the model away. If it has answered since its start, its earlier failures no longer count."""
        model, self.model, self.loading = self.model, None, None
        if model is not None and model.hub.answered:
            self.failures = 0
        return model

    def fail(self, why: str) -> None:
        """Refuse the waiting requests and, for a pause, new ones. The pause doubles with each failure in a row."""
        self.state, self.why = State.FAILED, why
        self.again = time.monotonic() + min(PAUSES[1], PAUSES[0] * 2**self.failures)
        self.failures += 1
        self.refuse(self.unloadable())

    def unloadable(self) -> Refusal:
        """The refusal of a request during the pause after a failure."""
        line = f"the model {shown(self.offer.name)} is not loaded: {self.why}"
        return Refusal(503, line, "server_error", retry=max(1, round(self.again - time.monotonic() + 0.5)))

    def offered_as(self, offer: Offer) -> None:
        """Replace the offer: what was known of the model, its failures included, no longer holds."""
        self.offer, self.cost, self.known, self.failures, self.again = offer, 0, {}, 0, 0.0
        if self.state is State.FAILED:
            self.state, self.why = State.ABSENT, ""

    def settled(self) -> None:
        """Record that a request has ended."""
        self.used = time.monotonic()
        if self.state is State.DRAINING and not self.busy:
            self.drained.set()
