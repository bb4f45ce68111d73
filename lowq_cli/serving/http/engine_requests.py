"""From a parsed HTTP request to requests of a model's engine: prompts are rendered, tokenized, checked and queued."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from secrets import randbits
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from lowq_cli.calibrate.texts import check_ids
from lowq_cli.engine.prompts import encode
from lowq_cli.hf.pictures import Packed, check_typed, expanded
from lowq_cli.output.read import Reader
from lowq_cli.output.syntaxes import Syntax
from lowq_cli.serving.http import fields, refusal, tools
from lowq_cli.serving.http.answers import Answer, Echoed, unanswered
from lowq_cli.serving.http.conversation import prompt_text, template_of
from lowq_cli.serving.http.pictures import take
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.reply import following
from lowq_cli.serving.http.rules import rules_of
from lowq_cli.serving.http.served_model import ServedModel
from lowq_cli.serving.http.text import Writer, places, stop_tokens
from lowq_cli.serving.request import Draw, Mask, Read, Request

COMPLETION_TOKENS = 16  # max_tokens of /v1/completions if the request sets none, as in OpenAI's API
READ_AT_ONCE = 64  # max. prompts of one request in the engine's queue at once, so that other requests get a share of it
LONG = 16384  # more characters than this are tokenized in a thread instead of in the event loop


async def queue(model: ServedModel, params: fields.Params, client: str, receive: Receive, seconds: float) -> Answer:
    """Queue the requests of a body to a model. Raises Refusal, LowqError, ClientDisconnect.

    client: the client's address. receive: gets the connection's messages. seconds: the max. time to read echoed prompts.
    """
    limits, chat = model.engine.limits, params.chat
    adapter, name = model.adapter(params.get("lora"), params.get("model"))
    offered = tools.read(params) if chat else tools.Tools()
    n = (1 if chat else len(params.get("prompt"))) * params.n
    if n > fields.MOST_CHOICES:
        raise refusal.wrong("n", f"{n} answers were asked for; a request may have {fields.MOST_CHOICES}")
    texts = params.get("stop", ())
    ending = stop_tokens(texts, model.added)
    prompts, place, pictures = await prompts_of(model, params, offered)
    mask: Callable[[], Mask] | None = None  # None: any text is allowed
    if params.get("response_format") is not None or offered.forced:
        # in a thread: the first call imports the library, and large schemas take up to seconds
        mask = await asyncio.to_thread(tools.form, params, offered, place, model.grammars)
    check_lengths(model, prompts, "messages" if chat else "prompt")
    ending |= frozenset(params.get("stop_token_ids", ()))
    check_ids(list(ending), model.engine.vocabulary)
    stop_ids = (frozenset() if params.get("ignore_eos") else model.stop_ids) | ending
    rules = rules_of(params, place.inside, bool(offered.given), stop_ids, mask)
    if rules is not None:
        mask = partial(model.grammars.mask, rules.recipe)
    settings = {"seed": randbits(62), **params.drawn(model.draw), "logprobs": params.logprobs}
    reads = bool(offered.given) or place.syntax.thinks  # otherwise an answer is plain text
    requests, writers, echoes = [], [], []
    for i in range(n):
        ids = tuple(prompts[i // params.n])
        room, most = limits.longest - len(ids), params.max_tokens
        most = min((room if chat else COMPLETION_TOKENS) if most is None else most, room)
        draw = Draw(**settings | {"seed": (settings["seed"] + i % params.n) % (1 << 63)})
        requests.append(Request(ids, most, stop_ids, draw, mask and mask(), client, pictures=pictures, adapter=adapter))
        reader = Reader(place.syntax, offered.offered, place.inside) if chat and reads else None
        special = params.get("skip_special_tokens") is False
        writers.append(Writer(model.tokenizer, ids, texts, stop_ids, reader, special))
        echoes.append(_echo(model, params, i // params.n, ids))
    echoed = []
    if params.get("echo") and params.logprobs is not None:
        query = Read("likelihoods", params.logprobs)
        likelihoods = await read_prompts(model, prompts, query, adapter, receive, seconds, client)
        each = [Echoed(p, places(model.tokenizer, p), likely) for p, likely in zip(prompts, likelihoods, strict=True)]
        echoed = [each[i // params.n] for i in range(n)]
    live = model.hub.submit(requests if params.max_tokens != 0 else [])
    return Answer(params, live, writers, sum(map(len, prompts)), model.names, name, echoes, echoed)


async def prompts_of(
    model: ServedModel, params: fields.Params, offered: tools.Tools
) -> tuple[list[list[int]], tools.Place, tuple[Packed, ...]]:
    """Token ids of every prompt, the place at which an answer begins, and the images. Raises Refusal, LowqError.

    Templates are rendered and long texts tokenized in a thread, so that other answers go on.
    """
    pictures: tuple[Packed, ...] = ()
    if params.chat:
        params, given = take(params)
        if given and model.pictures is None:
            raise refusal.wrong(given[0][0], "this model takes no pictures")
        pictures = await model.pictures.read(given) if model.pictures is not None else ()
    texts = [str(params.get("messages"))] if params.chat else [p for p in params.get("prompt") if isinstance(p, str)]
    characters = max(map(len, texts), default=0)
    if characters > model.most_characters:
        raise too_long(f"{characters} characters", model, "messages" if params.chat else "prompt")

    def work() -> tuple[list[list[int]], tools.Place]:
        if params.chat:
            template = template_of(model.tokenizer, bool(offered.given))
            syntax = model.syntax(template)
            if pictures and model.pictures is not None:
                check_typed(params.get("messages"), model.pictures.images, model.tokenizer.spelling)
            text = prompt_text(model.tokenizer, params, offered.given, syntax)
            if pictures and model.pictures is not None:
                text = expanded(text, pictures, model.pictures.images, model.tokenizer.spelling)
            ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
            return [list(ids)], tools.Place(syntax, template, model.added, syntax.inside(text), params.think)
        return encoded(model, params.get("prompt")), tools.Place(Syntax(None, None), "", model.added)

    aside = params.chat or sum(map(len, texts)) > LONG
    return *(await asyncio.to_thread(work) if aside else work()), pictures


def encoded(model: ServedModel, texts: Sequence[str | list[int]]) -> list[list[int]]:
    """The token ids of each text; token ids are returned unchanged."""
    return [encode(model.tokenizer, t) if isinstance(t, str) else t for t in texts]


def check_lengths(model: ServedModel, prompts: Sequence[Sequence[int]], param: str) -> None:
    """Raise a Refusal for a prompt that leaves no room for one more token, UsageError for ids outside the vocabulary."""
    longest = model.engine.limits.longest
    for prompt in prompts:
        if len(prompt) >= longest:
            raise too_long(f"{len(prompt)} tokens", model, param)
        check_ids(prompt, model.engine.vocabulary)


def too_long(size: str, model: ServedModel, param: str) -> Refusal:
    """The refusal of a prompt of this size in the words and with the code by which clients know that they have to shorten it.

    Claude Code looks for "prompt is too long: N tokens > M", opencode for that or the code, Codex for the code, and litellm
    (which aider uses) for "this model's maximum context length is". Without them, an agent gives up instead of compacting.
    """
    limits = model.engine.limits
    line = f"prompt is too long: {size} > {limits.longest - 1} tokens, as one more has to fit"
    line += f"; this model's maximum context length is {limits.longest} tokens"
    line += "; shorten the prompt" + (
        ", or give the server more room (--cache-tokens)" if limits.cache_tokens <= limits.longest else ""
    )
    return Refusal(400, line, param=param, code="context_length_exceeded")


def _echo(model: ServedModel, params: fields.Params, i: int, ids: tuple[int, ...]) -> str:
    if not params.get("echo"):
        return ""
    given = params.get("prompt")[i]
    return given if isinstance(given, str) else model.tokenizer.decode(list(ids), skip_special_tokens=True)


async def read_prompts(
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    query: Read,
    adapter: int,
    receive: Receive,
    seconds: float,
    client: str = "",
) -> list[Any]:
    """The engine's answers to a query about each prompt, without new tokens. Raises Refusal, LowqError, ClientDisconnect."""
    results: list[Any] = []
    async with asyncio.timeout(seconds):
        for at in range(0, len(prompts), READ_AT_ONCE):
            part = [Request(tuple(p), 1, client=client, read=query, adapter=adapter) for p in prompts[at : at + READ_AT_ONCE]]
            by_number: dict[int, Any] = {}
            live = model.hub.submit(part)
            with following(live, receive):
                while len(by_number) < len(part):
                    came = await live.take()
                    if not came:
                        raise ClientDisconnect
                    for index, events in came.items():
                        unanswered(events[-1].finish_reason, events[-1].message)
                        by_number[index] = events[-1].read
            results += [by_number[i] for i in range(len(part))]
    return results
