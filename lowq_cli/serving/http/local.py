"""Paths for lowq's own commands: they let a running server of the same user generate text, through its Unix socket.

A request names the model by its path. Only a loaded model answers, on the same device and with the same cache format that the
command would use. The response is lines of JSON: notes, pieces of text, the end.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import fields
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lowq_cli.engine.generation_config import DEFAULTS, settled
from lowq_cli.engine.prompts import encode, encode_messages, marks_of
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.stopping import check
from lowq_cli.running import model_path
from lowq_cli.serving.http.answers import encoded
from lowq_cli.serving.http.dispatcher import Live
from lowq_cli.serving.http.fields import parsed
from lowq_cli.serving.http.model_pool import ModelPool
from lowq_cli.serving.http.place import Place, State
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.reply import answer_json, following
from lowq_cli.serving.http.served_model import ServedModel
from lowq_cli.serving.request import Draw, Request
from lowq_cli.serving.writing import TextWriter
from lowq_packers.errors import LowqError, UsageError

PREFIX = "/lowq/"


def is_local(scope: Scope) -> bool:
    """Whether a request came through the Unix socket, which only this user can connect to."""
    host, port = scope.get("server") or ("", 0)
    return port is None and host.startswith("/")


class Local:
    """The handlers of the paths.

    Args:
        models: the server's pool. about: further facts for `info`. stop: ends the server.
    """

    def __init__(self, models: ModelPool, about: dict[str, Any], stop: Callable[[], None]) -> None:
        self.models, self.about, self.stop = models, about, stop

    def routes(self) -> list[Route]:
        """The routes for the application."""
        return [
            Route(f"{PREFIX}text", self.text, methods=["POST"]),
            Route(f"{PREFIX}info", self.info),
            Route(f"{PREFIX}stop", self.end, methods=["POST"]),
        ]

    async def info(self, request: HttpRequest) -> Response:
        """The facts of this server."""
        models = [{"name": m["id"], "state": m["state"], "bytes": m["bytes"]} for m in self.models.entries()]
        facts = {"process": os.getpid(), **self.about, "models": models, "idle_s": round(self.models.reports.idle_s(), 1)}
        return Response(encoded(facts) + b"\n", media_type="application/x-ndjson")

    async def end(self, request: HttpRequest) -> Response:
        """Stop."""
        self.stop()
        return answer_json({})

    async def text(self, request: HttpRequest) -> Response:
        """Stream a text as lines of JSON."""
        body = parsed(await request.body())
        place = self._place(body)
        try:
            async with self.models.lease(place.offer.name) as model:
                return await self._begin(model, body)
        except LowqError as e:
            return Response(encoded({"error": str(e), "exit_code": e.exit_code}) + b"\n", media_type="application/x-ndjson")

    def _place(self, body: dict[str, Any]) -> Place:
        """The loaded model that would generate the same text as the command. Raises Refusal."""
        for place in self.models.places.values():
            if place.state is State.READY and place.model is not None and model_path(place.offer.path) == body.get("path"):
                if place.model.facts.kv != body.get("kv"):
                    raise Refusal(404, f"it holds its cache in {place.model.facts.kv}, not {body.get('kv')}")
                if place.model.facts.act_from != "checkpoint":
                    raise Refusal(404, f"it takes activations as --act says ({place.model.facts.act})")
                if body.get("device") not in ("auto", place.model.facts.device.partition(":")[0]):
                    raise Refusal(404, f"it computes on {place.model.facts.device}")
                if place.outdated:
                    raise Refusal(404, "the model's files have changed since it was loaded there")
                return place
        raise Refusal(404, f"process {os.getpid()} has not loaded this model")

    async def _begin(self, model: ServedModel, body: dict[str, Any]) -> Response:
        """Queue the request. Raises Refusal if this server cannot answer it, LowqError if the command could not either."""
        drawn, origins = settled(model.facts.published, body["given"], DEFAULTS[body["default"]])
        Sampling(**drawn)
        stops, new_tokens, template = check(body["stop"]), body["max_new_tokens"], bool(model.tokenizer.chat_template)

        chat = isinstance(body["prompt"], list) or (template if body["chat"] is None else bool(body["chat"]))

        def work() -> tuple[list[int], dict[str, Any] | None]:
            prompt, think = body["prompt"], body.get("think")
            if isinstance(prompt, list):
                ids = encode_messages(model.tokenizer, prompt, think=think)
            else:
                ids = encode(model.tokenizer, prompt, chat, think=think)
            return ids, marks_of(model.tokenizer, ids) if chat else None

        ids, marks = await asyncio.to_thread(work)
        shown = marks.pop("shown") if marks else {}
        limit = model.facts.context
        if limit is not None and len(ids) >= limit:
            raise UsageError(f"the prompt has {len(ids)} tokens and the model's context ends at {limit}; shorten the prompt")
        room = new_tokens if limit is None else min(new_tokens, limit - len(ids))
        if len(ids) + room > model.engine.limits.longest:
            raise Refusal(404, f"its cache holds texts of up to {model.engine.limits.longest} tokens")
        draw = Draw(**{f.name: drawn[f.name] for f in fields(Sampling) if f.name in drawn}, seed=body["seed"])
        writer = TextWriter(model.tokenizer, ids, stops, model.stop_ids, "length" if room == new_tokens else "context", shown)
        live = model.hub.submit([Request(tuple(ids), room, model.stop_ids, draw)] if room else [])
        facts = {"process": os.getpid(), "prompt_tokens": len(ids), "sampling": drawn, "sampling_from": origins}
        facts |= {"context": limit, "act": model.facts.act, "act_from": model.facts.act_from}
        return Lines(
            live, writer, facts | {"decoder": model.engine.name, "template": template, "seed": body["seed"], "marks": marks}
        )


class Lines(Response):
    """A streamed response of JSON lines."""

    def __init__(self, live: Live, writer: TextWriter, head: dict[str, Any]) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-cache"}, "application/x-ndjson")
        del self.headers["content-length"]
        self.live, self.writer, self.head = live, writer, head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with following(self.live, receive):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for line in self._lines():
                await send({"type": "http.response.body", "body": encoded(line) + b"\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lines(self) -> AsyncIterator[dict[str, Any]]:
        answer, began, sent, first = self.writer.answer, time.monotonic(), 0, 0.0
        yield self.head
        if not self.live.numbers:
            answer.finish_reason = "length"
        try:
            while not answer.finish_reason:
                came = await self.live.take()
                if not came:  # the client left
                    return
                first = first or time.monotonic()
                for event in came[0]:
                    self.writer.take(event)
                    if event.finish_reason == "cancelled":
                        raise LowqError("the server is stopping")
                yield {"text": answer.text[sent:]}
                sent = len(answer.text)
        except LowqError as e:
            yield {"error": str(e), "exit_code": e.exit_code}
            return
        self.live.close()
        spent, new_tokens, ttft = time.monotonic() - first, len(answer.tokens), first - began if first else 0.0
        speed = (new_tokens - 1) / spent if ttft and spent and new_tokens > 1 else 0.0
        numbers = {"decode_tps": speed, "prefill_tps": self.head["prompt_tokens"] / ttft if ttft else 0.0, "ttft_s": ttft}
        yield {"finish_reason": answer.finish_reason, "tokens": answer.tokens, **numbers}
