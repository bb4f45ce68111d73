"""State by kind of layer: pages of all tokens, of a window, recurrent states; whatever comes, goes, is put back or drafted."""

from collections import Counter

import pytest
from simulated_device import driver


@pytest.mark.parametrize("seed", range(8))
def test_each_text_reads_what_it_wrote_and_nothing_is_lost(seed):
    seen, scheduled = Counter(), Counter()
    for n in range(24):
        d = driver(1000 * seed + n)
        for turn in range(160):
            for _ in range(d.rng.choice([0, 0, 0, 1, 2])):
                d.submit()
            if d.rng.random() < 0.06:
                d.cancel()
            d.turn()
            if turn % 3 == 0:
                d.check()
        d.empty()
        seen += d.seen
        scheduled.update(preemptions=d.scheduler.preemptions, prefix_hits=d.scheduler.prefix_hits)
    for name in ("moves", "zero", "copies", "snapshots", "given back", "drafts", "rewound", "cancelled"):
        assert seen[name] > 5, name
    assert scheduled["preemptions"] > 5
    assert scheduled["prefix_hits"] > 1000
