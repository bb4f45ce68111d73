"""Match regular expressions from untrusted files without backtracking, within a limited number of steps.

Python's `re` tries the alternatives one after another, 2**n of them for `(a+)+$`. This matcher follows all alternatives at
once, as the set of positions reached in the name, so the time is polynomial, and the steps are counted. A pattern that matches
only a few literal names is looked up in a dict.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import product
from re import _constants as codes  # type: ignore[attr-defined]  # the opcodes of re's parse tree, which has no public API
from re import _parser as parser  # type: ignore[attr-defined]
from re import error
from typing import Any, Generic, TypeVar

from lowq_packers.errors import DamagedError, UnsupportedError

STEPS = 5_000_000  # max. steps for all modules of a checkpoint, about 5 s; a usual checkpoint needs thousands
MAX_PATTERN = 2000  # max. characters of a pattern
SPELLED = 16  # max. literal names of a pattern that is replaced by a look-up
Value = TypeVar("Value")


class Rules(Generic[Value]):
    """Pairs (pattern, value). The first pattern that matches the beginning of a name gives its value.

    Raises DamagedError for an invalid regular expression, UnsupportedError for one that needs backtracking.
    """

    def __init__(self, rules: Iterable[tuple[str, Value]]) -> None:
        self.rules = list(rules)
        self.steps = 0
        self.spelled: dict[str, int] = {}
        self.open: list[tuple[int, Any]] = []
        for i, (pattern, _) in enumerate(self.rules):
            tree = _parse(pattern)
            names = _language(tree)
            if names is None:
                self.open.append((i, tree))
            for name in names or ():
                self.spelled.setdefault(name, i)

    def first(self, name: str) -> Value | None:
        """The value of the first rule that matches a name; None if none does. Raises DamagedError after STEPS steps."""
        best = self.spelled.get(name.removesuffix("\n"), len(self.rules))
        for i, tree in self.open:
            if i > best:
                break
            if self._ends(tree, {0}, name):
                best = i
        return self.rules[best][1] if best < len(self.rules) else None

    def _ends(self, tree: Any, starts: set[int], name: str) -> set[int]:
        """The positions where a match of `tree` that begins at one of `starts` can end."""
        for op, arg in tree:
            self.steps += 1 + len(starts)
            if self.steps > STEPS:
                raise DamagedError("the regular expressions in quantization_config take too long; name modules outright")
            starts = self._step(op, arg, starts, name)
            if not starts:
                break
        return starts

    def _step(self, op: Any, arg: Any, starts: set[int], name: str) -> set[int]:
        n = len(name)
        if op is codes.BRANCH:
            return set().union(*(self._ends(branch, starts, name) for branch in arg[1]))
        if op is codes.SUBPATTERN:
            return self._ends(arg[3], starts, name)
        if op in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            return self._repeat(arg[0], arg[1], arg[2], starts, name)
        if op is codes.AT:
            return {i for i in starts if _is_at(arg, i, name)}
        if op in (codes.ASSERT, codes.ASSERT_NOT):
            return {i for i in starts if bool(self._ends(arg[1], {i}, name)) == (op is codes.ASSERT)}
        return {i + 1 for i in starts if i < n and _takes(op, arg, name[i])}

    def _repeat(self, least: int, most: int, tree: Any, starts: set[int], name: str) -> set[int]:
        for _ in range(least):
            before, starts = starts, self._ends(tree, starts, name)
            if starts in (before, set()):
                break
        ends, new, count = set(starts), starts, least
        while new and count < most:
            new = self._ends(tree, new, name) - ends
            ends |= new
            count += 1
        return ends


def _takes(op: Any, arg: Any, char: str) -> bool:
    """Whether a node of the parse tree matches one character."""
    if op is codes.ANY:
        return char != "\n"
    if op is codes.LITERAL:
        return ord(char) == arg
    if op is codes.NOT_LITERAL:
        return ord(char) != arg
    if op is codes.RANGE:
        return bool(arg[0] <= ord(char) <= arg[1])
    if op is codes.CATEGORY:
        kind, negated = str(arg).removeprefix("CATEGORY_"), "NOT_" in str(arg)
        kinds = {"DIGIT": char.isdecimal(), "SPACE": char.isspace(), "WORD": char.isalnum() or char == "_"}
        return kinds[kind.removeprefix("NOT_")] != negated
    negated = arg[0][0] is codes.NEGATE  # op is IN
    return any(_takes(o, a, char) for o, a in arg if o is not codes.NEGATE) != negated


def _is_at(where: Any, i: int, name: str) -> bool:
    if where in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
        return i == 0
    if where is codes.AT_END_STRING:
        return i == len(name)
    if where is codes.AT_END:
        return i == len(name) or name[i:] == "\n"
    word = [0 <= j < len(name) and (name[j].isalnum() or name[j] == "_") for j in (i - 1, i)]
    return (word[0] != word[1]) == (where is codes.AT_BOUNDARY)


KNOWN = (
    *("BRANCH", "SUBPATTERN", "MAX_REPEAT", "MIN_REPEAT", "AT", "ASSERT", "ASSERT_NOT"),
    *("ANY", "LITERAL", "NOT_LITERAL", "RANGE", "CATEGORY", "IN", "NEGATE"),
)


@lru_cache(maxsize=1 << 16)
def _parse(pattern: str) -> Any:
    """The parse tree of a pattern. Raises DamagedError, and UnsupportedError for nodes that `Rules` does not support."""
    if len(pattern) > MAX_PATTERN:
        raise DamagedError(f"quantization_config: a rule of {len(pattern)} characters is longer than lowq reads")
    try:
        tree = parser.parse(pattern)
    except (error, RecursionError, OverflowError) as e:
        raise DamagedError(f"quantization_config: rule {pattern!r} is not a regular expression: {e}") from None
    if tree.state.flags & ~32 or not _is_known(tree):  # 32: str, not bytes
        raise UnsupportedError(f"quantization_config: rule {pattern!r} needs backtracking, which lowq does not do")
    return tree


def _is_known(tree: Any) -> bool:
    for op, arg in tree:
        kind = str(op)
        inside: list[Any] = []
        if kind == "BRANCH":
            inside = arg[1]
        elif kind == "SUBPATTERN":
            inside = [arg[3]]
        elif kind.endswith("REPEAT"):
            inside = [arg[2]]
        elif kind.startswith("ASSERT"):
            inside = [arg[1]]
        backwards = kind.startswith("ASSERT") and arg[0] != 1
        flags = kind == "SUBPATTERN" and (arg[1] or arg[2])
        if kind not in KNOWN or backwards or flags or not all(map(_is_known, inside)):
            return False
    return True


def _language(tree: Any) -> list[str] | None:
    """The literal names that a pattern with an end ("$") matches, if there are at most SPELLED; else None."""
    items = list(tree)
    if items and items[0] == (codes.AT, codes.AT_BEGINNING):
        items = items[1:]
    if not items or items[-1] != (codes.AT, codes.AT_END):
        return None
    return _spelled(items[:-1])


def _spelled(items: Any) -> list[str] | None:
    parts: list[list[str]] = []
    total = 1
    for op, arg in items:
        if op is codes.LITERAL:
            parts.append([chr(arg)])
            continue
        branches = arg[1] if op is codes.BRANCH else [arg[3]] if op is codes.SUBPATTERN else []
        some = [_spelled(branch) for branch in branches]
        if not some or any(s is None for s in some):
            return None
        parts.append([name for s in some for name in s or ()])
        total *= len(parts[-1])
        if total > SPELLED:
            return None
    return ["".join(p) for p in product(*parts)]
