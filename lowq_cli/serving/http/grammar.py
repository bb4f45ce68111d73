"""Structured output: JSON schemas and tool calls as masks over the next token, with the llguidance library (an extra).

A mask belongs to one request and is called by the engine's thread, which has those of the model's tokens from `mask_process`.
A form is tested for a few bytes before its request is queued, here and with a tokenizer of single bytes: the library takes a
second to prepare a model's own, of 150,000 tokens, and no other thread of the process can run Python meanwhile. The library can
still give up inside an answer, at its own limit (20 ms per step, because all other requests wait for it). The request then
fails with an error: half an object that ends with "stop" would look complete.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from lowq_cli.engine.tokenizer import Added, LoadedTokenizer
from lowq_cli.serving.http import rules
from lowq_cli.serving.http.fields import Params, items, known, shown, table, text
from lowq_cli.serving.http.refusal import Refusal, wrong
from lowq_cli.serving.request import Mask, Words
from lowq_cli.serving.token_masks import KEPT, NO_FORMS, TokenMasks, first_mask
from lowq_packers.errors import UsageError

# json.dumps' spacing, the most common in training data; with free whitespace a small model may write nothing else
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
BYTES = 256


class _Bytes:
    """A tokenizer as the library takes one: bytes are tokens, then come those added to a model's vocabulary, then an end."""

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, added: int) -> None:
        self.tokens = [bytes([i]) for i in range(BYTES)] + [b"\xff[%d]" % (BYTES + i) for i in range(added + 1)]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class Later(Mask):
    """A mask that is made when it is first used. An engine in another process makes its own from the recipe."""

    def __init__(self, recipe: str, make: Callable[[str], Mask]) -> None:
        self.recipe, self._make = recipe, make

    @cached_property
    def _mask(self) -> Mask:
        return self._make(self.recipe)

    def fill(self, words: Words) -> None:
        """Do what `Mask.fill` does."""
        self._mask.fill(words)

    def accept(self, token: int) -> None:
        """Do what `Mask.accept` does."""
        self._mask.accept(token)


class Grammars:
    """Tests the forms of answers for a model, and makes their masks.

    Args:
        tokenizer: of the model. stop_ids: tokens that end its answers. vocabulary: the number of logits.
    """

    def __init__(self, tokenizer: LoadedTokenizer, stop_ids: frozenset[int], vocabulary: int) -> None:
        self.tokenizer, self.ends, self.vocabulary = tokenizer, sorted(stop_ids), vocabulary
        self._tested = lru_cache(KEPT)(self._test)

    @cached_property
    def _library(self) -> tuple[Any, Any, int]:
        """(llguidance's matcher, its wrapper of a tokenizer of bytes, the number of tokens there). Raises Refusal."""
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ModuleNotFoundError:
            raise Refusal(400, "response_format and forced tool calls need a library: pip install llguidance") from None
        if not self.ends:
            raise Refusal(400, NO_FORMS)
        one = _Bytes(len(self.added))
        size = len(one.tokens)
        return LLMatcher, LLTokenizer(one, n_vocab=size, eos_token=[one.eos_token_id], slices=[]), size  # type: ignore[arg-type]

    @cached_property
    def added(self) -> dict[str, Added]:
        """The tokens that were added to the model's vocabulary, with the ids that they have in a test."""
        return {t: Added(BYTES + i, a.special) for i, (t, a) in enumerate(self.tokenizer.added_tokens().items())}

    @cached_property
    def _forms(self) -> TokenMasks:
        return TokenMasks(self.tokenizer.definition(), self.vocabulary, self.ends)

    def schema(self, schema: dict[str, Any], param: str) -> Callable[[], Mask]:
        """A function that makes masks for a JSON schema. Raises Refusal for a schema that is invalid or not supported."""
        try:
            grammar = self._library[0].grammar_from_json_schema(json.dumps(schema), overrides=SPACED)
        except ValueError as e:
            raise wrong(param, " ".join(str(e).split())[:200]) from None
        return self._grammar(grammar, grammar, param)

    def lark(self, grammar: Callable[[Mapping[str, Added]], str], added: Mapping[str, Added], param: str) -> Callable[[], Mask]:
        """A function that makes masks for a grammar in Lark's format. Raises Refusal.

        grammar: writes it, given the ids of the tokens that were added to the vocabulary. added: the model's ids.
        """
        serialized = self._library[0].grammar_from_lark
        return self._grammar(serialized(grammar(added)), serialized(grammar(self.added)), param)

    def _grammar(self, grammar: str, of_bytes: str, param: str) -> Callable[[], Mask]:
        try:
            self._tested(of_bytes)
        except UsageError as e:
            raise wrong(param, str(e)) from None
        return lambda: self.mask(grammar)

    def _test(self, grammar: str) -> None:
        matcher, tokens, size = self._library
        first_mask(matcher, tokens, grammar, [size - 1], size)

    def mask(self, recipe: str) -> Mask:
        """The mask at the start of an answer, with no work done yet."""
        return Later(recipe, lambda recipe: rules.mask_of(recipe, self.tokenizer, lambda form: self._forms.mask(form)))


class Form(NamedTuple):
    """The form of an answer. rule: its Lark rule. schema: its JSON schema, if it has one. param: the field that sets it."""

    rule: str
    param: str
    schema: dict[str, Any] | None = None


def answer_form(params: Params) -> Form | None:
    """The form that a request sets for its answer; None for any text. Raises Refusal."""
    given = params.get("response_format")
    if given is None or given.get("type") == "text":
        return None
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in FORMS:
        raise wrong("response_format.type", f"must be one of {', '.join(FORMS)}, not {shown(kind)}")
    known("response_format", given, {"type", FORMS[kind]})
    if params.get("ignore_eos"):
        raise wrong("ignore_eos", "an answer in a form ends where the form does; leave one out")
    if kind == "json_object":
        return _json({"type": "object"}, "response_format")
    name = f"response_format.{FORMS[kind]}"
    value = given.get(FORMS[kind])
    if kind == "json_schema":
        schema = table(name, value).get("schema")
        if isinstance(schema, str):  # vLLM accepts that, too
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                raise wrong(f"{name}.schema", "is not JSON") from None
        return _json(table(f"{name}.schema", schema), f"{name}.schema")
    if kind == "regex":
        return Form("/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", text(name, value)) + "/", name)
    return Form("(" + " | ".join(json.dumps(text(name, c), ensure_ascii=False) for c in items(name, value)) + ")", name)


FORMS = {"text": "type", "json_object": "type", "json_schema": "json_schema", "regex": "regex", "choice": "choice"}


def _json(schema: dict[str, Any], param: str) -> Form:
    return Form(f"%json {json.dumps({**schema, 'x-guidance': SPACED})}", param, schema)
