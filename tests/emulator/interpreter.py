"""Triton's interpreter with two of its steps made cheap: they take a third of the seconds of an interpreted kernel.

Integers that overflow are always refused here. Triton computes whether they do, too, but refuses them only in debug mode.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

SANITIZE = "binary_op_sanitize_overflow_impl"
OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@cache
def builtins_of(namespace: object) -> tuple[str, ...]:
    """Triton's builtins in one of its modules or classes: the interpreter looks for them at every call of a function."""
    return tuple(name for name, member in inspect.getmembers(namespace) if tl.core.is_builtin(member))


def _patch_builtin(namespace: Any, builder: Any, scope: Any) -> None:
    for name in builtins_of(namespace):
        if tl.core.is_builtin(member := getattr(namespace, name)):  # not yet replaced by a caller of this function
            interpreter._patch_attr(namespace, name, member, builder, scope)


def _check_overflow(lhs: tl.tensor, rhs: tl.tensor, operation: Any) -> None:
    """Integers below 64 bits do not overflow: checked in one numpy operation, not in eight of the interpreter's."""
    kind = lhs.type.scalar
    if kind.int_bitwidth < 64:
        result = OPERATIONS[operation.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        fits = kind.get_int_min_value() <= result.min() and result.max() <= kind.get_int_max_value()
        assert fits, f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"


STEPS = ((interpreter, "_patch_builtin", _patch_builtin), (interpreter.interpreter_semantic, SANITIZE, _check_overflow))
# An AttributeError here: this release of Triton has them by other names.
TRITONS = [(owner, name, getattr(owner, name)) for owner, name, _ in STEPS]


def speed_up() -> None:
    """Replace both steps by those of this file; results stay the same."""
    for owner, name, ours in STEPS:
        setattr(owner, name, ours)


@contextmanager
def unpatched(debug: bool = False) -> Iterator[None]:
    """Inside, kernels run in Triton's interpreter as it is installed, in its debug mode or not."""
    builder = interpreter.interpreter_builder
    options = builder.options
    for owner, name, theirs in TRITONS:
        setattr(owner, name, theirs)
    builder.options = replace(options, debug=debug)
    try:
        yield
    finally:
        builder.options = options
        speed_up()
