"""Clients that occupy resources: connections without requests, halves of heads and bodies, unread answers."""

import asyncio
import json
import random
import socket

import httpx
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from saying import Saying, byte_tokenizer, served_by

from lowq_cli.serving.http import connections
from lowq_cli.serving.http.app import make_app
from lowq_cli.serving.http.connections import ACCEPTS, IDLE_S, UNREAD_S, Connection
from lowq_cli.serving.http.guard import Guard
from lowq_cli.serving.http.run import listen

LONG = "x" * 4000
BODY = json.dumps({"prompt": "hi", "max_tokens": 5}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


class Here:
    """The application behind uvicorn, in this event loop."""

    def __init__(self, most=connections.MOST, tokens=None, **bounds):
        tokenizer = byte_tokenizer()
        self.served = served_by(Saying(tokens or [*range(10), tokenizer.eos_token_id]), tokenizer)
        for name, value in bounds.items():
            setattr(self.served, name, value)
        self.most = most

    async def __aenter__(self):
        self.socket = listen("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        config = uvicorn.Config(make_app(self.served), http=Connection, log_config=None, ws="none", backlog=ACCEPTS)
        self.server, self.before, Connection.most = uvicorn.Server(config), Connection.most, self.most
        self.task = asyncio.create_task(self.server.serve([self.socket]))
        while not self.server.started:
            await asyncio.sleep(0.001)
        return self

    async def __aexit__(self, *_):
        self.server.should_exit, Connection.most = True, self.before
        for c in list(self.server.server_state.connections):
            c.transport.abort()
        await self.task

    async def open(self):
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def answered(self):
        """The status of an honest request."""
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"http://127.0.0.1:{self.port}/v1/completions", content=BODY)
        return answer.status_code

    async def until(self, fact):
        async with asyncio.timeout(60):
            while not fact():
                await asyncio.sleep(0.001)

    @property
    def connections(self):
        return self.server.server_state.connections

    def later(self, seconds):
        """What the server does when so much time has gone by."""
        now = asyncio.get_running_loop().time()
        for c in list(self.connections):
            c.sweep(now + seconds)


ACTIONS = st.lists(
    st.sampled_from(["half head", "head", "half body", "body", "garbage", "half-close", "read", "wait"]), max_size=6
)


async def act(here, actions):
    """A client that does these things and then nothing more."""
    reader, writer = await here.open()
    sends = {
        "half head": b"POST /v1/completions HT",
        "head": POST % len(BODY),
        "half body": BODY[:9],
        "body": BODY,
        "garbage": b"\0\xff\r\n",
    }
    for action in actions:
        try:
            if action in sends:
                writer.write(sends[action])
                await writer.drain()
            elif action == "half-close":
                writer.write_eof()
            elif action == "read":
                async with asyncio.timeout(0.02):
                    await reader.read(100)
            else:
                await asyncio.sleep(0.001)
        except (OSError, TimeoutError, RuntimeError):
            pass
    return writer


@settings(max_examples=20, deadline=None)
@given(clients=st.lists(ACTIONS, min_size=1, max_size=12), most=st.integers(2, 6))
def test_hostile_clients_are_ended_and_an_honest_one_is_answered(clients, most):
    """More clients than places; those in the midst of a request hold theirs for as long as a body may take."""

    async def run():
        async with Here(most, body_s=0.2) as here:
            writers = [await act(here, actions) for actions in clients]
            async with asyncio.timeout(60):
                # 503 while all places are of requests that are being read; those that were ended leave the list a turn later
                while await here.answered() != 200 or len(here.connections) > most + 1:
                    await asyncio.sleep(0.02)
            await here.until(lambda: not any(c.busy for c in here.connections))
            here.later(IDLE_S + 1)
            await here.until(lambda: not here.connections)
            for w in writers:
                w.close()

    asyncio.run(run())


def test_an_idle_connection_gives_its_place_to_the_next():
    async def run():
        async with Here(most=3) as here:
            held = [await here.open() for _ in range(3)]
            assert await here.answered() == 200
            assert await held[0][0].read() == b""  # the one that has waited for longest

    asyncio.run(run())


def test_a_connection_without_a_place_is_told_when_to_come_again():
    async def run():
        async with Here(most=1) as here:
            _, busy = await here.open()
            busy.write(POST % len(BODY))
            await here.until(lambda: any(c.busy for c in here.connections))
            async with httpx.AsyncClient(timeout=60) as client:
                answer = await client.get(f"http://127.0.0.1:{here.port}/health")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "1 requests are open already" in answer.json()["error"]["message"]
            busy.close()

    asyncio.run(run())


@pytest.mark.parametrize("after_an_answer", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("half", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: loc"], ids=["nothing", "a word", "a line"])
def test_a_head_has_its_time(half, after_an_answer):
    async def run():
        async with Here() as here:
            reader, writer = await here.open()
            if after_an_answer:
                writer.write(POST % len(BODY) + BODY)
                await reader.readuntil(b"length")
                await here.until(lambda: not any(c.busy for c in here.connections))
                while not (await reader.read(1000)).endswith(b"}"):
                    pass
            for i in range(len(half)):  # byte by byte, which buys no time
                writer.write(half[i : i + 1])
                await asyncio.sleep(0.001)
            here.later(connections.HEAD_S - 5)
            await asyncio.sleep(0.01)
            assert here.connections
            here.later(IDLE_S + 1)
            output = await reader.read()
            assert output.startswith(b"HTTP/1.1 408") if half else not output

    asyncio.run(run())


def test_an_unread_answer_is_ended():
    async def run():
        async with Here() as here:
            here.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", here.port))
            body = json.dumps({"prompt": LONG, "max_tokens": 5, "n": 100, "echo": True}).encode()
            deaf.sendall(POST % len(body) + body)
            await here.until(lambda: any(c.unread for c in here.connections))
            here.later(UNREAD_S - 5)
            assert any(c.unread for c in here.connections)
            here.later(UNREAD_S + 1)
            await here.until(lambda: not here.connections)
            assert await here.answered() == 200
            deaf.close()

    asyncio.run(run())


@pytest.mark.parametrize("sent", [BODY, BODY[:9]], ids=["a request", "half a body"])
def test_a_client_that_closes_its_half_gets_an_error(sent):
    async def run():
        async with Here(tokens=[1]) as here:  # which never ends: an answer would come late
            reader, writer = await here.open()
            writer.write(POST % len(BODY) + sent)
            await here.until(lambda: any(c.busy for c in here.connections))
            writer.write_eof()
            assert b"was closed on your side" in await reader.read()
            await here.until(lambda: not here.connections)
            assert not here.served.models.one.hub.lives

    asyncio.run(run())


def test_bodies_that_never_end_are_bounded_together_and_the_largest_goes_first():
    size = 1 << 20

    async def run():
        async with Here(body_bytes=size, bodies_bytes=5 * size) as here:
            hostile = []
            slow_reader, slow = await here.open()  # the oldest connection, which blocks no other
            slow.write(POST % len(BODY) + BODY[:9])
            for _ in range(12):
                reader, writer = await here.open()
                writer.write(POST % size + b" " * (size - 100))
                await writer.drain()
                hostile.append((reader, writer))
                await asyncio.sleep(0.02)
            for reader, _ in hostile[:6]:
                async with asyncio.timeout(60):
                    assert (await reader.readline()).startswith(b"HTTP/1.1 429")
            assert await here.answered() == 200
            large = json.dumps({"prompt": "x", "user": "y" * (size - 100), "max_tokens": 3}).encode()
            async with httpx.AsyncClient(timeout=60) as client:
                whole = await client.post(f"http://127.0.0.1:{here.port}/v1/completions", content=large)
            assert whole.status_code == 200
            slow.write(BODY[9:])
            assert (await slow_reader.readline()).startswith(b"HTTP/1.1 200")
            for _, writer in hostile:
                writer.close()

    asyncio.run(run())


NAMES = ["localhost", "127.0.0.1", "[::1]"]


@st.composite
def hosts(draw):
    """(a Host header, whether it is a local name)."""
    name, port = draw(st.sampled_from([*NAMES, *map(str.upper, NAMES)])), draw(st.sampled_from(["", ":80", ":65535"]))
    bent = draw(st.sampled_from(["", "", ".evil.com", "evil", ":evil", ":80:evil", "@evil.com", " ", "/", ":", "]"]))
    before = draw(st.sampled_from(["", "", "", "evil.", "x@", "["]))
    return before + name + port + bent, not bent and not before


@settings(max_examples=300, deadline=None)
@given(host=hosts())
def test_only_local_names_are_local(host):
    text, local = host
    guard = Guard(None, "", ("127.0.0.1", "localhost", "::1"), print, None)
    scope = {"type": "http", "path": "/v1/models", "headers": [(b"host", text.encode())]}
    assert (guard.refusal(scope) is None) == local, text


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 30), key=st.sampled_from(["s3cret", "sécret key"]), right=st.booleans())
def test_a_scheme_has_no_case_and_a_key_has(seed, key, right):
    scheme = "".join(random.Random(seed).choice((c, c.upper())) for c in "bearer")
    given_key = key if right else key.upper()
    scope = {"type": "http", "path": "/v1/models", "headers": [(b"authorization", f"{scheme} {given_key}".encode())]}
    assert (Guard(None, key, (), print, None).refusal(scope) is None) == right
    scope["headers"] = [(b"authorization", f"basic {key}".encode())]
    assert Guard(None, key, (), print, None).refusal(scope).status == 401


def test_places_are_fewer_than_file_descriptors():
    for soft, hard in ((64, 64), (256, 256), (256, 4096), (256, -1), (1024, 1024), (1 << 20, 1 << 20)):
        limit, places = connections.limits(soft, hard)
        assert soft <= limit
        assert hard < 0 or limit <= hard
        assert 0 < places <= connections.MOST
        assert places <= limit - min(connections.SPARE, limit // 2)
