"""What a body may say: each field of OpenAI's two endpoints with its check, and what unknown fields meet.

Fields of theirs that say nothing about the text (who asks, how it is billed or stored) are taken and do nothing; those that
would change the text in a way that is not built are refused unless they hold their default. Extensions, under the names that
vLLM and llama.cpp gave them: top_k, min_p, repetition_penalty, ignore_eos, min_tokens, stop_token_ids, skip_special_tokens,
chat_template_kwargs, thinking_token_budget. Other servers' fields: `others`. A field that nobody knows is left out, and the log
says so; with `lowq serve --strict` it is refused, as OpenAI does: one that is misspelt would silently do nothing.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowq_cli.engine.prompts import check_characters
from lowq_cli.engine.ranges import INT64, Range, ranges
from lowq_cli.serving.http import foreign_fields
from lowq_cli.serving.http.refusal import Refusal, of, wrong
from lowq_cli.serving.request import BIAS, Draw
from lowq_packers.errors import UsageError

Check = Callable[[str, Any], Any]  # (field, value) -> the value, or a Refusal
MOST_STOPS = 16
MOST_CHOICES = 128  # of one request: prompts times n


def boolean(name: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise wrong(name, f"must be true or false, not {shown(value)}")
    return value


def whole(name: str, value: Any) -> int:
    """A whole number that 64 bits hold."""
    if not isinstance(value, int) or isinstance(value, bool) or not -INT64 - 1 <= value <= INT64:
        raise wrong(name, f"must be a whole number, not {shown(value)}")
    return value


def inside(r: Range) -> Check:
    """A number within a range."""
    kind: Check = whole if r.whole else number

    def check(name: str, value: Any) -> float:
        found: float = kind(name, value)
        try:
            r.check(name, found)
        except UsageError as e:
            raise of(e) from None
        return found

    return check


def number(name: str, value: Any) -> float:
    """A finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e300 or not math.isfinite(value):
        raise wrong(name, f"must be a number, not {shown(value)}")
    return float(value)


def text(name: str, value: Any) -> str:
    """A text without half characters."""
    if not isinstance(value, str):
        raise wrong(name, f"must be a text, not {shown(value)}")
    try:
        check_characters(value)
    except UsageError:
        raise wrong(name, "holds half a surrogate pair, which is no character") from None
    return value


def table(name: str, value: Any) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise wrong(name, f"must be an object, not {shown(value)}")
    return value


def items(name: str, value: Any) -> list[Any]:
    """A JSON array with something in it."""
    if not isinstance(value, list) or not value:
        raise wrong(name, f"must be an array that is not empty, not {shown(value)}")
    return value


def maybe_items(name: str, value: Any) -> list[Any]:
    """A JSON array: some clients send an empty one for nothing."""
    return [] if value == [] else items(name, value)


def stops(name: str, value: Any) -> tuple[str, ...]:
    """One text or several that end an answer."""
    found = tuple(text(name, v) for v in (value if isinstance(value, list) else [value]))
    if len(found) > MOST_STOPS or "" in found:
        raise wrong(name, f"must be up to {MOST_STOPS} texts, none of them empty")
    return found


def biases(name: str, value: Any) -> dict[int, float]:
    """Token ids, as texts, and what is added to their logits."""
    found = {}
    for key, bias in table(name, value).items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 9:
            raise wrong(name, f"names tokens by their ids, not {shown(key)}")
        found[int(key)] = inside(BIAS)(name, bias)
    return found


def tokens(name: str, value: Any) -> tuple[int, ...]:
    """Token ids."""
    return tuple(whole(name, v) for v in maybe_items(name, value))


def prompts(name: str, value: Any) -> list[str | list[int]]:
    """A text, several, token ids, or several of those."""
    if isinstance(value, str):
        return [text(name, value)]
    if all(isinstance(v, int) for v in items(name, value)):
        return [[whole(name, v) for v in value]]
    return [[whole(name, i) for i in items(name, v)] if isinstance(v, list) else text(name, v) for v in value]


def stream_options(name: str, value: Any) -> bool:
    """Whether usage follows the last chunk."""
    known(name, table(name, value), {"include_usage", "include_obfuscation"})
    return boolean(f"{name}.include_usage", value.get("include_usage") or False)


def only(*values: Any) -> Check:
    """A field that can be sent, but only with what it means when it is not."""

    def check(name: str, value: Any) -> None:
        if value not in values:
            raise wrong(name, f"{shown(value)} is not supported; leave it out")

    return check


def anything(name: str, value: Any) -> None:
    """A field that changes nothing here."""


