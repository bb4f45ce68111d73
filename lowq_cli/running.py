"""This user's running servers: the place of their sockets, and requests from commands to them.

A command that loads a model itself needs seconds before its first token. If a server has already loaded the model, the command
sends a request through a Unix socket in a folder that only this user can enter. This file does not import torch, transformers
or an HTTP library, so the first token arrives within 0.15 s of the interpreter's start.
"""

import fcntl
import json
import os
import socket
import stat
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from lowq_packers.errors import LowqError, NotFoundError
from lowq_packers.home import state_dir

SUFFIX = ".sock"  # suffix of a socket's name, after the id of the listening process
LONGEST = 100  # max. bytes of a socket's path that every system accepts
CONNECT_S = 2.0  # timeout of a connection, in s; it is immediate if a process listens
FIRST_S = 600.0  # timeout of an answer's next line, in s: the prompt can be long, the CPU slow, the model busy


class Declined(Exception):  # not an error: the command does the work itself
    """No server answers the request; the message is the reason."""


def folder() -> Path:
    """The folder of the sockets. Raises NotFoundError if this user has no home, or the folder belongs to another user."""
    return state_dir() / "run"


def own(status: os.stat_result) -> bool:
    """Whether a file belongs to this user and gives no permissions to other users."""
    return status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077


def listen() -> socket.socket | None:
    """A listening socket of this process for commands of the same user; None if it cannot be created, e.g. without a home."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    with suppress(OSError, LowqError):
        folder().mkdir(0o700, parents=True, exist_ok=True)
        if not own(folder().lstat()):
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = folder() / f"{os.getpid()}{SUFFIX}"
        temporary = path.with_suffix(".new")  # a command that finds a socket on which no process listens deletes it
        for left in (path, temporary):  # by an earlier process with the same id
            left.unlink(missing_ok=True)
        with _short(temporary) as name:
            sock.bind(name)
        temporary.chmod(0o600)
        sock.listen()
        temporary.rename(path)
        return sock
    return None


def forget() -> None:
    """Delete this process's socket."""
    with suppress(OSError, LowqError):
        (folder() / f"{os.getpid()}{SUFFIX}").unlink()


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of a socket that is short enough for the system: if the path is too long, through its folder's descriptor."""
    if len(os.fsencode(path)) <= LONGEST or not os.path.isdir("/proc/self/fd"):
        yield str(path)
        return
    opened = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/{path.name}"
    finally:
        os.close(opened)


def sockets() -> list[Path]:
    """The sockets of this user's servers, the newest first."""
    try:
        if not own(folder().lstat()):
            return []
        rows = [(e.stat(follow_symlinks=False), e.path) for e in os.scandir(folder()) if e.name.endswith(SUFFIX)]
    except (OSError, LowqError):
        return []
    mine = [(s.st_mtime_ns, Path(p)) for s, p in rows if stat.S_ISSOCK(s.st_mode) and own(s)]
    return [path for _, path in sorted(mine, reverse=True)]


def connect(path: Path) -> socket.socket:
    """A connection to a server of this user. Raises Declined. Deletes the socket of a server that has died."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(CONNECT_S)
    try:
        with _short(path) as name:
            sock.connect(name)
        if hasattr(socket, "SO_PEERCRED"):
            _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
            if user != os.getuid():
                raise OSError("it belongs to another user")
    except OSError as e:
        sock.close()
        if isinstance(e, ConnectionRefusedError):
            with suppress(OSError):
                path.unlink()
        raise Declined(f"process {path.stem} does not answer: {e}") from None
    sock.settimeout(FIRST_S)
    return sock


def lines(path: Path, what: str, body: object = None) -> Iterator[dict[str, Any]]:
    """The lines of a server's answer, each a JSON object. Raises Declined if no answer comes, LowqError for reported errors."""
    raw = b"" if body is None else json.dumps(body).encode()
    how = "GET" if body is None else "POST"
    with connect(path) as talk:
        try:
            head = f"{how} /lowq/{what} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
            talk.sendall(head.encode() + raw)
            reader = talk.makefile("rb")
            status, chunked = reader.readline().split(), False
            while header := reader.readline().strip():
                chunked = chunked or header.lower().replace(b" ", b"") == b"transfer-encoding:chunked"
            if len(status) < 2 or status[1] != b"200":
                raise Declined(_reason(reader.read()) if len(status) > 1 else f"process {path.stem} ended")
            for line in _chunked_lines(reader) if chunked else reader:
                message = json.loads(line)
                if "error" in message:
                    error = LowqError(message["error"])
                    error.exit_code = message.get("exit_code", LowqError.exit_code)
                    raise error
                yield message
        except (OSError, ValueError) as e:
            raise Declined(f"process {path.stem} does not answer: {e}") from None


