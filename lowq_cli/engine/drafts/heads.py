"""Draft heads as drafters: on the device, a round of guesses from the hidden states of the model's last step.

Row t of a head combines the token after t with the model's hidden states at t. The keys and values of guesses further on are
approximate; the next round overwrites them with rows that have the model's hidden states.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowq_cli.engine import heads
from lowq_cli.engine.batch import Batch, KeyValues, States
from lowq_cli.engine.drafts.drafter import DraftRows, LastRows
from lowq_cli.engine.drafts.static_cache import StaticCache
from lowq_cli.engine.graph import bucket
from lowq_cli.engine.heads import AssistantPlan, BlockPlan, HeadPlan
from lowq_cli.engine.model_record import owned
from lowq_cli.files.source import open_source
from lowq_kernels.decode.reference import MOST_DRAFTS, Packed
from lowq_packers.errors import UnsupportedError
from lowq_packers.heads import is_head

MOST = 7  # max. guesses per round: on an H100 a step of 8 rows takes 1.24 times one of 1 row; published heads get 3 to 5 right


class HeadDrafter(StaticCache):
    """A head as a `DeviceDrafter` with a separate static cache."""

    most = reach = MOST
    carries = True

    def __init__(self, plan: HeadPlan) -> None:
        super().__init__()
        if any(getattr(spec, "window", 0) for spec in plan.states):
            raise UnsupportedError("a draft head with sliding-window attention is not supported")
        self.plan, self.name, self.layers = plan, plan.described.kind, plan.layers

    def read(self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], rows: DraftRows) -> None:
        """As `DeviceDrafter.read`."""
        batch, states = self._prompt(ids, rows)
        self.plan.keep(ids, self._entering(hidden), batch, states)

    def _prompt(self, ids: torch.Tensor, rows: DraftRows) -> tuple[Batch, list[KeyValues | States]]:
        """Rows of prompts as a batch, and the state with the batch's block table."""
        M, per = len(ids), rows.per or 1
        tile = min(per, self.plan.tile)
        first = torch.arange(0, M, per, device=ids.device)[:, None] + torch.arange(0, per, tile, device=ids.device)
        end = torch.minimum(first + tile, (first // per + 1) * per)
        tiles = torch.stack((first.flatten(), end.flatten()), 1).int()
        packed = Packed(torch.empty(0, 0, dtype=torch.int32, device=ids.device), rows.rows.int(), rows.pos, tiles)
        places = torch.arange(self._places, dtype=torch.int32, device=ids.device)[:, None]
        batch = Batch(self.plan.ops, ids, 0, rows.pos, self.angles, given=packed, tile=self.plan.tile)
        return batch, self._at(places)

    def draft(
        self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], rows: DraftRows, last: torch.Tensor, K: int
    ) -> torch.Tensor:
        """As `DeviceDrafter.draft`."""
        batch = Batch(self.plan.ops, ids, len(ids), rows.pos, self.angles, drafted=True)
        written = self.write(ids, hidden, batch, self._at(rows.rows.int()[:, None]))
        places = rows.rows.index_select(0, last).int()[:, None]
        drawn, pos = ids.index_select(0, last), rows.pos.index_select(0, last)
        made = [t.index_select(0, last) for t in written]
        return self.go_on(LastRows(drawn, made, pos, self._at(places), self.angles), K)

    def write(
        self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], batch: Batch, held: Sequence[KeyValues | States]
    ) -> Sequence[torch.Tensor]:
        """As `PagedDrafter.write`."""
        return self.plan.guess(ids, self._entering(hidden), batch, held)

    def keep(
        self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], batch: Batch, held: Sequence[KeyValues | States]
    ) -> None:
        """As `PagedDrafter.keep`."""
        self.plan.keep(ids, self._entering(hidden), batch, held)

    def go_on(self, last: LastRows, K: int) -> torch.Tensor:
        """As `PagedDrafter.go_on`."""
        plan, (y, x), pos = self.plan, last.made, last.pos
        drafts = [plan.ids(plan.logits(y).argmax(-1))]
        if plan.unknown is not None and K > 1:
            return torch.cat((drafts[0][:, None], self._at_once(last, K - 1)), 1)
        while len(drafts) < K:
            pos = pos + 1
            batch = Batch(plan.ops, drafts[-1], len(pos), pos, last.angles)  # one row per sequence: one attention kernel
            y, x = plan.guess(drafts[-1], x, batch, last.held)
            drafts.append(plan.ids(plan.logits(y).argmax(-1)))
        return torch.stack(drafts, 1)

    def _at_once(self, last: LastRows, K: int) -> torch.Tensor:
        """K guesses (B, K) in one pass, from rows behind these whose tokens and hidden states are not known yet."""
        plan, pos, B = self.plan, last.pos, len(last.pos)
        assert plan.unknown is not None
        there = (pos[:, None] + torch.arange(1, K + 1, dtype=torch.int32, device=pos.device)).flatten()
        ids = torch.full_like(there, plan.described.parallel, dtype=torch.int64)  # type: ignore[arg-type]
        table = [KeyValues(one.k, one.v, one.table.repeat_interleave(K, 0)) for one in last.held]  # type: ignore[union-attr]
        batch = Batch(plan.ops, ids, B * K, there, last.angles, drafted=True)
        y, _ = plan.guess(ids, plan.unknown.repeat(B * K, 1), batch, table)
        return plan.ids(plan.logits(y).argmax(-1)).reshape(B, K)

    def _entering(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return self.plan.entering([hidden[i] for i in self.layers])


class BlockDrafter(HeadDrafter):
    """A head that guesses a block at once, as a `DeviceDrafter`; it caches keys and values of the model's hidden states."""

    plan: BlockPlan
    carries = False

    def __init__(self, plan: BlockPlan) -> None:
        super().__init__(plan)
        self.most, self.reach = min(MOST_DRAFTS, plan.block.size - (not plan.block.earlier)), plan.block.size

    def read(self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], rows: DraftRows) -> None:
        """As `DeviceDrafter.read`."""
        batch, states = self._prompt(ids, rows)
        self.plan.remember([hidden[i] for i in self.layers], batch, states)

    def write(
        self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], batch: Batch, held: Sequence[KeyValues | States]
    ) -> Sequence[torch.Tensor]:
        """As `PagedDrafter.write`."""
        self.keep(ids, hidden, batch, held)
        return ()

    def keep(
        self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], batch: Batch, held: Sequence[KeyValues | States]
    ) -> None:
        """As `PagedDrafter.keep`."""
        self.plan.remember([hidden[i] for i in self.layers], batch, held)

    def go_on(self, last: LastRows, K: int) -> torch.Tensor:
        """As `PagedDrafter.go_on`. A whole block is computed for fewer guesses too, since it was trained as a whole."""
        plan, drawn, size, B = self.plan, last.drawn, self.plan.block.size, len(last.drawn)
        masks = torch.full((B, size - 1), plan.block.mask, dtype=torch.int64, device=drawn.device)
        there = last.pos[:, None] + 1 + torch.arange(size, dtype=torch.int32, device=drawn.device)
        until = there[:, -1:].expand_as(there).flatten().contiguous()
        block = torch.cat((drawn[:, None], masks), 1).flatten()
        batch = Batch(plan.ops, block, len(block), there.flatten(), last.angles, drafted=True)
        table = [KeyValues(one.k, one.v, one.table.repeat_interleave(size, 0)) for one in last.held]  # type: ignore[union-attr]
        return plan.guesses(drawn, batch, table, until)[:, :K]

    def make_room(self, batch: int, slots: int, of_model: Sequence[KeyValues | States] = ()) -> None:
        """As `DeviceDrafter.make_room`; a block may reach further past the sequence than its guesses."""
        more = max(0, self.plan.block.size - 1 - MOST_DRAFTS)
        super().make_room(batch, bucket(slots + more) if more else slots, of_model)


