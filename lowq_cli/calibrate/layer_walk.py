"""One decoder layer under calibration: its original and its quantized weights, and the inputs of its linears with either.

A stage is a set of linears that share an input and are quantized together. Stages come in the order in which they run, and each
is measured with the stages before it quantized. The experts of a mixture come one by one, each with the tokens that visit it;
one that few tokens visit also gets tokens of the others.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowq_cli.hf.expert_kinds import DOWN, Kind, between, kind_of
from lowq_cli.hf.layers import Others, Spot, following, run
from lowq_cli.quantizers.gptq import Moments

# Tokens per input of a matrix up to which an expert gets tokens that do not visit it, evenly spaced, besides those that do, and
# the number of tokens up to which it gets them. Inputs of a layer's experts are correlated alike, so others' tokens show an
# expert's correlations better than few of its own. A mixture upcycled from story, 2 bits g64, squared output error over lsq's
# on the expert's tokens of another text, with 0 / 32 / 128 tokens of its own: gate and up 0.77 / 0.75 / 0.72, without others'
# 1 / 0.88 / 0.78; down 0.76 / 0.75 / 0.73, without 1 / 0.90 / 0.79. From 4 tokens per input on, others' change nothing.
FILLED, MOST_FILLED = 4, 4096

Weights = Mapping[str, torch.Tensor]  # parameter's name in the layer -> its values
Hidden = list[torch.Tensor]  # one (windows, T, K) per batch


@dataclass
class Stage:
    """Linears (by checkpoint name) that share an input, and the moments of that input."""

    names: list[str]
    moments: Moments


class Layer:
    """A decoder layer with two sets of weights. `module` must hold its original weights when this is made.

    Args:
        others: what it needs besides the hidden states.
        spots: checkpoint name of each matrix to quantize -> its place in the layer.
    """

    def __init__(self, module: nn.Module, others: Others, spots: dict[str, Spot]) -> None:
        self.module, self.others, self.spots = module, others, spots
        self.original = {s.path: module.get_parameter(s.path).data for s in spots.values()}
        self.quantized = dict(self.original)
        self._found: list[list[str]] = []  # cache of `_order`, which runs the layer once

    def matrix(self, name: str, weights: Weights) -> torch.Tensor:
        """The weight (N, K) of a checkpoint name, as a view."""
        spot = self.spots[name]
        W = weights[spot.path]
        return spot.cut.of(W)

    def set(self, name: str, W: torch.Tensor) -> None:
        """Use this quantized weight (N, K) for a checkpoint name from now on."""
        spot = self.spots[name]
        if spot.cut.expert is None and spot.cut.rows is None:
            self.quantized[spot.path] = W.T.contiguous() if spot.cut.transposed else W
            return
        if self.quantized[spot.path] is self.original[spot.path]:
            self.quantized[spot.path] = self.original[spot.path].clone()
        self.matrix(name, self.quantized).copy_(W)

    def scale(self, name: str, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None) -> None:
        """Multiply rows (N,) or columns (K,) of an original matrix, in place."""
        W = self.matrix(name, self.original)
        if rows is not None:
            W *= rows.unsqueeze(1)
        if columns is not None:
            W *= columns

    def parameter(self, path: str) -> torch.Tensor:
        """The original values of any parameter of the layer."""
        return self.original[path] if path in self.original else self.module.get_parameter(path).data

    def replace(self, path: str, values: torch.Tensor) -> None:
        """Give a parameter other values, of its shape, in both sets of weights."""
        self.original[path] = self.quantized[path] = values

    def run(self, hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The layer's output (windows, T, H) of hidden (windows, T, H) with a set of weights."""
        self.put(weights)
        return run(self.module, hidden, self.others)

    def put(self, weights: Weights) -> None:
        """Put a set of weights into the module."""
        for path, values in weights.items():
            self.module.get_parameter(path).data = values

    @contextmanager
    def one_window(self, batch: int) -> Iterator[None]:
        """Inside this context the layer runs on one window, although its other arguments were made for `batch` windows."""
        whole = self.others

        def first(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(first(v) for v in value)
            return value[:1] if isinstance(value, torch.Tensor) and value.dim() and len(value) == batch else value

        self.others = Others(first(whole.args), {k: first(v) for k, v in whole.kwargs.items()}, [])
        try:
            yield
        finally:
            self.others = whole

    def advance(self, x_ref: Hidden, x_quant: Hidden) -> None:
        """Replace both streams by the next layer's inputs."""
        for i in range(len(x_ref)):
            x_ref[i] = following(self.run(x_ref[i], self.original), self.others, i)
            x_quant[i] = following(self.run(x_quant[i], self.quantized), self.others, i)

    def stages(self, x_ref: Hidden, x_quant: Hidden, filled: int = FILLED) -> Iterator[Stage]:
        """The stages in order. Each must be quantized (`set`) before the next is asked for.

        filled: tokens per input of a matrix up to which its expert gets tokens of others.
        """
        for modules in self._order(x_ref[0]):
            names = [n for n, s in self.spots.items() if s.module in modules]
            if any(self.spots[n].cut.expert is not None for n in names):
                yield from self._experts(modules[0], names, x_ref, x_quant, filled)
            else:
                yield self._dense(modules[0], names, x_ref, x_quant)

    def uncalled(self, x_ref: Hidden) -> list[str]:
        """The matrices (by checkpoint name) of modules that the layer never calls."""
        called = {module for modules in self._order(x_ref[0]) for module in modules}
        return [n for n, s in self.spots.items() if s.module not in called]

    def _order(self, hidden: torch.Tensor) -> list[list[str]]:
        """The modules that hold matrices, in the order in which they run; modules that share an input are in one list."""
        if self._found:
            return self._found
        order: list[tuple[int, list[str]]] = []
        alive: list[torch.Tensor] = []  # kept alive, so that no two inputs get the same id

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
                alive.append(args[0])
                if order and order[-1][0] == id(args[0]):
                    order[-1][1].append(name)
                else:
                    order.append((id(args[0]), [name]))

            return hook

        names = dict.fromkeys(s.module for s in self.spots.values())
        hooks = [self.module.get_submodule(n).register_forward_pre_hook(note(n)) for n in names]
        try:
            self.run(hidden, self.original)
        finally:
            for h in hooks:
                h.remove()
        self._found = [names for _, names in order]
        return self._found

    def _dense(self, module: str, names: list[str], x_ref: Hidden, x_quant: Hidden) -> Stage:
        """The stage of plain linears: moments over all batches."""
        moments = None
        for x, quant in zip(x_ref, x_quant, strict=True):
            (clean, *_), (seen, *_) = self._given(module, x, self.original), self._given(module, quant, self.quantized)
            moments = _add(moments, _flat(clean), _flat(seen))
        assert moments is not None
        return Stage(names, moments)

    def _experts(self, module: str, names: list[str], x_ref: Hidden, x_quant: Hidden, filled: int) -> Iterator[Stage]:
        """Two stages per expert: the matrices before its activation, then down. Routing is that of the quantized model."""
        clean = torch.cat([_flat(self._given(module, x, self.original)[0]) for x in x_ref])
        inputs = [self._given(module, x, self.quantized) for x in x_quant]
        seen, visits = torch.cat([_flat(i[0]) for i in inputs]), torch.cat([i[1] for i in inputs])
        up, down = (f"{module}.{leaf}" for leaf in self._kind(module).stacks)
        for expert in self.experts(names):
            mine = _visitors(visits, expert)
            for path in (up, down):
                chosen = [n for n in names if self.spots[n].cut.expert == expert and self.spots[n].path == path]
                if not chosen:
                    continue
                at = _filled(mine, len(seen), self.matrix(chosen[0], self.original).shape[1], filled)
                x, quant = clean[at], seen[at]
                if path == down:
                    x = self._inside(module, expert, x, self.original)
                    quant = self._inside(module, expert, quant, self.quantized)
                yield Stage(chosen, _add(None, x, quant))

    def experts(self, names: list[str]) -> list[int]:
        """The indices of the experts that the named matrices belong to."""
        return sorted({e for n in names if (e := self.spots[n].cut.expert) is not None})

    def inner(self, module: str, x_quant: Hidden) -> Iterator[tuple[str, torch.Tensor]]:
        """For each expert the name of its down matrix and that matrix's inputs (tokens, K), computed with original weights."""
        inputs = [self._given(module, x, self.original) for x in x_quant]
        seen, visits = torch.cat([_flat(i[0]) for i in inputs]), torch.cat([i[1] for i in inputs])
        for name, spot in self.spots.items():
            if spot.module == module and spot.leaf == DOWN and spot.cut.expert is not None:
                yield name, self._inside(module, spot.cut.expert, seen[_visitors(visits, spot.cut.expert)], self.original)

    def routed(self, module: str, hidden: torch.Tensor) -> torch.Tensor:
        """The experts (tokens, k) of a mixture that each token visits in the original model."""
        return self._given(module, hidden, self.original)[1]

    def _inside(self, module: str, expert: int, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """An expert's intermediate values (tokens, I) for its inputs."""
        kind, experts = self._kind(module), self.module.get_submodule(module)
        path, whole = f"{module}.{kind.first}", {}
        for leaf in ("", "_bias") if kind.bias else ("",):
            W = weights[path + leaf] if path + leaf in weights else self.module.get_parameter(path + leaf).data
            whole[leaf] = W[expert : expert + 1]
        W = kind.rows(kind.first, whole[""])[0]
        bias = kind.in_order(kind.first, whole["_bias"])[0] if kind.bias else None
        return between(experts, kind.as_gated(nn.functional.linear(x, W, bias)))

    def _kind(self, module: str) -> Kind:
        """The form in which a mixture's experts are held."""
        kind = kind_of(self.module.get_submodule(module))
        assert isinstance(kind, Kind), kind
        return kind

    def _given(self, module: str, hidden: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, ...]:
        """The arguments that a module is called with. The layer runs only up to that module."""
        inputs: list[tuple[torch.Tensor, ...]] = []

        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            inputs.append(args)
            raise _Reached

        handle = self.module.get_submodule(module).register_forward_pre_hook(hook)
        try:
            self.run(hidden, weights)
        except _Reached:
            pass
        finally:
            handle.remove()
        return inputs[0]


class _Reached(Exception):
    """Raised by a hook to end the forward pass once it has the module's input."""


def _visitors(visits: torch.Tensor, expert: int) -> torch.Tensor:
    """The indices of the tokens that visit an expert."""
    return visits.eq(expert).any(-1).nonzero().squeeze(-1)


def _filled(mine: torch.Tensor, tokens: int, K: int, filled: int) -> torch.Tensor:
    """The indices of an expert's tokens, and of others where a matrix of K inputs has fewer than `filled` tokens per input."""
    count = min(filled * K, MOST_FILLED) - len(mine)
    if count <= 0:
        return mine
    other = torch.ones(tokens, dtype=torch.bool, device=mine.device)
    other[mine] = False
    rest = other.nonzero().squeeze(-1)
    spaced = torch.linspace(0, len(rest) - 1, min(count, len(rest)), device=mine.device).round().long()
    return torch.cat([mine, rest[spaced]])


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _add(moments: Moments | None, clean: torch.Tensor, seen: torch.Tensor) -> Moments:
    """The moments with further tokens (T, K) added."""
    if moments is None:
        K = seen.shape[1]
        moments = Moments(torch.zeros(K, K, device=seen.device), torch.zeros(K, K, device=seen.device))
    assert moments.drift is not None
    moments.tokens += seen.shape[0]
    moments.second.addmm_(seen.T, seen)
    moments.drift.addmm_((clean - seen).T, seen)
    return moments
