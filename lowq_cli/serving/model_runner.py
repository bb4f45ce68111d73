"""One pass of the model: a decode step of many sequences and pieces of prompts, together in the same matrix products.

The rows of a pass are those of `b` sequences that step, one token each, then the prompt tokens of several sequences one after
another. The matrix products take all rows as one matrix, so that prompt tokens cost little in addition to a step, whose time is
that of reading the weights. On a GPU passes of up to RECORDED rows are recorded as CUDA graphs at the start.

Where a plan has LoRA adapters, there are two kinds of passes of each size: those in which some row has an adapter, and those in
which none has, which run the base's own steps.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from lowq_cli.engine.batch import Batch, KeyValues, States, refill, upload
from lowq_cli.engine.graph import Captured, capture
from lowq_cli.engine.mixer_steps import Attend, AttendLatent
from lowq_cli.engine.pictures import PassImages, Shown, in_pass
from lowq_cli.engine.plan import Plan
from lowq_cli.engine.state import BLOCK
from lowq_cli.serving.batch_state import BatchState
from lowq_cli.serving.pass_sizes import PICTURED, RECORDED, PassSizes
from lowq_cli.serving.prompt_chunk import ChunkLayout, Piece, most_ends, runs_of
from lowq_cli.serving.token_budget import TokenBudget
from lowq_kernels import counters
from lowq_kernels.activations import STEPS
from lowq_kernels.decode.mixture import FEW_TOKENS
from lowq_kernels.decode.reference import TILE, Packed
from lowq_kernels.decode.runs import Run, Runs
from lowq_kernels.products.cpu.team import Team
from lowq_packers.errors import device_lost, log_error, one_line

COUNTERS = 1 << 18  # max. counters for the kernels of a recorded pass: an 8B's largest products use a few thousand each


def most_recorded(plan: Plan, state: Sequence[KeyValues | States]) -> int:
    """Return the max. rows of a pass with prompt tokens, over a paged state, that can be recorded; 0 if none can.

    The host groups a mixture's experts where no kernel does and tokens are many, gathers latents where no kernel reads them,
    and reads which sequence each prompt token belongs to where no kernel takes prompts: none of these can be recorded.
    """
    latents = [step for step in plan.steps if isinstance(step, AttendLatent)]
    held = [(one.k, step.facts) for step in latents if isinstance(one := state[step.index], KeyValues)]
    plain = [(one.k, s.heads) for s in plan.steps if isinstance(s, Attend) and isinstance(one := state[s.index], KeyValues)]
    gathered = any(plan.ops.latent.refuse(plan.dtype, *one) for one in held)
    gathered |= any(plan.ops.packed_waits(plan.dtype, *one) for one in plain)
    return 0 if gathered else min(RECORDED, FEW_TOKENS) if plan.grouped_by_host else RECORDED


class ModelRunner:
    """The passes of a model over a paged cache.

    Args:
        plan: the model. rows: the sequences' state. most: max. rows that step.
        state: the state of every stateful layer, keys and values in blocks. slots: positions that the block tables cover.
        fixed: as of `PassSizes`, so that the same kernels run whatever the other requests are.
    Attributes:
        capture: records a step, which returns its logits, in a pool of memory, as `graph.capture` does.
    """

    def __init__(
        self, plan: Plan, rows: BatchState, most: int, state: Sequence[KeyValues | States], slots: int, fixed: bool = False
    ) -> None:
        self.plan, self.rows, self.state, self.slots, self.device, self.ops = plan, rows, state, slots, plan.device, plan.ops
        self.capture: Callable[[Callable[[], object], Any], Captured] = capture
        # for the longest possible sequence (plus a block, `paged`), as vLLM does: rotary angles depend on no other sequence
        self.angles = plan.angles(slots, self.device, slots - BLOCK)
        self.recurrent = [one for one in state if isinstance(one, States)]
        self.by_text = bool(self.recurrent) or any(isinstance(step, AttendLatent) for step in plan.steps)
        # whether passes are with adapters; with both kinds, the same kernels would not run whatever the other requests are
        kinds = (False, True) if plan.adapters is not None else (False,)
        kinds, padded = kinds[-1:] if fixed or plan.everywhere else kinds, self.device.type == "cuda" or fixed
        self.sizes = PassSizes(most, padded, fixed, plan.model.images, kinds, most_recorded(plan, state), plan.most_recorded)
        # recorded passes by rows that step, all rows and whether they are with adapters
        self.captured: dict[tuple[int, int, bool], tuple[Captured, torch.Tensor | None]] = {}
        # the same where some sequence has images: steps with rotary positions of three parts, and passes with prompts
        self.showing: dict[tuple[int, int, bool], tuple[Captured, torch.Tensor | None]] = {}
        self.pass_images: PassImages | None = None
        self.pass_logits: torch.Tensor | None = None  # of all passes with prompts where some sequence has images
        self.left_pictured: Iterator[tuple[int, int, bool]] | None = None  # passes of `pictured` that were not recorded yet
        self.pool: Any = None  # memory that all recordings share
        self.met: set[tuple[int, int, bool]] | None = None  # sizes that ran once, if sizes are recorded when they first repeat
        self.untimed: list[tuple[int, int, bool]] = []  # those that `record_next` times
        self.reason = ""  # why passes that should be recorded are not
        self.token_budget = TokenBudget(self.sizes.totals)
        self.teams = defaultdict[int, Team](Team)  # by number of rows that step
        self.noted: dict[int, torch.Tensor] | None = None  # hidden states (M, H) of the last pass, if a drafter reads them

    def adapted(self, n: int, rows: Iterable[int] = ()) -> bool:
        """Return whether a pass of the first n rows, with pieces of prompts or drafts in `rows`, is one with adapters."""
        kinds = self.sizes.kinds
        return kinds[0] if len(kinds) == 1 else self.rows.adapted(n, rows)

    def run(self, n: int, pieces: Sequence[Piece] = (), drawn: np.ndarray | None = None) -> torch.Tensor | None:
        """Launch a pass of the first n rows and of pieces; return logits: n rows, padded, then one row per piece that samples.

        drawn: (n,) values as in `BatchState.target` for the first n rows; required with pieces. The logits are valid until
        the next pass. None where no row samples.
        """
        (b, M), adapted = self.sizes.size(n, sum(len(p.tokens) for p in pieces)), self.adapted(n, (p.row for p in pieces))
        if any(p.shown for p in pieces) or self.rows.shifted(n):
            return self._with_pictures(b, M, pieces, drawn, adapted)
        if not pieces:
            with self.teams[b] if self.device.type == "cpu" else nullcontext():
                return self._go(b, M, None, adapted=adapted)
        assert drawn is not None or not b
        runs = runs_of(pieces)
        return self._go(b, M, *self.layout(b, M).pack(pieces, drawn, runs), runs, adapted)

    def layout(self, b: int, M: int) -> ChunkLayout:
        """Return the layout of the prompt tokens in a pass of M rows, of which b step."""
        return ChunkLayout(b, M - b, self.plan.tile, self.rows.null_row, self.sizes.padded, self.by_text)

    def _with_pictures(
        self, b: int, M: int, pieces: Sequence[Piece], drawn: np.ndarray | None, adapted: bool
    ) -> torch.Tensor | None:
        """`run` for a pass in which some sequence has images."""
        runs, recorded = runs_of(pieces), self.showing.get((b, M, adapted))
        chunk, n = (None, 0) if not pieces else self.layout(b, M).pack(pieces, drawn, runs)
        given = [(p.shown, p.first, p.end) for p in pieces]
        if recorded is None:
            return self.forward(b, M, None if chunk is None else upload(chunk, self.device), n, runs, given, adapted)
        graph, place = recorded
        if place is not None and chunk is not None and self.pass_images is not None:
            self.pass_images.fill(given, M - b)
            place.copy_(upload(chunk, self.device))
        graph.replay()
        self.noted = graph.noted
        return graph.logits

    def record_pictured(self) -> bool:
        """Record one of the passes of `pictured`; return False if none is left, or if one with prompts cannot be recorded. No
        pass may be in flight, and no row may belong to a sequence."""
        self.left_pictured = self.sizes.pictured() if self.left_pictured is None else self.left_pictured
        b, M, adapted = next(self.left_pictured, (0, 0, False))
        if not M:
            return False
        images, place, n = self.plan.model.images, None, 0
        if b < M:
            assert images is not None
            if self.pass_images is None:
                width = self.plan.embed(torch.zeros(1, dtype=torch.int64, device=self.device)).shape[1]
                self.pass_images = PassImages(images, max(RECORDED, *PICTURED), width, self.device, self.plan.dtype)
                most = max(b + most_ends(M - b) for b, M in self.sizes.recorded() if b != M)
                self.pass_logits = torch.empty(most, self.plan.vocabulary, dtype=self.plan.dtype, device=self.device)
            chunk, n = self.layout(b, M).pack()
            place = upload(chunk, self.device)
        step = partial(self.forward, b, M, place, n, (), [] if place is None else self.pass_images, adapted)
        into = None if place is None or self.pass_logits is None else self.pass_logits[: b + most_ends(M - b)]
        try:
            self.showing[b, M, adapted] = self.graph_of(step, into, first=True), place
        except RuntimeError as e:  # cannot be recorded, or no memory for it: such passes then run unrecorded, only slower
            if device_lost(e):
                raise
            log_error(f"{'steps' if b == M else 'passes'} of {M} rows with pictures are not recorded", e)
            self.left_pictured = self.left_pictured if b == M else iter(())
            return b == M
        return True

    def graph_of(
        self, step: Callable[[], torch.Tensor | None], into: torch.Tensor | None, first: bool = False, again: bool = False
    ) -> Captured:
        """Record a pass that returns logits. Raises RuntimeError where it cannot be recorded.

        into: a tensor that gets the logits, None for one of the recording's own. first: run it before, which loads its kernels.
        again: after a failure, run it and record it once more: a thread's first product in cuBLAS cannot be recorded.
        """
        made = list[torch.Tensor | None]()

        def run() -> torch.Tensor | None:
            out = step()
            made[:] = [out if into is None or out is None else into.copy_(out)]
            return made[0]

        if first:
            run()
        try:
            graph = self.capture(run, self.pool)
        except RuntimeError as e:  # if it comes again, the caller gets it
            if not again or device_lost(e) or isinstance(e, torch.OutOfMemoryError):
                raise
            log_error("a pass is recorded once more", e)
            return self.graph_of(step, into, first=True)
        assert made[0] is not None
        graph.logits, graph.noted = made[0], self.noted
        return graph

    def _go(
        self, b: int, M: int, chunk: np.ndarray | None, tiles: int = 0, runs: Sequence[Run] = (), adapted: bool = False
    ) -> torch.Tensor | None:
        key = b, M, adapted
        if self.met is not None and key not in self.captured:
            if key not in self.met:
                self.met.add(key)
            elif (b, M) in self.sizes.recorded():
                self._record(*key, live=True)
        recorded = self.captured.get(key)
        if recorded is None:
            return self.forward(b, M, None if chunk is None else upload(chunk, self.device), tiles, runs, None, adapted)
        graph, place = recorded
        if place is not None and chunk is not None:
            refill(place, chunk)
        graph.replay()
        self.noted = graph.noted
        return graph.logits

    def forward(
        self,
        b: int,
        M: int,
        chunk: torch.Tensor | None,
        n: int,
        runs: Sequence[Run] = (),
        shown: Sequence[tuple[Shown | None, int, int]] | PassImages | None = None,
        adapted: bool = False,
    ) -> torch.Tensor | None:
        """Compute a pass, from and into tensors at fixed addresses; `chunk` and its n tiles have the `layout`.

        shown: in a pass with images, for each piece its images, its first token and its end. adapted: with the rows' adapters.
        """
        r, C, layout = self.rows, M - b, self.layout(b, M)
        packed, own, tokens, take, target = None, None, r.token[:b], None, r.target[:b]
        if chunk is not None:
            states, ids, pos, rows, tiles, take, target = layout.unpack(chunk, n)
            own = Runs(runs, C, self.device, states if len(states) else None, layout.states[0])
            units = sum(-(-run.length // TILE) for run in runs)
            packed = Packed(r.tables[0] if r.tables else rows.view(-1, 1), rows, pos, tiles, units, len(runs))
            tokens = torch.cat([tokens, ids]) if b else ids
        slots = r.slot[:b].long() if self.recurrent and b else None
        pictures = None
        if isinstance(shown, PassImages):
            pictures = shown.of(C, r.pos[:b] + r.shift[:b])
        elif shown is not None and self.plan.model.images is not None:
            pictures = in_pass(self.plan.model.images, shown, self.device, r.pos[:b] + r.shift[:b], C)
        adapters = None
        if adapted:
            adapters = r.adapter[:b] if chunk is None else torch.cat([r.adapter[:b], r.adapter.index_select(0, rows)])
        batch = Batch(
            self.ops, tokens, b, r.pos, self.angles, slots, r.order, given=packed, given_runs=own, pictures=pictures,
            adapters=adapters,
        )  # fmt: skip
        x = self.hidden(tokens, batch, self.state)
        if take is not None:
            if not take.shape[0]:
                return None
            x = x.index_select(0, take)
        logits = self.plan.capped(self.plan.logits(x)).contiguous()
        self.ops.choose_rows(logits, target, r.token, r.pos, r.seed, r.temperature)
        return logits

    def hidden(self, ids: torch.Tensor, batch: Batch, state: Sequence[KeyValues | States]) -> torch.Tensor:
        """Return the hidden states of a pass's rows; those of the layers of `plan.tap` stay in `noted`, the last one as -1."""
        if self.noted is None:
            return self.plan.hidden(self.plan.embed(ids), batch, state)
        taps = list[torch.Tensor]()
        y = self.plan.hidden(self.plan.embed(ids), batch, state, taps)
        self.noted = dict(zip(self.plan.taps, taps, strict=True)) | {-1: y}
        return y

    def zero(self, slots: Sequence[int]) -> None:
        """Zero the recurrent states of new sequences."""
        if slots:
            at = upload(np.array(slots, np.int64), self.device)
            for t in (t for one in self.recurrent for t in one.tensors.values()):
                t.index_fill_(0, at, 0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy recurrent states from one slot to another; no slot is in two pairs."""
        if pairs:
            at = upload(np.array(pairs, np.int64).T.copy(), self.device)
            for t in (t for one in self.recurrent for t in one.tensors.values()):
                t.index_copy_(0, at[1], t.index_select(0, at[0]))

    def graph_bytes(self) -> int:
        """Return the bytes of the recorded passes' logits, which keep their addresses; with pictures one pass's more."""
        head = self.plan.vocabulary * self.plan.dtype.itemsize
        each = [(b + most_ends(M - b)) * head for b, M in self.sizes.recorded()]
        return sum(each) + (max(each, default=0) if self.sizes.shows else 0)

    def record(self, done: Callable[[int, int], None] = lambda n, of: None) -> None:
        """Record and time the passes of `recorded`. No pass may be in flight, and no row may belong to a sequence.

        If a pass cannot be recorded, this one and those after it are launched kernel by kernel, and `reason` says so.
        """
        keys, timed = self.sizes.keys, self.sizes.timed
        counters.reserve(len(keys) * COUNTERS, self.device)
        for i, (b, M, adapted) in enumerate(keys):
            # larger passes, which were timed, gather latents by other kernels than recorded ones
            first = (adapted and M <= STEPS) or (self.by_text and b != M == self.sizes.totals[0])
            if not self._record(b, M, adapted, first):
                return
            if (b, M, adapted) in timed:
                self.measure(b, M, adapted)
            done(i + 1, len(keys))
        while self.record_pictured():
            pass

    def record_when_met(self) -> None:
        """Record each size when it comes the second time; the first time compiles or loads its kernels."""
        counters.reserve(len(self.sizes.keys) * COUNTERS, self.device)
        self.met, self.pool = set(), torch.cuda.graph_pool_handle()  # with a pool, `capture` runs nothing on live rows
        self.untimed = [key for key in self.sizes.timed if key not in self.token_budget.known]

    def record_next(self) -> bool:
        """Record one of the passes that `record_when_met` leaves, in the order of `recorded`, then of `pictured`, and time it
        unless an earlier load has; between these, time larger ones. Return False if there is none. As for `record`, no pass may
        be in flight, and no row may belong to a sequence."""
        if self.met is None:
            return False
        keys, untimed = self.sizes.keys, self.untimed
        key = next((k for k in (*keys, *untimed) if k not in self.captured or k in untimed), None)
        if key is None:
            return self.record_pictured()
        if key in keys and key not in self.captured and not self._record(*key, first=True):
            return False
        if key in untimed:
            untimed.remove(key)
            try:
                self.measure(*key)
            except torch.OutOfMemoryError as e:  # its seconds are then estimated from those of other passes
                log_error(f"passes of {key[1]} rows are not timed", e)
        return True

    def _record(self, b: int, M: int, adapted: bool, first: bool = False, live: bool = False) -> bool:
        """Record a pass; `first`: run it before, which loads its kernels. live: rows belong to sequences, which a run would
        advance. Returns False if it cannot be recorded."""
        chunk, n = (None, 0) if b == M else self.layout(b, M).pack()
        place = None if chunk is None else upload(chunk, self.device)
        # the logits of both kinds share memory: with 128 sequences of an 8B those of one kind take 0.7 GB
        base = self.captured.get((b, M, False)) if adapted else None
        step = partial(self.forward, b, M, place, n, (), None, adapted)
        try:
            graph = self.graph_of(step, None if base is None else base[0].logits, first, again=not live)
        except RuntimeError as e:  # passes then run unrecorded, only slower
            if device_lost(e) or (self.met is None and isinstance(e, torch.OutOfMemoryError)):
                raise
            self.reason, self.met = f"passes of {M} rows and more are not recorded: {one_line(e)}", None
            return False
        self.pool = self.pool or graph.graph.pool()
        self.captured[b, M, adapted] = graph, place
        return True

    def measure(self, b: int, M: int, adapted: bool = False) -> None:
        """Time a pass of null rows (the second of two runs), and note it for all passes of M rows, with or without prompts."""
        most, null = self.slots, self.rows.null_row
        dummies = [Run(i, min(i + most, M - b), 0, 0, null) for i in range(0, M - b, most)] if self.by_text else []
        dummies = dummies[: most_ends(M - b)]
        chunk, n = (None, 0) if b == M else self.layout(b, M).pack(runs=dummies)
        seconds = self.timed(lambda: self._go(b, M, chunk, n, dummies, adapted), adapted)
        for steps, rows, kind in {(b, M, adapted), *self.captured}:
            if rows == M and (steps == M) == (b == M) and kind == adapted:
                self.token_budget.note(steps, rows, seconds, adapted)

    def timed(self, launch: Callable[[], object], adapted: bool = False) -> float:
        """Return the seconds of the second of two launches; adapted: all rows, which belong to no sequence, have adapter 1."""
        wait = torch.cuda.current_stream(self.device).synchronize if self.device.type == "cuda" else lambda: None
        self.rows.adapter.fill_(int(adapted))
        for _ in range(2):
            wait()
            began = time.perf_counter()
            launch()
            wait()
        seconds = time.perf_counter() - began
        self.rows.adapter.zero_()
        return seconds
