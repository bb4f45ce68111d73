"""What a server says of its models: the entries of /v1/models, and the numbers of all engines together."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowq_cli.serving.host_memory import HostMemory
from lowq_cli.serving.http.metrics import COUNTERS, Metrics
from lowq_cli.serving.http.place import Place, State
from lowq_cli.serving.request import Stats


class ModelReports:
    """Reports on the models `places`. host: holds cache blocks that the models' caches have no room for, None for nothing."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.places = places
        self.host: HostMemory | None = None
        self.metrics = Metrics(self.host_bytes)
        self.created = int(time.time())

    def offered(self) -> list[str]:
        """The names of the models."""
        return [name for name, place in self.places.items() if not place.gone]

    def models(self, default: str) -> list[dict[str, Any]]:
        """The entries of all models in /v1/models, the default first."""
        names = sorted(self.offered(), key=lambda n: n != default)
        return [one for n in names for one in self.entries(self.places[n])]

    def entries(self, place: Place) -> list[dict[str, Any]]:
        """The entries of a model, its aliases and its adapters in /v1/models."""
        base = self._entry(place)
        refused = {} if place.model is None else place.model.facts.refused
        failed = {n: {"state": State.FAILED.value, "loaded": False, "error": one.why} for n, one in refused.items()}
        return [base, *({**base, "id": n, "parent": base["id"], **failed.get(n, {})} for n in place.offer.others)]

    def _entry(self, place: Place) -> dict[str, Any]:
        facts = place.model.shown() if place.model is not None else place.known or place.offer.published()
        head = {"id": place.offer.name, "object": "model", "created": self.created, "owned_by": "lowq"}
        more: dict[str, Any] = {"state": place.state.value, "loaded": place.state is State.READY}
        more |= {"bytes": place.need, "disk_bytes": place.offer.weight_bytes(), "pinned": place.offer.pin}
        more |= {"kv_host_bytes": self.host_bytes(place.offer.name)} if self.host is not None else {}
        return {**head, **facts, **more} | ({"error": place.why} if place.why else {})

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
