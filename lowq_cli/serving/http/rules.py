"""Masks that follow an answer as it is written: no end before so many tokens, and no more thoughts than so many."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowq_cli.engine.detokenize import Detokenizer, shown_tokens
from lowq_cli.engine.tokenizer import LoadedTokenizer
from lowq_cli.output.dialects import ways_of
from lowq_cli.output.parts import Offered
from lowq_cli.output.read import Reader
from lowq_cli.serving.request import Mask, Words, allow

PREFIX = "rules "  # of the recipe of such a mask


@dataclass(frozen=True)
class Rules:
    """What an answer has to keep to.

    least: tokens before it may end. thinking: tokens of thoughts at most, None for any number. inside: whether it begins in the
    midst of thoughts; tools: whether the conversation offers any, which may have a template of its own. form: the recipe of the
    mask that it has besides, "" for none. ends: tokens that end it.
    """

    least: int = 0
    thinking: int | None = None
    inside: bool = False
    tools: bool = False
    form: str = ""
    ends: Sequence[int] = ()

    def mask(self, tokenizer: LoadedTokenizer, inner: Callable[[str], Mask]) -> "Following":
        """A mask at its beginning. inner: makes the mask of a form."""
        return Following(self, tokenizer, inner(self.form) if self.form else None)

    @property
    def recipe(self) -> str:
        """From which an engine in another process makes a mask like it."""
        return PREFIX + json.dumps(asdict(self))

    @classmethod
    def of(cls, recipe: str) -> "Rules":
        """The rules that a recipe was made of."""
        return cls(**json.loads(recipe.removeprefix(PREFIX)))


class Following:
    """The mask of one request."""

    def __init__(self, rules: Rules, tokenizer: LoadedTokenizer, inner: Mask | None) -> None:
        self.rules, self.ends, self.inner, self.recipe = rules, rules.ends, inner, rules.recipe
        self.made = self.thought = 0
        self.next: list[int] = []  # tokens that have to come, one after the other
        if rules.thinking is not None:
            ways = ways_of(tokenizer.template(rules.tools), tokenizer.added_tokens())
            self.reader = Reader(ways, Offered(), rules.inside)
            self.text = Detokenizer(tokenizer, [], shown_tokens(tokenizer, self.reader.tags))
            self.close: list[int] = tokenizer(ways.end_of_thoughts, add_special_tokens=False)["input_ids"]

    def fill(self, words: Words) -> None:
        """The tokens that may come next."""
        if self.next:
            allow(words, self.next[0])
            return
        if self.inner is not None:
            self.inner.fill(words)
        else:
            words[:] = -1
        if self.made < self.rules.least:
            before = words.copy()
            for token in self.ends:
                words[token // 32] &= ~(-(1 << 31) if token % 32 == 31 else 1 << token % 32)
            if not words.any():  # a form that is written out
                words[:] = before

    def accept(self, token: int) -> None:
        """A token was drawn."""
        self.made += 1
        if self.inner is not None:
            self.inner.accept(token)
        if self.next:
            self.next.pop(0)
        if self.rules.thinking is None or token in self.ends:
            return
        self.reader.push(self.text.push(token))
        self.thought += self.reader.thinking
        if self.reader.thinking and self.thought >= self.rules.thinking and not self.next:
            self.next = list(self.close)


def rules_of(asked: Any, inside: bool, tools: bool, ends: Iterable[int], mask: Callable[[], Mask] | None) -> Rules | None:
    """The rules that a body names, if any; mask: makes that of its form."""
    least, thinking = asked.get("min_tokens", 0), asked.thinking
    if not least and thinking is None:
        return None
    return Rules(least, thinking, inside, tools, mask().recipe if mask else "", sorted(ends))
