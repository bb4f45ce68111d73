"""What a device is sent of its rows: after each flush it has what the host has, though only changes go there."""

import random

import numpy as np
import torch

from lowq_cli.serving.batch_state import BatchState


def test_every_change_is_sent():
    rng, rows = random.Random(3), BatchState(6, [5, 9], torch.device("cpu"))
    device = np.full_like(rows._host, -1)
    device[np.unique(np.concatenate(rows._changed))] = rows._host[np.unique(np.concatenate(rows._changed))]
    device[device == -1] = 0  # as it is made
    for _ in range(300):
        row = rng.randrange(6)
        for _ in range(rng.randrange(3)):
            group, first = rng.randrange(2), rng.randrange(4)
            rows.set_table(group, row, [rng.randrange(1, 99) for _ in range(rng.randrange(1, 6 - first))], first)
        rng.choice([rows.clear, lambda row: rows.set_slot(row, 7), lambda row: rows.place(row, 1 << 40, 0.5, 3, True)])(row)
        rows.set_order([row])
        places = np.unique(np.concatenate(rows._changed))
        device[places] = rows._host[places]
        rows.flush()
        assert np.array_equal(device, rows._host)
        assert rows._changed == []


def test_each_page_group_has_a_table_and_a_row_that_is_cleared_points_at_nothing():
    rows = BatchState(3, [2, 4], torch.device("cpu"))
    rows.set_table(0, 1, [8, 9])
    rows.set_table(1, 1, [5, 6], first=2)
    rows.set_slot(1, 4)
    assert [t.tolist() for t in rows.tables] == [[[0] * 2, [8, 9], [0] * 2, [0] * 2], [[0] * 4, [0, 0, 5, 6], [0] * 4, [0] * 4]]
    assert rows.slot.tolist() == [0, 4, 0, 0]
    rows.clear(1)
    assert not any(t.any() for t in rows.tables)
    assert rows.slot.tolist() == [0] * 4
    assert rows.target.tolist() == [3] * 4  # the null row
    assert not BatchState(3, [], torch.device("cpu")).tables  # a model without pages
