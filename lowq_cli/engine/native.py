"""The decoder of described families: a static cache, joined weights, few kernels per layer, and on a GPU one graph per step.

The number of cache slots comes from a short list of buckets, and the cache is kept between generations. So the step that is
captured as a CUDA graph for one (batch, bucket, sampling settings) is replayed for every later batch that fits. The next token
of sequence b is written to slot pos[b]; prompts of different lengths need no padding in the cache. The graph contains
sampling, the increment of positions and the embedding of the new token: a token costs the host one launch and one asynchronous
copy. Where the rotary angles depend on the sequence's length (`rope`), prompts past that length are read one at a time, each
with its own table of angles, and their cache is not reused.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowq_cli.engine.batch import Batch, KeyValues, Pictures, Rectangle, States
from lowq_cli.engine.drafts.balance import Balance
from lowq_cli.engine.drafts.drafter import DeviceDrafter
from lowq_cli.engine.drafts.recordings import Recordings
from lowq_cli.engine.drafts.static_drafter import AHEAD, Attached
from lowq_cli.engine.drafts.verify import Verification
from lowq_cli.engine.graph import Captured, bucket, capture_aside, capture_unchanged
from lowq_cli.engine.hf_eager import CHUNK
from lowq_cli.engine.pictures import Shown, in_pass
from lowq_cli.engine.plan import plan_of
from lowq_cli.engine.prefill import prompt_passes, reusable
from lowq_cli.engine.rope import Tables
from lowq_cli.engine.sampling import Sampler, Sampling
from lowq_cli.engine.slices import Sliced
from lowq_cli.engine.state import BLOCK, PIECE, ring, static_state, tensors_of
from lowq_cli.engine.stream import nothing
from lowq_kernels.decode import Ops
from lowq_kernels.decode.kv import PLAIN
from lowq_kernels.decode.reference import MOST_DRAFTS
from lowq_kernels.products.cpu.repeated import Repeated
from lowq_packers.arch.parts import Pages, Rope

KEPT_GRAPHS = 8  # max. captured graphs per cache; the next capture drops them all


class NativeDecoder:
    """Decodes a model of a described family from its joined weights; `weights.why_not` says which models.

    Args:
        model: the model, which keeps working: its layers become views into the joined weights.
        graphs: capture each step as a CUDA graph; only meaningful on a GPU.
        kv: the format of cached keys and values (`decode.kv.KINDS`).
        most: max. prompt tokens per pass, over all sequences.
    """

    name = "native"
    user: Any  # as of `Decoder`

    def __init__(self, model: Any, graphs: bool = True, kv: str = PLAIN, most: int = CHUNK) -> None:
        self.device, self.dtype, self.kv, self.most = model.device, model.dtype, kv, most
        self.plan = plan_of(model)
        self.steady = min((r.steady for r in self.plan.rotations.values()), default=math.inf)
        self.rereads = any(r.rereads for r in self.plan.rotations.values())
        self.ahead = self.device.type == "cuda"
        self.graphs = graphs and self.ahead
        self.reason = "" if self.graphs or not self.ahead else "without CUDA graphs, as asked"
        self.slots = self.batch = 0
        self.drafted = False  # whether the cache has slots for the recurrent states after drafts
        self.captured: dict[tuple[Sampling, bool], Captured] = {}  # by (sampling, whether rows rotate by three-part positions)
        self.run: Captured | None = None
        self.long = False  # whether the cache holds keys that were rotated for a sequence longer than `steady`
        self.held: list[list[int]] = []  # token ids whose keys and values the cache holds, per sequence
        self.written = 0  # tokens of the longest sequence written to the cache
        self.snapshot: list[torch.Tensor] = []  # the recurrent states after the last prompts, which are in `read`
        self.read: list[list[int]] = []
        self.chunk = sys.maxsize  # max. prompt tokens per sequence in one pass
        self.drafts = False  # whether steps may check drafts (`verify`); set before `start`
        self.wide: dict[int, Verification] = {}  # number of rows -> step
        self.attached: Attached | None = None  # the drafter that runs on the device, with its guesses
        self.saved: Any = None  # the cache out of a file that the next prompt begins with: a `saved_cache.SavedCache`
        self.recordings: dict[str, Recordings] = {}  # on a GPU: name of a drafter -> which of its steps are recorded
        self.capture_aside: Callable[..., Captured] = capture_aside  # records a step with drafts while plain ones run
        self.balances: dict[str, Balance] = {}  # on a GPU: name of a drafter -> the time that its drafts have won or lost
        self.timed: dict[str, Any] = {}  # on a CPU: name of a drafter -> times of its steps (`draft_length.TimedCosts`)
        self.shown: list[Shown | None] = []  # the images of each sequence
        self.turns = False  # whether some image makes tokens rotate by three-part positions

    @property
    def ops(self) -> Ops:
        """The decode operations of the model's device."""
        return self.plan.ops

    @property
    def linears(self) -> nn.Module:
        """The layers that a step calls, for `--explain`."""
        return self.plan.linears

    @torch.inference_mode()
    def start(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        room: int,
        between: Callable[[], None] = nothing,
        shown: Sequence[Shown | None] = (),
    ) -> torch.Tensor:
        """Read the prompts as one batch; returns the first new token of each, (B,) int64 on the device.

        shown: the images of each prompt. The leading tokens that all prompts share with `held` are not read again.
        """
        longest = max(map(len, prompts))
        # on a CPU also without drafts: a larger cache is a new one, into which a conversation is read again by other kernels
        self.make_room(len(prompts), longest + room + AHEAD * (self.drafts or self.device.type == "cpu"))
        self._show(shown)
        if self.saved is not None:
            self.saved.put(self)
            self.saved = None
        names = [list(p) if s is None else s.names for p, s in zip(prompts, self.shown, strict=True)]
        reused = 0 if self.long or longest > self.steady else self.reusable(names)
        self.held, self.long = [], longest > self.steady
        self.prompts, grows = prompts, any(len(p) <= self.steady < len(p) + room - 1 for p in prompts)
        self.generated: list[torch.Tensor] | None = [] if self.rereads and grows else None
        ids = torch.tensor([p + [0] * (longest - len(p)) for p in prompts])
        lengths = torch.tensor([len(p) for p in prompts])
        self.sampler.start(sampling, ids, torch.arange(longest) < lengths[:, None])
        self._restore(reused)
        self.whole = ids[0].to(self.device)
        x = self._read(ids.to(self.device), lengths.tolist(), reused, between)
        self.held, self.read, self.written = names, names, longest
        self.snapshot = [t[: self.batch + 1].clone() for t in tensors_of(self.state)]
        self.sampler.choose(self.head(x), advance=0)
        if self.attached is not None:
            self.attached.begin(self.token, self.pos)
        self.run = self._graph() if self.graphs and room > 1 else None
        return self.token

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        """The next token of each sequence, (B,) int64 on the device, always in the same tensor."""
        self.written += 1
        if self.generated is not None:
            self._follow(self.generated)
        if self.run is None:
            self.forward_step()
        else:
            self.run.replay()
            self.sampler.logits = self.run.logits
        return self.token

    def why_no_drafts(self, batch: int) -> str:
        """The reason why steps cannot check drafts, or ""."""
        if batch > 1:
            return f"{batch} texts side by side step together"
        if self.rereads:
            return "its angles depend on how long a text is"
        return ""

    def attach(self, drafter: DeviceDrafter | None) -> None:
        """Set the device drafter whose guesses steps check, before `start`; None: they check the drafts given to `verify`."""
        if drafter is (self.attached and self.attached.drafter):
            return
        self.attached = None if drafter is None else Attached(drafter, self.device)
        self.slots = self.batch = 0  # force a new cache: the drafter's cache is made together with it
        if self.attached is not None:
            self.plan.tap(self.attached.taps)

    def verify(self, drafts: Sequence[int], rows: int) -> Verification:
        """Launch a step of `rows` rows of the only sequence: its newest token and the drafts after it. `drafts` is empty with
        an attached device drafter."""
        step = self.verification(rows)
        self.written += rows
        step.step(drafts)
        return step

    def record_aside(self, rows: int, before: Iterable[Callable[[], object]]) -> Sliced:
        """Begin to record the step of `rows` rows in slices, while plain steps run; then it is `ready`, or there is an error.

        before: calls that come first, each of which launches a kernel of the step; until they are done it can be stopped.
        """
        key = replace(self.sampler.sampling, seed=0), self.turns
        pool = self.run.graph.pool() if self.run is not None else None

        @torch.inference_mode()
        def work(slices: Sliced) -> None:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                self.plan.make_ready(rows)
                for launch in before:
                    slices.pause()
                    launch()
                slices.commit()
                self.verification(rows).record(key, pool, slices)

        return Sliced(work)

    @property
    def records_aside(self) -> bool:
        """Whether steps with drafts are compiled and recorded while plain steps run, once they are worth it."""
        return bool(self.recordings) and self.attached is None

    def verification(self, rows: int) -> Verification:
        """The step of `rows` rows of the only sequence, which need not be recorded yet."""
        if rows not in self.wide:
            self.wide[rows] = Verification(self, rows)
        return self.wide[rows]

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor, shown: Sequence[Shown | None] = ()) -> torch.Tensor:
        """Logits (B, T, V) at every position of sequences (B, T). shown: the images of each sequence."""
        return self.head(self.hidden_states(ids, shown).flatten(0, 1)).reshape(*ids.shape, -1)

    @torch.inference_mode()
    def hidden_states(self, ids: torch.Tensor, shown: Sequence[Shown | None] = ()) -> torch.Tensor:
        """Normed hidden states (B, T, H) of sequences (B, T), the input of the head. shown: the images of each sequence."""
        B, T = ids.shape
        self.make_room(B, T)
        self._show(shown)
        self.held = []
        self._restore(0)
        hidden = [
            self._piece(slice(0, B), ids[:, tokens], tokens.start, [T] * B, self._tables(T)).reshape(
                B, -1, self.plan.model.hidden
            )
            for _, tokens in prompt_passes(1, 0, T, self.chunk, self._uncut(slice(0, B)), T)
        ]
        return torch.cat(hidden, 1)

    def _show(self, shown: Sequence[Shown | None]) -> None:
        """Set the images of the sequences that are read next."""
        self.shown = list(shown) or [None] * self.batch
        images = self.plan.model.images
        self.turns = images is not None and bool(images.sections) and any(self.shown)
        self.shift.copy_(torch.tensor([0 if s is None else s.shift for s in self.shown]))

    def _uncut(self, rows: slice) -> list[tuple[int, int]]:
        """(first token, end) of the images of some sequences that have to be read in one piece."""
        return [run for s in self.shown[rows] if s is not None for run in s.runs]

    def make_room(self, batch: int, length: int) -> None:
        """Allocate a cache with at least `length` slots for `batch` sequences, unless the present one is large enough."""
        for recordings in self.recordings.values():
            recordings.finish()
        if batch == self.batch and length <= self.slots and self.drafts <= self.drafted:
            return
        slots = bucket(length)
        self.captured.clear()  # graphs contain the addresses of the old cache
        self.wide.clear()
        self.shift = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.run, self.held = None, []
        self.state: list[KeyValues | States] = []  # free the old cache before the new one is allocated
        self.slots, self.batch, self.drafted = slots, batch, self.drafts
        self.state = static_state(self.plan, batch, slots, self.kv, MOST_DRAFTS * self.drafts)
        rings = any(isinstance(one, KeyValues) and one.table is not None for one in self.state)
        self.chunk = PIECE if rings else sys.maxsize
        self.angles = self.plan.angles(slots, self.device)
        self.sampler = Sampler(self.ops.choose, batch, self.plan.vocabulary, self.device)
        self.token, self.pos = self.sampler.token, self.sampler.pos
        self.places = torch.arange(1, batch + 1, device=self.device)
        self.repeated = Repeated() if self.device.type == "cpu" else None
        if self.attached is not None:
            self.attached.drafter.make_room(batch, slots, self.state)

    def reusable(self, prompts: list[list[int]]) -> int:
        """The number of leading tokens of all prompts that the cache already holds."""
        known, lost = reusable(self.held, prompts, self.read if self.snapshot else ()), 0
        for one, spec in zip(self.state, self.plan.states, strict=True):
            if isinstance(one, KeyValues) and isinstance(spec, Pages) and one.table is not None:
                lost = max(lost, self.written - ring(spec.window) * BLOCK + spec.window)
        return known if known >= lost else 0

    def _restore(self, known: int) -> None:
        """Set the recurrent states to those after the last prompts, or to zeros where `known` is 0."""
        torch.arange(1, self.batch + 1, out=self.places)
        for i, t in enumerate(tensors_of(self.state)):
            t[: self.batch + 1].copy_(self.snapshot[i]) if known else t.zero_()

    def _tables(self, length: int) -> Mapping[Rope | int, Tables]:
        """The angles for a prompt of `length` tokens."""
        if length <= self.steady:
            return self.angles
        return self.plan.angles(self.slots, self.device, length)

    def _read(self, ids: torch.Tensor, lengths: list[int], known: int, between: Callable[[], None]) -> torch.Tensor:
        """Write right-padded prompts (B, T) to the cache from token `known` on; returns their last normed states, (B, H)."""
        B, T = ids.shape
        if self.steady >= T and (B == 1 or not self._uncut(slice(0, B))):
            return self._prompt(slice(0, B), ids, lengths, known, self.angles, between)
        each = ((b, b + 1, n) for b, n in enumerate(lengths))
        read = [self._prompt(slice(b, c), ids[b:c, :n], [n], known, self._tables(n), between) for b, c, n in each]
        return torch.cat(read)

    def _follow(self, generated: list[torch.Tensor]) -> None:
        """Record the token that the next step reads; read a sequence again where that token takes it past `steady`."""
        for b, prompt in enumerate(self.prompts):
            if len(prompt) + len(generated) == self.steady:
                ids = prompt + (torch.stack(generated)[:, b].tolist() if generated else [])
                n, self.long = len(ids), True
                row, there = slice(b, b + 1), torch.tensor([ids], device=self.device)
                self._prompt(row, there, [n], 0, self._tables(n + 1), nothing)
        generated.append(self.token.clone())
        if all(len(prompt) + len(generated) > self.steady for prompt in self.prompts):
            self.generated = None

    def _prompt(
        self,
        rows: slice,
        ids: torch.Tensor,
        lengths: list[int],
        known: int,
        angles: Mapping[Rope | int, Tables],
        between: Callable[[], None],
    ) -> torch.Tensor:
        """As `_read`, for some rows of the cache, with one table of angles.

        Padding writes keys and values past the sequence's end, where they are overwritten before they are read.
        """
        B, T = ids.shape
        last = torch.empty(B, self.plan.model.hidden, dtype=self.dtype, device=self.device)
        ends = torch.tensor(lengths, device=self.device) - 1
        for some, tokens in prompt_passes(B, known, T, self.chunk, self._uncut(rows), self.most):
            between()
            piece = ids[some, tokens]
            b, t = piece.shape
            here = slice(rows.start + some.start, rows.start + some.stop)
            hidden = self._piece(here, piece, tokens.start, lengths[some], angles, B == 1).reshape(b, t, -1)
            at = ends[some] - tokens.start
            inside = (at >= 0) & (at < t)
            at_end = hidden[torch.arange(b, device=self.device), at.clamp(0, t - 1)]
            last[some] = torch.where(inside[:, None], at_end, last[some])
        return last

    def _piece(
        self,
        some: slice,
        ids: torch.Tensor,
        start: int,
        lengths: Sequence[int],
        angles: Mapping[Rope | int, Tables],
        reads: bool = False,
    ) -> torch.Tensor:
        """Run tokens ids (b, t) of the sequences `some`, which begin at `start`; returns their normed hidden states (b * t, H).
        reads: whether the attached drafter reads them too; only for a single sequence."""
        flat, there = ids.reshape(-1), Rectangle(some, start, ids.shape[1], lengths, self.batch)
        seen, pictures = self.shown[some], None
        if any(seen):
            assert self.plan.model.images is not None
            pictures = in_pass(self.plan.model.images, [(s, start, start + ids.shape[1]) for s in seen], self.device)
        batch = Batch(self.ops, flat, 0, self.pos, angles, self.places, rectangle=there, tile=self.plan.tile, pictures=pictures)
        if self.attached is None or not reads:
            return self.plan.hidden(self.plan.embed(flat), batch, self.state)
        taps = list[torch.Tensor]()
        y = self.plan.hidden(self.plan.embed(flat), batch, self.state, taps)
        self.attached.read(self.whole, start, ids.shape[1], self.attached.hidden(y, taps))
        return y

    def about(self, batch: int) -> str:
        """Facts about a step of `batch` sequences that the kernels' names do not show, for `--explain`."""
        return self.plan.about(batch)

    def forward_step(self) -> None:
        """Compute one token for each sequence; all tensors that it reads and writes stay at fixed addresses."""
        x = self.plan.embed(self.token)
        logits = self.repeated(self._whole, x) if self.repeated and not self.turns else self._whole(x)
        self.sampler.choose(self.plan.capped(logits), advance=1)

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (B, V) from the newest tokens' embeddings x (B, H), before factor and soft cap."""
        pictures = self.pictures_of(self.pos)
        batch = Batch(self.ops, self.token, self.batch, self.pos, self.angles, self.places, pictures=pictures)
        return self.plan.logits(self.plan.hidden(x, batch, self.state))

    def pictures_of(self, pos: torch.Tensor) -> Pictures | None:
        """Three-part positions of rows at `pos`, one row per sequence or all of one sequence; None: rows rotate by `pos`."""
        images = self.plan.model.images
        return in_pass(images, (), self.device, pos + self.shift) if self.turns and images is not None else None

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (M, V) of normed hidden states (M, H)."""
        return self.plan.capped(self.plan.logits(x))

    def _graph(self) -> Captured | None:
        """The step as a CUDA graph, captured once per sampling settings; None, with `reason` set, where capturing fails."""
        key = replace(self.sampler.sampling, seed=0), self.turns
        if key not in self.captured:
            if len(self.captured) >= KEPT_GRAPHS:
                self.captured.clear()
            graph, why = capture_unchanged(self.forward_step, [*self.sampler.state, *tensors_of(self.state)])
            if graph is None:
                self.graphs, self.reason = False, f"no CUDA graph: {why}"
                return None
            graph.logits = self.sampler.logits
            self.captured[key] = graph
        return self.captured[key]
