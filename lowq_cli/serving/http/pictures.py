"""Images of a request: extracted from its messages, fetched, and decoded by a separate process, which may crash on them.

An image comes as a data URL. An http or https URL is fetched only if the server was started with --allow-image-urls, and only
from a public address: the resolved address is checked and then connected to, for redirects as well.
"""

import asyncio
import base64
import binascii
import http.client
import ipaddress
import os
import queue
import re
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from lowq_cli.files.picture_file import MOST_BYTES
from lowq_cli.hf.pictures import Packed
from lowq_cli.serving import processes
from lowq_cli.serving.http.fields import Params, known, shown, table, text
from lowq_cli.serving.http.refusal import wrong
from lowq_cli.serving.large_messages import receive, send
from lowq_packers.arch.parts import Images
from lowq_packers.errors import LowqError, UsageError, log_error, one_line

MOST = 16  # max. images per request
DATA = re.compile(r"data:image(/[\w.+-]+)?;base64,", re.ASCII)
READERS = min(4, max(2, (os.cpu_count() or 1) // 4))  # max. processes that decode images, of 350 MB; 1,024 x 1,024 takes 25 ms
START_S = 120.0  # max. seconds until a process is ready: it imports for seconds, on a busy machine longer
READ_S = 30.0  # max. seconds that a process may take for one image
FETCH_S, REDIRECTS = 10.0, 3
KEPT_BYTES = 1 << 28  # max. bytes of the cache of preprocessed images: a conversation sends its images again with each turn
MORE_MEMORY = 2 << 30  # max. bytes that a process may allocate for an image after its imports
OTHERS = {"input_audio": "sound", "audio_url": "sound", "video_url": "videos", "video": "videos", "file": "files"}


def take(params: Params) -> tuple[Params, list[tuple[str, str]]]:
    """The request with a placeholder for each image, and the images as (field, URL). Raises Refusal.

    A message with images has parts {"type": "image"} and {"type": "text"} afterwards; other messages are unchanged.
    """
    pictures: list[tuple[str, str]] = []
    messages = []
    for i, message in enumerate(params.get("messages")):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts = [_part(f"messages[{i}].content[{j}]", part, pictures) for j, part in enumerate(content)]
            message = {**message, "content": parts}
        messages.append(message)
    if len(pictures) > MOST:
        raise wrong("messages", f"have {len(pictures)} pictures; a request may have {MOST}")
    return (replace(params, given={**params.given, "messages": messages}), pictures) if pictures else (params, pictures)


def _part(name: str, given: Any, pictures: list[tuple[str, str]]) -> Any:
    part = table(name, given)
    kind = part.get("type")
    if isinstance(kind, str) and kind in OTHERS:
        raise wrong(f"{name}.type", f"{shown(kind)} is not supported: this server takes texts and pictures, not {OTHERS[kind]}")
    if kind != "image_url":
        if kind == "image":  # "image" is our own placeholder
            raise wrong(f"{name}.type", '"image" is not supported; send a picture as "image_url"')
        return part
    inside = part.get("image_url")
    if not isinstance(inside, str):
        inside = table(f"{name}.image_url", inside)
        known(f"{name}.image_url", inside, {"url", "detail"})  # detail is ignored: the model's processor sets the resolution
        inside = inside.get("url")
    pictures.append((f"{name}.image_url", text(f"{name}.image_url.url", inside)))
    return {"type": "image"}


class PictureReader:
    """Reads the images of requests to a model.

    Args:
        folder, images: of the model. urls: whether images with http and https URLs are fetched.
        start_s, read_s: max. seconds until a process is ready, and until it has read an image.
    Attributes:
        processes: those that decode images, also those that are starting.
    """

    def __init__(
        self, folder: str, images: Images, urls: bool = False, start_s: float = START_S, read_s: float = READ_S
    ) -> None:
        self.folder, self.images, self.urls, self.start_s, self.read_s = folder, images, urls, start_s, read_s
        self._free = queue.SimpleQueue[_Process | Exception]()  # ready processes, and errors of those that did not start
        self._lock, self.processes, self._starting = threading.Lock(), list[_Process](), False
        self._kept = OrderedDict[bytes, Packed]()
        self._start()  # it imports for seconds; the others start when one is not enough

    async def read(self, given: list[tuple[str, str]]) -> tuple[Packed, ...]:
        """The preprocessed images of (field, URL) pairs. Raises Refusal, naming the field."""
        return tuple([await self._read(name, url) for name, url in given])

    async def _read(self, name: str, url: str) -> Packed:
        data = await asyncio.to_thread(self._bytes, name, url)
        key = sha256(data).digest()
        if (picture := self._kept.pop(key, None)) is None:
            try:
                picture = await asyncio.to_thread(self.preprocess, data)
            except UsageError as e:
                raise wrong(name, str(e)) from None
        self._kept[key] = picture
        while len(self._kept) > 1 and sum(len(p.data) for p in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return picture

    def _bytes(self, name: str, url: str) -> bytes:
        if match := DATA.match(url):
            encoded = url[match.end() :]
            if len(encoded) > MOST_BYTES * 4 // 3 + 4:
                raise wrong(name, f"has more than {MOST_BYTES >> 20} MB; make the picture smaller")
            try:
                return base64.b64decode(encoded, validate=True)
            except (binascii.Error, ValueError):
                raise wrong(name, "is a data URL that is not base64") from None
        if not url.startswith(("http://", "https://")):
            raise wrong(name, f"must be data:image/...;base64,..., not {shown(url)}")
        if not self.urls:
            raise wrong(name, "is a link, which this server does not fetch; send a data URL, or serve with --allow-image-urls")
        try:
            return fetch(url)
        except UsageError as e:
            raise wrong(name, str(e)) from None

    def _start(self) -> None:
        """Start one more process, unless one is starting or there are READERS; it is taken from `_free` once it is ready."""
        with self._lock:
            if not self._starting and len(self.processes) < READERS:
                self._starting, process = True, _Process(self.folder, self.images, self.start_s, self.read_s)
                self.processes.append(process)
                threading.Thread(target=self._wait, args=(process,), name="lowq-pictures", daemon=True).start()

    def _wait(self, process: "_Process") -> None:
        ready: _Process | Exception = process
        try:
            process.wait()
        except Exception as e:  # whoever waits for a process raises it
            self._remove(process)
            ready = e
        with self._lock:
            self._starting = False
        self._free.put(ready)

    def _remove(self, process: "_Process") -> None:
        process.kill()
        with self._lock:
            self.processes.remove(process)

    def preprocess(self, data: bytes) -> Packed:
        """The preprocessed image; a process that crashes on it or takes too long is replaced. Raises LowqError."""
        try:
            process = self._free.get_nowait()
        except queue.Empty:
            self._start()
            process = self._free.get()
        if isinstance(process, Exception):
            self._start()  # for others who wait
            raise process
        try:
            picture = process.ask(data)
        except _Ended as e:
            self._remove(process)
            self._start()
            raise UsageError(str(e)) from None
        except BaseException:
            self._free.put(process)
            raise
        self._free.put(process)
        return picture

    def stop(self) -> None:
        """End the processes."""
        with self._lock:
            for process in self.processes:
                process.kill()


class _Ended(Exception):  # not a server error: the image is refused
    """The process that read an image has ended."""


class _Process:
    """A process that reads images, one after another."""

    def __init__(self, folder: str, images: Images, start_s: float, read_s: float) -> None:
        self.start_s, self.read_s = start_s, read_s
        self.pipe, theirs = processes.context.Pipe()
        self.process = processes.started(_serve, (theirs, folder, images), "lowq-pictures")
        theirs.close()

    def wait(self) -> None:
        """Until it is ready. Raises the error with which it did not start."""
        try:
            if not self.pipe.poll(self.start_s):
                raise LowqError(f"the process that reads pictures is not ready after {self.start_s:.0f} s; try again later")
            failed = self.pipe.recv()
        except (EOFError, OSError):
            failed = LowqError("the process that reads pictures does not start; try: lowq doctor")
        if failed is not None:
            raise failed

    def ask(self, data: bytes) -> Packed:
        """The preprocessed image. Raises the error that the process reports, and _Ended."""
        try:
            self.pipe.send_bytes(data)
            if not self.pipe.poll(self.read_s):
                self.kill()
                raise _Ended(f"the picture takes longer than {self.read_s:.0f} s to read; make it smaller")
            reply = receive(self.pipe)
        except (EOFError, OSError):
            self.kill()
            raise _Ended("the picture ended the process that read it; it is damaged or too large") from None
        if isinstance(reply, Exception):
            raise reply
        assert isinstance(reply, Packed)
        return reply

    def kill(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()


def _serve(pipe: Any, folder: str, images: Images) -> None:
    """The loop of the process: send None when it is ready, receive an image's bytes, send the vision tower's input."""
    from lowq_cli.files.picture_file import decode
    from lowq_cli.hf.pictures import Processor, packed

    try:
        processor = Processor(Path(folder), images)
    except Exception as e:  # of the model's folder, or a bug: the server's process raises it
        pipe.send(_sendable(e))
        return
    _bounded()
    pipe.send(None)
    while True:
        try:
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            reply: Any = packed(processor(decode(data)), sha256(data).digest()[:16])
        except Exception as e:  # of the picture, or a bug: the server's process raises it
            reply = _sendable(e)
        send(pipe, reply)


def _sendable(e: Exception) -> Exception:
    """An error as the server's process raises it."""
    if isinstance(e, LowqError):
        return e
    if isinstance(e, MemoryError):
        return UsageError("the picture does not fit into memory; make it smaller")
    log_error("a picture cannot be read", e)  # readers raise LowqErrors, so this is a bug in lowq: the server answers 500
    return RuntimeError(f"{type(e).__name__}: {one_line(e)}")


def _bounded() -> None:
    """Limit this process to its current memory plus MORE_MEMORY, on systems that have such a limit."""
    try:
        import resource

        with open("/proc/self/statm") as f:
            most = int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MORE_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (ImportError, OSError, ValueError):
        return


def fetch(url: str) -> bytes:
    """The bytes at a URL. Raises UsageError for a private address, too many bytes, seconds or redirects."""
    until = time.monotonic() + FETCH_S
    for _ in range(REDIRECTS + 1):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise UsageError(f"{shown(url)} is not a link to a picture")
        content = _get(parts, until)
        if isinstance(content, bytes):
            return content
        url = urljoin(url, content)
    raise UsageError(f"the link redirects more than {REDIRECTS} times")


def _get(parts: Any, until: float) -> bytes | str:
    """The response's bytes, or the URL that it redirects to."""
    secure = parts.scheme == "https"
    try:
        port = parts.port or (443 if secure else 80)
        address = next(addresses(parts.hostname, port))
        left = max(0.1, until - time.monotonic())
        with socket.create_connection((address, port), timeout=left) as plain:
            stream = ssl.create_default_context().wrap_socket(plain, server_hostname=parts.hostname) if secure else plain
            connection = http.client.HTTPConnection(parts.hostname, port, timeout=left)
            connection.sock = stream
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "lowq", "Host": parts.netloc})
            answer = connection.getresponse()
            if answer.status in (301, 302, 303, 307, 308):
                return answer.getheader("Location") or ""
            if answer.status != 200:
                raise UsageError(f"the link answers {answer.status}")
            return b"".join(_bounded_body(answer, until))
    except UsageError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise UsageError(f"the link cannot be fetched: {one_line(e)}") from None


def _bounded_body(answer: http.client.HTTPResponse, until: float) -> Iterator[bytes]:
    """A response's bytes. Raises UsageError if they exceed MOST_BYTES or come after `until`."""
    total = 0
    while piece := answer.read1(1 << 16):
        total += len(piece)
        if total > MOST_BYTES:
            raise UsageError(f"the link leads to more than {MOST_BYTES >> 20} MB")
        if time.monotonic() > until:
            raise UsageError(f"the link takes longer than {FETCH_S:.0f} s")
        yield piece


def addresses(host: str, port: int) -> Iterator[str]:
    """The addresses of a host, to connect to without resolving it again. Raises UsageError if one is not public."""
    try:
        resolved = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        raise UsageError(f"the link's host {shown(host)} is not known") from None
    for address in resolved:
        if not _anybodys(address):
            raise UsageError(f"the link leads to {address}, an address inside a network, from which nothing is fetched")
    yield from sorted(resolved)


def _anybodys(address: str) -> bool:
    """Whether an address is on the public internet; for an IPv6 address that wraps an IPv4 one, whether that is."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        if inner is not None:
            return inner.is_global and not inner.is_multicast
        if parsed in ipaddress.ip_network("64:ff9b::/96"):  # NAT64
            return _anybodys(str(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)))
    return parsed.is_global and not parsed.is_multicast
