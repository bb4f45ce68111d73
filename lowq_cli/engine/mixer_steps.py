"""The steps of a plan that read and write what earlier tokens left: attention over keys and values, recurrent layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from lowq_cli.engine.batch import KeyValues, States
from lowq_cli.engine.steps import Frame, Open, Step
from lowq_kernels.decode.latent import Latent
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.prepare import Prepared
from lowq_kernels.decode.reference import Heads
from lowq_packers.arch.parts import Rope


@dataclass(frozen=True, eq=False)
class Prepare(Step):
    """Norm and rotate q, k, v for an `Attend` that does neither, in layers that differ from Llama's; the gate is kept."""

    facts: Prepared
    rope: Rope | None
    what = "attention"

    def width(self, before: int) -> int:
        return (self.facts.HQ + 2 * self.facts.HKV * self.facts.writes) * self.facts.D

    def compiled_for(self) -> tuple[object, ...]:
        p, rotation = self.facts, (self.rope and self.rope.dims, self.facts.pairing, self.facts.position_scale is None)
        norms = tuple(n and (n.kind, n.weight is None, n.bias is None, n.groups) for n in (p.q_norm, p.k_norm, p.v_norm))
        return p.HQ, p.HKV, p.D, p.order, p.gated, p.v_is_k, p.writes, p.over, p.norm_last, *rotation, *norms

    def run(self, f: Frame) -> None:
        tables: tuple[Any, Any] = (None, None) if self.rope is None else f.batch.angles[self.rope]
        at = f.batch.positions
        if self.rope is not None and (of_pictures := f.batch.tables_of(self.rope)) is not None:
            assert f.batch.pictures is not None
            # No family both scales queries by position and has three-part positions.
            at, tables = f.batch.pictures.numbers, of_pictures
        f.y, gate = f.ops.prepare(f.y, self.facts, at, *tables)
        if gate is not None:
            f.kept["gate"] = gate


@dataclass(frozen=True, eq=False)
class Attend(Step):
    """Attention of y = q, k, v; the layer's keys and values are state number `index`. rope None: the step does not rotate.

    whole: whether a token of an image attends to all tokens of the image. layer: the product that makes the queries; where it
    rounds its inputs to fp8 (--act), attention of prompts may round as well.
    """

    index: int
    heads: Heads
    rope: Rope | None
    whole: bool = False
    layer: nn.Module | None = None
    what = "attention"

    @property
    def rounds(self) -> bool:
        """Whether attention of prompts may round to fp8."""
        return getattr(self.layer, "act", "none") == "fp8"

    @cached_property
    def in_fp8(self) -> Heads:
        """The heads, for attention that may round."""
        return replace(self.heads, act="fp8")

    @cached_property
    def apart(self) -> tuple[Prepared, Heads]:
        """Norms and rotation as a separate operation, and attention without norms: for rows with three-part positions."""
        h = self.heads
        q, k = (None if w is None else Norm(w, h.eps, "rms", None, 1) for w in (h.q_norm, h.k_norm))
        return Prepared(h.HQ, h.HKV, h.D, q_norm=q, k_norm=k), replace(h, q_norm=None, k_norm=None)

    @property
    def state(self) -> Sequence[int]:  # type: ignore[override]
        return (self.index,)

    def width(self, before: int) -> int:
        return self.heads.HQ * self.heads.D

    def compiled_for(self) -> tuple[object, ...]:
        h = self.heads
        return h.HQ, h.HKV, h.D, h.window > 0, h.q_norm is None, h.sinks is None, h.beyond, self.rope and self.rope.dims

    def run(self, f: Frame) -> None:
        state = f.state[self.index]
        assert isinstance(state, KeyValues)
        heads = self.in_fp8 if self.rounds else self.heads
        tables = f.batch.angles[self.rope or heads.D]
        if self.rope is not None and (of_pictures := f.batch.tables_of(self.rope)) is not None:
            assert f.batch.pictures is not None
            facts, heads = self.apart
            f.y, _ = f.ops.prepare(f.y, facts, f.batch.pictures.numbers, *of_pictures)
            tables = f.batch.angles[heads.D]
        f.y = f.batch.attend(f.y, state, tables, heads, self.whole)


@dataclass(frozen=True, eq=False)
class PreparedAttend(Attend):
    """`Prepare`, `Attend` and, for heads with gates, `Open`: one kernel, or the three one after another."""

    prepare: Prepare = field(kw_only=True)

    def compiled_for(self) -> tuple[object, ...]:
        return (*super().compiled_for(), *self.prepare.compiled_for())

    def run(self, f: Frame) -> None:
        state, facts = f.state[self.index], self.prepare.facts
        assert isinstance(state, KeyValues)
        y = f.batch.attend_prepared(f.y, facts, state, self.prepare.rope, self.heads)
        if y is not None:
            f.y = y
            return
        self.prepare.run(f)
        super().run(f)
        if facts.gated:
            Open("gate").run(f)


@dataclass(frozen=True, eq=False)
class AttendBlock(Attend):
    """Attention of a block's rows: each attends up to the position in the kept "until" (M,), or up to itself without it."""

    def run(self, f: Frame) -> None:
        state, tables, h = f.state[self.index], f.batch.angles[self.heads.D], self.heads
        assert isinstance(state, KeyValues)
        q, until = f.y[:, : h.HQ * h.D], f.kept.get("until")
        f.y = f.batch.attend(f.y, state, tables, h)  # writes the keys and values of all rows; the next line then attends
        if until is not None:
            f.y = replace(f.batch, pos=until).attend(q.contiguous(), state, tables, replace(h, writes=False))


@dataclass(frozen=True, eq=False)
class AttendLatent(Step):
    """Latent attention of the kept queries "q" over the latents; y holds the rows' latents, state `index` the layer's."""

    index: int
    facts: Latent
    rope: Rope
    what = "attention"

    @property
    def state(self) -> Sequence[int]:  # type: ignore[override]
        return (self.index,)

    def width(self, before: int) -> int:
        return self.facts.heads * self.facts.v_dim

    def reads(self, before: int) -> Mapping[str, int]:
        return {"q": self.facts.heads * (self.facts.nope + self.facts.rotated)}

    def run(self, f: Frame) -> None:
        state = f.state[self.index]
        assert isinstance(state, KeyValues)
        f.y = f.batch.latent(f.kept.pop("q"), f.y, state, f.batch.angles[self.rope], self.facts)


@dataclass(frozen=True, eq=False)
class Recur(Step):
    """y = a recurrent mixer of y (`kernels.decode.recurrent`), whose fixed-size tensors are state number `index`."""

    index: int
    facts: Any
    out: int
    what = "recurrent"

    @property
    def state(self) -> Sequence[int]:  # type: ignore[override]
        return (self.index,)

    def width(self, before: int) -> int:
        return self.out

    def run(self, f: Frame) -> None:
        state = f.state[self.index]
        assert isinstance(state, States)
        f.y = f.batch.recur(f.y, self.facts, state, self.out)
