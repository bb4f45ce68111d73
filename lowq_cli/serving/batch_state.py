"""The state of every sequence on the device, one row each, in tensors at fixed addresses, from which recorded passes read.

The host keeps a copy and sends its changes (places and values) in one transfer before a pass, without waiting for it. A row's
position and newest token are updated by the device; the host only sets them at the start.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from lowq_cli.engine.batch import upload


class BatchState:
    """`count` rows, and the null row, which belongs to no sequence and is used as padding.

    Attributes:
        token (R,) int64, pos (R,) int32, seed (R,) int64, temperature (R,) fp32: as `choose_rows` takes them.
        target (R,) int32: the row itself where a step samples for it, else the null row.
        order (R,) int32: the rows, those of the longest sequences first.
        slot (R,) int32: the slot of its sequence's recurrent state, 0 for none.
        shift (R,) int32: offset of the rotary positions of its sequence's steps; not 0 only with images.
        adapter (R,) int32: its sequence's LoRA adapter, 0 for none.
        tables: for each page group (R, width) int32, the blocks of its sequence; block 0 wherever it has none.
        guesses (R, K) int64: what a drafter on the device has guessed after its newest token; None without such a drafter.
    Args:
        count: number of rows. widths: of the tables. separate: whether a CPU, too, gets changes by `flush`, as a GPU does.
    """

    def __init__(self, count: int, widths: Sequence[int], device: torch.device, separate: bool = False) -> None:
        R = count + 1
        self.null_row, self.device = count, device
        self._host = np.zeros(R * (9 + sum(widths)), np.int32)  # seeds first: they are 64 bits wide
        flat = torch.from_numpy(self._host)
        self._separate = separate or device.type == "cuda"
        self._flat = flat.to(device, copy=self._separate)
        ends = np.cumsum([2 * R, R, R, R, R, R, R, R, *(width * R for width in widths)])
        parts, copies = (np.split(self._host, ends[:-1]), torch.tensor_split(self._flat, ends[:-1].tolist()))
        self._seeds, self._temperatures = parts[0].view(np.int64), parts[1].view(np.float32)
        self._pos, self._targets, self._order, self._slots, self._shifts, self._adapters = parts[2:8]
        self._tables = [part.reshape(R, -1) for part in parts[8:]]
        self.seed, self.temperature = copies[0].view(torch.int64), copies[1].view(torch.float32)
        self.pos, self.target, self.order, self.slot, self.shift, self.adapter = copies[2:8]
        self.tables = [copy.view(R, -1) for copy in copies[8:]]
        self.token = torch.zeros(R, dtype=torch.int64, device=device)
        self.guesses: torch.Tensor | None = None
        self._starts = [0, *ends[:-1].tolist()]
        self._changed: list[np.ndarray] = []
        self._targets[:], self._order[:] = count, np.arange(R)
        self._note(3, 0, 2 * R)

    def place(self, row: int, seed: int, temperature: float, pos: int, drawn: bool, shift: int = 0) -> None:
        """Set a row's position and sampling settings; `drawn`: whether steps sample for it."""
        self._seeds[row], self._temperatures[row], self._pos[row], self._shifts[row] = seed, temperature, pos, shift
        self._targets[row] = row if drawn else self.null_row
        self._note(0, 2 * row, 2)
        for part in (1, 2, 3, 6):
            self._note(part, row, 1)

    def set_table(self, group: int, row: int, blocks: Sequence[int], first: int = 0) -> None:
        """Set the blocks of a row from place `first` on, in the table of a page group."""
        table = self._tables[group]
        table[row, first : first + len(blocks)] = blocks
        self._note(8 + group, row * table.shape[1] + first, len(blocks))

    def set_adapter(self, row: int, adapter: int) -> None:
        """Set the LoRA adapter of a row's sequence."""
        if self._adapters[row] != adapter:
            self._adapters[row] = adapter
            self._note(7, row, 1)

    def adapted(self, n: int, rows: Iterable[int]) -> bool:
        """Return whether a sequence in the first n rows, or in one of `rows`, has a LoRA adapter."""
        return bool(self._adapters[:n].any()) or any(self._adapters[row] for row in rows)

    def set_slot(self, row: int, slot: int) -> None:
        """Set the slot of a row's recurrent state."""
        self._slots[row] = slot
        self._note(5, row, 1)

    def clear(self, row: int) -> None:
        """Take a row out of use: passes that still write to it then write to block 0 and slot 0."""
        for group, table in enumerate(self._tables):
            used = np.flatnonzero(table[row])
            table[row] = 0
            self._note(8 + group, row * table.shape[1], int(used[-1]) + 1 if len(used) else 0)
        self.set_slot(row, 0)
        self.set_adapter(row, 0)
        self.place(row, 0, 0.0, 0, drawn=False)

    def shifted(self, n: int) -> bool:
        """Return whether a sequence in the first n rows has shifted rotary positions."""
        return bool(self._shifts[:n].any())

    def move(self, source: int, target: int) -> None:
        """Copy the newest token and the guesses after it from one row to another; the caller sets everything else."""
        for held in (self.token, *([] if self.guesses is None else [self.guesses])):
            held[target].copy_(held[source])

    def hold_guesses(self, most: int) -> None:
        """Make room for `most` guesses in each row."""
        self.guesses = torch.zeros(len(self.token), most, dtype=torch.int64, device=self.device)

    def set_order(self, first: Sequence[int]) -> None:
        """Put these rows first in `order`, followed by all others in ascending order: for any n above all of `first`, the first
        n entries of `order` are the rows below n."""
        rows = np.array(first, np.int32)
        order = np.concatenate([rows, np.delete(np.arange(self.null_row + 1, dtype=np.int32), rows)])
        changed = np.flatnonzero(order != self._order)
        if len(changed):
            self._order[:] = order
            self._changed.append(self._starts[4] + changed)

    def flush(self) -> None:
        """Send all changes to the device."""
        if not self._changed:
            return
        places = np.unique(np.concatenate(self._changed))
        self._changed.clear()
        if self._separate:
            both = upload(np.stack([places, self._host[places]]).astype(np.int32), self.device)
            self._flat.index_copy_(0, both[0].long(), both[1])

    def _note(self, part: int, first: int, n: int) -> None:
        start = self._starts[part] + first
        self._changed.append(np.arange(start, start + n))
