"""The fields of OpenAI's chat and completion bodies with their checks, and the treatment of unknown fields.

OpenAI's fields that do not affect the text (user, billing, storage) are accepted and ignored. Those that would change the text
in a way that is not implemented are refused unless they hold their default. Extensions have the names of vLLM and llama.cpp:
top_k, min_p, repetition_penalty, ignore_eos, min_tokens, stop_token_ids, skip_special_tokens, chat_template_kwargs,
thinking_token_budget. Fields of other servers are in `foreign_fields`. An unknown field is ignored and named in the log;
`lowq serve --strict` refuses it, as OpenAI does, because a misspelt field would otherwise have no effect without notice.
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

Check = Callable[[str, Any], Any]  # (field, value) -> the converted value; raises Refusal
MOST_STOPS = 16
MOST_CHOICES = 128  # max. choices of a request: prompts times n


def boolean(name: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise wrong(name, f"must be true or false, not {shown(value)}")
    return value


def whole(name: str, value: Any) -> int:
    """An integer of 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not -INT64 - 1 <= value <= INT64:
        raise wrong(name, f"must be a whole number, not {shown(value)}")
    return value


def inside(r: Range) -> Check:
    """A check for a number within a range."""
    kind: Check = whole if r.whole else number

    def check(name: str, value: Any) -> float:
        number: float = kind(name, value)
        try:
            r.check(name, number)
        except UsageError as e:
            raise of(e) from None
        return number

    return check


def number(name: str, value: Any) -> float:
    """A finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e300 or not math.isfinite(value):
        raise wrong(name, f"must be a number, not {shown(value)}")
    return float(value)


def text(name: str, value: Any) -> str:
    """A string without unpaired surrogates."""
    if not isinstance(value, str):
        raise wrong(name, f"must be a text, not {shown(value)}")
    try:
        check_characters(value)
    except UsageError:
        raise wrong(name, "holds half a surrogate pair, which is not a character") from None
    return value


def table(name: str, value: Any) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise wrong(name, f"must be an object, not {shown(value)}")
    return value


def items(name: str, value: Any) -> list[Any]:
    """A JSON array that is not empty."""
    if not isinstance(value, list) or not value:
        raise wrong(name, f"must be an array that is not empty, not {shown(value)}")
    return value


def maybe_items(name: str, value: Any) -> list[Any]:
    """A JSON array, which may be empty: some clients send [] instead of leaving the field out."""
    return [] if value == [] else items(name, value)


def stops(name: str, value: Any) -> tuple[str, ...]:
    """One stop string or several."""
    texts = tuple(text(name, v) for v in (value if isinstance(value, list) else [value]))
    if len(texts) > MOST_STOPS or "" in texts:
        raise wrong(name, f"must be up to {MOST_STOPS} texts, none of them empty")
    return texts


def biases(name: str, value: Any) -> dict[int, float]:
    """The biases added to logits, by token id; JSON has the ids as strings."""
    by_token = {}
    for key, bias in table(name, value).items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 9:
            raise wrong(name, f"names tokens by their ids, not {shown(key)}")
        by_token[int(key)] = inside(BIAS)(name, bias)
    return by_token


def tokens(name: str, value: Any) -> tuple[int, ...]:
    """Token ids."""
    return tuple(whole(name, v) for v in maybe_items(name, value))


def prompts(name: str, value: Any) -> list[str | list[int]]:
    """One or several prompts, each a string or a list of token ids."""
    if isinstance(value, str):
        return [text(name, value)]
    if all(isinstance(v, int) for v in items(name, value)):
        return [[whole(name, v) for v in value]]
    return [[whole(name, i) for i in items(name, v)] if isinstance(v, list) else text(name, v) for v in value]


def stream_options(name: str, value: Any) -> bool:
    """Whether a chunk with the usage follows the last chunk."""
    known(name, table(name, value), {"include_usage", "include_obfuscation"})
    return boolean(f"{name}.include_usage", value.get("include_usage") or False)


def only(*values: Any) -> Check:
    """A check for a field that is accepted only with these values, which mean the same as its absence."""

    def check(name: str, value: Any) -> None:
        if value not in values:
            raise wrong(name, f"{shown(value)} is not supported; leave it out")

    return check


def anything(name: str, value: Any) -> None:
    """Accept any value of a field that has no effect here."""


COUNT = Range(1, INT64, whole=True)
RANGES = ranges(Draw) | {
    "temperature": Range(0, 2),  # OpenAI's range; `Draw` refuses the smallest positive numbers
    "top_k": Range(-1, INT64, off=0, whole=True),  # -1 means off in vLLM
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
class Params:
    """A parsed body of any dialect, with the field names of OpenAI's chat and completions.

    draw: the settings of `Draw` that it sets. logprobs: alternatives per token, None for no log-probabilities. dialect: fields
    of a different dialect's body that its answer needs. think: whether the model has to think, None for its default. effort: a
    word for reasoning effort. thinking: max. thinking tokens. left_out: known fields without effect. unknown: unknown fields.
    plain: the completion that a chat means for a model without a chat template, None where such a model refuses it.
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
    plain: "Params | None" = None

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value, or the default if it is missing or null."""
        return self.given.get(name, default)

    def drawn(self, default: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of `Draw`, with `default` for those that the body leaves out."""
        return {"temperature": 1.0, **default, **self.draw}

    @property
    def ignored(self) -> str:
        """The part of the log line that names fields without effect, "" for none."""
        names = [*self.left_out, *(f"{shown(name)}{_meant(name, CHAT if self.chat else COMPLETION)}" for name in self.unknown)]
        return f"; ignored {', '.join(names[:9])}" if names else ""

    def check_known(self) -> None:
        """Raise a Refusal for an unknown field."""
        known("", dict.fromkeys(self.unknown), set(CHAT if self.chat else COMPLETION))

    @property
    def n(self) -> int:
        """The number of answers per prompt."""
        return self.get("n", 1)


