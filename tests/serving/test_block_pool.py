"""The book of blocks: whatever texts do, nothing is lost, nothing is shared that is not equal, the oldest goes first."""

from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from lowq_cli.serving.block_pool import START, BlockPool, name_after

SIZE = 2


def names(tokens):
    """Of each whole block of a text."""
    result = [START]
    for first in range(0, len(tokens) - SIZE + 1, SIZE):
        result.append(name_after(result[-1], tokens[first : first + SIZE]))
    return result[1:]


def find(pool, tokens):
    """The blocks that hold the beginning of a text."""
    return list(takewhile(bool, map(pool.find, names(tokens))))


def read(pool, tokens, contents=None):
    """A text's blocks after all of it was computed, with `contents` recorded for each; None if the pool has no room."""
    blocks, known = find(pool, tokens), names(tokens)
    pool.hold(blocks)
    for i in range(len(blocks), -(-len(tokens) // SIZE)):
        block = pool.take(blocks[-1] if blocks else 0)
        if block is None:
            pool.give_back(blocks)
            return None
        blocks.append(block)
        if contents is not None:
            contents[block] = tokens[: (i + 1) * SIZE]
        if i < len(known):
            pool.name(block, known[i])
    return blocks


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(TEXTS, st.integers(0, 5)), max_size=40), st.integers(2, 12))
def test_blocks_are_held_by_their_texts_alone(steps, blocks):
    pool, held, contents = BlockPool(blocks), [], {}
    for tokens, ending in steps:
        result = find(pool, tokens)
        for i, block in enumerate(result):  # what is found is what was written there last
            assert contents[block] == tokens[: (i + 1) * SIZE]
        mine = read(pool, tokens, contents)
        if mine is None:
            while ending < len(held):
                pool.give_back(held.pop(ending)[1])
        else:
            held.append((tokens, mine))
        in_use = {b for _, row in held for b in row}
        assert 0 not in in_use
        assert pool.free == blocks - 1 - len(in_use)
        for text, row in held:  # no other text wrote into a text's blocks
            assert [contents[b] for b in row] == [text[: (i + 1) * SIZE] for i in range(len(row))]
    for _, row in held:
        pool.give_back(row)
    assert pool.free == blocks - 1
    assert len({pool.take() for _ in range(blocks - 1)}) == blocks - 1
    assert pool.take() is None


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning():
    pool = BlockPool(7)
    old, new = read(pool, [1, 2, 3, 4, 5, 6]), read(pool, [7, 8, 9])
    pool.give_back(old)
    pool.give_back(new)
    again = read(pool, [7, 8, 9, 9, 1, 1])  # takes the blank ones first, and then the end of the older text
    assert again[0] == new[0]
    assert len(find(pool, [1, 2, 3, 4, 5, 6])) == 3
    assert pool.take() is not None
    assert len(find(pool, [1, 2, 3, 4, 5, 6])) == 2


def test_equal_contents_after_other_beginnings_are_not_equal():
    pool = BlockPool(9)
    read(pool, [1, 1, 5, 5])
    assert find(pool, [2, 2, 5, 5]) == []
    assert find(pool, [5, 5]) == []
    assert pool.idle(find(pool, [1, 1, 5, 5])) == 0


def test_neighbours_come_side_by_side_where_they_can():
    pool = BlockPool(9)
    first, second = pool.take(), pool.take()
    assert pool.take(first) not in (first, second)
    assert pool.take(5) == 6
