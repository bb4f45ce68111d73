"""Messages with large buffers between processes: what arrives, in how many reads, and what a sender's end does."""

import pickle
import socket
import threading
from multiprocessing import Pipe

import pytest

from lowq_cli.hf.pictures import Packed
from lowq_cli.serving import large_messages

BIG = bytes(range(256)) * (6 << 12)  # 6 MB: 30 times what a socket holds


class Sample:
    """Pickled with its data out of band."""

    def __init__(self, data):
        self.data = data

    def __reduce_ex__(self, protocol):
        return Sample, (pickle.PickleBuffer(self.data),)


def sent(message):
    """What arrives of a message."""
    ours, theirs = Pipe()
    thread = threading.Thread(target=large_messages.send, args=(theirs, message))
    thread.start()
    received = large_messages.receive(ours)
    thread.join()
    return received


@pytest.mark.parametrize("data", [BIG, bytearray(BIG), b"", b"x"], ids=["6 MB", "a bytearray", "nothing", "a byte"])
def test_a_picture_arrives(data):
    picture = Packed(b"name", 1024, (32, 32), (), data)
    what, number, received, again = sent(("submit", 3, picture, picture))
    assert (what, number, received.name, received.rows, received.grid) == ("submit", 3, b"name", 1024, (32, 32))
    assert received.data == again.data == data


def test_a_picture_is_not_copied_into_its_message():
    head, buffer = large_messages.parts(("submit", 3, Packed(b"name", 1024, (32, 32), (), BIG)))
    assert len(head) < 500
    assert buffer.obj is BIG


def test_several_buffers_keep_their_order():
    assert [s.data for s in sent([Sample(BIG), Sample(b"one"), Sample(BIG[:70000])])] == [BIG, b"one", BIG[:70000]]


def test_a_buffer_is_read_at_once(monkeypatch):
    """Between two reads a thread waits for the interpreter: 5 ms next to a thread that runs Python."""
    reads = []

    class Counted(socket.socket):
        def recv_into(self, *given):
            reads.append(super().recv_into(*given))
            return reads[-1]

    monkeypatch.setattr(socket, "socket", Counted)
    sent(Sample(BIG))
    assert reads == [len(BIG)]


def test_a_sender_that_ends_in_the_middle_is_an_end_of_file():
    ours, theirs = Pipe()
    head, _ = large_messages.parts(Sample(BIG))
    large_messages.write(theirs, [head, BIG[:1000]])
    theirs.close()
    with pytest.raises(EOFError):
        large_messages.receive(ours)