def read(body: dict[str, Any], chat: bool) -> Params:
    """Parse the body of a chat or completion request. Raises Refusal."""
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
    logprobs = given.get("logprobs")
    if chat:
        logprobs = given.get("top_logprobs", 0) if logprobs else None
        if given.get("top_logprobs") and logprobs is None:
            raise wrong("top_logprobs", "needs logprobs: true")
    thought = _thinking(given) if chat else {}
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    return Params(chat, given, draw, logprobs, most, left_out=tuple(left_out), unknown=tuple(unknown), **thought)


def _thinking(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of thinking: whether, with which effort, and how many tokens, from the field names of several servers."""
    switches = given.get("chat_template_kwargs", {})
    effort = given.get("reasoning_effort")
    budget = given.get("thinking_token_budget")
    flags = [switches[name] for name in ("enable_thinking", "thinking") if isinstance(switches.get(name), bool)]
    think = False if effort == "none" or budget == 0 else next(iter(flags), None)
    return {"think": think, "effort": None if effort == "none" else effort, "thinking": budget or None}


def known(where: str, body: dict[str, Any], names: set[str]) -> None:
    """Raise a Refusal for a field that is not in `names`. where: the field that holds `body`, "" for the whole body."""
    for name in body:
        if name not in names:
            full = f"{where}.{name}" if where else name
            line = f"unknown field {shown(full)}{_meant(name, names)}"
            raise Refusal(400, line, param=full[:64], code="unknown_parameter")


def _meant(name: str, names: Iterable[str]) -> str:
    """The part of a message that suggests a known name similar to `name`, "" if there is none."""
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
    raise ValueError(f"{word} is not a number in JSON")


def shown(value: Any) -> str:
    """A value for an error message: short, on one line."""
    if isinstance(value, dict | list):
        return ("an " if value else "an empty ") + ("object" if isinstance(value, dict) else "array")
    text_shown = json.dumps(value)
    return text_shown if len(text_shown) <= 60 else text_shown[:60] + "..."
