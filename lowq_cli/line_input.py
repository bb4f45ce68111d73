"""The user's input in `lowq chat`: one or more lines, commands that start with /, and no echo during an answer."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lowq_cli import console

FENCE = '"""'
COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?$", re.DOTALL)  # /usr/bin is not a command


def prepare() -> None:
    """Enable arrow keys and history for `ask`, if the system supports them (Windows does not)."""
    if sys.stdin.isatty():
        with suppress(ModuleNotFoundError):
            import readline  # noqa: F401  # `input` uses it once it is imported


def ask() -> str | None:
    """The user's next message, stripped; None at the end of the input.

    A line that ends with a backslash continues in the next line, and lines between two lines of three quotes form one message.
    Ctrl-C discards the line.
    """
    while True:
        try:
            message = _message()
        except EOFError:
            if sys.stdin.isatty():
                console.page("")  # end the line of the prompt, so that the shell's prompt starts a new one
            return None
        except KeyboardInterrupt:
            console.page("")  # end the discarded line
            console.say("(dropped; /quit or Ctrl-D leaves)")
            continue
        if message.strip():
            return message.strip()


def command(line: str) -> tuple[str, str] | None:
    """(name, rest) of a line such as "/set top-k 40"; None for a message to the model."""
    match = COMMAND.match(line)
    return (match[1], (match[2] or "").strip()) if match else None


def _message() -> str:
    line = _line("> ")
    if line.strip().startswith(FENCE):
        lines = [line.strip().removeprefix(FENCE)]
        while not lines[-1].rstrip().endswith(FENCE):
            lines.append(_line(". "))
        return "\n".join(lines).rstrip().removesuffix(FENCE)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_line(". "))
    return "\n".join(lines)


def _line(prompt: str) -> str:
    """A line from the terminal, or from a file or pipe. Raises EOFError at the end."""
    if sys.stdin.isatty():
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


@contextmanager
def unechoed() -> Iterator[None]:
    """Inside the block, typed characters are not shown, but kept for the next `ask`. Ctrl-C works."""
    if not sys.stdin.isatty() or sys.platform == "win32":
        yield
        return
    import termios

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(fd, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)
