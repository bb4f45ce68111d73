"""When a step with drafts is recorded: once it would have saved as much time as its recording takes.

To record a step of an 8B and run it once took 26 ms on an H200, as long as 20 plain steps, and a text of 64 tokens is over
before that is earned back. Two things make it cheap. The launches are recorded in slices, in the time in which the host waits
for plain steps (`engine/slices.py`). And a width is recorded only after plain steps, or steps of other widths, in whose place
steps of this width would have been expected to save its price: as with skis, which one hires until the hire has cost what a
pair costs, a text that never copies pays nothing, and no text pays more than it could have gained so far.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lowq_cli.engine.drafts.draft_length import Costs, most
from lowq_cli.engine.drafts.drafter import Guess
from lowq_cli.engine.kernel_launches import checks
from lowq_cli.engine.slices import Sliced
from lowq_packers.errors import device_lost, log_error

Launches = Iterable[Callable[[], object]]
PRICE_S = 1e-3  # seconds that plain steps lose while another step is recorded in slices
# Seconds that they lose in addition with the first recording of a process, as calls that load kernels cannot be cut: with it a
# text of 64 tokens by an 8B took 112 instead of 102 ms (H100).
LOADING_S = 10e-3
AT_ONCE_S = 50e-3  # seconds of a recording that plain steps have to wait for, where recording in slices failed


class Recordings:
    """The recorded widths of a decoder's steps with drafts, kept for all texts.

    Args:
        step_s: seconds of a plain step, as estimated; the unit of costs. launches: returns one launch of each kernel of a step.
    Attributes:
        ready: widths that steps may have, ascending. missed: width -> seconds that it would have saved until now.
    """

    def __init__(self, decoder: Any, widths: Sequence[int], step_s: float, launches: Callable[..., Launches] = checks) -> None:
        self.decoder, self.widths, self.step_s, self.launches = decoder, widths, step_s, launches
        self.ready = list[int]()
        self.missed, self.price = dict.fromkeys(widths, 0.0), dict.fromkeys(widths, PRICE_S + LOADING_S)
        self.rates = dict[int, float]()  # width -> seconds a token that it would save at the last choice
        self.tokens = 0  # of this text
        self.launched = set[int]()  # widths whose kernels were compiled
        self.slices: Sliced | None = None
        self.stopped: Sliced | None = None  # the last one that was given up; it may still be in a compiler
        self.width = 0  # that is being recorded

    def begin(self) -> None:
        """Start a text."""
        self.tokens, self.rates = 0, {}
        self._look()

    def choose(self, guess: Guess, costs: Costs, apart: float, plain: float) -> int:
        """As `draft_length.worth`, of the widths that are ready; notes what the others would save."""
        self.rates = {}
        drafts, best = most(guess, costs, self.ready, apart, plain)
        for width in set(self.widths).difference(self.ready) if guess.tokens else ():
            more, tokens = most(guess, costs, (width,), apart, plain)
            if more and tokens > best:
                self.rates[width] = (1 / best - 1 / tokens) * self.step_s
        return drafts

    def note(self, tokens: int, left: int, begins: bool) -> None:
        """Count what other widths would have saved with the step that was read, and begin to record one that is worth it.

        left: tokens that may still be generated. begins: whether a recording may begin now.
        """
        self.tokens += tokens
        for width, seconds in self.rates.items():
            self.missed[width] += seconds * tokens
        widths, self.rates = list(self.rates), {}
        if begins and widths and self.slices is None and (self.stopped is None or self.stopped.ended):
            width = max(widths, key=lambda w: self.missed[w] / self.price[w])
            if self.missed[width] * min(1.0, left / self.tokens) >= self.price[width]:
                self._record(width)

    def meanwhile(self, until: float) -> None:
        """Record until `until`, in seconds of `time.perf_counter`."""
        if self.slices is not None:
            self.slices.lend(until)
            if self.slices.ended:
                self._take()

    def finish(self) -> None:
        """Wait for the recording that was begun, or give it up while its kernels are still compiled, which can take seconds."""
        if self.slices is None:
            return
        if not self.slices.ended and self.slices.stop():
            self.slices, self.stopped = None, self.slices
        else:
            self._take()

    def _take(self) -> None:
        assert self.slices is not None
        slices, self.slices = self.slices, None
        slices.finish()
        if (e := slices.error) is not None:
            if not isinstance(e, RuntimeError) or device_lost(e):
                raise e
            log_error(f"a step of {self.width} rows is not recorded in slices", e)
        if not self.launched:
            self.price = dict.fromkeys(self.widths, PRICE_S)
        if e is not None:
            self.price[self.width] = AT_ONCE_S  # its first step is run, then recorded
        self.launched.add(self.width)
        self._look()

    def _record(self, width: int) -> None:
        if self.price[width] == AT_ONCE_S:
            self._have([*self.ready, width])
        else:
            d = self.decoder
            launches = () if width in self.launched else self.launches(d, width, (d.slots,), d.angles)
            self.width, self.slices = width, d.record_aside(width, launches)

    def _look(self) -> None:
        steps = self.decoder.wide
        self._have([w for w in self.widths if w in steps and steps[w].ready])

    def _have(self, ready: list[int]) -> None:
        if ready != self.ready:  # the others would save less than before
            self.ready, self.missed, self.rates = sorted(ready), dict.fromkeys(self.widths, 0.0), {}
