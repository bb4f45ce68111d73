"""The only file that prints. Results and --json go to stdout; plans, progress and hints to stderr.

Rich is imported when something is drawn, so that `--help` and errors stay under 0.2 s. Where stderr is not a terminal,
progress is a plain line every tenth of the way, and tables are drawn without colour.
"""

import json
import math
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_STEPS = 10  # number of progress lines if stderr is not a terminal
_errors: TextIO | None = None  # the stream for errors after `only_errors`
json_wanted = False  # whether this run was given --json: then an error is also one JSON object
json_is_out = False  # whether this run has printed its one JSON object
quiet = False  # whether only results and errors are printed: --quiet
WIDE, SLIM = 100, 48  # columns: wider terminals get a long progress bar; narrower ones get none, to show time and percent
NARROWEST = 8  # min. width, in columns, of a table cell that is broken over several lines


class _Progress:
    """The stream stderr for Rich. What cannot be written is dropped: a full disk or an ended reader must not end the work."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream(), name)

    def _stream(self) -> Any:
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # the stream itself while Rich draws a live row


@cache
def stderr() -> "Console":
    """The Rich console on stderr; 110 columns wide if stderr is not a terminal and COLUMNS names no width."""
    from rich.console import Console

    columns = os.environ.get("COLUMNS", "")
    width = None if sys.stderr.isatty() else int(columns) if columns.isdecimal() and int(columns) else 110
    return Console(file=cast(TextIO, _Progress()), highlight=False, width=width)


_UNSEEN = re.compile(  # control sequences of terminals, characters that change the text direction, and lone surrogates
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: str) -> str:
    """`text` with control characters escaped, since names from files can contain them. Newlines and tabs stay."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(message: str) -> None:
    """Print a line for the user on stderr, broken between words if the terminal is too narrow."""
    if not quiet:
        _print(_broken(visible(message), sys.stderr), sys.stderr)


def _print(line: str, stream: TextIO, end: str = "\n") -> None:
    """Print a line for the user. If writing fails because the reader has ended or the disk is full, the work continues."""
    with suppress(OSError):
        print(line, file=stream, end=end, flush=True)


def _broken(line: str, stream: TextIO) -> str:
    """The line, broken between words if the terminal is too narrow."""
    if not stream.isatty():
        return line
    width = max(40, shutil.get_terminal_size().columns)
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def page(text: str) -> None:
    """Print preformatted lines for the user on stderr, each broken between words if the terminal is too narrow."""
    _print("\n".join(_broken(line, sys.stderr) for line in visible(text).splitlines()), sys.stderr)


def warn(message: str) -> None:
    """Print a warning on stderr."""
    from rich.markup import escape

    if not quiet:  # without a terminal, lines are not broken
        stderr().print(f"[yellow]warning:[/] {escape(visible(message))}", soft_wrap=not sys.stderr.isatty())


def fail(message: str) -> None:
    """Print the one line of an error, broken between words if the terminal is too narrow."""
    stream = sys.stderr if _errors is None else _errors
    _print(_broken(f"lowq: {visible(message)}", stream), stream)


def only_errors() -> None:
    """Print only errors from now on: for torchrun's processes of rank 1 and above, as rank 0 prints for all."""
    global _errors
    _errors = sys.stderr
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open until the process ends


def out(text: str, end: str = "\n") -> None:
    """Print result text on stdout and flush it; on a terminal with control characters escaped."""
    print(visible(text) if sys.stdout.isatty() else text, end=end, flush=True)


def thought(text: str, terminal: bool) -> None:
    """Print a model's thoughts: on a terminal in a pale colour within the answer, otherwise on stderr, separate from it."""
    if not terminal:
        _print(text, sys.stderr, end="")
    elif "NO_COLOR" in os.environ:
        print(visible(text), end="", flush=True)
    else:
        print(f"\x1b[2m{visible(text)}\x1b[22m", end="", flush=True)


def out_line(text: str) -> None:
    """Print a result line for people on stdout, broken between words if the terminal is too narrow."""
    out(_broken(visible(text), sys.stdout))


def out_json(value: dict[str, Any]) -> None:
    """Print the one JSON object of a --json run."""
    global json_is_out
    json_is_out = True
    print(to_json(value), flush=True)


