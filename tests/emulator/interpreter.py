"""Triton's interpreter with its bookkeeping made cheap: types, constants and lookups, which take most of its time.

Integers that overflow are always refused here. Triton computes whether they do, too, but refuses them only in debug mode.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

SANITIZE = "binary_op_sanitize_overflow_impl"
OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
BLOCKS: dict[
    tuple[str, tuple[int, ...]], dict[str, Any]
] = {}  # (name of an element type, shape) -> attributes of that block type


@cache
def builtins_of(namespace: object) -> tuple[str, ...]:
    """Triton's builtins in one of its modules or classes: the interpreter looks for them at every call of a function."""
    return tuple(name for name, member in inspect.getmembers(namespace) if tl.core.is_builtin(member))


def _patch_builtin(namespace: Any, builder: Any, scope: Any) -> None:
    for name in builtins_of(namespace):
        if tl.core.is_builtin(member := getattr(namespace, name)):  # not yet replaced by a caller of this function
            scope.set_attr(namespace, name, _interpreted(member))


@cache
def _interpreted(member: Any) -> Callable[..., Any]:
    """A builtin with the interpreter as its `_semantic`, without the builtin's check of it."""
    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    return call


def _patch_lang(kernel: Any) -> Any:
    """Kernels call builtins of `tl`; functions of Triton's standard library, which they call, too, those of `tl.core`."""
    scope = interpreter._LangPatchScope()
    for namespace in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        _patch_builtin(namespace, interpreter.interpreter_builder, scope)
    interpreter._patch_lang_tensor(tl.tensor, scope)
    for namespace in (tl, tl.core):
        interpreter._patch_lang_core(namespace, scope)
    return scope


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call inside a kernel: the launch has replaced the builtins."""
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as e:
        raise interpreter.InterpreterError(repr(e)) from e


def _check_overflow(lhs: tl.tensor, rhs: tl.tensor, operation: Any) -> None:
    """Integers below 64 bits do not overflow: checked in one numpy operation, not in eight of the interpreter's."""
    kind = lhs.type.scalar
    if kind.int_bitwidth < 64:
        result = OPERATIONS[operation.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        fits = kind.get_int_min_value() <= result.min() and result.max() <= kind.get_int_max_value()
        assert fits, f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """All types of one element and shape share their attributes, which are computed once."""
    key = (element_ty.name, tuple(n.value if isinstance(n, tl.constexpr) else n for n in shape))
    if key in BLOCKS:
        self.__dict__ = BLOCKS[key]
    else:
        ORIGINALS["block_type"](self, element_ty, list(key[1]))
        self.key = key
        BLOCKS[key] = self.__dict__


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """A tensor's shape, count of elements and dtype are attributes of its type."""
    if "common" not in type.__dict__:
        ORIGINALS["tensor"](self, handle, type)
        type.common = self.shape, self.numel, self.dtype
    self.shape, self.numel, self.dtype = type.common
    self.handle, self.type = handle, type


@cache
def _np_dtype_of(name: str) -> np.dtype[Any]:
    return ORIGINALS["_get_np_dtype"](tl.dtype(name))


def _np_dtype(kind: Any) -> np.dtype[Any]:
    return np.dtype(np.uint64) if kind.scalar.is_ptr() else _np_dtype_of(kind.scalar.name)


def _convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Between bf16 and fp32 half of the bits are added or dropped."""
    if rounding is None and (source.name, target.name) == ("bf16", "fp32"):
        return data.astype(np.uint32) << 16
    if rounding is None and (source.name, target.name) == ("fp32", "bf16"):
        return (data.view(np.uint32) >> 16).astype(np.uint16)
    return ORIGINALS["_convert_float"](data, source, target, rounding)


class _Lazy(TritonSemantic):
    """Operands of an elementwise operation get the type of its result; numpy repeats their elements during the operation."""

    def broadcast_impl_value(self, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        shapes = [x.type.key[1] for x in (lhs, rhs) if x.type.is_block()]
        if not shapes or len(shapes[0]) != len(shapes[-1]):
            return super().broadcast_impl_value(lhs, rhs)
        shape = shapes[0] if shapes[0] == shapes[-1] else np.broadcast_shapes(*shapes)
        return _typed(lhs, shape), _typed(rhs, shape)


LAZY = _Lazy(interpreter.interpreter_builder)


def _typed(x: tl.tensor, shape: tuple[int, ...]) -> tl.tensor:
    return x if x.type.is_block() and x.type.key[1] == shape else tl.tensor(x.handle, tl.block_type(x.dtype, shape))


def _operands(self: Any, lhs: Any, rhs: Any, *positional: bool, **named: bool) -> Any:
    """Operands of one type are taken as they are, but not in a division (a fourth flag): halves are divided in fp32."""
    same = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.type.name == rhs.type.name
    if same and len(positional) < 4 and not named and not lhs.dtype.is_ptr():
        return lhs, rhs
    return ORIGINALS["binary_op_type_checking_impl"](LAZY, lhs, rhs, *positional, **named)


def _broadcast(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Blocks of one shape stay as they are: Triton's compares their shapes with a list, from which they always differ."""
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.key[1] == rhs.type.key[1]:
        return lhs, rhs
    return ORIGINALS["broadcast_impl_value"](self, lhs, rhs)


@lru_cache(4096)
def _constant(semantic: Any, value: Any, kind: str) -> tl.tensor:
    return ORIGINALS["scalar_constant"](semantic, value, tl.dtype(kind))


def _scalar_constant(self: Any, value: Any, dtype: Any) -> tl.tensor:
    """A constant, which is made once: an operation never writes to its operands."""
    return _constant(self, value, dtype.name)


STEPS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (  # the owner of a step of Triton's, its name, and ours
    (interpreter, "_patch_lang", _patch_lang),
    (interpreter.InterpretedFunction, "__call__", _call),
    (interpreter.interpreter_semantic, SANITIZE, _check_overflow),
    (interpreter, "_get_np_dtype", _np_dtype),
    (interpreter, "_convert_float", _convert_float),
    (tl.block_type, "__init__", _block_type),
    (tl.tensor, "__init__", _tensor),
    (TritonSemantic, "binary_op_type_checking_impl", _operands),
    (TritonSemantic, "broadcast_impl_value", _broadcast),
    (TritonSemantic, "scalar_constant", _scalar_constant),
)
# An AttributeError here: this release of Triton has them by other names.
TRITONS = [(owner, name, getattr(owner, name)) for owner, name, _ in STEPS]
ORIGINALS = {owner.__name__ if name == "__init__" else name: step for owner, name, step in TRITONS}


def speed_up() -> None:
    """Replace the steps by those of this file; results stay the same."""
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
