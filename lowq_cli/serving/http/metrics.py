"""The numbers of /metrics for Prometheus: engine counters, latencies that clients see, share of the memory bandwidth."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lowq_cli.serving.request import Engine, Stats

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Roofline:
    """The share of the memory bandwidth that steps reach.

    speed: bytes per second; None if it is unknown or memory is not the limit. read: entry i is the bytes of weights that a step
    of 2**i sequences reads.

    Prefill takes part of the same seconds, but its bytes are not counted, so a server with long prompts shows a lower share.
    """

    speed: float | None = None
    read: tuple[int, ...] = (0,)

    def share(self, before: Stats, now: Stats) -> float | None:
        """The share of the steps between two readings of the counters; None if it is unknown."""
        steps, seconds = now.steps - before.steps, now.busy_s - before.busy_s
        if self.speed is None or not steps or seconds <= 0:
            return None
        batch = max(1, round((now.new_tokens - before.new_tokens) / steps))
        low = min(batch.bit_length() - 1, len(self.read) - 1)
        high = min(low + 1, len(self.read) - 1)
        bytes_ = self.read[low] + (self.read[high] - self.read[low]) * (batch / (1 << low) - 1)
        return bytes_ * steps / seconds / self.speed


def roofline(model: Any, most: int) -> Roofline:
    """The Roofline of a model for steps of up to `most` sequences. An unknown bandwidth is measured now (under a second)."""
    from lowq_cli.engine import explain  # imports torch, which only the engine's process loads
    from lowq_cli.engine.decoders import decoder_of

    read = tuple(explain.bytes_per_token(model, decoder_of(model), 1 << i) for i in range(most.bit_length() + 1))
    return Roofline(explain.memory_speed(model.device, read[0])[0], read)


@dataclass
class Watched:
    """A model's engine, None while it is not loaded; `past`: the counters of its earlier engines."""

    engine: Engine | None
    roofline: Roofline
    before: Stats
    past: Stats = field(default_factory=Stats)
    loads: int = 0

    def now(self) -> Stats:
        """The engine's numbers now; counters include earlier engines and only grow."""
        s = Stats() if self.engine is None else self.engine.stats()
        return replace(s, **{name: getattr(s, name) + getattr(self.past, name) for name, _, _ in COUNTERS})


class Metrics:
    """The server's numbers by model. host_bytes: maps a model's name to the bytes of its cache in host memory."""

    def __init__(self, host_bytes: Callable[[str], int] = lambda name: 0) -> None:
        self.host_bytes = host_bytes
        self.registry = CollectorRegistry()
        self.watched: dict[str, Watched] = {}
        by = {"labelnames": ["model"], "registry": self.registry}
        self.requests = Counter("lowq_requests", "Requests by how they ended", ["model", "outcome"], registry=self.registry)
        how: Any = {"buckets": SECONDS, **by}
        self.first = Histogram("lowq_time_to_first_token_seconds", "From request to first token", **how)
        self.gap = Histogram("lowq_inter_token_seconds", "Between two tokens of a request", **how)
        self.whole = Histogram("lowq_request_seconds", "From request to the end of its answer", **how)
        self.registry.register(self)  # type: ignore[arg-type]

    def watch(self, name: str, engine: Engine, roofline: Roofline) -> None:
        """Add the engine of a model that was loaded."""
        entry = self.watched.get(name) or Watched(None, roofline, Stats())
        self.watched[name] = Watched(engine, roofline, engine.stats(), entry.past, entry.loads + 1)

    def leave(self, name: str) -> None:
        """Remove the engine of a model that was unloaded, and keep its counters."""
        entry = self.watched[name]
        try:
            entry.past = entry.now()
        finally:
            entry.engine = None

    def text(self) -> bytes:
        """The response to /metrics."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The engines' current numbers; called by the registry."""
        rows = {name: w.now() for name, w in self.watched.items()}
        for field_, name, about in COUNTERS:
            counter = CounterMetricFamily(name, about, labels=["model"])
            for model, s in rows.items():
                counter.add_metric([model], getattr(s, field_))
            yield counter
        loads = CounterMetricFamily("lowq_model_loads", "Times that the model was loaded", labels=["model"])
        for model, w in self.watched.items():
            loads.add_metric([model], w.loads)
        yield loads
        for name, about, value in GAUGES:
            gauge = GaugeMetricFamily(name, about, labels=["model"])
            for model, s in rows.items():
                if self.watched[model].engine is not None:
                    gauge.add_metric([model], value(s))
            yield gauge
        host = GaugeMetricFamily("lowq_kv_host_bytes", "Bytes of the cache in host memory, loaded or not", labels=["model"])
        for model in self.watched:
            host.add_metric([model], self.host_bytes(model))
        yield host
        yield self._shares()

    def _shares(self) -> Metric:
        gauge = GaugeMetricFamily("lowq_roofline_ratio", "Share of the memory's speed that steps reached", labels=["model"])
        for model, w in self.watched.items():
            if w.engine is None:
                continue
            s = w.engine.stats()
            share, w.before = w.roofline.share(w.before, s), s
            if share is not None:
                gauge.add_metric([model], share)
        return gauge


COUNTERS = (
    ("prompt_tokens", "lowq_prompt_tokens", "Prompt tokens read"),
    ("new_tokens", "lowq_generation_tokens", "Tokens generated"),
    ("prefix_hits", "lowq_prefix_cache_hit_tokens", "Prompt tokens found in the cache"),
    ("host_hits", "lowq_kv_host_hit_tokens", "Of those, prompt tokens that came back from host memory"),
    ("preemptions", "lowq_preemptions", "Requests put back into the queue for want of cache"),
    ("steps", "lowq_steps", "Steps of the engine"),
    ("drafted", "lowq_draft_tokens", "Tokens that were guessed and checked"),
    ("accepted", "lowq_draft_tokens_accepted", "Of those, tokens that were right"),
    ("busy_s", "lowq_busy_seconds", "Seconds in which the engine computed"),
)  # (field of Stats, metric, help)
GAUGES: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("lowq_requests_running", "Requests being computed", lambda s: s.running),
    ("lowq_requests_waiting", "Requests in the queue", lambda s: s.waiting),
    ("lowq_cache_usage_ratio", "Share of the cache's blocks in use", lambda s: s.blocks_used / s.blocks if s.blocks else 0.0),
)


class Speed:
    """Tokens per second since the last call. stats: returns the sum of all engines' numbers."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self.stats, self.tokens, self.at = stats, 0, time.monotonic()

    def now(self) -> tuple[Stats, float]:
        """(Stats, tokens per second)."""
        s, at = self.stats(), time.monotonic()
        rate = (s.new_tokens - self.tokens) / max(at - self.at, 1e-9)
        self.tokens, self.at = s.new_tokens, at
        return s, rate