COUNT = Range(1, INT64, whole=True)
RANGES = ranges(Draw) | {
    "temperature": Range(0, 2),  # as OpenAI has it; of the numbers between, `Draw` refuses the smallest
    "top_k": Range(-1, INT64, off=0, whole=True),  # -1 is "off" in vLLM's words
    "seed": Range(-INT64 - 1, INT64, whole=True),
}
LOGPROBS = inside(RANGES.pop("logprobs"))
SAMPLING: dict[str, Check] = {name: inside(r) for name, r in RANGES.items()} | {"logit_bias": biases}
COMMON: dict[str, Check] = SAMPLING | {
    **{"model": text, "n": inside(Range(1, MOST_CHOICES, whole=True)), "stop": stops, "ignore_eos": boolean},
    **{"min_tokens": inside(Range(0, INT64, whole=True)), "stop_token_ids": tokens, "skip_special_tokens": boolean},
    "response_format": table,
    **{"lora": text, "stream": boolean, "stream_options": stream_options, "user": anything},
}
COMPLETION = COMMON | {
    **{"prompt": prompts, "max_tokens": inside(Range(0, INT64, whole=True)), "logprobs": LOGPROBS},
    **{"echo": boolean, "suffix": only(""), "best_of": inside(COUNT)},
}
CHAT = COMMON | {
    **{"messages": items, "max_tokens": inside(COUNT), "max_completion_tokens": inside(COUNT)},
    **{"logprobs": boolean, "top_logprobs": LOGPROBS},
    **{"tools": maybe_items, "tool_choice": lambda name, value: value, "parallel_tool_calls": boolean},
    **{"chat_template_kwargs": table, "modalities": only(["text"]), "functions": only([]), "function_call": only("none")},
    **{"reasoning_effort": text},
    "thinking_token_budget": inside(Range(0, INT64, whole=True)),
    **dict.fromkeys(("audio", "web_search_options"), only()),
    **dict.fromkeys(("store", "metadata", "service_tier", "safety_identifier"), anything),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "moderation"), anything),
}


@dataclass(frozen=True)
class Asked:
    """A body that was read, whatever dialect it came in: under the names that OpenAI's chat and completions have.

    draw: the settings of `Draw` that it names. logprobs: alternatives a token, None for none. dialect: what another dialect has
    to know of its body for the answer. think: whether the model is to think, None as it likes; effort: how much, in a word;
    thinking: tokens of thoughts at most. left_out: fields that change nothing here; unknown: those that nobody knows.
    """

    chat: bool
    given: Mapping[str, Any]
    draw: dict[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    max_tokens: int | None = None
    dialect: Mapping[str, Any] = field(default_factory=dict)
    think: bool | None = None
    effort: str | None = None
    thinking: int | None = None
    left_out: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value, or the default where it is missing or null."""
        return self.given.get(name, default)

    def drawn(self, default: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of `Draw`: those that it leaves out are `default`'s."""
        return {"temperature": 1.0, **default, **self.draw}

    @property
    def ignored(self) -> str:
        """What the log says of fields that nothing comes of, "" for none."""
        names = [*self.left_out, *(f"{shown(name)}{_meant(name, CHAT if self.chat else COMPLETION)}" for name in self.unknown)]
        return f"; ignored {', '.join(names[:9])}" if names else ""

    def check_known(self) -> None:
        """Raise a Refusal for a field that nobody knows."""
        known("", dict.fromkeys(self.unknown), set(CHAT if self.chat else COMPLETION))

    @property
    def n(self) -> int:
        """Answers to each prompt."""
        return self.get("n", 1)


def read(body: dict[str, Any], chat: bool) -> Asked:
    """The body of a request to one of the two endpoints. Raises Refusal."""
    fields = CHAT if chat else COMPLETION
    body, left_out = foreign_fields.plain(body, set(fields))
    given = {name: fields[name](name, value) for name, value in body.items() if value is not None and name in fields}
    unknown = [name for name in body if name not in fields]
    needed = "messages" if chat else "prompt"
    if needed not in given:
        raise wrong(needed, "is needed")
    draw = {name: given[name] for name in SAMPLING if name in given}
    if "top_k" in draw:
        draw["top_k"] = max(0, draw["top_k"])
    if "seed" in draw:
        draw["seed"] &= INT64
    if given.get("best_of", given.get("n", 1)) != given.get("n", 1):
        raise wrong("best_of", "is not supported; leave it out")
    asked = given.get("logprobs")
    if chat:
        asked = given.get("top_logprobs", 0) if asked else None
        if given.get("top_logprobs") and asked is None:
            raise wrong("top_logprobs", "needs logprobs: true")
    thought = _thinking(given) if chat else {}
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    return Asked(chat, given, draw, asked, most, left_out=tuple(left_out), unknown=tuple(unknown), **thought)


def _thinking(given: Mapping[str, Any]) -> dict[str, Any]:
    """Whether and how much a model is to think, under the names that servers have given that."""
    switches = given.get("chat_template_kwargs", {})
    effort = given.get("reasoning_effort")
    budget = given.get("thinking_token_budget")
    said = [switches[name] for name in ("enable_thinking", "thinking") if isinstance(switches.get(name), bool)]
    think = False if effort == "none" or budget == 0 else next(iter(said), None)
    return {"think": think, "effort": None if effort == "none" else effort, "thinking": budget or None}


def known(where: str, body: dict[str, Any], names: set[str]) -> None:
    """Raise a Refusal for a field that is not one of `names`; where: the field that holds these, "" for the body itself."""
    for name in body:
        if name not in names:
            full = f"{where}.{name}" if where else name
            line = f"unknown field {shown(full)}{_meant(name, names)}"
            raise Refusal(400, line, param=full[:64], code="unknown_parameter")


def _meant(name: str, names: Iterable[str]) -> str:
    """What a name was perhaps meant to be."""
    near = difflib.get_close_matches(name[:64], names, 1)
    return f"; did you mean {near[0]}?" if near else ""


def parsed(raw: bytes) -> dict[str, Any]:
    """A body as a JSON object. Raises Refusal."""
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as e:
        raise Refusal(400, f"the body is not UTF-8: byte {e.start} is {raw[e.start]:#04x}") from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except ValueError as e:
        raise Refusal(400, f"the body is not JSON: {' '.join(str(e).split())[:200]}") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"the body must be a JSON object, not {shown(body)}")
    return body


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number in JSON")


def shown(value: Any) -> str:
    """A value for an error's line: short, on one line."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    found = json.dumps(value)
    return found if len(found) <= 60 else found[:60] + "..."
