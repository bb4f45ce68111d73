"""A model that is loaded, with what its answers are made with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from lowq_cli.engine.tokenizer import LoadedTokenizer
from lowq_cli.output.dialects import ways_of
from lowq_cli.serving.http.dispatcher import Hub
from lowq_cli.serving.http.fields import shown
from lowq_cli.serving.http.grammar import Grammars
from lowq_cli.serving.http.metrics import Roofline
from lowq_cli.serving.http.pictures import PictureReader
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.text import Names
from lowq_cli.serving.request import Engine

SHRINKS = 4  # times that normalizing may shorten a text, at most


@dataclass(frozen=True)
class Facts:
    """Of a model that is loaded.

    weight_bytes: held by it. device: where it computes. kv: what keys and values are held in. context: tokens of a text, as the
    model's config says, None where it names no limit. published: how its generation_config.json has it drawn. pooling: how the
    hidden states of a text become one vector, of POOLINGS. drafts: what guesses tokens, or why nothing does. adapters: names
    of its LoRA adapters, in their order. act: what activations are rounded to, None for nothing.
    """

    weight_bytes: int = 0
    device: str = "cpu"
    kv: str = "16"
    context: int | None = None
    published: dict[str, Any] = field(default_factory=dict)
    pooling: str = "last"
    drafts: str = "none"
    adapters: tuple[str, ...] = ()
    act: str | None = None


class ServedModel:
    """A model that requests can be put to.

    Args:
        engine: not started yet. tokenizer, stop_ids: the model's. name: what clients call it.
        draw: settings of `Draw` where a request leaves them out. roofline: what `Metrics` takes. facts: what more is known.
        end: ends the engine; is told whether its cache stays in host memory.
        pictures: what reads those of requests, None where it takes none.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: LoadedTokenizer,
        name: str,
        stop_ids: frozenset[int],
        draw: dict[str, Any] | None = None,
        roofline: Roofline | None = None,
        facts: Facts | None = None,
        pictures: PictureReader | None = None,
        end: Callable[[bool], None] | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.name, self.stop_ids = engine, tokenizer, name, stop_ids
        self.draw, self.roofline, self.facts = draw or {}, roofline or Roofline(), facts or Facts()
        self.hub, self.pictures = Hub(engine), pictures
        self.end: Callable[[bool], None] = end or (lambda keep: engine.stop(0))
        self.names, self.added = Names(tokenizer), tokenizer.added_tokens()
        self.ways = lru_cache(lambda template: ways_of(template, self.added))  # how it writes, by the template in use
        self.grammars = Grammars(tokenizer, stop_ids, engine.vocabulary)

    @cached_property
    def most_characters(self) -> int:
        """A longer text cannot be short enough, whatever its tokens are."""
        longest = max(map(len, self.tokenizer.get_vocab()), default=1)
        return SHRINKS * longest * self.engine.limits.longest

    def adapter(self, asked: str | None, model: str | None) -> tuple[int, str]:
        """(the number of the adapter that a request asks for, by its own field or as its model, 0 for none; its name).

        Raises Refusal.
        """
        names = self.facts.adapters
        if asked is not None and asked not in names:
            has = f"there are {', '.join(map(shown, names))}" if names else "it has none"
            raise Refusal(404, f"lora: {shown(asked)} is no adapter of this model; {has}", param="lora", code="model_not_found")
        name = asked or (model if model in names else None)
        return (0, self.name) if name is None else (names.index(name) + 1, name)

    def shown(self) -> dict[str, Any]:
        """What /v1/models tells of it."""
        template = str(self.tokenizer.chat_template or "")
        features = ["completions", *["chat"] * bool(template), *["tools"] * ("tools" in template)]
        ways = self.ways(template)
        features += ["thinking"] * (ways.thoughts is not None or ways.channels)
        features += ["images"] * (self.pictures is not None)
        more = {"max_model_len": self.engine.limits.longest, "chat": bool(template), "features": features}
        return {**more, "sampling": self.draw, "engine": self.engine.name}
