"""The event loop's side, with an engine made of a list: readers that dawdle, bugs, several requests that go in together."""

import asyncio
import json
import threading

import pytest
from saying import served_by

pytest.importorskip("starlette", reason="starlette is not installed")

from lowq_cli.engine.open_model import ready
from lowq_cli.serving.http.app import make_app
from lowq_cli.serving.http.text import Writer
from lowq_cli.serving.request import Busy, Event, Limits, Stats


class Scripted:
    """Tells the tokens it is given; `room` requests go in."""

    name, reason, closed, vocabulary = "scripted", "", "", 8192
    limits = Limits(1024, 1, 8, 1024, 0)

    def __init__(self, tokens, room=100):
        self.tokens, self.room, self.requests, self.cancelled = tokens, room, [], []

    def start(self, sink, done=None):
        self.sink = sink

    def submit(self, request):
        if len(self.requests) == self.room:
            raise Busy("8 requests wait already; try again later")
        self.requests.append(request)
        return len(self.requests)

    def play(self, number):
        """All events of a request, one step each, from a thread of their own."""

        def work():
            for i, token in enumerate(self.tokens):
                self.sink([(number, Event(token, finish_reason="length" if i + 1 == len(self.tokens) else None))])

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def cancel(self, number):
        self.cancelled.append(number)

    def stats(self):
        return Stats()

    def stop(self, seconds):
        pass


@pytest.fixture(scope="module")
def tokenizer():
    return ready("demo", "cpu")[1]