class AssistantDrafter(HeadDrafter):
    """A head that reads the model's keys and values, as a `DeviceDrafter`: it writes nothing, and reads nothing of prompts."""

    plan: AssistantPlan
    reach = 0

    def lent(self, of_model: Sequence[KeyValues | States]) -> list[KeyValues]:
        """As `PagedDrafter.lent`."""
        numbers = [self.plan.target.kept_by[layer] for layer in self.plan.model.lent]
        return [one for i in numbers if isinstance(one := of_model[i], KeyValues)]

    def read(self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], rows: DraftRows) -> None:
        """As `DeviceDrafter.read`."""

    def draft(
        self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], rows: DraftRows, last: torch.Tensor, K: int
    ) -> torch.Tensor:
        """As `DeviceDrafter.draft`."""
        places, made = rows.rows.index_select(0, last), [h.index_select(0, last) for h in self._made(hidden)]
        tables = [places.int()[:, None] if one.table is None else one.table.index_select(0, places) for one in self._held]
        held = [KeyValues(one.k, one.v, table) for one, table in zip(self._held, tables, strict=True)]
        drawn, pos = ids.index_select(0, last), rows.pos.index_select(0, last)
        return self.go_on(LastRows(drawn, made, pos, held, self.angles), K)

    def write(
        self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], batch: Batch, held: Sequence[KeyValues | States]
    ) -> Sequence[torch.Tensor]:
        """As `PagedDrafter.write`: what the guesses begin with."""
        return self._made(hidden)

    def keep(
        self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], batch: Batch, held: Sequence[KeyValues | States]
    ) -> None:
        """As `PagedDrafter.keep`."""

    def go_on(self, last: LastRows, K: int) -> torch.Tensor:
        """As `PagedDrafter.go_on`: all guesses are made at one position, over the keys and values up to `pos`."""
        plan, drafts, x, pos = self.plan, [last.drawn], last.made[0], last.pos
        for _ in range(K):
            y, x = plan.guess(drafts[-1], x, Batch(plan.ops, drafts[-1], len(pos), pos, last.angles), last.held)
            drafts.append(plan.logits(y).argmax(-1))
        return torch.stack(drafts[1:], 1)

    def _made(self, hidden: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        return [hidden[i] for i in self.layers]

    @property
    def _held(self) -> list[KeyValues]:
        return [one for one in self.state if isinstance(one, KeyValues)]


def takes(config: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to a draft head rather than a model."""
    return is_head(config)


def load(folder: str, model: Any) -> HeadDrafter:
    """The head in a folder, as a drafter. Raises as `heads.load`."""
    plan = heads.load(folder, model)
    if isinstance(plan, AssistantPlan):
        return AssistantDrafter(plan)
    return BlockDrafter(plan) if isinstance(plan, BlockPlan) else HeadDrafter(plan)


def inside(model: Any) -> HeadDrafter | None:
    """The MTP layer of the checkpoint that a model was read from; None where it has none that lowq can run."""
    if not (folder := owned(model).tuned):
        return None
    with open_source(folder) as source:
        try:
            return HeadDrafter(heads.inside(source, model))
        except UnsupportedError:
            return None
