"""The ASGI application: the server's paths and the handler of each, behind the checks that every request passes first."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lowq_cli.calibrate.texts import check_ids
from lowq_cli.serving.dialects import embeddings, ollama, rerank, tokens
from lowq_cli.serving.dialects.chat import Chat
from lowq_cli.serving.dialects.completions import Completions
from lowq_cli.serving.dialects.messages import Messages
from lowq_cli.serving.dialects.ollama import Ollama
from lowq_cli.serving.dialects.responses import Responses
from lowq_cli.serving.http import fields, refusal, tools
from lowq_cli.serving.http.answers import Answer, Dialect, Gone
from lowq_cli.serving.http.bodies import Bodies
from lowq_cli.serving.http.engine_requests import check_lengths, encoded, prompts_of, queue, read_prompts
from lowq_cli.serving.http.guard import Guard
from lowq_cli.serving.http.local import Local
from lowq_cli.serving.http.metrics import CONTENT_TYPE, Metrics
from lowq_cli.serving.http.model_pool import ModelPool
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.reply import EventStream, Log, answer_json, following, too_late
from lowq_cli.serving.request import MOST_LOGPROBS, Done, Read
from lowq_packers.errors import LowqError

PICTURE_BODY = 32 << 20  # max. bytes of a body if a model takes images: an image of 20 MB has 27 MB as base64
EMBEDDINGS = ("/v1/embeddings", "/api/embed", "/api/embeddings")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


@dataclass
class Served:
    """The models of a server, its limits and its callbacks.

    Args:
        models: the model pool.
        api_key: the key that clients must send, "" for none. hosts: allowed values of the Host header, () for any.
        body_bytes: max. bytes of a body. body_s, answer_s: max. seconds to read a body and to answer.
        silence_s: max. seconds without bytes in a stream, while a prompt is read or a call is held back.
        bodies_bytes: max. bytes of all bodies in memory together.
        log: called with one line per request. failed: called with each unexpected exception (a bug in lowq).
        recording: called with the progress of the engine's start. idle_s: seconds without a request until the server ends.
        about: facts for lowq commands of the same user. stop: ends the server. strict: whether unknown fields are refused.
    """

    models: ModelPool
    api_key: str = ""
    hosts: tuple[str, ...] = ()
    body_bytes: int = 4 << 20
    bodies_bytes: int = 64 << 20
    body_s: float = 30.0
    answer_s: float = 3600.0
    silence_s: float = 10.0  # Codex and opencode end a stream after 300 s of silence, nginx after 60
    log: Callable[[str], None] = lambda line: None
    failed: Callable[[Exception], None] = lambda e: None
    recording: Done = lambda n, of: None
    strict: bool = False
    idle_s: float = float("inf")
    about: dict[str, Any] = field(default_factory=dict)
    stop: Callable[[], None] = lambda: None
    unstarted: Exception | None = field(default=None, init=False)  # why the engine did not start

    @property
    def metrics(self) -> Metrics:
        """The server's numbers."""
        return self.models.reports.metrics


