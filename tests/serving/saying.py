"""An engine that says given tokens, a byte-level tokenizer with tokens added, and the application in front of them."""

import asyncio
import json
from contextlib import contextmanager

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lowq_cli.engine.tokenizer import FastTokenizer
from lowq_cli.serving.http.app import Served, make_app
from lowq_cli.serving.http.model_pool import ModelPool
from lowq_cli.serving.http.served_model import ServedModel
from lowq_cli.serving.request import Event, Limits, Stats, check

END = "</s>"


def strict(raw):
    """The value of a JSON text; a number that is not finite, which most clients' readers refuse, is an error."""

    def refuse(word):
        raise ValueError(f"{word} is not a number of JSON")

    return json.loads(raw, parse_constant=refuse)


def byte_tokenizer(special=(), plain=(), template=None, alphabet=None):
    """Every byte, or character of `alphabet`, is a token; END and what is `special` are left out of texts, `plain` is text."""
    alphabet = sorted(alphabet or pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in (END, *special)])
    tokens.add_tokens([AddedToken(s, special=False, normalized=False) for s in plain])
    return FastTokenizer(tokens, {"eos_token": END}, template)


class Saying:
    """Answers every request with the same tokens, one a step, as far as its max_tokens and stop_ids go."""

    name, reason, closed, vocabulary = "saying", "", "", 320
    limits, drafted = Limits(4096, 8, 64, 4096, 0), (0, 0)

    def __init__(self, tokens):
        self.tokens, self.number, self.sink = tokens, 0, None

    def start(self, sink, done=None):
        self.sink = sink

    def submit(self, request):
        check(request, self.limits.longest, self.vocabulary)
        self.number += 1
        logprob = None if request.draw.logprobs is None else -0.5
        for i, token in enumerate(self.tokens, 1):
            finish = "stop" if token in request.stop_ids else "length" if i == request.max_tokens else None
            self.sink([(self.number, Event(token, logprob, finish_reason=finish, drafted=self.drafted))])
            if finish:
                break
        return self.number

    def cancel(self, number):
        pass

    def stats(self):
        return Stats()

    def stop(self, seconds):
        pass


def served_by(engine, tokenizer, stop_ids=None, draw=None, **how):
    """A server of one model, called m."""
    ends = frozenset([tokenizer.eos_token_id]) if stop_ids is None else stop_ids
    return Served(ModelPool.of_one(ServedModel(engine, tokenizer, "m", ends, draw)), **how)


@contextmanager
def opened(served):
    """What answers requests (path, body) with (status, body), a stream's body being its list of chunks. Once a Served, and once
    an engine: it is started here.
    """
    with asyncio.Runner() as runner:
        runner.run(served.models.start(lambda n, of: None))
        transport = httpx.ASGITransport(app=make_app(served))
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120)

        def ask(path, body):
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = runner.run(client.post(path if path.startswith("/") else f"/v1/{path}", content=raw))
            if answer.headers["content-type"] == "application/x-ndjson":
                return answer.status_code, [strict(line) for line in answer.text.splitlines()]
            if not answer.headers["content-type"].startswith("text/event-stream"):
                return answer.status_code, strict(answer.text)
            lines = [line.rpartition("data: ")[2] for line in answer.text.split("\n\n") if "data: " in line]
            return answer.status_code, [strict(line) for line in lines if line != "[DONE]"]

        yield ask
        runner.run(client.aclose())


def posts(served, *asked):
    """The answers of a server that is opened for these requests, one after the other."""
    with opened(served) as ask:
        return [ask(path, body) for path, body in asked]


def message(answer):
    """(content, calls as (name, arguments), finish_reason) of a chat's answer, whole or streamed."""
    if isinstance(answer, dict):
        choice = answer["choices"][0]
        output, calls = choice["message"]["content"], choice["message"].get("tool_calls", [])
        return output or "", [(c["function"]["name"], c["function"]["arguments"]) for c in calls], choice["finish_reason"]
    choices = [chunk["choices"][0] for chunk in answer if chunk["choices"]]
    output = "".join(c["delta"].get("content") or "" for c in choices)
    calls = []
    for c in (c for choice in choices for c in choice["delta"].get("tool_calls", [])):
        if "id" in c:
            assert (c["index"], c["type"], c["function"]["arguments"]) == (len(calls), "function", "")
            calls.append([c["function"]["name"], ""])
        else:
            calls[c["index"]][1] += c["function"]["arguments"]
    return output, [tuple(c) for c in calls], choices[-1]["finish_reason"]
