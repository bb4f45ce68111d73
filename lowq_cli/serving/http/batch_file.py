"""Answers a file of requests in OpenAI's batch format with the server's application, but without a server.

Each line is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}, for any path of the server.
Each answer is a line with the custom_id, a response of status_code, request_id and body, and an error. Answers are written as
they complete, so an interrupted batch continues with the lines that have no answer yet.
"""

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from starlette.types import ASGIApp, Message

from lowq_cli.files.folder import busy
from lowq_cli.files.locks import lock
from lowq_cli.serving.http.answers import encoded
from lowq_cli.state import writing
from lowq_packers.atomic import write_whole
from lowq_packers.errors import LowqError, UsageError
from lowq_packers.regular import read_regular

FIELDS = {"custom_id", "method", "url", "body"}
AGAIN = (429, 503)  # HTTP statuses after which a request is tried again
TRIES = 5
STREAMED = ("/api/chat", "/api/generate")  # ollama's paths, which answer by a stream unless told not to
BEGINNING = b'{"id":"batch_req_'  # of each line of answers
MOST_ANSWERS = 1 << 33  # max. bytes of an existing file of answers


@dataclass(frozen=True)
class Line:
    """One request of the file."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read(text: str, where: str) -> list[Line]:
    """The requests of a file. Raises UsageError with the number of an invalid line."""
    lines: dict[str, Line] = {}
    for number, row in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if not row.strip():
            continue
        at = f"line {number} of {where}"
        try:
            given = json.loads(row)
        except (ValueError, RecursionError):
            raise UsageError(f"{at} is not JSON") from None
        if not isinstance(given, dict) or set(given) - FIELDS or not isinstance(given.get("body"), dict):
            raise UsageError(f"{at} must be an object with custom_id, method, url and body, and body an object")
        name, url = given.get("custom_id"), given.get("url")
        if not isinstance(name, str) or not isinstance(url, str) or given.get("method", "POST") != "POST":
            raise UsageError(f"{at}: custom_id and url must be texts, and method POST")
        if name in lines:
            raise UsageError(f"{at} has the custom_id {name!r} of another line")
        if given["body"].get("stream"):
            raise UsageError(f"{at} asks for a stream; an answer of a batch is whole")
        whole = {"stream": False} if url in STREAMED else {}
        lines[name] = Line(name, url, given["body"] | whole)
    if not lines:
        raise UsageError(f"{where} holds no requests")
    return list(lines.values())


class Answers:
    """The file of answers, open and locked. It has the name `_hidden` until its first line."""

    def __init__(self, f: BinaryIO, out: Path) -> None:
        self.f, self.out = f, out

    def write(self, row: bytes) -> None:
        """Append a line of answers. Raises UsageError where another program has made a file of this name."""
        self.f.write(row)
        self.f.flush()
        if not _is(self.f, self.out):
            if self.out.exists():
                raise UsageError(f"another program has written {self.out} meanwhile; name another file with --out")
            _hidden(self.out).rename(self.out)


@contextmanager
def held(out: Path) -> Iterator[tuple[Answers, set[str]]]:
    """The file of answers, locked and open for more of them, and what `answered` finds in it. Removed if it stays empty.

    Raises BusyError where another process has it, and UsageError where it cannot be written or as `answered`.
    """
    with ExitStack() as stack:
        for path in (out, _hidden(out)):
            stack.callback(_remove_empty, path)  # ahead of the opening, so that a signal at any moment leaves no file
        with writing(out):
            f, done = _locked(out, stack), answered(out)
            if out.exists() and not _is(f, out):  # `answered` has written it anew
                f = _locked(out, stack)
        yield Answers(f, out), done


def _hidden(out: Path) -> Path:
    """The name of a file of answers without a line, which SIGKILL may leave."""
    return out.with_name(f".{out.name}.begun")


def _remove_empty(path: Path) -> None:
    """Remove the file if it is empty and no other process has it."""
    with suppress(OSError):
        if path.is_file() and not path.stat().st_size:
            with path.open("ab") as f:
                if lock(f.fileno()) is not False and _is(f, path) and not path.stat().st_size:
                    path.unlink()


def _locked(out: Path, stack: ExitStack) -> BinaryIO:
    """The file open for more lines, and locked until `stack` ends. Raises BusyError."""
    hidden = _hidden(out)
    for path in (out, hidden):  # opening a pipe would wait for a reader
        if (path.exists() and not path.is_file()) or (path == hidden and path.is_symlink()):
            raise UsageError(f"{path} is not a regular file; name another file with --out")
    while True:
        path = out if out.exists() else hidden
        f = stack.enter_context(path.open("ab"))
        if lock(f.fileno()) is False:
            raise busy(out)
        # the process that had the lock may have written it anew, removed it, or given it its name
        if _is(f, path) and (path == out or not out.exists()):
            if path != out:
                f.truncate(0)  # a line whose process was killed before it gave the file its name
            return f


def _is(f: BinaryIO, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(f.fileno()), path.stat())


def answered(out: Path) -> set[str]:
    """The custom_ids of final answers and refusals. Removes all other lines from the file: those of requests that can be tried
    again, and an incomplete last line.

    Raises UsageError if the file does not hold answers of a batch.
    """
    if not out.exists():
        return set()
    raw = read_regular(out, MOST_ANSWERS)
    if b"\n" not in raw and not BEGINNING.startswith(raw.replace(b" ", b"")[: len(BEGINNING)]):
        raise UsageError(f"{out} exists and does not hold answers of a batch; name another file with --out")
    rows = [row for row in raw.splitlines(keepends=True) if row.endswith(b"\n")]
    try:
        answers = [json.loads(row) for row in rows]
        status = [row["response"]["status_code"] for row in answers]
        names = [str(row["custom_id"]) for row in answers]
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{out} exists and does not hold answers of a batch; name another file with --out") from None
    final = [i for i, code in enumerate(status) if code < 500 and code not in AGAIN]
    if (whole := b"".join(rows[i] for i in final)) != raw:
        write_whole(out, whole)
    return {names[i] for i in final}


async def run(
    app: ASGIApp, lines: Sequence[Line], at_once: int, write: Callable[[bytes], object], ended: Callable[[], str]
) -> dict[str, int]:
    """Answer requests, `at_once` at a time; return the numbers of answered and refused ones.

    write: called with each line of answers. ended: returns why the engine ended, or "". Raises LowqError with that reason.
    """
    counts, left = {"answered": 0, "refused": 0}, iter(lines)

    async def work(lines: Iterator[Line]) -> None:
        for line in lines:
            status, body = await _ask_again(app, line, ended)
            counts["answered" if status == 200 else "refused"] += 1
            response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
            row = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}
            write(encoded(row) + b"\n")

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, len(lines))):
            group.create_task(work(left))
    return counts


async def _ask_again(app: ASGIApp, line: Line, ended: Callable[[], str]) -> tuple[int, Any]:
    """(status, body) of one request, which is tried up to TRIES times while its status is in AGAIN."""
    for attempt in range(TRIES):
        status, retry, raw = await _ask(app, line)
        if why := ended():
            raise LowqError(f"{why}; run the same command again to continue with the remaining requests")
        if status not in AGAIN or attempt == TRIES - 1:
            break
        await asyncio.sleep(retry)
    return status, json.loads(raw)


async def _ask(app: ASGIApp, line: Line) -> tuple[int, float, bytes]:
    """(status, seconds to wait for another attempt, body) of one request."""
    raw = json.dumps(line.body, ensure_ascii=False).encode("utf-8", "replace")  # with its NaN, which the server refuses
    head, body, sent = Head(), bytearray(), False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # the client never disconnects
        sent = True
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            head.status = message["status"]
            head.retry = float(dict(message["headers"]).get(b"retry-after", 1))
        else:
            body.extend(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": line.url, "raw_path": line.url.encode(), "query_string": b""}
    scope |= {"headers": [(b"host", b"localhost")], "http_version": "1.1", "scheme": "http", "root_path": ""}
    await app({**scope, "server": ("localhost", 0), "client": None}, receive, send)
    return head.status, head.retry, bytes(body)


@dataclass
class Head:
    """Status and Retry-After of a response."""

    status: int = 500
    retry: float = 1.0
