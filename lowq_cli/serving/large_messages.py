"""Messages between processes that may hold pictures of several MB.

multiprocessing reads what its socket holds, 0.2 MB or less at a time, and needs the interpreter after each of these reads. Next
to a thread that runs Python a message of 6 MB took 172 ms instead of 9 (2 CPU cores). Here large parts of a message follow it,
each in one read, and are neither copied into the pickle nor out of it (pickle's out-of-band buffers).
"""

import os
import pickle
import socket
import struct
from collections.abc import Sequence
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

Part = bytes | bytearray | memoryview
COUNT, SIZE = struct.Struct("!I"), struct.Struct("!Q")
SOCKETS = os.name == "posix"  # whether a pipe of both directions is a socket


def parts(message: Any) -> list[Part]:
    """A message as `write` takes it: the pickle behind the number and sizes of its buffers, then the buffers."""
    into, buffers = BytesIO(), list[pickle.PickleBuffer]()
    ForkingPickler(into, 5, True, buffers.append).dump(message)  # type: ignore[arg-type]  # typeshed has no 4th argument
    raw = [b.raw() for b in buffers]
    return [COUNT.pack(len(raw)) + b"".join(SIZE.pack(b.nbytes) for b in raw) + into.getvalue(), *raw]


def write(pipe: Connection, message: Sequence[Part]) -> None:
    """Send what `parts` has made. One thread at a time."""
    head, *buffers = message
    pipe.send_bytes(head)
    for buffer in buffers:
        if not SOCKETS:
            pipe.send_bytes(buffer)
            continue
        left = memoryview(buffer)
        while left:
            left = left[os.write(pipe.fileno(), left) :]


def send(pipe: Connection, message: Any) -> None:
    """Send a message to whoever calls `receive`."""
    write(pipe, parts(message))


def receive(pipe: Connection) -> Any:
    """The next message. Raises EOFError and OSError as `Connection.recv` does."""
    data = memoryview(pipe.recv_bytes())
    (count,), at = COUNT.unpack_from(data), COUNT.size
    sizes = [SIZE.unpack_from(data, at + i * SIZE.size)[0] for i in range(count)]
    buffers = [_read(pipe, size) for size in sizes]
    return pickle.loads(data[at + count * SIZE.size :], buffers=buffers)


def _read(pipe: Connection, size: int) -> Part:
    if not SOCKETS:
        return pipe.recv_bytes()
    into = bytearray(size)
    left = memoryview(into)
    with socket.socket(fileno=os.dup(pipe.fileno())) as s:
        while left:
            n = s.recv_into(left, 0, socket.MSG_WAITALL)
            if not n:
                raise EOFError
            left = left[n:]
    return into
