"""What a vision tower computes from the pixels of an image, apart from what depends on the image's size alone.

transformers computes positions, windows and masks from the size at each call and reads some of them back from the device, which
a CUDA graph cannot hold. `trace` runs a tower once and lists the operations that read values made from the pixels, of which the
list is computed again for other pixels; all other values are the same for each image of this size and are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from lowq_packers.errors import UnsupportedError

ATEN = torch.ops.aten
BY_INDEX = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default)


@dataclass(frozen=True)
class Value:
    """The tensor of a number that a program computes."""

    number: int


@dataclass
class Operation:
    """One operation; `Value`s in its arguments stand for tensors. results: numbers of its tensors. last: numbers of the values
    that no later operation reads."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: list[int]
    last: list[int] = field(default_factory=list)


class Program:
    """The operations of a traced tower.

    Args:
        operations: in their order. outputs: numbers of the tensors that the tower returns; the pixels' number is 0.
    """

    def __init__(self, operations: list[Operation], outputs: list[int]) -> None:
        self.operations, self.outputs = operations, outputs
        read = set(outputs)
        for operation in reversed(operations):
            given = {a.number for a in tree_leaves((operation.args, operation.kwargs)) if isinstance(a, Value)}
            operation.last = [n for n in {*given, *operation.results} if n not in read]
            read |= given

    def __call__(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        """The tower's tensors for other pixels of the same shape."""
        values = {0: pixels}

        def value(argument: Any) -> Any:
            return values[argument.number] if isinstance(argument, Value) else argument

        for operation in self.operations:
            args, kwargs = tree_map(value, (operation.args, operation.kwargs))
            made = tree_leaves(operation.function(*args, **kwargs))
            values |= zip(operation.results, made, strict=True)
            for number in operation.last:
                del values[number]
        return [values[n] for n in self.outputs]


def trace(run: Callable[[], Sequence[torch.Tensor]], pixels: torch.Tensor) -> tuple[Program, list[torch.Tensor]]:
    """The program of `run`, which reads `pixels`, and what `run` returned.

    Raises UnsupportedError where what `run` does next depends on the pixels.
    """
    with _Trace(pixels) as traced:
        made = list(run())
    if not all(t in traced.numbers for t in made):
        raise UnsupportedError("the vision tower's result does not depend on the pixels")
    return Program(traced.operations, [traced.numbers[t] for t in made]), made


class _Trace(TorchDispatchMode):
    """Lists the operations that read the pixels or a tensor made from them.

    A tensor that is the same for all images may get values of the pixels written into it. It is then set to its first contents
    at this point of the program, and operations that read its memory are listed from here on.
    """

    def __init__(self, pixels: torch.Tensor) -> None:
        super().__init__()
        self.numbers: Any = WeakTensorKeyDictionary({pixels: 0})
        self.operations = list[Operation]()
        self.count = 1
        self.written = set[int]()  # addresses of memory, kept by the program, that pixels' values are written into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        if not any(t in self.numbers or self._place(t) in self.written for t in given):
            return func(*args, **kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor)
            if written and value not in self.numbers:
                self._keep(value)
        out = func(*args, **kwargs)
        made = tree_leaves(out)
        if not all(isinstance(t, torch.Tensor) for t in made):
            raise UnsupportedError(f"the vision tower asks for a value of the pixels ({func})")
        if func in BY_INDEX:
            args = (args[0], self._places(args[0].device, args[1]), *args[2:])
        named = tree_map(
            lambda a: Value(self.numbers[a]) if isinstance(a, torch.Tensor) and a in self.numbers else a, (args, kwargs)
        )
        results = list[int]()
        for t in made:
            if t not in self.numbers:
                self.numbers[t], self.count = self.count, self.count + 1
            results.append(self.numbers[t])
        self.operations.append(Operation(func, named[0], named[1], results))
        return out

    def _named(self, argument: Any) -> Any:
        known = isinstance(argument, torch.Tensor) and argument in self.numbers
        return Value(self.numbers[argument]) if known else argument

    @staticmethod
    def _place(t: torch.Tensor) -> int:
        return t.untyped_storage().data_ptr()

    def _keep(self, t: torch.Tensor) -> None:
        if self._place(t) not in self.written:
            whole = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())
            self.operations.append(Operation(ATEN.copy_.default, (whole, whole.clone()), {}, [self.count]))
            self.written.add(self._place(t))
            self.count += 1

    def _places(self, device: torch.device, indices: Sequence[Any]) -> list[Any]:
        """Indices on the device, and none boolean: to count what these choose, torch waits for the device."""
        found = list[Any]()
        for i in indices:
            if not isinstance(i, torch.Tensor) or i in self.numbers:
                found.append(i)
            else:
                found += i.to(device).nonzero().unbind(1) if i.dtype == torch.bool else [i.to(device)]
        return found
