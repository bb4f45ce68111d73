"""The rows of one pass of a model: which sequence each belongs to, where it stands there, and where its state is held.

The first `steps` rows are one token of each of as many sequences; the rest are tokens of prompts (or drafts), those of a
sequence side by side. A static cache has a place for each sequence (decoder); a paged one has blocks that a table names
(server, and layers that only look back over a window).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

import torch

from lowq_cli.engine.rope import Tables
from lowq_kernels.decode import Ops, recurrent
from lowq_kernels.decode.kv import Cache, part
from lowq_kernels.decode.latent import Latent
from lowq_kernels.decode.reference import Groups, Heads, Packed, attend_packed, attend_prompt
from lowq_kernels.decode.runs import Run, Runs
from lowq_packers.arch.parts import Images, Rope


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of one layer: k, v (B, HKV, S, D), or (blocks, HKV, BLOCK, D) with the `table` (R, most) int32 of rows.

    v is None where values are the first values of the keys (latent attention).
    """

    k: Cache
    v: Cache | None
    table: torch.Tensor | None = None


@dataclass(frozen=True)
class States:
    """What a recurrent layer holds: tensors (slots, ...) by name; slot 0 belongs to no sequence."""

    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Chain:
    """Rows first .. end of one sequence, whose recurrent state is in `slot` (1,) int64; `copies` (end - first - 1,) int64 are
    the slots that it is copied to after each of them but the last."""

    first: int
    end: int
    slot: torch.Tensor
    copies: torch.Tensor


@dataclass(frozen=True)
class Rectangle:
    """Tokens start .. start + T of the sequences of `some` places of a static cache, side by side.

    lengths: tokens of each of those texts in all: rows past them fill up the rectangle, and their output is of no use.
    nowhere: the row of tables that belongs to no text.
    """

    some: slice
    start: int
    T: int
    lengths: Sequence[int]
    nowhere: int

    def runs(self) -> list[Run]:
        """The rows of each sequence that are its tokens."""
        ends = (min(self.T, max(0, n - self.start)) for n in self.lengths)
        place = self.some.start
        return [Run(i * self.T, i * self.T + n, place + i + 1, self.start, place + i) for i, n in enumerate(ends)]

    def packed(self, tile: int, device: torch.device) -> Packed:
        """The same rows as a paged cache takes them, in tiles of up to `tile`; its table is that of each layer."""
        runs = self.runs()
        place = torch.arange(self.start, self.start + self.T, dtype=torch.int32).repeat(len(runs))
        rows = torch.full((len(runs) * self.T,), self.nowhere, dtype=torch.int32)
        tiles = []
        for i, run in enumerate(runs):
            rows[run.first : run.end] = self.some.start + i
            tiles += [(t, min(t + tile, run.end)) for t in range(run.first, run.end, tile)]
        there = torch.tensor(tiles, dtype=torch.int32).reshape(-1, 2).to(device)
        return Packed(rows.new_empty(0, 0), rows.to(device), place.to(device), there)


@cache
def _axes(images: Images, dims: int, device: torch.device) -> torch.Tensor:
    """`Images.axes` on a device, kept: a pass that is recorded uploads nothing."""
    return torch.tensor(images.axes(dims)).to(device)


@dataclass(frozen=True)
class Pictures:
    """What pictures change in a pass of M rows, as `arch.parts.Images` describes it.

    rows (n,) int64: those that stand for a picture. features (n, H): what is there in place of an embedding. added: of each of
    the first layers (n, H), added behind it. places (3, M) int64: what rows turn by, in time, height and width; None: their
    slots. until (R,) int64: of each row after the steps the last slot that it sees where pictures are seen whole, or None.
    """

    images: Images
    rows: torch.Tensor | None = None
    features: torch.Tensor | None = None
    added: Sequence[torch.Tensor] = ()
    places: torch.Tensor | None = None
    until: torch.Tensor | None = None

    def shown(self, x: torch.Tensor) -> torch.Tensor:
        """Embeddings x (M, H) with the features of pictures in their place."""
        assert self.rows is not None
        assert self.features is not None
        return x.index_copy(0, self.rows, self.features)

    @cached_property
    def numbers(self) -> torch.Tensor:
        """(M,) int32: the rows of `turned`."""
        assert self.places is not None
        return torch.arange(self.places.shape[1], dtype=torch.int32, device=self.places.device)

    def turned(self, tables: Tables) -> "Tables | None":
        """cos, sin (M, R) of every row, from those of every place (S, R); None where rows turn by their slots."""
        if self.places is None:
            return None
        index = self.places[_axes(self.images, tables[0].shape[1], self.places.device)].T.contiguous()
        return tables[0].gather(0, index), tables[1].gather(0, index)