def _chunked_lines(reader: BinaryIO) -> Iterator[bytes]:
    """The lines of a body in chunks: with httptools installed, uvicorn sends chunks to a client of HTTP/1.0, too."""
    rest = b""
    while size := int(reader.readline().partition(b";")[0], 16):
        *whole, rest = (rest + reader.read(size)).split(b"\n")
        yield from whole
        reader.readline()
    yield from [rest] * bool(rest)


def _reason(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "it refuses"


class Reply:
    """A text that a server generates; iterate for its pieces. At its end it has the attributes of `engine.Generation`.

    facts: the fields that the server sends before the text: process, prompt_tokens, sampling, sampling_from, decoder, template.
    """

    def __init__(self, facts: dict[str, Any], rest: Iterator[dict[str, Any]]) -> None:
        self.facts, self._rest = facts, rest
        self.text, self.tokens, self.finish_reason = "", [list[int]()], "interrupted"
        self.ttft_s = self.decode_tps = self.prefill_tps = 0.0

    def __iter__(self) -> Iterator[str]:
        ended = False
        try:
            for line in self._rest:
                if piece := line.get("text"):
                    self.text += piece
                    yield piece
                if "finish_reason" in line:
                    ended, self.finish_reason, self.tokens = True, line["finish_reason"], [line["tokens"]]
                    self.ttft_s, self.decode_tps, self.prefill_tps = (line[n] for n in ("ttft_s", "decode_tps", "prefill_tps"))
        except Declined as e:
            raise LowqError(f"the server that was answering has ended ({e}); give the command again") from None
        finally:
            self._rest.close()  # type: ignore[attr-defined]  # a generator: closing it disconnects from the server, which then stops
        if not ended:
            raise LowqError("the server that was answering has ended; run the command again")


def model_path(model: str) -> str:
    """The name of a model in requests to a server: its resolved path, or its hub id."""
    path = Path(__file__).parent / "demo" if model == "demo" else Path(os.path.expanduser(model))
    return str(path.resolve()) if path.exists() else model


def ask(body: dict[str, Any]) -> Reply:
    """The reply of the first server of this user that has loaded the model `body["path"]`.

    Raises Declined if no server has loaded it, or none can answer now; LowqError if the request itself is invalid.
    """
    why = "no server of yours is running"
    for path in sockets():
        try:
            rest = lines(path, "text", body)
            return Reply(next(rest), rest)
        except (Declined, StopIteration) as e:
            why = str(e) or f"process {path.stem} ended"
    raise Declined(why)


def leave_behind(model: str, keep_alive: str, flags: list[str]) -> str:
    """Start a server of one model for this user's commands, which ends after `keep_alive` without a request.

    Returns "" as soon as the server answers, or the reason why it does not.
    """
    import subprocess
    import time

    line = [sys.executable, "-P", "-c", "from lowq_cli.main import run; run()", "serve", model_path(model), "--local"]
    line += ["--keep-alive", keep_alive, "--quiet", *flags]
    log = folder() / "last.log"
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as log_file:
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log_file, "stderr": log_file, "start_new_session": True}
        process = subprocess.Popen(line, **how)
    path = folder() / f"{process.pid}{SUFFIX}"
    while not path.exists():
        if process.poll() is not None:
            return log.read_text(errors="replace").strip().splitlines()[-1:][0] if log.stat().st_size else "it ended"
        time.sleep(0.01)
    try:
        next(lines(path, "info"))  # waits until the model is loaded
    except (Declined, StopIteration) as e:
        said_last = log.read_text(errors="replace").strip().splitlines()
        return said_last[-1] if said_last else str(e)
    return ""


def ask_or_leave(body: dict[str, Any], keep_alive: str | None, device: str) -> Reply:
    """`ask`; with `keep_alive`, start a server first if none has loaded the model. Raises Declined, LowqError."""
    try:
        return ask(body)
    except Declined:
        if keep_alive is None:
            raise
    with _starting(body["path"]):
        with suppress(Declined):  # another command has started one meanwhile
            return ask(body)
        if why := leave_behind(body["path"], keep_alive, ["--device", device, "--kv", body["kv"]]):
            raise Declined(f"no background server could be started: {why}")
        return ask(body)


@contextmanager
def _starting(model: str) -> Iterator[None]:
    """One command at a time starts a server of a model: of several that begin at once, each would load it."""
    from lowq_cli.state import writing

    with writing(folder()):
        folder().mkdir(0o700, parents=True, exist_ok=True)
        fd = os.open(folder() / "starting", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, zlib.crc32(os.fsencode(model)))  # the model's byte: one file for all models
        yield
    finally:
        os.close(fd)


def all_info() -> list[dict[str, Any]]:
    """The `info` of each server of this user."""
    servers = []
    for path in sockets():
        with suppress(Declined, StopIteration, LowqError):
            servers.append(next(lines(path, "info")))
    return servers


def stop(process: int) -> None:
    """Ask a server to end. Raises NotFoundError if it does not answer."""
    try:
        next(lines(folder() / f"{process}{SUFFIX}", "stop", {}), None)
    except Declined as e:
        raise NotFoundError(str(e)) from None
