"""Compile a model's description to steps: each part of the vocabulary becomes a list of operations."""

from dataclasses import astuple, dataclass, replace
from functools import singledispatchmethod
from typing import Any, Protocol

import torch
from torch import nn

from lowq_cli.engine import expert_steps, mixer_steps
from lowq_cli.engine import steps as s
from lowq_kernels.decode.latent import Latent
from lowq_kernels.decode.norms import Norm, normed
from lowq_kernels.decode.prepare import PositionScale, Prepared
from lowq_kernels.decode.recurrent import delta, mamba2, short_conv
from lowq_kernels.decode.reference import Heads
from lowq_kernels.decode.router import RouterFacts
from lowq_packers.arch import parts as p


class Weights(Protocol):
    """The source of a plan's tensors, by the names of a description."""

    def linear(self, part: p.Linear) -> nn.Module:
        """The parts, concatenated along the rows, as one layer."""
        ...

    def matrix(self, part: p.Linear) -> torch.Tensor:
        """The parts' weight (N, K), dequantized, in the model's dtype."""
        ...

    def vector(self, name: str) -> torch.Tensor:
        """A parameter by its full name below the text model, such as "layers.0.input_layernorm.weight"."""
        ...

    def experts(self, part: Any) -> Any:
        """The module that computes a layer's experts: called with x (M, H), ids and weights (M, top_k)."""
        ...

    @property
    def embed(self) -> nn.Module: ...

    @property
    def head(self) -> nn.Module: ...


