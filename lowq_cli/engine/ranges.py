"""The range of a setting, stated once, in its type: sampling, the server's fields and the commands' flags all check it.

TopP = Annotated[float, Range(0, 1, off=1)]
"""

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from lowq_packers.errors import UsageError

INT64 = (1 << 63) - 1  # the largest int64


@dataclass(frozen=True)
class Range:
    """The values that a setting may have.

    Args:
        least, most: the bounds, inclusive. apart: one more allowed value outside the bounds. whole: only whole numbers.
        off: the value that turns the setting off; apart_is: the meaning of `apart`. Both are for the error message.
    """

    least: float
    most: float
    apart: float | None = None
    apart_is: str = "off"
    off: float | None = None
    whole: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise UsageError for a value outside the range, and for one that is not a number or is NaN."""
        number = isinstance(value, int if self.whole else int | float) and not isinstance(value, bool)
        if not number or (value != self.apart and not self.least <= value <= self.most):
            raise UsageError(f"{name}={value} must be {self}")

    def __str__(self) -> str:
        kind = "a whole number " if self.whole else ""
        first = "" if self.apart is None else f"{self.apart:g} ({self.apart_is}) or "
        least, most = (f"{_short(v)} (off)" if v == self.off else _short(v) for v in (self.least, self.most))
        between = self.off is not None and self.least < self.off < self.most
        return f"{kind}{first}from {least} to {most}" + (f"; {self.off:g} is off" if between else "")


def _short(value: float) -> str:
    return "2^63 - 1" if value == INT64 else f"{value:g}"


@cache
def ranges(settings: type) -> dict[str, Range]:
    """The range of every field of a dataclass that has one."""
    hints = get_type_hints(settings, include_extras=True)
    extras = {name: get_args(hint)[1:] for name, hint in hints.items() if get_origin(hint) is Annotated}
    return {name: r for name, extra in extras.items() for r in extra if isinstance(r, Range)}


def check_ranges(settings: Any) -> None:
    """Raise UsageError for the first field of a dataclass that is outside its range; None is always allowed."""
    for name, r in ranges(type(settings)).items():  # type: ignore[arg-type]  # a type is hashable
        if (value := getattr(settings, name)) is not None:
            r.check(name, value)
