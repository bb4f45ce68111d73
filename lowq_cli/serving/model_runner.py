"""One pass of the model: a decode step of many sequences and pieces of prompts, together in the same matrix products.

The rows of a pass are those of `b` sequences that step, one token each, then the prompt tokens of several sequences one after
another. The matrix products take all rows as one matrix, so that prompt tokens cost little in addition to a step, whose time is
that of reading the weights. On a GPU there are few sizes of passes, padded with null rows, and passes of up to RECORDED rows
are recorded as CUDA graphs at the start. On a CPU a pass has exactly the rows it needs.

Where a plan has LoRA adapters, there are two kinds of passes of each size: those in which some row has an adapter, and those in
which none has, which run the base's own steps.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from lowq_cli.engine.batch import Batch, KeyValues, States, refill, upload
from lowq_cli.engine.graph import Captured, capture
from lowq_cli.engine.pictures import PassImages, Shown, in_pass
from lowq_cli.engine.plan import Plan
from lowq_cli.engine.state import BLOCK
from lowq_cli.serving.batch_state import BatchState
from lowq_cli.serving.scheduler import READERS, buckets
from lowq_cli.serving.token_budget import TokenBudget
from lowq_kernels import counters
from lowq_kernels.activations import STEPS
from lowq_kernels.decode.mixture import FEW_TOKENS
from lowq_kernels.decode.reference import TILE, Packed
from lowq_kernels.decode.runs import CHUNK, Run, Runs, states_of
from lowq_kernels.products.cpu.team import Team
from lowq_packers.errors import device_lost, log_error, one_line

# Max. rows of a recorded pass: launching an 8B's kernels one by one takes 6 to 15 ms, computing a pass of 512 rows 10.5 ms.
RECORDED = 1024
# Sizes, in rows, of passes with prompt tokens. Sizes that are not recorded cost nothing, and a prompt of 3,200 tokens in a pass
# of 4,096 rows took 28% longer than necessary; products work on tiles of up to 256 rows.
TOTALS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, *range(1280, 4097, 256))
# Sizes of passes without steps that are recorded as well for models that see: one picture of 1,024 rows and its text. Launching
# an 8B's kernels for them took the host 53 ms on an H200, which computes them in 30.
PICTURED = (1152, 1280)
COUNTERS = 1 << 18  # max. counters for the kernels of a recorded pass: an 8B's largest products use a few thousand each
RIDING = 8  # min. rows that step in a pass with prompt tokens; their number is this times a power of two


@dataclass(frozen=True)
class Piece:
    """A piece of a prompt.

    row: the row of its block tables. first: the position of its first token. target: the row that samples after it, or -1.
    slot: the slot of its recurrent state. shown: the images of its sequence.
    """

    row: int
    first: int
    tokens: Sequence[int]
    target: int
    slot: int = 0
    shown: Shown | None = None

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.first + len(self.tokens)


class ModelRunner:
    """The passes of a model over a paged cache.

    Args:
        plan: the model. rows: the sequences' state. most: max. rows that step.
        state: the state of every stateful layer, keys and values in blocks. slots: positions that the block tables cover.
        fixed: whether steps have one size, prompts have one size, and no pass mixes them, so that the same kernels run
            whatever the other requests are.
    Attributes:
        capture: records a step, which returns its logits, in a pool of memory, as `graph.capture` does.
    """

    def __init__(
        self,
        plan: Plan,
        rows: BatchState,
        most: int,
        state: Sequence[KeyValues | States],
        slots: int,
        fixed: bool = False,
    ) -> None:
        self.plan, self.rows, self.most, self.state, self.fixed, self.slots = plan, rows, most, state, fixed, slots
        self.device, self.ops = plan.device, plan.ops
        self.capture: Callable[[Callable[[], object], Any], Captured] = capture
        self.padded = self.device.type == "cuda" or fixed
        # for the longest possible sequence (plus a block, `paged`), as vLLM does: rotary angles depend on no other sequence
        self.angles = plan.angles(slots, self.device, slots - BLOCK)
        self.recurrent = [one for one in state if isinstance(one, States)]
        self.sizes = [most] if fixed else list(buckets(most))
        self.totals = (512,) if fixed else TOTALS if plan.model.images is None else tuple(sorted({*TOTALS, *PICTURED}))
        # the host groups a mixture's experts where no kernel does and tokens are many, and it gathers latents: neither can be
        # recorded
        latents = any(isinstance(one, KeyValues) and one.v is None for one in state)
        self.by_text = latents or bool(self.recurrent)
        self.most_recorded = 0 if latents else min(RECORDED, FEW_TOKENS) if plan.grouped_by_host else RECORDED
        # whether passes are with adapters; with both kinds, the same kernels would not run whatever the other requests are
        self.kinds = (False, True) if plan.adapters is not None else (False,)
        self.kinds = self.kinds[-1:] if fixed or plan.everywhere else self.kinds
        # recorded passes by rows that step, all rows and whether they are with adapters
        self.captured: dict[tuple[int, int, bool], tuple[Captured, torch.Tensor | None]] = {}
        # steps by number of rows and kind, with rotary positions of three parts for images
        self.turned: dict[tuple[int, bool], Captured] = {}
        # passes with prompts where some sequence has images
        self.showing: dict[tuple[int, int, bool], tuple[Captured, torch.Tensor]] = {}
        self.pass_images: PassImages | None = None
        self.pass_logits: torch.Tensor | None = None  # of all passes with prompts where some sequence has images
        self.left_pictured: Iterator[tuple[int, int, bool]] | None = None  # passes of `pictured` that were not recorded yet
        self.pool: Any = None  # memory that all recordings share
        self.met: set[tuple[int, int, bool]] | None = None  # sizes that ran once, if sizes are recorded when they first repeat
        self.reason = ""  # why passes that should be recorded are not
        self.token_budget = TokenBudget(self.totals)
        self.teams = defaultdict[int, Team](Team)  # by number of rows that step
        self.noted: dict[int, torch.Tensor] | None = None  # hidden states (M, H) of the last pass, if a drafter reads them

    @property
    def shows(self) -> bool:
        """Whether passes with pictures can be recorded: no kernel takes tokens that attend to the whole image."""
        images = self.plan.model.images
        return images is not None and not images.whole

    def bucket(self, n: int) -> int:
        """Return the rows that a step of n sequences computes."""
        return next(s for s in self.sizes if s >= n) if self.padded and n else n

    def riding(self, n: int) -> int:
        """Return the rows that a step of n sequences takes in a pass with prompt tokens."""
        if not self.padded or not n:
            return n
        return min(max(RIDING, 1 << (n - 1).bit_length()), self.most)

    def size(self, n: int, pieces: Sequence[Piece]) -> tuple[int, int]:
        """Return the rows that step, and all rows, of a pass of the first n rows and these pieces."""
        if not pieces:
            return self.bucket(n), self.bucket(n)
        b = self.riding(n)
        M = b + sum(len(p.tokens) for p in pieces)
        return b, next(t for t in self.totals if t >= M) if self.padded else M

    def adapted(self, n: int, rows: Iterable[int] = ()) -> bool:
        """Return whether a pass of the first n rows, with pieces of prompts or drafts in `rows`, is one with adapters."""
        return self.kinds[0] if len(self.kinds) == 1 else self.rows.adapted(n, rows)

    def run(self, n: int, pieces: Sequence[Piece] = (), drawn: np.ndarray | None = None) -> torch.Tensor | None:
        """Launch a pass of the first n rows and of pieces; return logits: n rows, padded, then one row per piece that samples.

        drawn: (n,) values as in `BatchState.target` for the first n rows; required with pieces. The logits are valid until
        the next pass. None where no row samples.
        """
        (b, M), adapted = self.size(n, pieces), self.adapted(n, (p.row for p in pieces))
        if any(p.shown for p in pieces) or self.rows.shifted(n):
            return self._with_pictures(b, M, pieces, drawn, adapted)
        if not pieces:
            with self.teams[b] if self.device.type == "cpu" else nullcontext():
                return self._go(b, M, None, adapted=adapted)
        assert drawn is not None or not b
        runs = self._runs(pieces)
        return self._go(b, M, *self._describe(b, M - b, pieces, drawn, runs), runs, adapted)

    def _with_pictures(
        self, b: int, M: int, pieces: Sequence[Piece], drawn: np.ndarray | None, adapted: bool
    ) -> torch.Tensor | None:
        """`run` for a pass in which some sequence has images; only steps without prompts are recorded for these."""
        if not pieces and (b, adapted) in self.turned:
            graph = self.turned[b, adapted]
            graph.replay()
            self.noted = graph.noted
            return graph.logits
        runs = self._runs(pieces)
        chunk, n = (None, 0) if not pieces else self._describe(b, M - b, pieces, drawn, runs)
        given = [(p.shown, p.first, p.end) for p in pieces]
        if (b, M, adapted) in self.showing and chunk is not None and self.pass_images is not None:
            graph, place = self.showing[b, M, adapted]
            self.pass_images.fill(given, M - b)
            place.copy_(upload(chunk, self.device))
            graph.replay()
            self.noted = graph.noted
            return graph.logits
        return self.forward(b, M, None if chunk is None else upload(chunk, self.device), n, runs, given, adapted)

    def pictured(self) -> Iterator[tuple[int, int, bool]]:
        """Yield (rows that step, all rows, whether with adapters) of every pass to record for sequences with images: steps, if
        these need separate rotary positions, and passes with prompts."""
        images = self.plan.model.images
        if images is not None and images.sections:
            yield from ((b, b, adapted) for b, adapted in product(self.sizes, self.kinds))
        if self.shows:
            yield from ((b, M, adapted) for (b, M), adapted in product(self.recorded(), self.kinds) if b != M)
            alone = PICTURED if self.most_recorded == RECORDED and not self.fixed else ()
            yield from ((0, M, adapted) for M, adapted in product(alone, self.kinds) if self.plan.most_recorded >= M)

    def record_pictured(self) -> bool:
        """Record one of the passes of `pictured`; return False if none is left, or if one with prompts cannot be recorded. No
        pass may be in flight, and no row may belong to a sequence."""
        self.left_pictured = self.pictured() if self.left_pictured is None else self.left_pictured
        b, M, adapted = next(self.left_pictured, (0, 0, False))
        if not M:
            return False
        if b == M:
            graph = self._recording(partial(self.forward, b, b, None, 0, (), [], adapted), f"steps of {b} rows")
            if graph is not None:
                self.turned[b, adapted] = graph
            return True
        assert self.plan.model.images is not None
        if self.pass_images is None:
            width = self.plan.embed(torch.zeros(1, dtype=torch.int64, device=self.device)).shape[1]
            self.pass_images = PassImages(self.plan.model.images, max(RECORDED, *PICTURED), width, self.device, self.plan.dtype)
            most = max(b + self.ends(M - b) for b, M in self.recorded() if b != M)
            self.pass_logits = torch.empty(most, self.plan.vocabulary, dtype=self.plan.dtype, device=self.device)
        chunk, n = self._describe(b, M - b, (), None)
        place = upload(chunk, self.device)
        step = partial(self.forward, b, M, place, n, (), self.pass_images, adapted)
        graph = self._recording(step, f"passes of {M} rows", self.pass_logits)
        if graph is None:
            self.left_pictured = iter(())
            return False
        self.showing[b, M, adapted] = graph, place
        return True

    def _recording(
        self,
        step: Callable[[], torch.Tensor | None],
        what: str,
        logits: torch.Tensor | None = None,
    ) -> Captured | None:
        """Record a pass with pictures; None where that fails: the pass then runs unrecorded, only slower."""
        made = list[torch.Tensor | None]()

        def run() -> torch.Tensor | None:
            out = step()
            made[:] = [out if logits is None or out is None else logits[: out.shape[0]].copy_(out)]
            return made[0]

        try:
            run()  # compiles the kernels
            graph = self.capture(run, self.pool)
        except RuntimeError as e:  # cannot be recorded, or no memory for it
            if device_lost(e):
                raise
            log_error(f"{what} with pictures are not recorded", e)
            return None
        assert made[0] is not None
        graph.logits, graph.noted = made[0], self.noted
        return graph

    def _runs(self, pieces: Sequence[Piece]) -> list[Run]:
        """Return the prompt tokens of a pass as one Run per sequence."""
        ends = np.cumsum([0, *(len(p.tokens) for p in pieces)]).tolist()
        return [Run(ends[i], ends[i + 1], p.slot, p.first, p.row) for i, p in enumerate(pieces)]

    def _go(
        self, b: int, M: int, chunk: np.ndarray | None, tiles: int = 0, runs: Sequence[Run] = (), adapted: bool = False
    ) -> torch.Tensor | None:
        key = b, M, adapted
        if self.met is not None and key not in self.captured:
            if key not in self.met:
                self.met.add(key)
            elif (b, M) in self.recorded():
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

    @staticmethod
    def ends(C: int) -> int:
        """Return the max. number of prompts that can end in a pass with C prompt tokens."""
        return min(READERS, C)

    def _describe(
        self, b: int, C: int, pieces: Sequence[Piece], drawn: np.ndarray | None, runs: Sequence[Run] = ()
    ) -> tuple[np.ndarray, int]:
        """Return a pass's prompt tokens as one int32 array, and n: the runs for recurrent layers; ids, pos and rows (C each);
        tiles (n, 2); take and target of each row of the logits."""
        null, ends = self.rows.null_row, [p for p in pieces if p.target >= 0]
        ids, pos, rows = np.zeros(C, np.int32), np.zeros(C, np.int32), np.full(C, null, np.int32)
        last, tiles, first = [], list[tuple[int, int]](), 0
        for p in pieces:
            end = first + len(p.tokens)
            ids[first:end], pos[first:end], rows[first:end] = p.tokens, np.arange(p.first, p.first + len(p.tokens)), p.row
            tiles += [(t, min(t + self.plan.tile, end)) for t in range(first, end, self.plan.tile)]
            if p.target >= 0:
                last.append(b + end - 1)
            first = end
        of_steps = np.full(b, null, np.int32)
        of_steps[: 0 if drawn is None else len(drawn)] = () if drawn is None else drawn
        fill = self.ends(C) - len(ends) if self.padded else 0
        if self.padded:
            tiles += [(0, 0)] * (-(-C // self.plan.tile) + self.ends(C) - len(tiles))
        take = [*range(b), *last, *([0] * fill)]
        target = [*of_steps, *(p.target for p in ends), *([null] * fill)]
        of_tiles, of_logits = np.array(tiles, np.int32).reshape(-1), np.array([*take, *target], np.int32)
        return np.concatenate([self._of_states(C, runs), ids, pos, rows, of_tiles, of_logits]), len(tiles)

    def _of_states(self, C: int, each: Sequence[Run]) -> np.ndarray:
        """Return `states_of` the runs of a padded pass with recurrent layers, padded to the same length for any runs."""
        runs, tiles = self._states_rows(C)
        numbers = np.zeros((runs + tiles, 4), np.int32)
        if runs and each:
            of_runs, of_tiles = states_of(each)
            numbers[: len(of_runs)] = np.array(of_runs, np.int32).reshape(-1, 4)
            numbers[runs : runs + len(of_tiles)] = np.array(of_tiles, np.int32).reshape(-1, 4)
        return numbers.reshape(-1)

    def _states_rows(self, C: int) -> tuple[int, int]:
        """Return the max. runs, and tiles of runs, of a padded pass with recurrent layers."""
        return (self.ends(C), -(-C // CHUNK) + self.ends(C)) if self.padded and self.recurrent else (0, 0)

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
        """Compute a pass, from and into tensors at fixed addresses; `chunk` and its n tiles have the layout of `_describe`.

        shown: in a pass with images, for each piece its images, its first token and its end. adapted: with the rows' adapters.
        """
        r, C = self.rows, M - b
        packed, own, tokens, take, target = None, None, r.token[:b], None, r.target[:b]
        if chunk is not None:
            most, more = self._states_rows(C)
            states, chunk = chunk[: 4 * (most + more)], chunk[4 * (most + more) :]
            own = Runs(runs, C, self.device, states.view(-1, 4) if most else None, most)
            ids, pos, rows, rest = chunk[:C], chunk[C : 2 * C], chunk[2 * C : 3 * C], chunk[3 * C :]
            units = sum(-(-run.length // TILE) for run in runs)
            packed = Packed(
                r.tables[0] if r.tables else rows.view(-1, 1), rows, pos, rest[: 2 * n].view(n, 2), units, len(runs)
            )
            half = (rest.shape[0] - 2 * n) // 2
            take, target = rest[2 * n : 2 * n + half], rest[2 * n + half :]
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
        each = [(b + self.ends(M - b)) * head for b, M in self.recorded()]
        return sum(each) + (max(each, default=0) if self.shows else 0)

    def recorded(self) -> Iterator[tuple[int, int]]:
        """Yield (rows that step, all rows) of every pass to record, in the order in which they are needed."""
        largest = self.plan.most_recorded
        yield from ((s, s) for s in self.sizes if s <= largest)
        riding = (0,) if self.fixed else sorted({self.riding(s) for s in (0, *self.sizes)})
        yield from ((b, M) for M in self.totals for b in riding if b < M <= min(self.most_recorded, largest))

    def _keys(self) -> list[tuple[int, int, bool]]:
        """Return the passes to record of each kind, those without adapters first."""
        return [(b, M, adapted) for adapted in self.kinds for b, M in self.recorded()]

    def record(self, done: Callable[[int, int], None] = lambda n, of: None) -> None:
        """Record and time the passes of `recorded`. No pass may be in flight, and no row may belong to a sequence.

        If a pass cannot be recorded, this one and those after it are launched kernel by kernel, and `reason` says so. For
        each number of rows, only the pass with the most rows that step is timed: passes with fewer take up to 10% less (8B
        on an H200), and timing all 59 passes took 1.4 s.
        """
        keys = self._keys()
        most = {M: b for b, M, _ in keys if b != M}
        counters.reserve(len(keys) * COUNTERS, self.device)
        for i, (b, M, adapted) in enumerate(keys):
            if not self._record(b, M, adapted, first=adapted and M <= STEPS):
                return
            if b in (M, most.get(M)):
                self.measure(b, M, adapted)
            done(i + 1, len(keys))
        while self.record_pictured():
            pass

    def record_when_met(self) -> None:
        """Record each size when it comes the second time; the first time compiles or loads its kernels."""
        counters.reserve(len(self._keys()) * COUNTERS, self.device)
        self.met, self.pool = set(), torch.cuda.graph_pool_handle()  # with a pool, `capture` runs nothing on live rows

    def record_next(self) -> bool:
        """Record one of the passes that `record_when_met` leaves, in the order of `recorded`, then of `pictured`; return False
        if there is none. As for `record`, no pass may be in flight, and no row may belong to a sequence."""
        if self.met is None:
            return False
        key = next((k for k in self._keys() if k not in self.captured), None)
        return self.record_pictured() if key is None else self._record(*key, first=True)

    def _record(self, b: int, M: int, adapted: bool, first: bool = False, live: bool = False) -> bool:
        """Record a pass; `first`: run it before, which loads its kernels. live: rows belong to sequences, which a run would
        advance. Returns False if it cannot be recorded."""
        chunk, n = (None, 0) if b == M else self._describe(b, M - b, (), None)
        place = None if chunk is None else upload(chunk, self.device)
        made: list[torch.Tensor | None] = []
        # the logits of both kinds share memory: with 128 sequences of an 8B those of one kind take 0.7 GB
        base = self.captured.get((b, M, False)) if adapted else None

        def step() -> torch.Tensor | None:
            logits = self.forward(b, M, place, n, (), None, adapted)
            made.append(logits if base is None or logits is None else base[0].logits.copy_(logits))
            return made[-1]

        try:
            if first:
                step()
            graph = self.capture(step, self.pool) if live else self._captured(step)
        except RuntimeError as e:  # passes then run unrecorded, only slower
            if device_lost(e) or (self.met is None and isinstance(e, torch.OutOfMemoryError)):
                raise
            self.reason, self.met = f"passes of {M} rows and more are not recorded: {one_line(e)}", None
            return False
        self.pool = self.pool or graph.graph.pool()
        assert made[-1] is not None
        graph.logits, graph.noted = made[-1], self.noted
        self.captured[b, M, adapted] = graph, place
        return True

    def _captured(self, step: Callable[[], object]) -> Captured:
        """Record a step; once more after running it where that fails: a thread's first product in cuBLAS cannot be recorded."""
        try:
            return self.capture(step, self.pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:  # if it comes again, the caller gets it
            if device_lost(e):
                raise
            log_error("a pass is recorded once more", e)
        step()
        return self.capture(step, self.pool)

    def measure(self, b: int, M: int, adapted: bool = False) -> None:
        """Time a pass of null rows (the second of two runs), and note it for all passes of M rows, with or without prompts."""
        most, null = self.slots, self.rows.null_row
        nobodys = [Run(i, min(i + most, M - b), 0, 0, null) for i in range(0, M - b, most)] if self.by_text else []
        nobodys = nobodys[: self.ends(M - b)]
        chunk, n = (None, 0) if b == M else self._describe(b, M - b, (), None, nobodys)
        seconds = self.timed(lambda: self._go(b, M, chunk, n, nobodys, adapted), adapted)
        for steps, rows, kind in {(b, M, adapted), *self.captured}:
            if rows == M and (steps == M) == (b == M) and kind == adapted:
                self.token_budget.note(steps, rows, seconds, adapted)

    def timed(self, launch: Callable[[], object], adapted: bool = False) -> float:
        """Return the seconds of the second of two launches; adapted: all rows, which belong to no sequence, have adapter 1."""
        self.rows.adapter.fill_(int(adapted))
        for _ in range(2):
            self._wait()
            began = time.perf_counter()
            launch()
            self._wait()
        seconds = time.perf_counter() - began
        self.rows.adapter.zero_()
        return seconds

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
