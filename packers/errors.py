"""The errors that users can cause or fix: one exception type with an exit code.

A message names what failed, the value, the limit and the way out, in one line. `lowq_cli.main` prints it on stderr and
exits with `exit_code`; library callers catch `LowqError`. An exception that is not a LowqError is a bug of ours (exit 1).
"""

import errno

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a write for which there is no room


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
    """A quality gate the caller set was missed."""

    exit_code = 6


def one_line(e: BaseException) -> str:
    """The message of another library's exception, as one line of at most 300 characters."""
    return " ".join(str(e).split())[:300] or type(e).__name__


def disk_full(e: OSError, path: object, then: str = "run the same command again") -> DoesNotFitError | None:
    """The error to raise if `e`, from writing `path` (None: unknown), means that the disk is full; else None."""
    if e.errno not in _DISK_FULL:
        return None
    return DoesNotFitError(f"the disk is full{f' ({path})' if path else ''}; make room and {then}")


class no_panic:  # a class, since a generator's `with` would take longer than decoding a token
    """Turn a panic or bare Exception of a library written in Rust into a DamagedError about its input."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, _: object) -> None:
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):
            raise DamagedError(f"{self.what} is damaged: {one_line(e)}") from None  # type: ignore[arg-type]
