"""Hostile clients that occupy resources while honest ones run: each repeats one behaviour until it is cancelled."""

import asyncio
import json
import random
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {}\r\n\r\n"
ASKED = json.dumps({"prompt": "once", "max_tokens": 200, "stream": True}).encode()
Act = Callable[[asyncio.StreamReader, asyncio.StreamWriter, random.Random], Awaitable[None]]


async def idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    """Say nothing, or half a head, until the server ends it."""
    writer.write(rng.choice((b"", b"GET /hea", HEAD.format(9).encode()[:-3])))
    await reader.read()


async def half_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    """Megabytes of a body that never ends."""
    writer.write(HEAD.format(4 << 20).encode() + b" " * rng.randrange(1 << 20, 4 << 20))
    await reader.read()


async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    """Ask for a stream and do not read it; leave after a while."""
    writer.write(HEAD.format(len(ASKED)).encode() + ASKED)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(5 * rng.random())


async def half_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    """Ask and close one's own half at once."""
    writer.write(HEAD.format(len(ASKED)).encode() + ASKED)
    writer.write_eof()
    await reader.read()
    await asyncio.sleep(rng.random())


async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    """Connect, say some bytes that are none of HTTP, and reset the connection."""
    writer.write(rng.randbytes(rng.randrange(1, 400)))
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    await asyncio.sleep(0.3 * rng.random())


ACTS: tuple[tuple[Act, int], ...] = (
    (idle, 150),
    (half_body, 24),
    (deaf, 4),
    (half_close, 4),
    (drop, 8),
)  # and how many of each


async def beside(host: str, port: int, seed: int) -> None:
    """All of them, until cancelled."""

    async def again(act: Act, rng: random.Random) -> None:
        while True:
            await asyncio.sleep(rng.random())
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    await act(reader, writer, rng)
                finally:
                    writer.close()

    tasks = [again(act, random.Random(f"{seed} {act.__name__} {i}")) for act, count in ACTS for i in range(count)]
    await asyncio.gather(*tasks)
