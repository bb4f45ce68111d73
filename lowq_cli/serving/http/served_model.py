"""A model that is loaded, with what its answers are made with; and a server that has one such model from its start on."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

from lowq_cli.engine.tokenizer import LoadedTokenizer
from lowq_cli.serving.http.fields import shown
from lowq_cli.serving.http.grammar import Grammars
from lowq_cli.serving.http.hub import Hub
from lowq_cli.serving.http.metrics import Metrics, Roofline
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.text import Names
from lowq_cli.serving.request import Done, Engine

SHRINKS = 4  # times that normalizing may shorten a text, at most


class ServedModel:
    """A model that requests can be put to.

    Args:
        engine: not started yet. tokenizer, stop_ids: the model's. name: what clients call it.
        draw: settings of `Draw` where a request leaves them out. roofline: what `Metrics` takes.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: LoadedTokenizer,
        name: str,
        stop_ids: frozenset[int],
        draw: dict[str, Any] | None = None,
        roofline: Roofline | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.name, self.stop_ids = engine, tokenizer, name, stop_ids
        self.draw, self.created = draw or {}, int(time.time())
        self.metrics = Metrics(engine, roofline or Roofline())
        self.hub = Hub(engine, self.metrics.first.observe, self.metrics.gap.observe)
        self.names, self.added = Names(tokenizer), tokenizer.added_tokens()
        self.grammars = Grammars(tokenizer, stop_ids, engine.vocabulary)

    @cached_property
    def most_characters(self) -> int:
        """A longer text cannot be short enough, whatever its tokens are."""
        longest = max(map(len, self.tokenizer.get_vocab()), default=1)
        return SHRINKS * longest * self.engine.limits.longest

    def shown(self) -> dict[str, Any]:
        """What /v1/models tells of it."""
        more: dict[str, Any] = {"max_model_len": self.engine.limits.longest, "chat": bool(self.tokenizer.chat_template)}
        more |= {"sampling": self.draw}
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "lowq", **more}


class OneModel:
    """What a server of one model offers."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    @property
    def metrics(self) -> Metrics:
        """The server's numbers."""
        return self.model.metrics

    async def start(self, done: Done) -> None:
        """Start its engine."""
        await asyncio.to_thread(self.model.hub.start, asyncio.get_running_loop(), done)

    @asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[ServedModel]:
        """The model called `name`, or the default, which stays loaded until the block is left and its requests have ended.

        Raises Refusal.
        """
        self._check(name)
        yield self.model

    def shown(self, name: str | None = None) -> list[dict[str, Any]]:
        """What /v1/models tells of all, or of the one called `name`. Raises Refusal."""
        self._check(name)
        return [self.model.shown()]

    def state(self) -> tuple[int, int, str]:
        """(requests running, requests waiting, why none is taken, or "")."""
        s = self.model.engine.stats()
        return s.running, s.waiting, self.model.engine.closed or s.stalled

    def _check(self, name: str | None) -> None:
        if name not in (None, self.model.name):
            line = f"the model {shown(name)} is not served here; this server has {shown(self.model.name)}"
            raise Refusal(404, line, param="model", code="model_not_found")