@dataclass(frozen=True)
class Batch:
    """Rows of a pass.

    ids (M,): their tokens. steps: rows that are one token of a sequence each. pos (R,) int32: the position of the next token of
    each row of state; a step writes there. angles: cos, sin of each kind of rotation; of a head dim, tables that turn nothing.
    slots (R,) int64: where the recurrent state of a row is. order (R,) int32: rows with the longest texts first, or None.
    rectangle or packed: the rows after the steps. runs: those by sequence, for recurrent layers. pictures: those of its texts.
    adapters (M,) int32: the LoRA adapter of each row, 0 for none; None: what the plan has all rows take.
    drafted: several steps may be of one sequence, its newest token and drafts of the next ones, side by side; the tables of the
    state are those of the rows, and `chains` are the rows by sequence.
    """

    ops: Ops
    ids: torch.Tensor
    steps: int
    pos: torch.Tensor
    angles: Mapping[Rope | int, Tables]
    slots: torch.Tensor | None = None
    order: torch.Tensor | None = None
    rectangle: Rectangle | None = None
    given: Packed | None = None
    given_runs: Runs | None = None
    tile: int = 128
    adapters: torch.Tensor | None = None
    drafted: bool = False
    groups: Groups | None = None
    chains: Sequence["Chain"] = ()
    pictures: Pictures | None = None
    values: dict[str, torch.Tensor] = field(default_factory=dict)  # what one layer leaves for later ones
    _turned: dict[Rope, Tables] = field(default_factory=dict)

    @property
    def shows(self) -> bool:
        """Whether some of its rows stand for pictures."""
        return self.pictures is not None and self.pictures.rows is not None

    @property
    def mixed(self) -> bool:
        """Whether there are rows after the steps."""
        return self.rectangle is not None or self.given is not None

    @cached_property
    def packed(self) -> Packed:
        """The rows after the steps."""
        if self.given is not None:
            return self.given
        assert self.rectangle is not None
        return self.rectangle.packed(self.tile, self.pos.device)

    @cached_property
    def runs(self) -> Runs:
        """The rows after the steps by sequence, counted from the first of them."""
        if self.given_runs is not None:
            return self.given_runs
        each = self.rectangle.runs() if self.rectangle is not None else ()
        return Runs([run for run in each if run.first < run.end], self.ids.shape[0] - self.steps, self.ids.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """(M,) int32: the position of every row."""
        own = self.pos[: self.steps]
        if not self.mixed:
            return own
        return torch.cat([own, self.packed.pos]) if self.steps else self.packed.pos

    def turned(self, kind: Rope) -> "Tables | None":
        """cos, sin (M, R) of every row; None where all turn by their slots, by the tables of `angles`."""
        if self.pictures is None or self.pictures.places is None:
            return None
        if kind not in self._turned:
            found = self.pictures.turned(self.angles[kind])
            assert found is not None
            self._turned[kind] = found
        return self._turned[kind]

    def attend(self, qkv: torch.Tensor, held: KeyValues, turned: Tables, heads: Heads, whole: bool = False) -> torch.Tensor:
        """Attention of every row over its sequence: qkv (M, (HQ + 2 HKV) D) -> (M, HQ D).

        whole: whether a token of a picture sees all of the picture.
        """
        b, parts = self.steps, []
        assert held.v is not None
        if b:
            own, order = qkv[:b] if self.mixed else qkv, None if self.order is None else self.order[:b]
            attend = partial(self.ops.attend_rows, groups=self.groups) if self.drafted else self.ops.attend
            parts.append(attend(own, held.k, held.v, self.pos[:b], *turned, heads, held.table, order))
        if self.mixed:
            until = self.pictures.until if whole and self.pictures is not None else None
            parts.append(self._prompts(qkv[b:] if b else qkv, held, turned, heads, until))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def latent(self, q: torch.Tensor, x: torch.Tensor, held: KeyValues, turned: Tables, facts: Latent) -> torch.Tensor:
        """Latent attention of every row: q (M, heads (nope + rotated)), latents x (M, rank + rotated) -> (M, heads v_dim)."""
        b, forms, parts = self.steps, self.ops.latent, []
        if b:
            order = None if self.order is None else self.order[:b]
            parts.append(forms.step(q[:b], x[:b], held.k, self.pos[:b], *turned, facts, held.table, order))
        if self.mixed:
            q, x = q[b:], x[b:]
            if held.table is not None:
                parts.append(forms.packed(q, x, held.k, replace(self.packed, table=held.table), *turned, facts, self.runs))
            else:
                assert self.rectangle is not None
                k = part(held.k, self.rectangle.some)
                split = (t.reshape(k.shape[0], -1, t.shape[-1]) for t in (q, x))
                parts.append(forms.prompt(*split, k, self.rectangle.start, *turned, facts).flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def recur(self, x: torch.Tensor, facts: recurrent.Facts, held: States, width: int) -> torch.Tensor:
        """A mixer with a state of fixed size over the rows of each sequence in order: x (M, N) -> (M, width)."""
        b, parts = self.steps, []
        if b:
            own = x[:b] if self.mixed else x
            if self.drafted:
                chains = ((own[c.first : c.end], recurrent.Rows(c.slot, c.copies)) for c in self.chains)
                parts += [recurrent.dispatched(rows, facts, held.tensors, places) for rows, places in chains]
            else:
                assert self.slots is not None
                parts.append(recurrent.dispatched(own, facts, held.tensors, self.slots[:b]))
        if self.mixed and self.runs.some:
            parts.append(recurrent.dispatched(x[b:] if b else x, facts, held.tensors, self.runs))
        elif self.mixed:
            parts.append(x.new_zeros(x.shape[0] - b, width))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prompts(
        self, qkv: torch.Tensor, held: KeyValues, turned: Tables, heads: Heads, until: torch.Tensor | None
    ) -> torch.Tensor:
        assert held.v is not None
        if held.table is not None:
            packed = replace(self.packed, table=held.table)
            if until is not None:  # which no kernel takes
                return attend_packed(qkv, held.k, held.v, packed, *turned, heads, until)
            return self.ops.attend_packed(qkv, held.k, held.v, packed, *turned, heads)
        assert self.rectangle is not None
        k, v = (part(cache, self.rectangle.some) for cache in (held.k, held.v))
        split, start = qkv.reshape(k.shape[0], -1, qkv.shape[-1]), self.rectangle.start
        if until is not None:
            return attend_prompt(split, k, v, start, *turned, heads, until.reshape(k.shape[0], -1)).flatten(0, 1)
        return self.ops.attend_prompt(split, k, v, start, *turned, heads).flatten(0, 1)
