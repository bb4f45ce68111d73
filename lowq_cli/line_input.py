"""What a person types into `lowq chat`: one line or several, commands that start with /, and nothing while an answer comes."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lowq_cli import console

FENCE = '"""'
COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?$", re.DOTALL)  # /usr/bin is a text


def prepare() -> None:
    """Arrow keys and history for `ask`, where this system has them (Windows does not)."""
    if sys.stdin.isatty():
        with suppress(ModuleNotFoundError):
            import readline  # noqa: F401  # `input` uses it once it is imported


def ask() -> str | None:
    """What is said next, without blanks around it; None at the end of the input.

    A line that ends with a backslash goes on in the next one, and so does all between two lines of three quotes. Ctrl-C drops
    what was typed.
    """
    while True:
        try:
            said = _message()
        except EOFError:
            if sys.stdin.isatty():
                console.page("")  # the line with the prompt ends here, not behind the shell's
            return None
        except KeyboardInterrupt:
            console.page("")  # the line that was being typed ends here
            console.say("(dropped; /quit or Ctrl-D leaves)")
            continue
        if said.strip():
            return said.strip()


def command(said: str) -> tuple[str, str] | None:
    """(name, rest) of a line such as "/set top-k 40"; None for what is said to the model."""
    found = COMMAND.match(said)
    return (found[1], (found[2] or "").strip()) if found else None


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
    """Inside, what is typed is not shown; it waits for the next `ask`. Ctrl-C works."""
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
