"""An answer of a running server of the same user, in place of a model loaded by the command itself."""

from collections.abc import Mapping
from typing import Any

from lowq_cli import console, thinking
from lowq_cli.generation.statistics import ENDED, count, drawn_text, exhausted, with_thoughts


def answered_by_a_server(
    folder: str,
    text: str | None,
    settings: Mapping[str, Any],
    seed: int,
    default: str,
    device: str,
    as_json: bool,
    keep_alive: str | None,
) -> tuple[str, bool]:
    """Let a running server of this user answer if it has the model loaded, or start one that stays.

    Returns the reason why none did, or "", and whether Ctrl-C ended the answer.
    """
    from lowq_cli import running

    body = request_body(folder, text, settings, seed, default, device)
    try:
        reply = running.ask_or_leave(body, keep_alive, device)
    except running.Declined as e:
        return str(e), False
    facts = reply.facts
    marks, _ = facts.pop("marks", None), facts.pop("context", None)
    interrupted = exhausted(reply) if as_json else thinking.write(reply, marks)
    if as_json:
        unknown = dict.fromkeys(("peak_memory_bytes", "roofline_pct", "roofline", "drafts"))
        numbers = {**with_thoughts(reply.text, marks), "tokens": reply.tokens[0], "finish_reason": reply.finish_reason}
        numbers |= {n: round(getattr(reply, n), 4) for n in ("prefill_tps", "decode_tps", "ttft_s")}
        console.out_json({"model": folder, **numbers, "kv": body["kv"], "decoder_reason": "", **unknown, **facts})
    else:
        console.out("")
        new_tokens, read = len(reply.tokens[0]), count(facts["prompt_tokens"], "prompt token")
        first = f", first token after {reply.ttft_s:.2f} s" if reply.ttft_s else ""
        speed = f" at {reply.decode_tps:.1f}/s" if reply.decode_tps else ""
        drawn = drawn_text(facts["sampling"], facts["sampling_from"], seed)
        ended = ENDED.get(reply.finish_reason, reply.finish_reason)
        line = f"{read}{first}; {count(new_tokens, 'new token')}{speed} ({ended})"
        console.say(f"{line}; by the running server (process {facts['process']}){drawn}")
    return "", interrupted


def request_body(folder: str, text: Any, settings: Mapping[str, Any], seed: int, default: str, device: str) -> dict[str, Any]:
    """The request to a running server; text: a prompt, or messages."""
    from lowq_cli import running

    given = {n: settings.get(n) for n in ("temperature", "top_p", "top_k", "repetition_penalty")}
    more = {"chat": settings["chat"], "max_new_tokens": settings["max_new_tokens"], "stop": settings.get("stop", [])}
    path = {"path": running.model_path(folder), "kv": settings.get("kv", "16"), "device": device}
    path |= {} if settings.get("think") is None else {"think": settings["think"]}
    return {**path, "prompt": text, "given": given, "default": default, "seed": seed, **more}
