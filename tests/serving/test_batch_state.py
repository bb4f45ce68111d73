"""What a device is sent of its rows: after each flush it has what the host has, though only changes go there."""

import random

import torch

from lowq_cli.serving.batch_state import BatchState


def parts(rows):
    return [rows.pos, rows.target, rows.order, rows.slot, rows.shift, rows.adapter, rows.seed, rows.temperature, *rows.tables]


def test_every_change_is_sent():
    rng, both = random.Random(3), [BatchState(6, [5, 9], torch.device("cpu"), separate=one) for one in (True, False)]

    def change(name, *values):
        for rows in both:
            getattr(rows, name)(*values)

    for _ in range(300):
        row = rng.randrange(6)
        for _ in range(rng.randrange(3)):
            group, first = rng.randrange(2), rng.randrange(4)
            change("set_table", group, row, [rng.randrange(1, 99) for _ in range(rng.randrange(1, 6 - first))], first)
        change(
            *rng.choice([("clear", row), ("set_slot", row, 7), ("place", row, 1 << 40, 0.5, 3, True), ("set_adapter", row, 2)])
        )
        change("set_order", [row])
        change("flush")
        assert all(map(torch.equal, *map(parts, both)))


def test_a_flush_sends_nothing_but_changes():
    """Positions are counted on the device: the host's are those of the start."""
    rows = BatchState(3, [2], torch.device("cpu"), separate=True)
    rows.place(0, 1, 0.5, 7, True)
    rows.flush()
    rows.pos += 1
    rows.flush()
    rows.place(1, 1, 0.5, 20, True)
    assert rows.pos.tolist() == [8, 1, 1, 1]
    rows.flush()
    assert rows.pos.tolist() == [8, 20, 1, 1]


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
