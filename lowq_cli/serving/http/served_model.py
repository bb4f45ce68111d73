"""A loaded model with its engine, tokenizer and settings."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from lowq_cli import state
from lowq_cli.engine.model_record import file_facts
from lowq_cli.engine.tokenizer import LoadedTokenizer
from lowq_cli.output.syntaxes import syntax_of
from lowq_cli.serving.http.dispatcher import Hub
from lowq_cli.serving.http.fields import shown
from lowq_cli.serving.http.grammar import Grammars
from lowq_cli.serving.http.metrics import Roofline
from lowq_cli.serving.http.pictures import PictureReader
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.text import Names
from lowq_cli.serving.request import Engine

SHRINKS = 4  # max. factor by which a tokenizer's normalizer may shorten a text
SETTLED_S = 2.0  # min. seconds since the last write to an adapter's files before they are read again: a copy may be under way


@dataclass(frozen=True)
class Refused:
    """An adapter that its model could not take: its folder, why, and its files as they were then (`file_facts`)."""

    folder: str
    why: str
    files: list[tuple[str, int, int, int]]

    @classmethod
    def of(cls, folder: str, why: str = "") -> "Refused":
        """The folder with its files as they are now."""
        return cls(folder, why, file_facts(str(state.user_path(folder))))

    def changed(self, settled: bool) -> bool:
        """Whether its files have changed since; settled: and nothing was written to them for SETTLED_S."""
        files, now = Refused.of(self.folder).files, time.time_ns()
        writing = settled and any(abs(now - changed_ns) < SETTLED_S * 1e9 for _, _, changed_ns, _ in files)
        return files != self.files and not writing


@dataclass(frozen=True)
class Facts:
    """Facts of a loaded model.

    weight_bytes: bytes of its weights. device: the device it computes on. kv: the format of keys and values in the cache.
    context: max. tokens of a sequence by the model's config, None if it names no limit. published: the sampling settings of its
    generation_config.json. pooling: how the hidden states of a text become one vector, one of POOLINGS. drafts: the source of
    draft tokens, or why there are none. adapters: names of its LoRA adapters, in order. act: the format that activations are
    rounded to, "none" for no rounding. act_from: who chose it, as `act_from`. refused: the adapters that it could not take, by
    name. files: its files as they were before it was read (`file_facts`).
    """

    weight_bytes: int = 0
    device: str = "cpu"
    kv: str = "16"
    context: int | None = None
    published: dict[str, Any] = field(default_factory=dict)
    pooling: str = "last"
    drafts: str = "none"
    adapters: tuple[str, ...] = ()
    act: str = "none"
    act_from: str = "checkpoint"
    refused: Mapping[str, Refused] = field(default_factory=dict)
    files: list[tuple[str, int, int, int]] = field(default_factory=list)


class ServedModel:
    """A model that answers requests.

    Args:
        engine: an engine that is not started yet. tokenizer, stop_ids: of the model. name: the name that clients use.
        draw: settings of `Draw` for requests that leave them out. roofline: for `Metrics`. facts: further facts of the model.
        end: ends the engine; its argument says whether the cache is kept in host memory.
        pictures: reads the images of requests; None if the model takes none.
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
        self.syntax = lru_cache(lambda template: syntax_of(template, self.added))  # template -> how the model writes calls
        self.grammars = Grammars(tokenizer, stop_ids, engine.vocabulary)

    @cached_property
    def most_characters(self) -> int:
        """The number of characters above which a text exceeds the context for certain, whatever its tokens are."""
        longest = max(map(len, self.tokenizer.get_vocab()), default=1)
        return SHRINKS * longest * self.engine.limits.longest

    def adapter(self, requested: str | None, model: str | None) -> tuple[int, str]:
        """(number of the adapter that a request names in `lora` or `model`, 0 for none; the name of the adapter or model).

        Raises Refusal.
        """
        names = self.facts.adapters
        if (refused := self.facts.refused.get(requested or model or "")) is not None:
            line = f"the adapter {shown(requested or model)} is not loaded: {refused.why}"
            raise Refusal(503, line, "server_error", "lora" if requested else "model")
        if requested is not None and requested not in names:
            has = f"there are {', '.join(map(shown, names))}" if names else "it has none"
            raise Refusal(
                404, f"lora: {shown(requested)} is not an adapter of the model; {has}", param="lora", code="model_not_found"
            )
        name = requested or (model if model in names else None)
        return (0, self.name) if name is None else (names.index(name) + 1, name)

    def shown(self) -> dict[str, Any]:
        """The model's part of its entry in /v1/models."""
        template = str(self.tokenizer.chat_template or "")
        features = ["completions", *["chat"] * bool(template), *["tools"] * ("tools" in template)]
        syntax = self.syntax(template)
        features += ["thinking"] * (syntax.thoughts is not None or syntax.channels)
        features += ["images"] * (self.pictures is not None)
        more = {"max_model_len": self.engine.limits.longest, "chat": bool(template), "features": features}
        return {**more, "sampling": self.draw, "engine": self.engine.name}
