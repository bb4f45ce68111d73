"""What /metrics tells Prometheus: counters of the engine, times that clients see, the share of the memory's speed."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lowq_cli.serving.request import Engine, Stats

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Roofline:
    """The share of the memory's speed that steps reach.

    speed: bytes per second; None where it is not known, or memory is not the limit. read: by powers of two of texts, the bytes
    of weights that a step of so many reads.

    Prompts are read in the same seconds and not counted as bytes, so a server that reads long ones shows a lower share.
    """

    speed: float | None = None
    read: tuple[int, ...] = (0,)

    def share(self, before: Stats, now: Stats) -> float | None:
        """Of the steps between two moments; None where it is not known."""
        steps, seconds = now.steps - before.steps, now.busy_s - before.busy_s
        if self.speed is None or not steps or seconds <= 0:
            return None
        batch = max(1, round((now.new_tokens - before.new_tokens) / steps))
        low = min(batch.bit_length() - 1, len(self.read) - 1)
        high = min(low + 1, len(self.read) - 1)
        bytes_ = self.read[low] + (self.read[high] - self.read[low]) * (batch / (1 << low) - 1)
        return bytes_ * steps / seconds / self.speed


def roofline(model: Any, most: int) -> Roofline:
    """A model's, for steps of up to `most` texts. Memory's speed is measured now where it is not known (under a second)."""
    from lowq_cli.engine import explain  # torch, which only the engine's process has
    from lowq_cli.engine.decoders import decoder_of

    read = tuple(explain.bytes_per_token(model, decoder_of(model), 1 << i) for i in range(most.bit_length() + 1))
    return Roofline(explain.memory_speed(model.device, read[0])[0], read)


class Metrics:
    """The server's numbers.

    Args:
        engine: whose Stats are read when Prometheus asks.
    """

    def __init__(self, engine: Engine, roofline: Roofline = Roofline()) -> None:
        self.engine, self.roofline = engine, roofline
        self.registry = CollectorRegistry()
        self.before = engine.stats()
        self.requests = Counter("lowq_requests", "Requests by how they ended", ["outcome"], registry=self.registry)
        how: Any = {"buckets": SECONDS, "registry": self.registry}
        self.first = Histogram("lowq_time_to_first_token_seconds", "From request to first token", **how)
        self.gap = Histogram("lowq_inter_token_seconds", "Between two tokens of a request", **how)
        self.whole = Histogram("lowq_request_seconds", "From request to the end of its answer", **how)
        self.registry.register(self)  # type: ignore[arg-type]

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's numbers now, for the registry."""
        s = self.engine.stats()
        for name, value, about in (
            ("lowq_prompt_tokens", s.prompt_tokens, "Prompt tokens read"),
            ("lowq_generation_tokens", s.new_tokens, "Tokens generated"),
            ("lowq_prefix_cache_hit_tokens", s.prefix_hits, "Prompt tokens found in the cache"),
            ("lowq_preemptions", s.preemptions, "Requests put back into the queue for want of cache"),
            ("lowq_steps", s.steps, "Steps of the engine"),
            ("lowq_busy_seconds", s.busy_s, "Seconds in which the engine computed"),
        ):
            yield CounterMetricFamily(name, about, value)
        for name, value, about in (
            ("lowq_requests_running", s.running, "Requests being computed"),
            ("lowq_requests_waiting", s.waiting, "Requests in the queue"),
            ("lowq_cache_usage_ratio", s.blocks_used / s.blocks if s.blocks else 0.0, "Share of the cache's blocks in use"),
        ):
            yield GaugeMetricFamily(name, about, value)
        share, self.before = self.roofline.share(self.before, s), s
        if share is not None:
            yield GaugeMetricFamily("lowq_roofline_ratio", "Share of the memory's speed that steps reached", share)


class Speed:
    """Tokens per second since it was last asked."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.tokens, self.at = engine, 0, time.monotonic()

    def now(self) -> tuple[Stats, float]:
        """(Stats, tokens per second)."""
        s, at = self.engine.stats(), time.monotonic()
        rate = (s.new_tokens - self.tokens) / max(at - self.at, 1e-9)
        self.tokens, self.at = s.new_tokens, at
        return s, rate
