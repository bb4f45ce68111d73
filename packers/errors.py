"""The errors that users can cause or fix: one exception type with an exit code.

A message names what failed, the value, the limit and the way out, in one line. `lowq_cli.main` prints it on stderr and
exits with `exit_code`; library callers catch `LowqError`. An exception that is not a LowqError is a bug of ours (exit 1).
"""

import errno
import os
import sys
import traceback
from types import TracebackType

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a write for which there is no room
_MACHINE = (  # errors of this machine, which no file's bytes cause
    *(*_DISK_FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE),
)
_OURS = ("lowq_packers", "lowq_kernels", "lowq_cli")
_LOST = (  # texts of CUDA errors after which a process can no longer use its GPU, in messages of torch, Triton and the driver
    *("illegal memory access", "illegal instruction", "misaligned address", "invalid program counter"),
    *(
        "unspecified launch failure",
        "device-side assert triggered",
        "hardware stack error",
        "launch timed out",
        "context is destroyed",
    ),
    *("operation not supported on global/shared address space", "uncorrectable ECC error", "uncorrectable NVLink error"),
)


class LowqError(Exception):
    """An error that the user can fix. The command line exits with `exit_code`."""

    exit_code = 2


class UsageError(LowqError):
    """Flags, recipe or arguments that contradict each other or are out of range."""

    exit_code = 2


class SchemeError(UsageError):
    """Bits, group size, zero kind or tensor shape that no layout or kernel can hold."""


class NotFoundError(LowqError):
    """A model, file or tensor that does not exist."""

    exit_code = 3


class DamagedError(NotFoundError):
    """A file that exists but is truncated, malformed, or contradicts its config."""


class DoesNotFitError(LowqError):
    """Not enough memory or disk."""

    exit_code = 4


class UnsupportedError(LowqError):
    """An architecture, format, layout or kernel that lowq does not handle."""

    exit_code = 5


class QualityError(LowqError):
    """The result misses a quality bound that the user set."""

    exit_code = 6


def one_line(e: BaseException) -> str:
    """The message of another library's exception, as one line of at most 300 characters."""
    return " ".join(str(e).split())[:300] or type(e).__name__


def device_lost(e: BaseException) -> bool:
    """Whether an error says that this process can no longer use its GPU: every later call fails, too."""
    return isinstance(e, RuntimeError | LowqError) and any(text in str(e) for text in _LOST)


def is_no_refusal(e: BaseException) -> bool:
    """Whether an exception from a library is not the fault of the file or value that the library was given.

    That holds for a LowqError, which has its own message; for too little memory, a full disk and a lost GPU; for Ctrl-C and the
    like; and for a bug in our code that the library called. Call it where the exception is caught.
    """
    if isinstance(e, OSError):
        return e.errno in _MACHINE
    if isinstance(e, LowqError | MemoryError) or type(e).__name__ == "OutOfMemoryError" or device_lost(e):
        return True
    if not isinstance(e, Exception):
        return type(e).__name__ != "PanicException"  # the exception of a library written in Rust
    frames = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(e.__traceback__)]
    return len(frames) > 1 and frames[-1].partition(".")[0] in _OURS  # the first frame is the one that catches it


class library_errors:  # a class, as `no_panic`
    """Turn a library's exception about the user's input into `error` with the message "WHAT: text"; the cause is chained."""

    def __init__(self, error: type[LowqError], what: str) -> None:
        self.error, self.what = error, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, _: TracebackType | None) -> None:
        if e is None or is_no_refusal(e):
            return
        if isinstance(e, ImportError):  # a package is missing; the file is not damaged
            raise UnsupportedError(f"{self.what}: {one_line(e)}") from e
        raise self.error(f"{self.what}: {one_line(e)}") from e


class naming:  # a class, as `no_panic`
    """Put a file's or folder's name in front of the message of a LowqError that does not have it; "" names none."""

    def __init__(self, where: object) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(e, LowqError) and str(self.where) not in str(e):
            e.args = (f"{self.where}: {e}",)


def log_error(what: str, e: BaseException) -> None:
    """Print an error that does not stop the work, with its traceback, if LOWQ_DEBUG is set."""
    if os.environ.get("LOWQ_DEBUG"):
        sys.stderr.write(f"{what}:\n{''.join(traceback.format_exception(e))}")


def disk_full(e: OSError, path: object, then: str = "run the same command again") -> DoesNotFitError | None:
    """The error to raise if `e`, from writing `path` (None: unknown), means that the disk is full; else None."""
    if e.errno not in _DISK_FULL:
        return None
    return DoesNotFitError(f"the disk is full{f' ({path})' if path else ''}; make room and {then}")


class no_panic:  # a class, since a generator's `with` would take longer than decoding a token
    """Turn a panic or bare Exception of a library written in Rust into a DamagedError about its input.

    what: the input in the message; it may be an object whose text is made only then.
    """

    def __init__(self, what: object) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, _: object) -> None:
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):
            raise DamagedError(f"{self.what} is damaged: {one_line(e)}") from None  # type: ignore[arg-type]
