"""Parse and check single values of a recipe, from flags and TOML files. All functions raise UsageError."""

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from lowq_packers.errors import UsageError
from lowq_packers.scheme import BITS, GROUP_STEP

Group = int | Literal["channel"]
Keep = Literal["keep"]


@dataclass(frozen=True)
class Override:
    """Tensors that `pattern` matches get `bits` ("keep": not quantized) and `group` (None: the recipe's)."""

    pattern: str
    bits: int | Keep
    group: Group | None = None

    def __post_init__(self) -> None:
        if not self.pattern:
            raise UsageError("an override needs a pattern: --override PATTERN=BITS[:GROUP], such as '*.down_proj=8:64'")
        if self.bits != "keep":
            check_bits(self.bits, f"override {self.pattern}")
        if self.group is not None:
            check_group(self.group, f"override {self.pattern}")

    @classmethod
    def parse(cls, text: str) -> "Override":
        """Parse "PATTERN=BITS", "PATTERN=BITS:GROUP" or "PATTERN=keep"."""
        pattern, sign, value = text.rpartition("=")
        if not sign:
            raise UsageError(f"override {text!r} has no '='; write PATTERN=BITS[:GROUP], such as '*.down_proj=8:64'")
        return cls.of(pattern.strip(), value)

    @classmethod
    def of(cls, pattern: str, value: object) -> "Override":
        """Make an override from a pattern and 8, "8", "8:64", "8:channel", "keep" or {bits, group}."""
        if isinstance(value, Mapping):
            check_keys(value, ("bits", "group"), f"override {pattern}")
            if "bits" not in value:
                raise UsageError(f"override {pattern} has no bits")
            bits, group = value["bits"], value.get("group")
        else:
            bits, _, group = str(value).strip().partition(":")
        where = f"override {pattern}"
        keep = str(bits).strip() == "keep"
        if keep and group:
            raise UsageError(f"{where}: a tensor that is kept has no group")
        return cls(pattern, "keep" if keep else number(bits, where), group_of(group, where) if group else None)

    def __str__(self) -> str:
        return f"{self.pattern}={self.bits}" + ("" if self.group is None else f":{self.group}")


def overrides(value: object) -> tuple[Override, ...]:
    """Parse a table, or a list of "PATTERN=BITS[:GROUP]"."""
    if isinstance(value, Mapping):
        return tuple(Override.of(pattern, v) for pattern, v in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(v if isinstance(v, Override) else Override.parse(str(v)) for v in value)
    raise UsageError(f"overrides={spelled(value)} must be a table, pattern = bits")


def patterns(value: object) -> tuple[str, ...]:
    """Parse a list of patterns."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UsageError(f"skip={spelled(value)} must be a list of patterns")
    return tuple(value)


def widths(value: object) -> tuple[int, ...]:
    """Parse widths from "8,4" or a list."""
    if not isinstance(value, Iterable):
        raise UsageError(f"widths={spelled(value)} must be a list of widths")
    return tuple(number(v, "widths") for v in (value.split(",") if isinstance(value, str) else value))


def parse_size(value: object) -> int:
    """Bytes of '2GiB', '500MB' or '4096'."""
    text = str(value)
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
    digits = text.rstrip("bBkKmMgGiI ")
    unit = text[len(digits) :].strip().lower()
    try:
        size = int(float(digits) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise UsageError(f"size {text!r} is not a size; write 2GiB, 500MB or a number of bytes")
    return size


def percent(value: object) -> object:
    """The number in '1%' or '1'; a value that is not a string is returned unchanged."""
    try:
        return float(value.strip().removesuffix("%")) if isinstance(value, str) else value
    except ValueError:
        raise UsageError(f"max_ppl={value!r} is not a percentage; write 1% or 0.5") from None


def check_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise UsageError for an unknown key, with the most similar known one."""
    known = list(known)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"{where} has the unknown key {key!r}; {hint}")


def number(value: object, where: str) -> int:
    """Parse an integer from 4, "4" or "-4"; whether it is large enough is checked where its limits are known."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,4000}\s*", value):
        return int(value)
    raise UsageError(f"{where}={spelled(value)} is not a whole number")


def bits_or_word(value: object, where: str) -> int | str:
    """A width, or "keep", "auto", "fp8"."""
    if value in ("keep", "auto", "fp8"):
        return value  # type: ignore[return-value]
    try:
        return number(value, where)
    except UsageError as e:
        raise UsageError(f"{e} and not 'keep'; use one of {', '.join(map(str, BITS))}, or keep") from None


def spelled(value: object) -> str:
    """A value in the syntax of a recipe file, shortened, instead of Python's."""
    if isinstance(value, Mapping):
        return f"[a table of {', '.join(map(str, value))}]"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(spelled, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def group_of(value: object, where: str) -> Group:
    """Parse a group size: 64, "64" or "channel"."""
    if value == "channel":
        return "channel"
    try:
        return number(value, where)
    except UsageError as e:
        raise UsageError(f"{e} and not 'channel'; use 32, 64, 128 or channel") from None


def check_bits(bits: object, where: str) -> None:
    """Raise UsageError unless `bits` is a width that lowq packs."""
    if type(bits) is not int or bits not in BITS:
        raise UsageError(f"{where}: {spelled(bits)} is not a width lowq packs; use one of {', '.join(map(str, BITS))}")


def check_group(group: object, where: str) -> None:
    """Raise UsageError unless `group` is "channel" or a positive multiple of 16."""
    if group != "channel" and (type(group) is not int or group < 1 or group % GROUP_STEP):
        place = "" if where == "group" else f"{where}: "
        raise UsageError(
            f"{place}group {spelled(group)} is neither a positive multiple of {GROUP_STEP} nor 'channel'; use 32, 64 or 128"
        )


def matches(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches (syntax: recipe.py), in their order. Raises UsageError if there are none."""
    names = list(names)
    glob = re.compile(fnmatch.translate(f"*.{pattern}.*"))
    matching = [n for n in names if glob.match(f".{n}.")]
    if not matching:
        try:
            expression = re.compile(pattern)
        except re.error:
            expression = None
        matching = [n for n in names if expression is not None and expression.search(n)]
    if not matching:
        near = difflib.get_close_matches(pattern, {*names, *(p for n in names for p in n.split("."))}, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "; lowq inspect MODEL --tensors lists the names"
        raise UsageError(f"pattern {pattern!r} matches no weight of this model{hint}")
    return matching
