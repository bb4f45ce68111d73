"""Sends an answer, whole or as a stream, cancels it if the client leaves, and logs one line."""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lowq_cli.serving.http.answers import Answer, Dialect, Gone, encoded
from lowq_cli.serving.http.dispatcher import Live
from lowq_cli.serving.http.metrics import Metrics
from lowq_cli.serving.http.refusal import Refusal, bug


def answer_json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(encoded(value), status, headers, "application/json")


class Log:
    """Logs and counts one request."""

    def __init__(self, metrics: Metrics, say: Callable[[str], None], dialect: Dialect) -> None:
        self.metrics, self.say, self.dialect, self.began = metrics, say, dialect, time.monotonic()

    def answered(self, answer: Answer) -> None:
        """Record a complete answer."""
        self.ended("ok", "+".join(sorted(set(answer.finish_reasons))), answer)

    def refused(self, why: Refusal) -> Response:
        """Record a refusal and return its response."""
        self.ended("refused" if why.status < 500 else "failed", f"{why.status} {why.message}")
        return answer_json(self.dialect.refused(why), why.status, why.headers)

    def ended(self, outcome: str, how: str, answer: Answer | None = None) -> None:
        """Log the line: path, prompt and answer tokens, seconds, speed, how it ended."""
        seconds = time.monotonic() - self.began
        model = "" if answer is None else answer.model
        self.metrics.requests.labels(model, outcome).inc()
        self.metrics.whole.labels(model).observe(seconds)
        numbers = ""
        if answer is not None:
            usage, first = answer.usage(), answer.live.first
            new_tokens, spent = usage["completion_tokens"], time.monotonic() - first if first else 0.0
            speed = f", {new_tokens / spent:.0f}/s" if new_tokens > 1 and spent else ""
            after = f", first after {first - answer.live.began:.2f} s" if first else ""
            right, wrong = (sum(w.drafted[i] for w in answer.writers) for i in (0, 1))
            drafts = f", {right} of {right + wrong} drafts right" if right + wrong else ""
            numbers = f"{usage['prompt_tokens']} + {new_tokens} tokens{after}{speed}{drafts}, "
        how += answer.params.ignored if answer is not None else ""
        self.say(f"{time.strftime('%H:%M:%S')} {self.dialect.name}: {numbers}{seconds:.2f} s, {how}")


class following:
    """While the block runs, a client that leaves wakes the pending `take`; at its end all open requests are cancelled."""

    def __init__(self, live: Live, receive: Receive) -> None:
        self.live, self.receive = live, receive

    def __enter__(self) -> None:
        self.task = asyncio.create_task(self._watch())

    def __exit__(self, *_: object) -> None:
        self.task.cancel()
        self.live.close()

    async def _watch(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.live.leave()


class EventStream(Response):
    """A streamed answer. seconds: its time limit. silence_s: the silence after which an event without content is sent."""

    def __init__(self, answer: Answer, log: Log, seconds: float, silence_s: float, failed: Callable[[Exception], None]) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, log.dialect.media_type)
        del self.headers["content-length"]
        self.answer, self.log_, self.seconds, self.failed = answer, log, seconds, failed
        self.silence_s = silence_s
        self.sent = time.monotonic()  # time of the latest bytes, inf while they wait for the client to read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, each chunk after the client has taken the previous one."""
        answer, dialect, how = self.answer, self.log_.dialect, "client left"
        with following(answer.live, receive), suppress(Gone):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            pulse = asyncio.create_task(self._pulse(send))
            try:
                async with asyncio.timeout(self.seconds):
                    async for chunk in dialect.chunks(answer):
                        await self._send(send, chunk)
                how = ""
            except TimeoutError:
                how = await self._error(send, too_late(self.seconds))
            except Refusal as refused:
                how = await self._error(send, refused)
            except Gone:
                raise
            except Exception as e:  # a bug in lowq: it ends the answer; LOWQ_DEBUG shows the traceback
                self.failed(e)
                how = await self._error(send, bug(e))
            finally:
                pulse.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        if how or not all(answer.finish_reasons):
            self.log_.ended("gone", how or "failed", answer)
        else:
            self.log_.answered(answer)

    async def _send(self, send: Send, chunk: bytes) -> None:
        self.sent = math.inf
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self.sent = time.monotonic()

    async def _pulse(self, send: Send) -> None:
        """Send events without content while the stream has none with content."""
        while True:
            left = self.sent + self.silence_s - time.monotonic()
            if left > 0:
                await asyncio.sleep(min(left, self.silence_s))
            else:
                await self._send(send, self.log_.dialect.idle(self.answer))

    async def _error(self, send: Send, why: Refusal) -> str:
        """Send the last event of an answer that ends with an error; return its message for the log."""
        await self._send(send, self.log_.dialect.failed(why, self.answer))
        return why.message


def too_late(seconds: float) -> Refusal:
    """The refusal of an answer that exceeds the time limit."""
    return Refusal(504, f"the answer took longer than {seconds:.0f} s", "timeout")
