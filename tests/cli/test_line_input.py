"""Typed input of chat, in a real terminal (a pty) with Ctrl-C, text typed ahead, and echo."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from lowq_cli import line_input

TALK = """
import select, sys
from lowq_cli import line_input
line_input.prepare()
while (said := line_input.ask()) is not None:
    print("SAID", repr(said), flush=True)
    with line_input.unechoed():
        print("ANSWERING", flush=True)
        select.select([sys.stdin], [], [], 60 if said == "first" else 0)[0]
        print("ANSWERED", flush=True)
"""


def own_terminal():
    """Before the program starts: stdin is its terminal, and Ctrl-C is not ignored, as where a script runs pytest with `&`."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Screen:
    """A program in a terminal of 80 columns."""

    def __init__(self, code):
        self.master, slave = pty.openpty()
        env = {**os.environ, "TERM": "dumb", "COLUMNS": "80"}
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        command = [sys.executable, "-P", "-c", code]
        self.process = subprocess.Popen(command, **streams, env=env, start_new_session=True, preexec_fn=own_terminal)
        os.close(slave)
        self.seen = ""

    def type(self, text):
        os.write(self.master, text.encode())

    def wait(self, text, seconds=60, press=""):
        """The output up to `text`; the key `press` is pressed now, and again after two seconds without it."""
        start, presses = time.monotonic(), 0
        while text not in self.seen:
            waited = time.monotonic() - start
            assert waited < seconds, self.seen
            if press and waited >= 2 * presses:
                self.type(press)
                presses += 1
            if select.select([self.master], [], [], 0.2)[0]:
                self.seen += re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", os.read(self.master, 4096).decode())
        before, _, self.seen = self.seen.partition(text)
        return before + text


@pytest.fixture
def screen():
    shown = Screen(TALK)
    yield shown
    shown.process.kill()
    shown.process.wait()
    os.close(shown.master)


def test_ctrl_c_drops_the_line_and_the_conversation_goes_on(screen):
    screen.wait("> ")
    screen.type("half a li")
    screen.wait("half a li")
    # CPython's readline.c looks at signals only when one cuts its select() short: a Ctrl-C between the echo and that
    # call is not seen before the next key, so it is pressed again, as a person would
    screen.wait("(dropped; /quit or Ctrl-D leaves)", press="\x03")
    screen.wait("> ")
    screen.type("whole\r")
    assert "SAID 'whole'" in screen.wait("ANSWERED")


def test_input_typed_during_an_answer_is_the_next_line(screen):
    screen.wait("> ")
    screen.type("first\r")
    screen.wait("ANSWERING")
    screen.type("second\r")
    assert "second" not in screen.wait("ANSWERED")
    assert "SAID 'second'" in screen.wait("ANSWERED")


def test_several_lines_are_one_message(screen):
    screen.wait("> ")
    screen.type("one\\\r")
    screen.wait(". ")
    screen.type("two\r")
    assert r"SAID 'one\ntwo'" in screen.wait("ANSWERED")
    screen.type('"""a\r')
    screen.wait(". ")
    screen.type("\r")
    screen.wait(". ")
    screen.type('b"""\r')
    assert r"SAID 'a\n\nb'" in screen.wait("ANSWERED")


@pytest.mark.parametrize(
    ("said", "order"),
    [("/help", ("help", "")), ("/set top-k 40", ("set", "top-k 40")), ("/usr/bin is full", None), ("a /help", None)],
)
def test_chat_commands_are_distinguished_from_texts(said, order):
    assert line_input.command(said) == order