@dataclass(frozen=True, eq=False)
class Tokens:
    """A `parts.TokenTable` with its weights: maps ids (M,) and their embeddings x (M, H) to (M, layers, dims)."""

    part: p.TokenTable
    rows: torch.Tensor
    project: nn.Module
    norm: Norm

    def __call__(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        shape = (-1, self.part.layers, self.part.dims)
        scale = torch.full((), self.part.scale, dtype=x.dtype, device=x.device)
        of_tokens = (self.rows[ids].to(x.dtype) * scale).reshape(shape)
        projected = normed((self.project(x) * self.part.by).reshape(shape), self.norm)
        return (projected + of_tokens) * 2**-0.5


class Compiler:
    """The steps of a model.

    Attributes:
        steps: the operations, in order. states: the state that each stateful step needs; the step has its number.
        products: for each layer, role -> the module that multiplies. ropes: the kinds of rotation that occur.
    """

    def __init__(self, model: p.Model, weights: Weights, dtype: torch.dtype) -> None:
        self.weights, self.dtype = weights, dtype
        self.steps: list[s.Step] = []
        self.states: list[p.Pages | p.Recurrent] = []
        self.products: list[dict[str, nn.Module]] = []
        self.ropes: set[p.Rope] = set()
        # layer -> number of its keys and values, for other layers that share them, and for draft heads
        self.layer_state = {layer: i for i, layer in enumerate(model.lent)}
        self.images = model.images
        self.pending: p.Update | None = None  # the update whose output is not added to the residual stream yet
        self.single_mixer = True  # whether the current update has a single mixer and no branches
        self.second = ""  # name of a kept value that the pending update adds to the residual stream together with y
        self.own: tuple[Norm, Norm] | None = None  # norms of y and of that value before their sum
        self.entered: list[int] = []  # for each layer, and the end: steps before the stream is its input
        for number, layer in enumerate(model.layers):
            self.products.append({})
            self.number = number
            if model.merge is not None and not number:
                self._emit(self._beside(model.merge.beside))
                self._product(model.merge.project, "fc")
                self._emit(s.Begin())
            for update in layer:
                self._update(update)
            if self.images is not None and number < self.images.deepstack:
                self._emit(s.AddFeatures(number))  # before the step that adds this layer's last update and norms the sum
        self._add_norm(model.norm)
        self.entered.append(len(self.steps))

    def _emit(self, *steps: s.Step) -> None:
        self.steps += steps

    def _product(self, part: p.Linear, role: str) -> nn.Module:
        layer = self.weights.linear(part)
        self.products[-1][role if role not in self.products[-1] else f"{role}_{len(self.products[-1])}"] = layer
        self._emit(s.Product(layer, role, part))
        return layer

    def norm(self, part: p.Norm) -> Norm:
        """A norm's tensors."""
        weight = self._vector(f"{part.name}.weight") if part.name else None
        if weight is not None and part.add_one:
            weight = 1.0 + weight.float()  # in fp32: bf16 would round 1 + w
        bias = self._vector(f"{part.name}.bias") if part.bias else None
        return Norm(weight, part.eps, part.kind, bias, part.groups)

    def token_table(self, part: p.TokenTable) -> "Tokens":
        """The model's per-layer token table, with its weights."""
        rows, norm = self.weights.vector(f"{part.embed}.weight"), self.norm(part.norm)
        return Tokens(part, rows, self.weights.linear(part.project), norm)

    def _beside(self, part: p.Beside) -> s.Beside:
        e, h = (None if n is None else self.norm(n) for n in (part.embedding, part.hidden))
        return s.Beside(e, h, part.hidden_first, part.zero_first, part.replaces)

    def _update(self, update: p.Update) -> None:
        branches = [m for m in update.mixers if isinstance(m, p.Branch)]
        two = branches if len(branches) == len(update.mixers) == 2 else []
        plain = update.norm is None and update.beside is None and self.own is None
        begins = plain and bool(two) and all(b.norm and b.into == 1.0 for b in two)
        if begins:  # one step makes the inputs of both branches
            self._add_norm(two[0].norm, two[1].norm)
            two = [replace(b, norm=None) for b in two]
        elif update.beside is not None:
            self._emit(self._beside(update.beside))
        else:
            self._add_norm(update.norm)
        if len(self.entered) == self.number:
            self.entered.append(len(self.steps))
        self.single_mixer = len(update.mixers) == 1 and not isinstance(update.mixers[0], p.Branch)
        self.second, self.own = "", None
        posts = [self.norm(b.post) for b in two if b.post and b.out == 1.0]
        if len(posts) == 2 and all(map(s.is_plain, posts)):  # the step that adds both branches also norms them
            self.own, two = (posts[1], posts[0]), [replace(b, post=None) for b in two]
        if self.single_mixer:
            self._mixer(update.mixers[0])
        elif begins:
            self._mixer(two[0])
            self.second = "sum"
            self._emit(s.Keep("sum"), s.Take("also", last=True))
            self._mixer(two[1])
        else:
            self._emit(s.Keep("in"))
            for i, mixer in enumerate(two or update.mixers):
                if i:
                    self._emit(s.Take("in"))
                self._mixer(mixer)
                if i < len(update.mixers) - 1:
                    self.second = "sum"
                    self._emit(s.Keep("sum", add=i > 0))
        self.pending = update

    def _add_norm(self, norm: p.Norm | None, also: p.Norm | None = None) -> None:
        """Emit the step that adds the pending update to the stream and norms the sum; if possible the fused `AddNorm`.

        also: the norm of a second branch."""
        last, self.pending = self.pending, None
        next_norm = None if norm is None else self.norm(norm)
        post = self.norm(last.post) if last and last.post else None
        after = self.weights.vector(last.after) if last and last.after else None
        by, other = last.scale if last else 1.0, None if also is None else self.norm(also)
        self._emit(s.added(s.UpdateNorm(next_norm, post, by, after, last is None, self.second, self.own, other)))

    @singledispatchmethod
    def _mixer(self, part: Any) -> None:
        raise NotImplementedError(type(part).__name__)

    @_mixer.register
    def _(self, part: p.Branch) -> None:
        if part.norm is not None or part.into != 1.0:
            self._emit(s.Normed(self.norm(part.norm) if part.norm else None, "in", part.into))
        self._mixer(part.mixer)
        if part.post is not None or part.out != 1.0:
            self._emit(s.Normed(self.norm(part.post) if part.post else None, "y", part.out))

    @_mixer.register
    def _(self, part: p.Attention) -> None:
        if part.gate is not None:
            self._emit(s.Keep("before"))
            self._product(part.gate, "gate")
            self._emit(s.Keep("gate"), s.Take("before", last=True))
        layer = self._product(part.qkv, "qkv" if part.shares is None else "q")
        if part.clip:
            self._emit(s.Clip(part.clip))
        if part.state is not None:
            self.layer_state[self.number] = self._state(part.state)
        index = self.layer_state[self.number if part.shares is None else part.shares]
        q, k, v = (None if n is None else self.norm(n) for n in (part.q_norm, part.k_norm, part.v_norm))
        if part.rope is not None:
            self.ropes.add(part.rope)
        sinks = self.weights.vector(part.sinks).float() if part.sinks else None
        heads = Heads(
            part.heads, part.kv_heads, part.dim, part.scale, part.window, sinks=sinks, softcap=part.softcap, chunk=part.chunk,
            writes=part.shares is None,
        )  # fmt: skip
        if _direct(part) and part.rope is not None:
            heads = replace(heads, q_norm=q.weight, k_norm=k.weight, eps=q.eps) if q and k else heads
            self._emit(mixer_steps.Attend(index, heads, part.rope, self._whole(part), layer))
        else:
            scale = None if part.position_scale is None else PositionScale(*astuple(part.position_scale))
            facts = Prepared(
                part.heads, part.kv_heads, part.dim, part.order, part.gated, part.v_is_k, part.shares is None, q, k, v,
                part.norm_over, part.norm_last, part.rope.pairing if part.rope else "halves", part.key_scale, scale,
            )  # fmt: skip
            prepare = mixer_steps.Prepare(facts, part.rope)
            if part.block:
                self._emit(prepare, mixer_steps.AttendBlock(index, heads, None))
            else:
                self._emit(mixer_steps.PreparedAttend(index, heads, None, self._whole(part), prepare=prepare))
        if part.gate is not None or (part.gated and part.block):
            self._emit(s.Open("gate"))
        self._product(part.o, "o")

    def _whole(self, part: p.Attention) -> bool:
        """Whether the tokens of an image attend to the whole image in this layer."""
        kind = self.images.whole if self.images is not None else ""
        return kind == "all" or (kind == "windows" and part.window > 0)

    @_mixer.register
    def _(self, part: p.LatentAttention) -> None:
        if len(part.down) == 1:
            self._product(part.down[0], "q_kv_down")
            self._emit(s.Cut("latent", part.down[0].rows[0], whole=part.q_norm is not None))
        else:
            self._emit(s.Keep("before"))
            self._product(part.down[1], "kv_down")
            self._emit(s.Keep("latent"), s.Take("before", last=True, wide=part.down[1].columns))
            self._product(part.down[0], "q")
        if part.q_norm is not None and part.q_up is not None:
            self._emit(s.Normed(self.norm(part.q_norm)))
            self._product(part.q_up, "q_up")
        self._emit(s.Keep("q"), s.Take("latent", last=True, wide=part.rank + part.rotated))
        up = self.weights.matrix(part.kv_up).unflatten(0, (part.heads, -1))
        scale = None if part.position_scale is None else PositionScale(*astuple(part.position_scale))
        facts = Latent(
            part.heads, part.nope, part.rotated, part.v_dim, part.rank, part.scale, up[:, : part.nope].contiguous(),
            up[:, part.nope :].contiguous(), self.norm(part.kv_norm), part.rope.pairing, scale,
        )  # fmt: skip
        self.ropes.add(part.rope)
        self._emit(mixer_steps.AttendLatent(self._state(part.state), facts, part.rope))
        self._product(part.o, "o")

    @_mixer.register
    def _(self, part: p.GatedDelta) -> None:
        facts = delta.Delta(
            part.k_heads, part.v_heads, part.k_dim, part.v_dim, part.grouped, *self._conv(part.conv), self._vector(part.a_log),
            self._vector(part.dt_bias), self.norm(part.norm),
        )  # fmt: skip
        self._recurrent(part, facts)

    @_mixer.register
    def _(self, part: p.Mamba2) -> None:
        facts = mamba2.Mamba2(
            part.heads, part.dim, part.groups, part.N, *self._conv(part.conv), self._vector(part.a_log),
            self._vector(part.dt_bias), self._vector(part.d), self.norm(part.norm) if part.norm else None, part.scales,
            part.gate_last, part.dt,
        )  # fmt: skip
        self._recurrent(part, facts)

    @_mixer.register
    def _(self, part: p.ShortConv) -> None:
        self._recurrent(part, short_conv.ShortConv(*self._conv(part.conv)))

    def _recurrent(self, part: p.GatedDelta | p.Mamba2 | p.ShortConv, facts: Any) -> None:
        self._product(part.inputs, "inputs")
        self._emit(mixer_steps.Recur(self._state(part.state), facts, part.out.columns))
        self._product(part.out, "out")

    def _conv(self, part: p.Conv) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = self.weights.vector(f"{part.name}.weight")
        return weight.reshape(part.channels, part.width), self.weights.vector(f"{part.name}.bias") if part.bias else None

    def _vector(self, name: str) -> torch.Tensor:
        return self.weights.vector(name).flatten()

    @_mixer.register
    def _(self, part: p.Mlp) -> None:
        self._product(part.up, "gate_up" if part.gated else "up")
        if part.act == "xielu":
            self._emit(s.Xielu(tuple(self._vector(f"{part.scalars}.{name}") for name in p.SCALARS)))
        else:
            self._emit(s.Gate(part.act, part.gated, part.gate_scale))
        self._product(part.down, "down")

    @_mixer.register
    def _(self, part: p.PerLayer) -> None:
        self._product(part.gate, "per_layer_gate")
        self._emit(s.TimesToken(part.layer, part.act))
        self._product(part.up, "per_layer_up")

    @_mixer.register
    def _(self, part: p.Experts) -> None:
        experts = self.products[-1]["experts"] = self.weights.experts(part)
        facts = self._router(part.router)
        around = part.shared is not None or part.latent is not None
        if around:
            self._emit(s.Keep("tokens"))
        self._emit(expert_steps.Route(facts, "x" if facts.norm is not None else "y"))
        if part.latent is not None:
            self._product(part.latent[0], "latent_down")
        self._emit(expert_steps.Experts(experts, part.weigh_inputs))
        if part.latent is not None:
            self._product(part.latent[1], "latent_up")
        if part.shared is not None:
            self._emit(s.Keep("routed"), s.Take("tokens"))
            self._mixer(part.shared)
            if part.shared_gate:
                weight = self.weights.vector(f"{part.shared_gate}.weight")
                self._emit(s.OpenBy(weight, "tokens"))
            if self.single_mixer:
                self.second = "routed"
            else:
                self._emit(s.Keep("routed", add=True), s.Take("routed", last=True))
        if around:
            self._emit(s.Drop("tokens"))

    def _router(self, r: p.Router) -> RouterFacts:
        def vector(name: str) -> torch.Tensor | None:
            return self._vector(name) if name else None

        weight, bias = self.weights.vector(f"{r.name}.weight"), f"{r.name}.bias" if r.logits_bias else ""
        return RouterFacts(
            weight, r.top_k, r.score, vector(bias), vector(r.bias), r.groups, r.group_score, r.normalise, r.sum_eps, r.factor,
            r.rounded, self.norm(r.norm) if r.norm else None, vector(r.scale), vector(r.each),
        )  # fmt: skip

    def _state(self, spec: p.Pages | p.Recurrent) -> int:
        self.states.append(spec)
        return len(self.states) - 1


def _direct(part: p.Attention) -> bool:
    """Whether the operation `attend` alone computes everything between the qkv product and the o product."""
    q, k = part.q_norm, part.k_norm
    norms = (q is None and k is None) or (q is not None and k is not None and _of_heads(q) and _of_heads(k) and q.eps == k.eps)
    turns = part.rope is not None and part.rope.pairing == "halves"
    odd = any((part.block, part.gated, part.v_is_k, part.norm_last, part.v_norm, part.position_scale))
    odd = odd or part.shares is not None
    return norms and turns and not odd and part.order == "parts" and part.norm_over == "head" and part.key_scale == 1.0


def _of_heads(n: p.Norm) -> bool:
    return n.kind == "rms" and bool(n.name) and not n.bias and n.groups == 1
