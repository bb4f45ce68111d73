"""The separate static cache of a drafter on the device, for draft heads and draft models alike."""

from collections.abc import Sequence
from typing import Any

import torch

from lowq_cli.engine.batch import KeyValues, States
from lowq_cli.engine.state import static_state
from lowq_kernels.decode.kv import PLAIN


class StaticCache:
    """A cache with one place per sequence; a place is a single block, so that kernels for paged caches read it."""

    plan: Any

    def __init__(self) -> None:
        self.state: list[KeyValues | States] = []

    def make_room(self, batch: int, slots: int, of_model: Sequence[KeyValues | States] = ()) -> None:
        """As `DeviceDrafter.make_room`."""
        self.state = []  # free the old state before the new one is allocated
        self.state = [*static_state(self.plan, batch, slots, PLAIN), *self.lent(of_model)]
        self.angles = self.plan.angles(slots, self.plan.device)

    def lent(self, of_model: Sequence[KeyValues | States]) -> list[KeyValues]:
        """As `PagedDrafter.lent`."""
        return []

    @property
    def _places(self) -> int:
        return next(len(one.k) for one in self.state if isinstance(one, KeyValues))  # type: ignore[arg-type]

    def _at(self, table: torch.Tensor) -> list[KeyValues | States]:
        """The state with a block table: a sequence's place in the static cache is one block."""
        return [KeyValues(one.k, one.v, table) for one in self.state if isinstance(one, KeyValues)]
