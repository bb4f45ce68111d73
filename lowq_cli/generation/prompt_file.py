"""generate --prompts: a file of prompts or conversations, one JSON line per answer."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowq_cli import console
from lowq_cli.generation.statistics import count, drawn_text
from lowq_packers.errors import UsageError

if TYPE_CHECKING:
    from lowq_cli.models import CausalModel, Tokenizer


def read_prompts(where: str) -> list[dict[str, Any]]:
    """The lines of a JSONL file or stdin: each "prompt" or "messages", and its other keys.

    Raises NotFoundError, UsageError (with a line).
    """
    from lowq_cli.calibrate.texts import read_utf8

    try:
        text = sys.stdin.read() if where == "-" else read_utf8(Path(where), "prompts in")
    except UnicodeDecodeError:
        raise UsageError("stdin is not UTF-8 text; --prompts takes JSONL") from None
    requests = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):  # str.splitlines also splits at U+2028
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            if line.lstrip().startswith(("{", "[", '"')):  # intended as JSON
                raise UsageError(
                    f'line {number} of {where} is not JSON; write a text as it is, "text" or {{"prompt": "text"}}'
                ) from None
            value = line.strip()
        line = value if isinstance(value, dict) else {"prompt": value}
        if "messages" in line and "prompt" not in line:
            if not _are_messages(line["messages"]):
                raise UsageError(
                    f"line {number} of {where}: messages must be an array of objects such as "
                    '{"role": "user", "content": "text"}'
                )
        elif "images" in line or "image" in line:
            raise UsageError(f"line {number} of {where} has pictures, which --prompts does not take; use --prompt with --image")
        elif not isinstance(line.get("prompt"), str):
            raise UsageError(f'line {number} of {where} holds no text; write it as "text" or {{"prompt": "text"}}')
        requests.append(line)
    if not requests:
        raise UsageError(f"{where} holds no prompts")
    return requests


def _are_messages(value: Any) -> bool:
    """Whether a value is a conversation: an array of objects, each with a role and a content that are texts."""
    each = value if isinstance(value, list) else []
    return bool(each) and all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in each)


def answer_all(
    model: "CausalModel",
    tokenizer: "Tokenizer",
    requests: list[dict[str, Any]],
    batch: int | None,
    settings: dict[str, Any],
    origins: Mapping[str, str],
    act: Mapping[str, str],
    as_json: bool,
) -> None:
    """One JSON line per prompt on stdout, with its line's other keys, in order, `batch` at once; the totals on stderr.

    act: facts for the object of as_json, which has all lines. Every prompt is encoded, and refused if it is too long, before
    the first is answered.
    """
    import time

    from lowq_cli.serving.offline import answers

    settings.pop("images", None)
    contents = [line.get("prompt", line.get("messages")) for line in requests]
    ids = _encode_all(model, tokenizer, contents, settings.pop("chat"), settings.pop("think", None))
    lines, tokens, began = [], 0, time.perf_counter()
    for given, a in zip(requests, answers(model, tokenizer, ids, settings, batch), strict=True):
        line = {**given, "text": a.text, "tokens": a.tokens, "finish_reason": a.finish_reason}
        if as_json:
            lines.append(line)
        else:
            console.out(console.to_json(line))
        tokens += len(a.tokens)
    speed = tokens / max(time.perf_counter() - began, 1e-9)
    if as_json:
        numbers = {"new_tokens": tokens, "tps": round(speed, 2), **act, "seed": settings["seed"]}
        console.out_json({"results": lines, **numbers})
    totals = f"{count(len(requests), 'prompt')}, {count(tokens, 'new token')}"
    drawn = drawn_text({n: settings[n] for n in origins}, origins, settings["seed"])
    console.say(f"{totals} at {speed:.1f}/s, prefill included{drawn}")


def _encode_all(
    model: "CausalModel", tokenizer: "Tokenizer", prompts: list[Any], chat: bool, think: bool | None
) -> list[list[int]]:
    """The token ids of each prompt, a text or messages. Raises UsageError naming the first that cannot be answered."""
    from lowq_cli.engine.prompts import check_length, encode, encode_messages

    encoded = []
    for number, text in enumerate(prompts, 1):
        try:
            one = isinstance(text, str)
            ids = encode(tokenizer, text, chat, think=think) if one else encode_messages(tokenizer, text, think=think)
            encoded.append(ids)
            check_length(model, len(encoded[-1]))
        except UsageError as e:
            raise UsageError(f"prompt {number} of {len(prompts)}: {e}") from None
    return encoded
