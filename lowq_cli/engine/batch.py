"""The rows of one pass of a model: the sequence of each row, its position there, and the place of its state.

The first `steps` rows are one token of one sequence each. The rows after them are tokens of prompts (or drafts), with the rows
of a sequence next to each other. A static cache has one place per sequence (the decoder); a paged cache has blocks that a block
table lists (the server, and layers with a sliding window).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

import numpy as np
import torch

from lowq_cli.engine.rope import Tables
from lowq_kernels.decode import Ops, recurrent
from lowq_kernels.decode.kv import Cache, part
from lowq_kernels.decode.latent import Latent
from lowq_kernels.decode.prepare import Prepared
from lowq_kernels.decode.reference import Groups, Heads, Packed, Places, attend_packed, attend_prompt
from lowq_kernels.decode.runs import Run, Runs
from lowq_packers.arch.parts import Images, Rope


def upload(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a contiguous copy on the device; the transfer is asynchronous."""
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    tensor = tensor.contiguous()  # as pinned memory must be
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()


def refill(place: torch.Tensor, values: np.ndarray) -> None:
    """Copy values into a tensor at a fixed address; to a GPU the transfer is asynchronous."""
    tensor = torch.from_numpy(values)
    place.copy_(tensor.pin_memory() if place.is_cuda else tensor, non_blocking=True)


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of one layer: k, v (B, HKV, S, D), or (blocks, HKV, BLOCK, D) with a block `table` (R, most) int32.

    v is None where a value is the first part of its key (latent attention).
    """

    k: Cache
    v: Cache | None
    table: torch.Tensor | None = None


@dataclass(frozen=True)
class States:
    """The state of a recurrent layer: tensors (slots, ...) by name; slot 0 does not belong to a sequence."""

    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Chain:
    """Rows first .. end of one sequence, whose recurrent state is in `slot` (1,) int64. After each of these rows except the
    last, the state is copied to a slot of `copies` (end - first - 1,) int64."""

    first: int
    end: int
    slot: torch.Tensor
    copies: torch.Tensor


@dataclass(frozen=True)
class Rectangle:
    """Tokens start .. start + T of the sequences at the places `some` of a static cache, sequence after sequence.

    lengths: the total tokens of each sequence; rows past them are dummies, whose output is ignored.
    nowhere: the row of the block tables for dummies.
    """

    some: slice
    start: int
    T: int
    lengths: Sequence[int]
    nowhere: int

    def runs(self) -> list[Run]:
        """The rows of each sequence, without dummies."""
        ends = (min(self.T, max(0, n - self.start)) for n in self.lengths)
        place = self.some.start
        return [Run(i * self.T, i * self.T + n, place + i + 1, self.start, place + i) for i, n in enumerate(ends)]

    def packed(self, tile: int, device: torch.device) -> Packed:
        """The same rows for a paged cache, in tiles of up to `tile` rows; each layer adds its own block table."""
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
    """`Images.axes` on a device, cached, since a recorded pass cannot upload it."""
    return torch.tensor(images.axes(dims)).to(device)


@dataclass(frozen=True)
class Pictures:
    """The rows of images in a pass of M rows, their features and positions, as `arch.parts.Images` describes them.

    rows (n,) int64: the rows of image tokens. features (n, H): what replaces their embeddings. added: for each of the first
    layers (n, H), added to the layer's output. places (3, M) int64: the rows' positions in time, height and width; None: the
    rows rotate by their slots. until (R,) int64: for each row after the steps, the last slot that it attends to in layers where
    the tokens of an image attend to the whole image; or None. chosen (R, 1) bool: in a recorded pass, instead of `rows`: which
    of the R rows after the steps are image tokens; features and added then have R rows each.
    """

    images: Images
    rows: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    features: torch.Tensor | None = None
    added: Sequence[torch.Tensor] = ()
    places: torch.Tensor | None = None
    until: torch.Tensor | None = None

    def shown(self, x: torch.Tensor) -> torch.Tensor:
        """Embeddings x (M, H) with those of image rows replaced by features."""
        assert self.features is not None
        if self.chosen is not None:
            before = x.shape[0] - self.chosen.shape[0]
            return torch.cat([x[:before], torch.where(self.chosen, self.features, x[before:])])
        assert self.rows is not None
        return x.index_copy(0, self.rows, self.features)

    def add(self, x: torch.Tensor, layer: int) -> None:
        """x (M, H) += the features of image rows for one of the first layers, in place."""
        if self.chosen is not None:
            x[x.shape[0] - self.chosen.shape[0] :] += torch.where(self.chosen, self.added[layer], 0.0)
        elif self.rows is not None:
            x.index_add_(0, self.rows, self.added[layer])

    @cached_property
    def numbers(self) -> torch.Tensor:
        """(M,) int32: the row numbers, which index the tables of `tables_of`."""
        assert self.places is not None
        return torch.arange(self.places.shape[1], dtype=torch.int32, device=self.places.device)

    def tables_of(self, tables: Tables) -> "Tables | None":
        """cos, sin (M, R) of every row, selected from tables (S, R) by position; None where rows rotate by their slots."""
        if self.places is None:
            return None
        index = self.places[_axes(self.images, tables[0].shape[1], self.places.device)].T.contiguous()
        return tables[0].gather(0, index), tables[1].gather(0, index)


@dataclass(frozen=True)
class Batch:
    """The rows of a pass.

    ids (M,): the rows' tokens. steps: the number of rows that are one token of one sequence each. pos (R,) int32: for each row
    of state the position of its next token, where a step writes. angles: cos, sin of each kind of rotation; under a head dim,
    tables that do not rotate. slots (R,) int64: the slot of each row's recurrent state. order (R,) int32: the rows with the
    longest sequences first, or None. rectangle or packed: the rows after the steps. runs: the same rows by sequence, for
    recurrent layers. pictures: the images of the batch. adapters (M,) int32: the LoRA adapter of each row, 0 for none; None:
    that of all rows is `Adapters.all` of the plan. drafted: several steps may belong to one sequence (its newest token and
    drafts of the next ones, next to each other); the state then has a block table row for each of them, and `chains` lists the
    rows by sequence. pause: called before each step of the plan, where a pass is recorded in slices (`engine/slices.py`).
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
    pause: Callable[[], None] | None = None
    values: dict[str, torch.Tensor] = field(default_factory=dict)  # values that one layer computes and later layers read
    _tables: dict[Rope, Tables] = field(default_factory=dict)

    @property
    def shows(self) -> bool:
        """Whether some rows are image tokens."""
        return self.pictures is not None and self.pictures.features is not None

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
        """The rows after the steps by sequence; the first of these rows is number 0."""
        if self.given_runs is not None:
            return self.given_runs
        each = self.rectangle.runs() if self.rectangle is not None else ()
        return Runs([run for run in each if run.first < run.end], self.ids.shape[0] - self.steps, self.ids.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """(M,) int32: the position of every row."""
        of_rows = self.pos[: self.steps]
        if not self.mixed:
            return of_rows
        return torch.cat([of_rows, self.packed.pos]) if self.steps else self.packed.pos

    def tables_of(self, kind: Rope) -> "Tables | None":
        """cos, sin (M, R) of every row; None where all rows rotate by their slots, with the tables of `angles`."""
        if self.pictures is None or self.pictures.places is None:
            return None
        if kind not in self._tables:
            tables = self.pictures.tables_of(self.angles[kind])
            assert tables is not None
            self._tables[kind] = tables
        return self._tables[kind]

    def attend(self, qkv: torch.Tensor, state: KeyValues, tables: Tables, heads: Heads, whole: bool = False) -> torch.Tensor:
        """Attention of every row over its sequence: qkv (M, (HQ + 2 HKV) D) -> (M, HQ D).

        whole: whether a token of an image attends to all tokens of the image.
        """
        b, parts = self.steps, []
        assert state.v is not None
        if b:
            rows, order = qkv[:b] if self.mixed else qkv, None if self.order is None else self.order[:b]
            attend = partial(self.ops.attend_rows, groups=self.groups) if self.drafted else self.ops.attend
            parts.append(attend(rows, state.k, state.v, Places(self.pos[:b], *tables, state.table, order), heads))
        if self.mixed:
            until = self.pictures.until if whole and self.pictures is not None else None
            parts.append(self._prompts(qkv[b:] if b else qkv, state, tables, heads, until))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_prepared(
        self, qkv: torch.Tensor, p: Prepared, state: KeyValues, kind: Rope | None, heads: Heads
    ) -> torch.Tensor | None:
        """`prepare`, attention and gates of every row by one kernel, or None where there is none: of steps alone."""
        together = self.ops.attend_prepared
        unknown = self.drafted and self.groups is None
        if together is None or kind is None or self.mixed or unknown or self.tables_of(kind) is not None:
            return None
        order, groups = None if self.order is None else self.order[: self.steps], self.groups if self.drafted else None
        at = Places(self.pos[: self.steps], *self.angles[kind], state.table, order)
        return together(qkv, p, state.k, state.v, at, heads, groups)

    def latent(self, q: torch.Tensor, x: torch.Tensor, state: KeyValues, tables: Tables, facts: Latent) -> torch.Tensor:
        """Latent attention of every row: q (M, heads (nope + rotated)), latents x (M, rank + rotated) -> (M, heads v_dim)."""
        b, forms, parts = self.steps, self.ops.latent, []
        if b:
            order = None if self.order is None else self.order[:b]
            parts.append(forms.step(q[:b], x[:b], state.k, Places(self.pos[:b], *tables, state.table, order), facts))
        if self.mixed:
            q, x = q[b:], x[b:]
            if state.table is not None:
                parts.append(forms.packed(q, x, state.k, replace(self.packed, table=state.table), *tables, facts, self.runs))
            else:
                assert self.rectangle is not None
                k = part(state.k, self.rectangle.some)
                split = (t.reshape(k.shape[0], -1, t.shape[-1]) for t in (q, x))
                parts.append(forms.prompt(*split, k, self.rectangle.start, *tables, facts).flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def recur(self, x: torch.Tensor, facts: recurrent.Facts, state: States, width: int) -> torch.Tensor:
        """A recurrent mixer over the rows of each sequence in order: x (M, N) -> (M, width)."""
        b, parts = self.steps, []
        if b:
            own = x[:b] if self.mixed else x
            if self.drafted:
                chains = ((own[c.first : c.end], recurrent.Rows(c.slot, c.copies)) for c in self.chains)
                parts += [recurrent.dispatched(rows, facts, state.tensors, places) for rows, places in chains]
            else:
                assert self.slots is not None
                parts.append(recurrent.dispatched(own, facts, state.tensors, self.slots[:b]))
        if self.mixed and self.runs.some:
            parts.append(recurrent.dispatched(x[b:] if b else x, facts, state.tensors, self.runs))
        elif self.mixed:
            parts.append(x.new_zeros(x.shape[0] - b, width))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prompts(
        self, qkv: torch.Tensor, state: KeyValues, tables: Tables, heads: Heads, until: torch.Tensor | None
    ) -> torch.Tensor:
        assert state.v is not None
        if state.table is not None:
            packed = replace(self.packed, table=state.table)
            if until is not None:  # no kernel takes `until`
                return attend_packed(qkv, state.k, state.v, packed, *tables, heads, until)
            return self.ops.attend_packed(qkv, state.k, state.v, packed, *tables, heads)
        assert self.rectangle is not None
        k, v = (part(cache, self.rectangle.some) for cache in (state.k, state.v))
        split, start = qkv.reshape(k.shape[0], -1, qkv.shape[-1]), self.rectangle.start
        if until is not None:
            return attend_prompt(split, k, v, start, *tables, heads, until.reshape(k.shape[0], -1)).flatten(0, 1)
        return self.ops.attend_prompt(split, k, v, start, *tables, heads).flatten(0, 1)
