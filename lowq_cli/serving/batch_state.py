"""What every text has on the device, a row each, in tensors that never move: recorded passes read them there.

The host keeps a copy and sends what it changed, places and values in one transfer, before a pass: it never waits for it. What
the device moves on by itself, a row's position and newest token, the host only sets.
"""

from collections.abc import Sequence

import numpy as np
import torch


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device that is made when the device comes to it; the host goes on."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()


class BatchState:
    """`count` rows and the null row, which is no text's: what only fills up a pass points there.

    Attributes:
        token (R,) int64, pos (R,) int32, seed (R,) int64, temperature (R,) fp32: as `choose_rows` takes them.
        target (R,) int32: the row itself where a step draws for it, else the null row.
        order (R,) int32: the rows, those of the longest texts first.
        slot (R,) int32: the slot of its text's recurrent state, 0 for none.
        shift (R,) int32: what is added to the positions by which its text's steps turn, of one with pictures.
        adapter (R,) int32: its text's LoRA adapter, 0 for none.
        tables: of each page group (R, width) int32, the blocks of its text; block 0 wherever it has none.
    """

    def __init__(self, count: int, widths: Sequence[int], device: torch.device) -> None:
        R = count + 1
        self.null_row, self.device = count, device
        self._host = np.zeros(R * (9 + sum(widths)), np.int32)  # seeds first: they are 64 bits wide
        flat = torch.from_numpy(self._host)
        self._flat = flat.to(device) if device.type == "cuda" else flat
        ends = np.cumsum([2 * R, R, R, R, R, R, R, R, *(width * R for width in widths)])
        parts, copies = (np.split(self._host, ends[:-1]), torch.tensor_split(self._flat, ends[:-1].tolist()))
        self._seeds, self._temperatures = parts[0].view(np.int64), parts[1].view(np.float32)
        self._pos, self._targets, self._order, self._slots, self._shifts, self._adapters = parts[2:8]
        self._tables = [part.reshape(R, -1) for part in parts[8:]]
        self.seed, self.temperature = copies[0].view(torch.int64), copies[1].view(torch.float32)
        self.pos, self.target, self.order, self.slot, self.shift, self.adapter = copies[2:8]
        self.tables = [copy.view(R, -1) for copy in copies[8:]]
        self.token = torch.zeros(R, dtype=torch.int64, device=device)
        self._starts = [0, *ends[:-1].tolist()]
        self._changed: list[np.ndarray] = []
        self._targets[:], self._order[:] = count, np.arange(R)
        self._note(3, 0, 2 * R)

    def place(self, row: int, seed: int, temperature: float, pos: int, drawn: bool, shift: int = 0) -> None:
        """A text's place and way of drawing; `drawn`: whether steps draw for it."""
        self._seeds[row], self._temperatures[row], self._pos[row], self._shifts[row] = seed, temperature, pos, shift
        self._targets[row] = row if drawn else self.null_row
        self._note(0, 2 * row, 2)
        for part in (1, 2, 3, 6):
            self._note(part, row, 1)

    def set_table(self, group: int, row: int, blocks: Sequence[int], first: int = 0) -> None:
        """The blocks of a row from its `first` on, in the table of a page group."""
        table = self._tables[group]
        table[row, first : first + len(blocks)] = blocks
        self._note(8 + group, row * table.shape[1] + first, len(blocks))

    def set_adapter(self, row: int, adapter: int) -> None:
        """The LoRA adapter of a row's text."""
        if self._adapters[row] != adapter:
            self._adapters[row] = adapter
            self._note(7, row, 1)

    def set_slot(self, row: int, slot: int) -> None:
        """The slot of a row's recurrent state."""
        self._slots[row] = slot
        self._note(5, row, 1)

    def clear(self, row: int) -> None:
        """No text's any more: what a pass still writes there goes to block 0, and to slot 0."""
        for group, table in enumerate(self._tables):
            used = np.flatnonzero(table[row])
            table[row] = 0
            self._note(8 + group, row * table.shape[1], int(used[-1]) + 1 if len(used) else 0)
        self.set_slot(row, 0)
        self.set_adapter(row, 0)
        self.place(row, 0, 0.0, 0, drawn=False)

    def shifted(self, n: int) -> bool:
        """Whether a text of the first n rows turns by other positions than its slots."""
        return bool(self._shifts[:n].any())

    def move(self, source: int, target: int) -> None:
        """The newest token from one row to another; the rest is the caller's to place."""
        self.token[target].copy_(self.token[source])

    def set_order(self, first: Sequence[int]) -> None:
        """Rows that come before all others, which stay as they are numbered: for any n above all of `first`, the first n of
        `order` are the rows below n."""
        rows = np.array(first, np.int32)
        order = np.concatenate([rows, np.delete(np.arange(self.null_row + 1, dtype=np.int32), rows)])
        changed = np.flatnonzero(order != self._order)
        if len(changed):
            self._order[:] = order
            self._changed.append(self._starts[4] + changed)

    def flush(self) -> None:
        """Send what has changed."""
        if not self._changed:
            return
        places = np.unique(np.concatenate(self._changed))
        self._changed.clear()
        if self._flat.is_cuda:
            both = upload(np.stack([places, self._host[places]]).astype(np.int32), self.device)
            self._flat.index_copy_(0, both[0].long(), both[1])

    def _note(self, part: int, first: int, n: int) -> None:
        start = self._starts[part] + first
        self._changed.append(np.arange(start, start + n))