def make_app(served: Served) -> ASGIApp:
    """The ASGI application; its lifespan starts the engine."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            await served.models.start(served.recording)
        except Exception as e:  # any error: `serve` raises it again, where uvicorn would only exit with a number
            served.unstarted = e
            raise
        yield

    endpoints = Endpoints(served)
    routes = [
        Route("/", endpoints.page),
        Route("/health", endpoints.health),
        Route("/ready", endpoints.ready),
        Route("/metrics", endpoints.metrics),
        *Local(served.models, served.about, lambda: served.stop()).routes(),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/v1/chat/completions", endpoints.answers("chat"), methods=["POST"]),
        Route("/v1/completions", endpoints.answers("completion"), methods=["POST"]),
        Route("/v1/responses", endpoints.answers("responses"), methods=["POST"]),
        Route("/v1/messages", endpoints.answers("messages"), methods=["POST"]),
        Route("/v1/messages/count_tokens", endpoints.count_tokens, methods=["POST"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/api/chat", endpoints.answers("api/chat"), methods=["POST"]),
        Route("/api/generate", endpoints.answers("api/generate"), methods=["POST"]),
        *(Route(path, endpoints.embeddings, methods=["POST"]) for path in EMBEDDINGS),
        *(Route(path, endpoints.rerank, methods=["POST"]) for path in ("/v1/rerank", "/rerank")),
        Route("/api/tags", endpoints.tags),
        Route("/api/ps", endpoints.loaded),
        Route("/api/show", endpoints.show, methods=["POST"]),
        Route("/api/version", endpoints.version),
    ]
    handlers: dict[Any, Any] = {HTTPException: _no_such_path, Refusal: _refused}
    return Guard(
        Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers),
        served.api_key,
        served.hosts,
        served.log,
        _body,
    )


def _body(path: str, why: Refusal) -> dict[str, Any]:
    """The body of a refusal in the dialect of a path, whether or not that path exists."""
    if path.startswith("/v1/messages"):
        return Messages().refused(why)
    return Ollama(True).refused(why) if path.startswith("/api/") else why.body


async def _refused(request: HttpRequest, why: Exception) -> Response:
    assert isinstance(why, Refusal)
    return answer_json(_body(request.url.path, why), why.status, why.headers)


async def _no_such_path(request: HttpRequest, why: Exception) -> Response:
    assert isinstance(why, HTTPException)
    how = f"{request.method} {request.url.path}"
    line = f"{how} is not served here" if why.status_code == 404 else f"{how}: {str(why.detail).lower()}"
    body = _body(request.url.path, Refusal(why.status_code, line))
    return answer_json(body, why.status_code, dict(why.headers or {}))


class Endpoints:
    """The handlers of the paths."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.bodies = Bodies(served.body_bytes, served.body_s, served.bodies_bytes)
        several: tuple[Dialect, ...] = (Chat(), Completions(), Responses(), Messages(), Ollama(True), Ollama(False))
        self.of = {d.name: d for d in several}

    async def page(self, _: HttpRequest) -> Response:
        """/: the chat page for the browser."""
        html = resources.files("lowq_cli.serving.http").joinpath("page.html").read_bytes()
        return Response(html, media_type="text/html", headers={"Content-Security-Policy": PAGE_POLICY})

    async def health(self, _: HttpRequest) -> Response:
        """/health: the process is up; how many requests run and wait."""
        s = self.served.models.reports.stats()
        return answer_json({"status": "ok", "running": s.running, "waiting": s.waiting})

    async def ready(self, _: HttpRequest) -> Response:
        """/ready: whether requests are answered now."""
        why = self.served.models.not_ready()
        return answer_json({"status": why or "ready"}, 503 if why else 200)

    async def metrics(self, _: HttpRequest) -> Response:
        """/metrics: the numbers for Prometheus."""
        return Response(self.served.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, _: HttpRequest) -> Response:
        """/v1/models: all models."""
        return answer_json({"object": "list", "data": self.served.models.entries()})

    async def model(self, request: HttpRequest) -> Response:
        """/v1/models/NAME: one model."""
        return answer_json(await self.served.models.entry(request.path_params["name"]))

    def answers(self, dialect: str) -> Callable[[HttpRequest], Awaitable[Response]]:
        """The handler of a path at which a model answers in this dialect."""
        return partial(self._answer, dialect=self.of[dialect])

    async def tags(self, _: HttpRequest) -> Response:
        """/api/tags: all models, for ollama's clients."""
        return answer_json({"models": [ollama.described(m, m["disk_bytes"]) for m in self.served.models.entries()]})

    async def loaded(self, _: HttpRequest) -> Response:
        """/api/ps: the loaded models, for ollama's clients."""
        return answer_json({"models": [ollama.described(m) for m in self.served.models.entries() if m["loaded"]]})

    async def version(self, _: HttpRequest) -> Response:
        """/api/version."""
        return answer_json({"version": ollama.VERSION})

    async def show(self, request: HttpRequest) -> Response:
        """/api/show: one model."""

        async def result(body: dict[str, Any]) -> dict[str, Any]:
            name = fields.text("model", body.get("model", body.get("name"))).removesuffix(ollama.LATEST)
            return ollama.shown_model(await self.served.models.entry(name))

        return await self._reply(request, self.of["api/chat"], result)

    async def tokenize(self, request: HttpRequest) -> Response:
        """/tokenize: the tokens of a text, or of a conversation in the model's chat template."""

        async def result(body: dict[str, Any]) -> dict[str, Any]:
            params = tokens.to_tokenize(body)
            async with self.served.models.lease(_model(body), request.receive) as model:
                if params is None:
                    ids = await asyncio.to_thread(tokens.of_text, model.tokenizer, body)
                else:
                    ids = (await prompts_of(model, params, tools.read(params)))[0][0]
                return tokens.response(model, ids, body)

        return await self._reply(request, self.of["completion"], result)

    async def embeddings(self, request: HttpRequest) -> Response:
        """/v1/embeddings, ollama's /api/embed, and its older /api/embeddings of one text."""
        ours, one = request.url.path.startswith("/v1/"), request.url.path == "/api/embeddings"

        async def result(body: dict[str, Any]) -> dict[str, Any]:
            settings = embeddings.read(ollama.embedding(body) if one else body)
            name = _model(body)
            name = name if ours or name is None else name.removesuffix(ollama.LATEST)
            async with self.served.models.lease(name, request.receive) as model:
                ids = await asyncio.to_thread(encoded, model, settings.texts)
                check_lengths(model, ids, "input")
                query, (adapter, _) = Read("hidden", pooling=settings.pooling or model.facts.pooling), model.adapter(None, name)
                outputs = await read_prompts(model, ids, query, adapter, request.receive, self.served.answer_s)
            vectors = await asyncio.to_thread(embeddings.vectors, outputs, settings)
            n = sum(map(len, ids))
            if ours:
                return embeddings.whole(model.name, vectors, settings, n)
            if one:
                return {"embedding": vectors[0].tolist()}
            return {"model": model.name, "embeddings": [v.tolist() for v in vectors], "prompt_eval_count": n}

        return await self._reply(request, self.of["completion" if ours else "api/chat"], result)

    async def rerank(self, request: HttpRequest) -> Response:
        """/v1/rerank."""

        async def result(body: dict[str, Any]) -> dict[str, Any]:
            ranking = rerank.read(body)
            async with self.served.models.lease(_model(body), request.receive) as model:
                if not model.tokenizer.chat_template:
                    raise refusal.wrong("model", "has no chat template, by which a model judges documents; use /v1/embeddings")
                ids = [(await prompts_of(model, ranking.chat(d), tools.Tools()))[0][0] for d in ranking.documents]
                check_lengths(model, ids, "documents")
                query, (adapter, _) = Read("next", MOST_LOGPROBS), model.adapter(None, _model(body))
                outputs = await read_prompts(model, ids, query, adapter, request.receive, self.served.answer_s)
                scores = [rerank.score(one[0], lambda t: model.names.of(t)[0]) for one in outputs]
            return rerank.whole(model.name, scores, ranking, sum(map(len, ids)))

        return await self._reply(request, self.of["completion"], result)

    async def detokenize(self, request: HttpRequest) -> Response:
        """/detokenize: the text of tokens."""

        async def result(body: dict[str, Any]) -> dict[str, Any]:
            ids = tokens.to_detokenize(body)
            async with self.served.models.lease(_model(body), request.receive) as model:
                check_ids(ids, model.engine.vocabulary)
                text = await asyncio.to_thread(model.tokenizer.decode, ids, skip_special_tokens=False)
            return {"prompt": text, "content": text}

        return await self._reply(request, self.of["completion"], result)

    async def count_tokens(self, request: HttpRequest) -> Response:
        """/v1/messages/count_tokens: the number of prompt tokens that a request to /v1/messages would have."""
        dialect = self.of["messages"]

        async def count(body: dict[str, Any]) -> dict[str, Any]:
            params = dialect.read(body)
            async with self.served.models.lease(params.get("model"), request.receive) as model:
                prompts, *_ = await prompts_of(model, params, tools.read(params))
            return {"input_tokens": len(prompts[0])}

        return await self._reply(request, dialect, count)

    async def _reply(
        self, request: HttpRequest, dialect: Dialect, work: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> Response:
        """The response to a request that needs no generated text; `work` maps the body to the response."""
        log = Log(self.served.metrics, self.served.log, dialect)
        try:
            async with self.bodies.of(request) as raw:
                return answer_json(await work(fields.parsed(raw)))
        except ClientDisconnect:
            return Response(status_code=499)
        except (LowqError, Refusal) as e:
            return log.refused(refusal.of(e))
        except Exception as e:  # a bug in lowq: answered with 500; LOWQ_DEBUG shows the traceback
            self.served.failed(e)
            return log.refused(refusal.bug(e))

    async def _answer(self, request: HttpRequest, dialect: Dialect) -> Response:
        log = Log(self.served.metrics, self.served.log, dialect)
        try:
            async with self.bodies.of(request) as raw:
                parsed = dialect.read(fields.parsed(raw))
                if self.served.strict:
                    parsed.check_known()
                if parsed.dialect.get("unloads") and await self.served.models.unload(parsed.get("model")):
                    return answer_json(ollama.unloaded(parsed))
                answer = await self._begin(parsed, request)
            if parsed.get("stream"):
                return EventStream(answer, log, self.served.answer_s, self.served.silence_s, self.served.failed)
            with following(answer.live, request.receive):
                async with asyncio.timeout(self.served.answer_s):
                    whole = await dialect.whole(answer)
            log.answered(answer)
            return answer_json(whole)
        except Gone:
            log.ended("gone", "client left", answer)
            return Response(status_code=499)
        except ClientDisconnect:
            log.ended("gone", "client left before its answer began")
            return Response(status_code=499)
        except TimeoutError:
            return log.refused(too_late(self.served.answer_s))
        except (LowqError, Refusal) as e:
            return log.refused(refusal.of(e))
        except Exception as e:  # a bug in lowq: answered with 500; LOWQ_DEBUG shows the traceback
            self.served.failed(e)
            return log.refused(refusal.bug(e))

    async def _begin(self, params: fields.Params, request: HttpRequest) -> Answer:
        """Lease the model and queue the requests of a body. Raises Refusal, LowqError."""
        async with self.served.models.lease(params.get("model"), request.receive) as model:
            if params.plain is not None and not model.tokenizer.chat_template:
                params = params.plain
            client = request.client.host if request.client else ""
            return await queue(model, params, client, request.receive, self.served.answer_s)


def _model(body: dict[str, Any]) -> str | None:
    """The `model` field of a body. Raises Refusal."""
    return None if body.get("model") is None else fields.text("model", body["model"])
