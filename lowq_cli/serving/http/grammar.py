"""Structured output: JSON schemas and tool calls as masks over the next token, with the llguidance library (an extra).

A mask belongs to one request and is called by the engine's thread. A form is tested for a few tokens before its request is
queued. The library can still give up inside an answer, at its own limit (20 ms per step, because all other requests wait for
it). The request then fails with an error: half an object that ends with "stop" would look complete.
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
from lowq_cli.serving.http.fields import Params, items, known, shown, table, text
from lowq_cli.serving.http.refusal import Refusal, wrong
from lowq_cli.serving.request import Mask, Words, allow
from lowq_packers.errors import UsageError

NO_TOKEN = "no token can follow"
KEPT = 32  # max. parsed grammars in the cache; a schema of 2,000 properties takes 0.1 s to parse
TRIED = 8  # tokens tested: a schema of 2,000 properties fails at the second, a schema that refers only to itself at the first
# json.dumps' spacing, the most common in training data; with free whitespace a small model may write nothing else
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar:
    """The mask of one request; its recipe is the library's serialized grammar."""

    def __init__(self, matcher: Any, ends: Sequence[int], recipe: str) -> None:
        self.matcher, self.ends, self.recipe = matcher, ends, recipe

    def fill(self, words: Words) -> None:
        """Write the tokens that the grammar allows, at its end the stop tokens. Raises UsageError if the library gave up."""
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
    """Makes masks for a model.

    Args:
        tokenizer: of the model. stop_ids: tokens that end its answers. vocabulary: the number of logits.
    """

    def __init__(self, tokenizer: LoadedTokenizer, stop_ids: frozenset[int], vocabulary: int) -> None:
        self.tokenizer, self.ends, self.vocabulary = tokenizer, sorted(stop_ids), vocabulary
        self.lock = Lock()
        self._first = lru_cache(KEPT)(lambda recipe: self._library[0](self._library[1], recipe, log_level=0))

    @cached_property
    def _library(self) -> tuple[Any, Any]:
        """(llguidance's matcher, its wrapper of this tokenizer). Raises Refusal if one of them is not available."""
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ModuleNotFoundError:
            raise Refusal(400, "response_format and forced tool calls need a library: pip install llguidance") from None
        definition = self.tokenizer.definition()
        if definition is None or not self.ends:
            raise Refusal(400, "this model's tokenizer does not support answers in a form")
        try:
            return LLMatcher, LLTokenizer(definition, n_vocab=self.vocabulary, eos_token=self.ends)
        except ValueError as e:  # such as more tokens than the model has logits
            raise Refusal(400, f"this model's tokenizer does not support answers in a form: {e}") from None

    def schema(self, schema: dict[str, Any], param: str) -> Callable[[], Mask]:
        """A function that makes masks for a JSON schema. Raises Refusal for a schema that is invalid or not supported."""
        with self.lock:
            matcher = self._library[0]
        try:
            return self._grammar(matcher.grammar_from_json_schema(json.dumps(schema), overrides=SPACED), param)
        except ValueError as e:
            raise wrong(param, " ".join(str(e).split())[:200]) from None

    def lark(self, grammar: str, param: str) -> Callable[[], Mask]:
        """A function that makes masks for a grammar in Lark's format. Raises Refusal."""
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
        """The mask at the start of an answer. Raises UsageError for a grammar that the library refuses."""
        if recipe.startswith(rules.PREFIX):
            return rules.Rules.of(recipe).mask(self.tokenizer, self.mask)
        first = self._first(recipe)
        if first.is_error():
            raise UsageError(" ".join(first.get_error().split())[:200])
        return Grammar(first.deep_copy(), self.ends, recipe)

    def _try(self, grammar: Mask) -> None:
        """Test a grammar with a few tokens, each the first allowed one. Raises UsageError if none is allowed."""
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
