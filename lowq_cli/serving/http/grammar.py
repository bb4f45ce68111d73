"""Answers in a form: JSON schemas and calls of tools as masks over the next token, by the llguidance library (an extra).

A mask belongs to one request and is asked by the engine's thread. A form is tried before it is queued, for some tokens; the
library can still give up in the midst of an answer, at a limit of its own (it keeps a step under 20 ms, for all others wait for
it). That is an error of the request, as half an object which "stop" follows would pass for a whole one.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from lowq_cli.engine.tokenizer import LoadedTokenizer
from lowq_cli.serving.http import rules
from lowq_cli.serving.http.fields import Asked, items, known, shown, table, text
from lowq_cli.serving.http.refusal import Refusal, wrong
from lowq_cli.serving.request import Mask, Words, allow
from lowq_packers.errors import UsageError

NO_TOKEN = "no token can follow"
KEPT = 32  # grammars: one of 2,000 properties takes 0.1 s to read
TRIED = 8  # tokens: a schema of 2,000 properties fails at the second, one that is itself at the first
# as json.dumps writes it, which models have seen most; free blanks would let a small one write nothing else
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar:
    """The mask of one request; its recipe is the grammar as the library writes it."""

    def __init__(self, matcher: Any, ends: Sequence[int], recipe: str) -> None:
        self.matcher, self.ends, self.recipe = matcher, ends, recipe

    def fill(self, words: Words) -> None:
        """The tokens that the grammar allows; at its end those that end a text. Raises UsageError where the library gave up."""
        self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self.matcher.is_error() or not (words.any() or self.matcher.is_accepting()):
            why = (self.matcher.get_error() or NO_TOKEN).partition("<state>")[0].replace("NoExtensionBias", NO_TOKEN)
            raise UsageError(f"the answer cannot keep to its form: {' '.join(why.split())[:200]}; a simpler schema may do")
        if not words.any():
            for token in self.ends:
                allow(words, token)

    def accept(self, token: int) -> None:
        """A token was drawn."""
        if token not in self.ends:
            self.matcher.consume_token(token)


class Grammars:
    """Masks for a model.

    Args:
        tokenizer: the model's. stop_ids: tokens that end its texts. vocabulary: logits of a token.
    """

    def __init__(self, tokenizer: LoadedTokenizer, stop_ids: frozenset[int], vocabulary: int) -> None:
        self.tokenizer, self.ends, self.vocabulary = tokenizer, sorted(stop_ids), vocabulary
        self.lock = Lock()
        self._first = lru_cache(KEPT)(lambda recipe: self._library[0](self._library[1], recipe, log_level=0))

    @cached_property
    def _library(self) -> tuple[Any, Any]:
        """(llguidance's matcher, its view of this tokenizer). Raises Refusal where one of them cannot be had."""
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ModuleNotFoundError:
            raise Refusal(400, "response_format and forced tool calls need a library: pip install llguidance") from None
        definition = self.tokenizer.definition()
        if definition is None or not self.ends:
            raise Refusal(400, "this model's tokenizer is not one that forms can be written with")
        return LLMatcher, LLTokenizer(definition, n_vocab=self.vocabulary, eos_token=self.ends)

    def schema(self, schema: dict[str, Any], param: str) -> Callable[[], Mask]:
        """What makes masks for a JSON schema. Raises Refusal for a schema that is none, or that the library does not know."""
        with self.lock:
            matcher = self._library[0]
        try:
            return self._grammar(matcher.grammar_from_json_schema(json.dumps(schema), overrides=SPACED), param)
        except ValueError as e:
            raise wrong(param, " ".join(str(e).split())[:200]) from None

    def lark(self, grammar: str, param: str) -> Callable[[], Mask]:
        """The same for a grammar in Lark's form."""
        with self.lock:
            matcher = self._library[0]
        return self._grammar(matcher.grammar_from_lark(grammar), param)

    def _grammar(self, grammar: str, param: str) -> Callable[[], Mask]:
        try:
            self._try(self.mask(grammar))
        except UsageError as e:
            raise wrong(param, str(e)) from None
        return lambda: self.mask(grammar)

    def mask(self, recipe: str) -> Mask:
        """A mask at its beginning. Raises UsageError for a grammar that the library does not take."""
        if recipe.startswith(rules.PREFIX):
            return rules.Rules.of(recipe).mask(self.tokenizer, self.mask)
        first = self._first(recipe)
        if first.is_error():
            raise UsageError(" ".join(first.get_error().split())[:200])
        return Grammar(first.deep_copy(), self.ends, recipe)

    def _try(self, grammar: Mask) -> None:
        """Write a few tokens, always the first that may come. Raises UsageError where none may."""
        words = np.zeros(-(-self.vocabulary // 32), np.int32)
        for _ in range(TRIED):
            grammar.fill(words)
            word = int(words.nonzero()[0][0])
            bits = int(words[word])
            token = 32 * word + (bits & -bits).bit_length() - 1
            if token in self.ends:
                return
            grammar.accept(token)


class Form(NamedTuple):
    """The form of an answer. rule: as Lark has it. schema: where it is one of JSON. param: the field that names it."""

    rule: str
    param: str
    schema: dict[str, Any] | None = None


def answer_form(asked: Asked) -> Form | None:
    """The form that an answer has to keep to; None for any text. Raises Refusal."""
    given = asked.get("response_format")
    if given is None or given.get("type") == "text":
        return None
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in FORMS:
        raise wrong("response_format.type", f"must be one of {', '.join(FORMS)}, not {shown(kind)}")
    known("response_format", given, {"type", FORMS[kind]})
    if asked.get("ignore_eos"):
        raise wrong("ignore_eos", "an answer in a form ends where the form does; leave one out")
    if kind == "json_object":
        return _json({"type": "object"}, "response_format")
    name = f"response_format.{FORMS[kind]}"
    value = given.get(FORMS[kind])
    if kind == "json_schema":
        schema = table(name, value).get("schema")
        if isinstance(schema, str):  # as vLLM takes it too
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
