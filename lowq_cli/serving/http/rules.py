"""Token masks for min_tokens and for the budget of thinking tokens, which depend on the answer so far."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowq_cli.engine.detokenize import Detokenizer, shown_tokens
from lowq_cli.engine.tokenizer import LoadedTokenizer
from lowq_cli.output.parts import Offered
from lowq_cli.output.read import Reader
from lowq_cli.output.syntaxes import syntax_of
from lowq_cli.serving.request import Mask, Words, allow

PREFIX = "rules "  # begins the recipe of such a mask


@dataclass(frozen=True)
class Rules:
    """The limits that an answer has to keep.

    least: min. tokens before it may end. thinking: max. thinking tokens, None for no limit. inside: whether it begins inside
    thoughts. tools: whether the request offers tools, for which a model may have a separate template. form: the recipe of an
    additional mask, "" for none. ends: tokens that end the answer.
    """

    least: int = 0
    thinking: int | None = None
    inside: bool = False
    tools: bool = False
    form: str = ""
    ends: Sequence[int] = ()

    def mask(self, tokenizer: LoadedTokenizer, inner: Callable[[str], Mask]) -> "Following":
        """The mask at the start of an answer. inner: makes the mask of a form from its recipe."""
        return Following(self, tokenizer, inner(self.form) if self.form else None)

    @property
    def recipe(self) -> str:
        """A string from which an engine in another process makes the same mask."""
        return PREFIX + json.dumps(asdict(self))

    @classmethod
    def of(cls, recipe: str) -> "Rules":
        """The rules of a recipe."""
        return cls(**json.loads(recipe.removeprefix(PREFIX)))


def mask_of(recipe: str, tokenizer: LoadedTokenizer, form: Callable[[str], Mask]) -> Mask:
    """The mask at the start of an answer. form: makes the mask of a form from its recipe, which `recipe` is or holds."""
    return Rules.of(recipe).mask(tokenizer, form) if recipe.startswith(PREFIX) else form(recipe)


class Following(Mask):
    """The mask of one request, which follows its tokens."""

    def __init__(self, rules: Rules, tokenizer: LoadedTokenizer, inner: Mask | None) -> None:
        self.rules, self.ends, self.inner, self.recipe = rules, rules.ends, inner, rules.recipe
        self.made = self.thought = 0
        self.takes_drafts = inner is None or inner.takes_drafts
        self.next: list[int] = []  # forced next tokens, in order
        if rules.thinking is not None:
            syntax = syntax_of(tokenizer.template(rules.tools), tokenizer.added_tokens())
            self.reader = Reader(syntax, Offered(), rules.inside)
            self.text = Detokenizer(tokenizer, [], shown_tokens(tokenizer, self.reader.tags))
            self.takes_drafts &= not syntax.channels  # these may open again whenever the budget is used up
            self.close: list[int] = tokenizer(syntax.end_of_thoughts, add_special_tokens=False)["input_ids"]

    def ask(self, drafts: Sequence[int] = ()) -> None:
        """Do what `Mask.ask` does."""
        if self.inner is not None and not self.next:
            self.inner.ask(self._certain(drafts))

    def fill(self, words: Words) -> None:
        """Write the allowed next tokens into `words`."""
        if self.next:
            allow(words, self.next[0])
            return
        if self.inner is not None:
            self.inner.fill(words)
        else:
            words[:] = -1
        self._forbid_ends(words, self.made)

    def fill_drafts(self, words: Words, drafts: Sequence[int]) -> int:
        """Do what `Mask.fill_drafts` does."""
        if self.next:
            self.fill(words[0])
            return 0
        drafts = self._certain(drafts)
        taken = len(drafts)
        if self.inner is not None:
            taken = self.inner.fill_drafts(words, drafts)
        else:
            words[:] = -1
        for i in range(taken + 1):
            self._forbid_ends(words[i], self.made + i)
        return taken

    def _certain(self, drafts: Sequence[int]) -> Sequence[int]:
        """The drafts after which thoughts are certainly within their budget: each is a token of them at most, and whether it
        is one shows only in the text."""
        if self.rules.thinking is None or not self.reader.may_think:
            return drafts
        return drafts[: max(0, self.rules.thinking - self.thought - 1)]

    def _forbid_ends(self, words: Words, made: int) -> None:
        """Forbid the stop tokens after `made` tokens, if these are too few."""
        if made >= self.rules.least:
            return
        before = words.copy()
        for token in self.ends:
            words[token // 32] &= ~(-(1 << 31) if token % 32 == 31 else 1 << token % 32)
        if not words.any():  # the form allows nothing but the end: min_tokens gives way
            words[:] = before

    def accept(self, token: int) -> None:
        """Advance by a token that was sampled."""
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


def rules_of(params: Any, inside: bool, tools: bool, ends: Iterable[int], mask: Callable[[], Mask] | None) -> Rules | None:
    """The rules of a request, None if it sets none. mask: makes the mask of its form."""
    least, thinking = params.get("min_tokens", 0), params.thinking
    if not least and thinking is None:
        return None
    return Rules(least, thinking, inside, tools, mask().recipe if mask else "", sorted(ends))
