"""Masks over the tokens of a model by grammars, with the llguidance library (an extra)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from lowq_cli.serving.request import Mask, Words, allow
from lowq_packers.errors import UsageError

NO_TOKEN = "no token can follow"
KEPT = 32  # max. parsed grammars in the cache; a schema of 2,000 properties takes 0.1 s to parse
TRIED = 8  # tokens tested: a schema of 2,000 properties fails at the second, a schema that refers only to itself at the first
NO_FORMS = "this model's tokenizer does not support answers in a form"


class Grammar(Mask):
    """The mask of one request; its recipe is the library's serialized grammar."""

    takes_drafts = True

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

    def fill_drafts(self, words: Words, drafts: Sequence[int]) -> int:
        """Do what `Mask.fill_drafts` does. Where the library gives up after a draft, the drafts from there on are not taken."""
        self.fill(words[0])
        after = Grammar(self.matcher.deep_copy() if drafts else self.matcher, self.ends, self.recipe)
        for i, token in enumerate(drafts):
            if token in self.ends or not allows(words[i], token):
                return i
            after.accept(token)
            try:
                after.fill(words[i + 1])
            except UsageError:
                return i
        return len(drafts)

    def accept(self, token: int) -> None:
        """A token was drawn."""
        if token not in self.ends:
            self.matcher.consume_token(token)


class TokenMasks:
    """Makes masks for a model's tokens.

    Args:
        definition: the text of the model's tokenizer.json; None if its tokenizer has none. vocabulary: the number of logits.
        ends: tokens that end the model's answers.

    With 150,000 tokens it takes 0.7 to 1 s, in which the library lets no other thread of the process run Python, and 100 MB.

    Raises UsageError for a tokenizer that the library refuses.
    """

    def __init__(self, definition: str | None, vocabulary: int, ends: Sequence[int]) -> None:
        from llguidance import LLMatcher, LLTokenizer

        self.ends, self.vocabulary = list(ends), vocabulary
        if definition is None or not self.ends:
            raise UsageError(NO_FORMS)
        try:
            tokens = LLTokenizer(definition, n_vocab=vocabulary, eos_token=self.ends)
        except ValueError as e:  # such as more tokens than the model has logits
            raise UsageError(f"{NO_FORMS}: {e}") from None
        self._first = lru_cache(KEPT)(lambda recipe: first_mask(LLMatcher, tokens, recipe, self.ends, vocabulary))

    def mask(self, recipe: str) -> Grammar:
        """The mask at the start of an answer. Raises UsageError for a grammar that the library refuses or nothing can begin."""
        return Grammar(self._first(recipe).matcher.deep_copy(), self.ends, recipe)


def first_mask(matcher: Any, tokens: Any, recipe: str, ends: Sequence[int], vocabulary: int) -> Grammar:
    """A mask that was tested for a few tokens, each the first allowed one. Raises UsageError if none is allowed.

    matcher: the library's class. tokens: its tokenizer. recipe: its grammar.
    """
    first = Grammar(matcher(tokens, recipe, log_level=0), ends, recipe)
    if first.matcher.is_error():
        raise UsageError(" ".join(first.matcher.get_error().split())[:200])
    words, after = np.zeros(-(-vocabulary // 32), np.int32), Grammar(first.matcher.deep_copy(), ends, recipe)
    for _ in range(TRIED):
        after.fill(words)
        word = int(words.nonzero()[0][0])
        bits = int(words[word])
        token = 32 * word + (bits & -bits).bit_length() - 1
        if token in ends:
            break
        after.accept(token)
    return first


def allows(words: Words, token: int) -> bool:
    """Whether a token's bit is set."""
    return bool(words[token // 32] >> token % 32 & 1)