class Talk:
    """One request to the application, in the words of ASGI."""

    def __init__(self, app, body, path="/v1/completions"):
        self.sent, self.app, self.gone, self.asked = [], app, asyncio.Event(), False
        raw = json.dumps(body).encode()
        self.scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": [(b"host", b"x")]}
        self.scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("x", 1)}
        self.raw = raw

    async def receive(self):
        if not self.asked:
            self.asked = True
            return {"type": "http.request", "body": self.raw, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    async def run(self):
        await self.app(self.scope, self.receive, self.send)
        return self.sent[0]["status"], b"".join(m.get("body", b"") for m in self.sent)


def served(engine, tokenizer, **how):
    result = served_by(engine, tokenizer, frozenset(), **how)
    return result, make_app(result)


async def until(true):
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came")


def test_a_slow_reader_gets_the_tokens_of_meanwhile_in_one_piece(tokenizer):
    async def go():
        engine = Scripted(list(range(300, 500)))
        s, app = served(engine, tokenizer)
        await s.models.start(lambda n, of: None)
        slow, reading = Talk(app, {"prompt": "Once", "stream": True, "max_tokens": 200}), asyncio.Event()

        async def send(message):
            slow.sent.append(message)
            if len(slow.sent) == 2:
                await reading.wait()  # the first chunk: its reader stops here

        slow.send = send
        task = asyncio.create_task(slow.run())
        await until(lambda: engine.requests)
        await asyncio.to_thread(engine.play(1).join)
        quick = Talk(app, {"prompt": "Once", "max_tokens": 200})
        other = asyncio.create_task(quick.run())
        await until(lambda: len(engine.requests) == 2)
        engine.play(2)
        status, body = await other
        assert len(slow.sent) == 2
        reading.set()
        _, streamed = await task
        chunks = [json.loads(line[6:]) for line in streamed.decode().split("\n\n") if line.startswith("data: {")]
        assert status == 200
        assert len(chunks) <= 4
        assert "".join(c["choices"][0]["text"] for c in chunks) == json.loads(body)["choices"][0]["text"]

    asyncio.run(go())


def test_an_unread_stream_ends_in_time(tokenizer):
    async def go():
        engine, output = Scripted([300]), []
        s, app = served(engine, tokenizer, answer_s=0.1, log=output.append)
        await s.models.start(lambda n, of: None)
        whole, streamed = (Talk(app, {"prompt": "Once", "stream": b}) for b in (False, True))
        assert (await whole.run())[0] == 504
        assert b"took longer than 0 s" in (await streamed.run())[1]
        assert engine.cancelled == [1, 2]
        assert "took longer" in output[0]

    asyncio.run(go())


def test_requests_that_belong_together_go_in_together_or_not_at_all(tokenizer):
    async def go():
        engine = Scripted([300], room=2)
        s, app = served(engine, tokenizer)
        await s.models.start(lambda n, of: None)
        status, body = await Talk(app, {"prompt": "Once", "n": 3}).run()
        assert (status, json.loads(body)["error"]["type"]) == (429, "rate_limit_error")
        assert engine.cancelled == [1, 2]
        assert not s.models.one.hub.lives

    asyncio.run(go())


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_bug_ends_the_request_with_an_error_and_leaves_nothing_open(tokenizer, streamed):
    """Here one of the engine: a token of 71 bits."""

    async def go():
        engine, failed = Scripted([1 << 70]), []
        s, app = served(engine, tokenizer, failed=failed.append)
        await s.models.start(lambda n, of: None)
        task = asyncio.create_task(Talk(app, {"prompt": "Once", "stream": streamed}).run())
        await until(lambda: engine.requests)
        engine.play(1)
        status, body = await task
        assert status == (200 if streamed else 500)
        assert b"internal error, please report it: OverflowError" in body
        assert isinstance(failed[0], OverflowError)
        assert not s.models.one.hub.lives

    asyncio.run(go())


def test_an_error_of_the_engine_is_reported(tokenizer):
    async def go():
        engine = Scripted([])
        s, app = served(engine, tokenizer)
        await s.models.start(lambda n, of: None)
        task = asyncio.create_task(Talk(app, {"prompt": "Once"}).run())
        await until(lambda: engine.requests)
        engine.sink([(1, Event(finish_reason="error", message="the device is lost"))])
        status, body = await task
        assert (status, json.loads(body)["error"]["message"]) == (500, "the device is lost")

    asyncio.run(go())


TEXT = "Grüße, 世界! 🙂 naïve — 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 👩‍👩‍👧"


@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 100])
def test_characters_that_tokens_cut_come_whole(tokenizer, at_once):
    ids = tokenizer(TEXT)["input_ids"]
    assert len(ids) > len(TEXT)  # or no token would cut one
    writer, pieces = Writer(tokenizer, (5,), (), frozenset()), []
    events = [Event(i, finish_reason="length" if n + 1 == len(ids) else None) for n, i in enumerate(ids)]
    for i in range(0, len(events), at_once):
        pieces.append(writer.push(events[i : i + at_once]).text)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in p for p in pieces)


def test_bytes_that_are_no_text_come_out_in_the_end(tokenizer):
    ids = tokenizer("🙂")["input_ids"][:-1]
    writer = Writer(tokenizer, (5,), (), frozenset())
    first = writer.push([Event(i) for i in ids]).text
    assert first == ""
    assert set(writer.push([Event(None, finish_reason="cancelled")]).text) == {"\ufffd"}


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_an_answer_ends_at_the_token_that_completed_a_stop_however_many_came_with_it(tokenizer, at_once):
    ids = tokenizer("Once upon a time there was a king who had a daughter")["input_ids"]
    steps = [Event(t, logprob=-1.0, finish_reason="length" if i + 1 == len(ids) else None) for i, t in enumerate(ids)]
    writer, pieces = Writer(tokenizer, (5,), (" there was",), frozenset()), []
    for i in range(0, len(steps), at_once):
        pieces.append(writer.push(steps[i : i + at_once]))
        if pieces[-1].finish_reason:
            break
    needed = next(n for n in range(len(ids)) if " there was" in tokenizer.decode(ids[:n]))
    assert 2 < needed < len(ids)
    assert "".join(p.text for p in pieces).strip() == "Once upon a time"
    assert writer.tokens == sum(len(p.logprobs) for p in pieces) == needed
    assert pieces[-1].finish_reason == "stop"
