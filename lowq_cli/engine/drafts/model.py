"""A smaller model as a drafter: any checkpoint with the same tokenizer. It guesses its likeliest tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowq_cli.cached_models import called
from lowq_cli.engine.batch import Batch, KeyValues, States
from lowq_cli.engine.drafts.drafter import Angles, DraftRows, LastRows
from lowq_cli.engine.drafts.static_cache import StaticCache
from lowq_cli.engine.plan import Plan, plan_of, why_not
from lowq_cli.engine.state import PIECE
from lowq_kernels.decode.reference import Packed
from lowq_packers.arch.parts import Pages
from lowq_packers.errors import UnsupportedError

MOST = 7  # max. guesses per round


class ModelDrafter(StaticCache):
    """A model as a `DeviceDrafter` with a separate static cache. vocabulary: size of the target model's vocabulary."""

    most = reach = MOST
    layers: tuple[int, ...] = ()
    carries = False

    def __init__(self, plan: Plan, name: str, vocabulary: int) -> None:
        super().__init__()
        if not all(isinstance(spec, Pages) and not spec.window for spec in plan.states):
            raise UnsupportedError(f"{name} has layers with a recurrent state or a window; a draft model may not")
        self.plan, self.name, self.vocabulary = plan, f"model {name}", vocabulary

    def read(self, ids: torch.Tensor, hidden: dict[int, torch.Tensor], rows: DraftRows) -> None:
        """As `DeviceDrafter.read`; ids are the rows' own tokens."""
        for part in torch.arange(len(ids), device=ids.device).split(PIECE):
            row_ids, pos, of = ids[part], rows.pos[part], rows.rows[part].int()
            starts = torch.arange(0, len(part), self.plan.tile, dtype=torch.int32, device=ids.device)
            tiles = torch.stack((starts, (starts + self.plan.tile).clamp(max=len(part))), 1)
            table = torch.arange(self._places, dtype=torch.int32, device=ids.device)[:, None]
            given = Packed(table, of, pos, tiles)
            batch = Batch(self.plan.ops, row_ids, 0, pos, self.angles, given=given, tile=self.plan.tile)
            self.plan.hidden(self.plan.embed(row_ids), batch, self._at(table), state_only=True)

    def draft(
        self, ids: torch.Tensor, hidden: dict[int, torch.Tensor], rows: DraftRows, last: torch.Tensor, K: int
    ) -> torch.Tensor:
        """As `DeviceDrafter.draft`; each drawn token is one position after its row."""
        places = rows.rows.int()[:, None]
        batch = Batch(self.plan.ops, ids, len(ids), rows.pos + 1, self.angles, drafted=True)
        y = self.plan.hidden(self.plan.embed(ids), batch, self._at(places)).index_select(0, last)
        states = self._at(places.index_select(0, last))
        return self._likeliest(y, rows.pos.index_select(0, last) + 1, states, self.angles, K)

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
        self.plan.hidden(self.plan.embed(ids), batch, held, state_only=True)

    def go_on(self, last: LastRows, K: int) -> torch.Tensor:
        """As `PagedDrafter.go_on`."""
        pos = last.pos + 1
        return self._likeliest(self._step(last.drawn, pos, last.held, last.angles), pos, last.held, last.angles, K)

    def _likeliest(
        self, y: torch.Tensor, pos: torch.Tensor, held: Sequence[KeyValues | States], angles: Angles, K: int
    ) -> torch.Tensor:
        """K tokens (B, K) after rows at `pos`, whose normed hidden states are y (B, H)."""
        drafts = list[torch.Tensor]()
        while True:
            logits = self.plan.logits(y)[:, : self.vocabulary]  # padding rows of the head are not tokens
            drafts.append(logits.argmax(-1))
            if len(drafts) == K:
                return torch.stack(drafts, 1)
            pos = pos + 1
            y = self._step(drafts[-1], pos, held, angles)

    def _step(self, ids: torch.Tensor, pos: torch.Tensor, held: Sequence[KeyValues | States], angles: Angles) -> torch.Tensor:
        return self.plan.hidden(self.plan.embed(ids), Batch(self.plan.ops, ids, len(ids), pos, angles), held)


def load(folder: str, model: Any, tokenizer: Any) -> ModelDrafter:
    """The draft model in a folder or hub id. Raises UnsupportedError for a different tokenizer, and for a family without a
    plan."""
    from lowq_cli.engine.open_model import ready

    small, its = ready(folder, str(model.device))
    if (reason := why_not(small)) is not None:
        raise UnsupportedError(f"{folder} cannot be used as a draft model: {reason}")
    if its.get_vocab() != tokenizer.get_vocab():
        raise UnsupportedError(
            f"{folder} has another tokenizer than the model, so its drafts cannot be checked; use one of the same family"
        )
    return ModelDrafter(plan_of(small), called(folder), plan_of(model).vocabulary)
