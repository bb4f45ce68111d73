"""A description of a model as steps: each part of the vocabulary says here which operations it is."""

from functools import singledispatchmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowq_cli.engine import steps as s
from lowq_kernels.decode.reference import Heads
from lowq_packers.arch import parts as p

if TYPE_CHECKING:
    from lowq_cli.engine.plan import Weights


class Compiler:
    """The steps of a model.

    Attributes:
        steps: the operations, in order. states: what each stateful one remembers, by the number it has in its step.
        products: of each layer, role -> the module that multiplies. ropes: the kinds of rotation that occur.
    """

    def __init__(self, model: p.Model, weights: "Weights", dtype: torch.dtype) -> None:
        self.weights, self.dtype = weights, dtype
        self.steps: list[s.Step] = []
        self.states: list[p.Pages | p.Recurrent] = []
        self.products: list[dict[str, nn.Module]] = []
        self.ropes: set[p.Rope] = set()
        self.layer_state: dict[int, int] = {}  # layer -> number of its keys and values, for layers that share them
        self.pending: p.Update | None = None  # whose sum has not been added to the residual stream yet
        for number, layer in enumerate(model.layers):
            self.products.append({})
            self.number = number
            for update in layer:
                self._update(update)
        self._add_norm(model.norm)

    def _emit(self, *steps: s.Step) -> None:
        self.steps += steps

    def _product(self, part: p.Linear, role: str) -> None:
        layer = self.weights.linear(part)
        self.products[-1][role if role not in self.products[-1] else f"{role}_{len(self.products[-1])}"] = layer
        self._emit(s.Product(layer, role))

    def norm(self, part: p.Norm) -> s.NormWeights:
        """A norm's tensors."""
        weight = self.weights.vector(f"{part.name}.weight") if part.name else None
        if weight is not None and part.add_one:
            weight = 1.0 + weight.float()  # fp32: 1 + w is what it computes, bf16 would round it
        bias = self.weights.vector(f"{part.name}.bias") if part.bias else None
        return s.NormWeights(weight, part.eps, part.kind, bias, part.groups)

    def _update(self, update: p.Update) -> None:
        self._add_norm(update.norm)
        if len(update.mixers) == 1 and not isinstance(update.mixers[0], p.Branch):
            self._mixer(update.mixers[0])
        else:
            self._emit(s.Keep("in"))
            for i, mixer in enumerate(update.mixers):
                if i:
                    self._emit(s.Take("in"))
                self._mixer(mixer)
                self._emit(s.Keep("sum", add=i > 0))
            self._emit(s.Take("sum", last=True))
        self.pending = update

    def _add_norm(self, norm: p.Norm | None) -> None:
        """What the last update gave is added to the stream, which is normed for the next; both in one where that can be."""
        last, self.pending = self.pending, None
        own = None if norm is None else self.norm(norm)
        post = self.norm(last.post) if last and last.post else None
        simple = last is None or (last.scale == 1.0 and not last.after)
        alike = post is None or (post.plain and own is not None and post.eps == own.eps)
        if own is not None and own.plain and simple and alike:
            self._emit(s.AddNorm(own, post.weight if post else None, first=last is None))
            return
        if last is not None:
            after = self.weights.vector(last.after) if last.after else None
            self._emit(s.Add(post, last.scale, after))
        self._emit(s.Normed(own, "x"))

    @singledispatchmethod
    def _mixer(self, part: Any) -> None:
        raise NotImplementedError(type(part).__name__)

    @_mixer.register
    def _(self, part: p.Attention) -> None:
        self._product(part.qkv, "qkv")
        assert part.state
        self.layer_state[self.number] = self._state(part.state)
        assert part.rope
        self.ropes.add(part.rope)
        q, k = (None if n is None else self.norm(n) for n in (part.q_norm, part.k_norm))
        heads = Heads(
            part.heads, part.kv_heads, part.dim, part.scale, part.window,
            q.eps if q else 0.0, q.weight if q else None, k.weight if k else None,
            self.weights.vector(part.sinks).float() if part.sinks else None,
        )  # fmt: skip
        self._emit(s.Attend(self.layer_state[self.number], heads, part.rope))
        self._product(part.o, "o")

    @_mixer.register
    def _(self, part: p.Mlp) -> None:
        self._product(part.up, "gate_up" if part.gated else "up")
        self._emit(s.Gate(part.act, part.gated, part.gate_scale))
        self._product(part.down, "down")

    @_mixer.register
    def _(self, part: p.Experts) -> None:
        r = part.router
        weight = self.weights.vector(f"{r.name}.weight")
        bias = self.weights.vector(f"{r.name}.bias") if r.logits_bias else None
        experts = self.weights.experts(part)
        self.products[-1]["experts"] = experts
        self._emit(s.Experts(experts, (weight, r.top_k, r.normalise, r.rounded, bias)))

    def _state(self, spec: p.Pages | p.Recurrent) -> int:
        self.states.append(spec)
        return len(self.states) - 1
