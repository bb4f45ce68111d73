"""Texts that end a generation: never shown in part, the first of several wins, wherever the pieces are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowq_cli.engine.stopping import Stopper, check
from lowq_packers.errors import UsageError

TEXTS = st.text(alphabet="ab\n", max_size=12)


@given(st.lists(TEXTS, max_size=6), st.lists(TEXTS.filter(bool), max_size=3))
def test_the_shown_text_ends_before_the_first_stop(pieces, stops):
    whole, stopper, shown = "".join(pieces), Stopper(stops), ""
    cut = False
    for piece in pieces:
        if not cut:
            more, cut = stopper.push(piece)
            shown += more
    shown += "" if cut else stopper.flush()
    ends = [at for s in stops if (at := whole.find(s)) >= 0]
    assert cut == bool(ends)
    if not cut:
        assert shown == whole
    else:  # a later piece may complete a stop that begins before the one already found, which then does not count
        assert whole.startswith(shown)
        assert any(whole[len(shown) :].startswith(s) for s in stops)
        assert not any(s in shown for s in stops)


def test_text_is_held_back_only_while_it_may_be_a_stop():
    stopper = Stopper(["\n\nUser:"])
    assert stopper.push("Hi.\n") == ("Hi.", False)
    assert stopper.push("\nUse") == ("", False)
    assert stopper.push("ful") == ("\n\nUseful", False)
    assert stopper.push("\n\nUser: x") == ("", True)


def test_an_empty_stop_is_refused():
    with pytest.raises(UsageError, match="is empty"):
        check(["x", ""])


OVERLAPPING = [(("a", "baa"), "cbaab", "cb"), (("abcd", "bc"), "xabcd", "xa"), (("ba", "a"), "cba", "c")]


@pytest.mark.parametrize(("stops", "text", "shown"), OVERLAPPING)
def test_the_stop_that_is_whole_first_counts_however_the_text_comes(stops, text, shown):
    """A reader that is slow gets several tokens at once."""
    for size in range(1, len(text) + 1):
        stopper, out = Stopper(stops), ""
        for at in range(0, len(text), size):
            piece, cut = stopper.push(text[at : at + size])
            out += piece
            if cut:
                break
        assert (out, cut) == (shown, True), size