def to_json(value: object) -> str:
    """One line of JSON. Numbers that are not finite become null, because JSON cannot represent them.

    Bytes of a path that are not UTF-8 become escapes, which JSON readers turn back.
    """
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace").decode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], on_stdout: bool = False, spare: Sequence[str] = ()
) -> None:
    """Print a table. A column whose title starts with '>' is right-aligned, and its cells are never broken.

    If it is wider than the terminal, columns move closer together and titles break between words. If that is not enough, the
    columns in `spare` are dropped, in that order. If the rest still does not fit, every row becomes a paragraph.
    """
    if quiet and not on_stdout:
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [[visible(str(cell)) for cell in row] for row in rows]
    title = visible(title)
    titles = [name.lstrip(">") for name in columns]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    needed = [max(map(len, ["", *title.split(), *column])) for title, *column in zip(titles, *cells, strict=True)]
    console = _stdout() if on_stdout else stderr()
    tight = sum(widths) + 3 * len(widths) > console.width  # a space at each end, three between two columns
    shown = list(range(len(columns)))
    for name in spare:
        if sum(needed[i] for i in shown) + 2 * len(shown) + 1 > console.width:
            shown.remove(columns.index(name))
    least = sum(needed[i] if columns[i].startswith(">") else min(needed[i], NARROWEST) for i in shown) + 2 * len(shown) + 1
    if least > console.width:
        text = _paragraphs(title, titles, cells, sys.stdout if on_stdout else sys.stderr)
        if on_stdout:
            print(text, flush=True)
        else:
            _print(text, sys.stderr)
        return
    drawn = Table(
        title=Text(title) if title else None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    drawn.collapse_padding = tight
    for i in shown:
        if columns[i].startswith(">"):
            drawn.add_column(titles[i], justify="right", min_width=needed[i], max_width=needed[i] if tight else None)
        else:
            drawn.add_column(titles[i], overflow="fold")
    for row in cells:
        drawn.add_row(*(Text(row[i]) for i in shown))  # Text, not str: "[/b]" in a name must not be read as markup
    console.print(drawn)


def _paragraphs(title: str, titles: Sequence[str], cells: Sequence[Sequence[str]], stream: TextIO) -> str:
    """The rows of a table as paragraphs, for terminals that are too narrow for it."""
    lines = [title] if title else []
    for first, *rest in cells:
        sentence = ", ".join(f"{name} {cell}".strip() for name, cell in zip(titles[1:], rest, strict=True) if cell)
        lines.append(_broken(f"{first}: {sentence}" if first else sentence, stream))
    return "".join(f"{line}\n" for line in lines)


def _stdout() -> "Console":
    """The Rich console for results; at least 110 columns wide if stdout is not a terminal."""
    from rich.console import Console

    class Results(Console):
        """A console that raises BrokenPipeError when the reader has ended, like other streams."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Results(highlight=False, width=None if sys.stdout.isatty() else 110)


def size(n_bytes: float) -> str:
    """1234567 -> '1.2 MB' (decimal units, as disks and model hubs count)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n_bytes) < 1000 or unit == "GB":
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.{2 if unit == 'GB' else 1}f} {unit}"
        n_bytes /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """75.2 -> '1:15 min', 3.21 -> '3.2 s', 3723 -> '1:02:03 h', 45689359 -> '529 days'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.0f} days"
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes}:{s:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{s:02d} h"


def age(seconds: float) -> str:
    """90 -> '1 min', 200000 -> '2 days'."""
    for unit, length in (("day", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            n = int(seconds // length)
            return f"{n} {unit}{'s' * (unit == 'day' and n > 1)}"
    return f"{int(seconds)} s"


@contextmanager
def progress(label: str, total: int, began: float | None = None, before: int = 0) -> Iterator[Callable[[int, str], None]]:
    """Show a progress bar with ETA; yields `advance(done, note)`, where `done` counts from 0 to `total` in any unit.

    began: when the work began, by `time.monotonic`, if that was earlier. before: how much was done when it began.
    On a terminal it is one live row. Elsewhere it is a plain line at the first call and then at every tenth of the total.
    """
    if quiet:
        yield lambda done, note: None
        return
    if not stderr().is_terminal:
        yield _plain_progress(label, total, time.monotonic() if began is None else began, before)
        return
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    def whole(kind: Callable[..., ProgressColumn], *args: str, **how: int) -> ProgressColumn:
        return kind(*args, **how, table_column=Column(no_wrap=True, min_width=how.get("bar_width", 3)))

    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # on a narrow terminal the note is truncated
    columns = [whole(TextColumn, "[bold]{task.description}")]
    if stderr().width > SLIM:
        columns.append(whole(BarColumn, bar_width=28 if stderr().width > WIDE else 10))
    columns += [whole(TaskProgressColumn), whole(TimeElapsedColumn), whole(TextColumn, "eta"), whole(TimeRemainingColumn)]
    columns += [TextColumn("{task.fields[note]}", markup=False, table_column=rest)]
    with Progress(*columns, console=stderr(), transient=True, expand=True) as bar:
        task = bar.add_task(label, total=total, note="")
        if began is not None:
            bar.tasks[task].start_time = began
        yield lambda done, note: bar.update(task, completed=done, note=visible(note))


@contextmanager
def status(doing: str) -> Iterator[None]:
    """Show a spinner while there is no progress to show (imports, reading headers, loading); only on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.markup import escape

    with stderr().status(escape(visible(doing))):
        yield


@contextmanager
def live() -> Iterator[Callable[[str], None] | None]:
    """Show a live last line below other output; yields the function that sets it, or None if stderr is not a terminal."""
    if quiet or not stderr().is_terminal:
        yield None
        return
    with stderr().status("") as shown:
        yield shown.update


def _plain_progress(label: str, total: int, start: float, before: int = 0) -> Callable[[int, str], None]:
    shown = -1

    def advance(done: int, note: str) -> None:
        nonlocal shown
        step = done * PLAIN_STEPS // max(total, 1)
        if step > shown:
            shown = step
            spent = time.monotonic() - start
            eta = duration(spent * (total - done) / (done - before)) if done > before else "?"
            say(f"{label} {100 * done // max(total, 1):3d}%  {duration(spent)}, eta {eta}  {note}")

    return advance
