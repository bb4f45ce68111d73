"""The decoder of described families: static cache, joined weights, few kernels per layer; on a GPU one graph per step.

The cache has a number of slots from a short list of buckets and is kept between texts, so the step captured as a CUDA
graph for one (batch, bucket, way of sampling) is replayed for every later text that fits. Sequence b's next token sits at
slot pos[b]; prompts of different lengths need no padding there. Sampling, the step in position and the new token's
embedding are inside the graph: a token costs the host one launch and one asynchronous copy. Where angles depend on how long
a text is (`rope`), prompts past that length are read one by one, each by a table of its own, and nothing of them is kept.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowq_cli.engine.batch import Batch, KeyValues, Pictures, Rectangle, States
from lowq_cli.engine.drafts.drafter import DeviceDrafter
from lowq_cli.engine.drafts.static_drafter import AHEAD, Attached
from lowq_cli.engine.drafts.verify import Verification
from lowq_cli.engine.graph import Captured, bucket, capture, keep
from lowq_cli.engine.hf_eager import CHUNK
from lowq_cli.engine.pictures import Shown, end_of_pass, in_pass
from lowq_cli.engine.plan import plan_of
from lowq_cli.engine.rope import Tables
from lowq_cli.engine.sampling import Sampler, Sampling
from lowq_cli.engine.state import BLOCK, PIECE, ring, static_state, tensors_of
from lowq_cli.engine.stream import nothing
from lowq_kernels.decode import Ops
from lowq_kernels.decode.kv import PLAIN
from lowq_kernels.decode.reference import MOST_DRAFTS
from lowq_kernels.products.cpu.repeated import Repeated
from lowq_packers.arch.parts import Pages, Rope
from lowq_packers.errors import UnsupportedError, device_lost

KEPT_GRAPHS = 8


class NativeDecoder:
    """A model of a described family, decoded from its joined weights. See `weights.why_not` for which.

    Args:
        model: the model, which keeps working: its layers become views into the joined weights.
        graphs: capture each step as a CUDA graph; only meaningful on a GPU.
        kv: what keys and values are held in (`decode.kv.KINDS`).
    """

    name = "native"

    def __init__(self, model: Any, graphs: bool = True, kv: str = PLAIN) -> None:
        self.device, self.dtype, self.kv = model.device, model.dtype, kv
        self.plan = plan_of(model)
        self.steady = min((r.steady for r in self.plan.rotations.values()), default=math.inf)
        self.rereads = any(r.rereads for r in self.plan.rotations.values())
        self.ahead = self.device.type == "cuda"
        self.graphs = graphs and self.ahead
        self.reason = "" if self.graphs or not self.ahead else "without CUDA graphs, as asked"
        self.slots = self.batch = 0
        self.drafted = False  # whether the cache has room for drafts' recurrent states
        self.captured: dict[tuple[Sampling, bool], Captured] = {}  # by whether rows turn by places of three parts
        self.run: Captured | None = None
        self.long = False  # whether something the cache holds is turned as a text past `steady` is
        self.held: list[list[int]] = []  # token ids whose keys and values the cache holds, per sequence
        self.written = 0  # tokens of the longest text that the cache was given
        self.snapshot: list[torch.Tensor] = []  # the recurrent states after the last prompts, `read`
        self.read: list[list[int]] = []
        self.chunk = sys.maxsize  # prompt tokens of a text in one pass
        self.drafts = False  # whether steps of a text may check drafts (`verify`); decided before `start`
        self.wide: dict[int, Verification] = {}  # by rows
        self.attached: Attached | None = None  # what drafts on the device
        self.timed: dict[str, Any] = {}  # drafter on the device -> times of its steps (`draft_length.TimedCosts`), on a CPU
        self.shown: list[Shown | None] = []  # the pictures of each text
        self.turns = False  # whether some of them make tokens turn by places of three parts

    @property
    def ops(self) -> Ops:
        """The operations of its device."""
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
        """Read the prompts side by side; the first new token of each, (B,) int64 on the device.

        shown: the pictures of each prompt. What all of them share with `held` is in the cache already and not read again.
        """
        longest = max(map(len, prompts))
        self._make_room(len(prompts), longest + room + AHEAD * self.drafts)
        self._show(shown)
        names = [list(p) if s is None else s.names for p, s in zip(prompts, self.shown, strict=True)]
        known = 0 if self.long or longest > self.steady else self._reusable(names)
        if self.attached is not None and known and not self.snapshot:
            known -= 1  # what a head keeps of the last one depends on the token after it
        self.held, self.long = [], longest > self.steady
        self.prompts, grows = prompts, any(len(p) <= self.steady < len(p) + room - 1 for p in prompts)
        self.said: list[torch.Tensor] | None = [] if self.rereads and grows else None
        ids = torch.tensor([p + [0] * (longest - len(p)) for p in prompts])
        lengths = torch.tensor([len(p) for p in prompts])
        self.sampler.start(sampling, ids, torch.arange(longest) < lengths[:, None])
        self._restore(known)
        self.whole = ids[0].to(self.device)
        x = self._read(ids.to(self.device), lengths.tolist(), known, between)
        self.held, self.read, self.written = names, names, longest
        self.snapshot = [t[: self.batch + 1].clone() for t in tensors_of(self.state)]
        self.sampler.choose(self.head(x), advance=0)
        if self.attached is not None:
            self.attached.begin(self.token, self.pos)
        self.run = self._graph() if self.graphs and room > 1 else None
        return self.token

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        """The next token of each sequence, (B,) int64 on the device; the same tensor every time."""
        self.written += 1
        if self.said is not None:
            self._follow(self.said)
        if self.run is None:
            self.forward_step()
        else:
            self.run.replay()
            self.sampler.logits = self.run.logits
        return self.token

    def why_no_drafts(self, batch: int) -> str:
        """The reason that steps check no drafts, "" where they can."""
        if batch > 1:
            return f"{batch} texts side by side step together"
        if self.rereads:
            return "its angles depend on how long a text is"
        return ""

    def attach(self, drafter: DeviceDrafter | None) -> None:
        """Have steps check what a drafter guesses on the device, or what `verify` is given. Before `start`."""
        if drafter is (self.attached and self.attached.drafter):
            return
        self.attached = None if drafter is None else Attached(drafter, self.device)
        self.slots = self.batch = 0  # its cache is made with the decoder's own
        if self.attached is not None:
            self.plan.tap(self.attached.taps)

    def verify(self, drafts: Sequence[int], rows: int) -> Verification:
        """Launch a step of so many rows of the one text: its newest token, and drafts of those after it; none are given where a
        drafter is attached."""
        if rows not in self.wide:
            self.wide[rows] = Verification(self, rows)
        self.written += rows
        self.wide[rows].step(drafts)
        return self.wide[rows]

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor, shown: Sequence[Shown | None] = ()) -> torch.Tensor:
        """Logits (B, T, V) at every place of whole texts (B, T). shown: the pictures of each."""
        return self.head(self.hidden_states(ids, shown).flatten(0, 1)).reshape(*ids.shape, -1)

    @torch.inference_mode()
    def hidden_states(self, ids: torch.Tensor, shown: Sequence[Shown | None] = ()) -> torch.Tensor:
        """The normed hidden states (B, T, H) that those logits are made of."""
        B, T = ids.shape
        self._make_room(B, T)
        self._show(shown)
        self.held = []
        self._restore(0)
        hidden = [
            self._piece(slice(0, B), ids[:, tokens], tokens.start, [T] * B, self._tables(T)).reshape(
                B, -1, self.plan.model.hidden
            )
            for _, tokens in passes(1, 0, T, self.chunk, self._uncut(slice(0, B)), T)
        ]
        return torch.cat(hidden, 1)

    def _show(self, shown: Sequence[Shown | None]) -> None:
        """Take note of the pictures of the texts that are read next."""
        self.shown = list(shown) or [None] * self.batch
        images = self.plan.model.images
        self.turns = images is not None and bool(images.sections) and any(self.shown)
        self.shift.copy_(torch.tensor([0 if s is None else s.shift for s in self.shown]))

    def _uncut(self, rows: slice) -> list[tuple[int, int]]:
        """First tokens and ends of the pictures of some texts that have to be read in one piece."""
        return [run for s in self.shown[rows] if s is not None for run in s.runs]

    def _make_room(self, batch: int, length: int) -> None:
        """A cache with at least `length` slots for `batch` sequences, kept from the last text where it fits."""
        if batch == self.batch and length <= self.slots and self.drafts <= self.drafted:
            return
        slots = bucket(length)
        self.captured.clear()  # graphs hold the old cache's addresses
        self.wide.clear()
        self.shift = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.run, self.held = None, []
        self.state: list[KeyValues | States] = []  # let go before there is another
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
            self.attached.drafter.make_room(batch, slots)

    def _reusable(self, prompts: list[list[int]]) -> int:
        """Leading tokens of all prompts that the state holds as they are."""
        if not self.held:
            return 0
        known = min(shared(h, p) for h, p in zip(self.held, prompts, strict=True))
        if self.snapshot:  # a recurrent state is that of a whole prompt: the answer after it is read again
            whole = len(self.read[0])
            if known < whole or any(len(p) != whole for p in self.read):
                return 0
            known = whole
        lost = 0
        for one, spec in zip(self.state, self.plan.states, strict=True):
            if isinstance(one, KeyValues) and isinstance(spec, Pages) and one.table is not None:
                lost = max(lost, self.written - ring(spec.window) * BLOCK + spec.window)
        return known if known >= lost else 0

    def _restore(self, known: int) -> None:
        """Recurrent states as they were after `known` tokens: after the last prompts, or before anything."""
        for i, t in enumerate(tensors_of(self.state)):
            t[: self.batch + 1].copy_(self.snapshot[i]) if known else t.zero_()

    def _tables(self, length: int) -> Mapping[Rope | int, Tables]:
        """The angles of a prompt of so many tokens."""
        if length <= self.steady:
            return self.angles
        return self.plan.angles(self.slots, self.device, length)

    def _read(self, ids: torch.Tensor, lengths: list[int], known: int, between: Callable[[], None]) -> torch.Tensor:
        """Fill the cache from prompts (B, T), right-padded, from token `known` on; the last normed hidden states, (B, H)."""
        B, T = ids.shape
        if self.steady >= T and (B == 1 or not self._uncut(slice(0, B))):
            return self._prompt(slice(0, B), ids, lengths, known, self.angles, between)
        each = ((b, b + 1, n) for b, n in enumerate(lengths))
        read = [self._prompt(slice(b, c), ids[b:c, :n], [n], known, self._tables(n), between) for b, c, n in each]
        return torch.cat(read)

    def _follow(self, said: list[torch.Tensor]) -> None:
        """Note the token that a step will read; where it takes a text past `steady`, read that anew, turned as a long one."""
        for b, prompt in enumerate(self.prompts):
            if len(prompt) + len(said) == self.steady:
                ids = prompt + (torch.stack(said)[:, b].tolist() if said else [])
                n, self.long = len(ids), True
                row, there = slice(b, b + 1), torch.tensor([ids], device=self.device)
                self._prompt(row, there, [n], 0, self._tables(n + 1), nothing)
        said.append(self.token.clone())
        if all(len(prompt) + len(said) > self.steady for prompt in self.prompts):
            self.said = None

    def _prompt(
        self,
        rows: slice,
        ids: torch.Tensor,
        lengths: list[int],
        known: int,
        angles: Mapping[Rope | int, Tables],
        between: Callable[[], None],
    ) -> torch.Tensor:
        """`_read` of some rows of the cache, by one table.

        What padding writes into the cache lies past the sequence's position and is overwritten before it is read.
        """
        B, T = ids.shape
        last = torch.empty(B, self.plan.model.hidden, dtype=self.dtype, device=self.device)
        ends = torch.tensor(lengths, device=self.device) - 1
        for some, tokens in passes(B, known, T, self.chunk, self._uncut(rows)):
            between()
            piece = ids[some, tokens]
            b, t = piece.shape
            here = slice(rows.start + some.start, rows.start + some.stop)
            hidden = self._piece(here, piece, tokens.start, lengths[some], angles, B == 1).reshape(b, t, -1)
            at = ends[some] - tokens.start
            inside = (at >= 0) & (at < t)
            found = hidden[torch.arange(b, device=self.device), at.clamp(0, t - 1)]
            last[some] = torch.where(inside[:, None], found, last[some])
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
        """Tokens ids (b, t), from `start` on, of the sequences `some`; their normed hidden states (b * t, H). reads: whether a
        drafter is to read them, too, of the one text."""
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
        """What a step of `batch` sequences does other than its kernels' names tell, for `--explain`."""
        return self.plan.about(batch)

    def forward_step(self) -> None:
        """One token for each sequence; everything it reads and writes stays at fixed addresses."""
        x = self.plan.embed(self.token)
        logits = self.repeated(self._whole, x) if self.repeated and not self.turns else self._whole(x)
        self.sampler.choose(self.plan.capped(logits), advance=1)

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """From the newest tokens' embeddings x (B, H) to logits."""
        pictures = self.turned(self.pos)
        batch = Batch(self.ops, self.token, self.batch, self.pos, self.angles, self.places, pictures=pictures)
        return self.plan.logits(self.plan.hidden(x, batch, self.state))

    def turned(self, pos: torch.Tensor) -> Pictures | None:
        """How rows at these positions turn, each its text's next token or all of one text; None where it is by position."""
        images = self.plan.model.images
        return in_pass(images, (), self.device, pos + self.shift) if self.turns and images is not None else None

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (M, V) of normed hidden states (M, H)."""
        return self.plan.capped(self.plan.logits(x))

    def _graph(self) -> Captured | None:
        """This step as a CUDA graph, captured once per way of sampling; None, with a reason, where that fails."""
        key = replace(self.sampler.sampling, seed=0), self.turns
        if key not in self.captured:
            if len(self.captured) >= KEPT_GRAPHS:
                self.captured.clear()
            back = keep([*self.sampler.state, *tensors_of(self.state)])
            try:
                found = capture(self.forward_step)
            except RuntimeError as e:  # the step waits for the device, or there is no room: `reason` says it
                if device_lost(e):
                    raise
                self.graphs, self.reason = False, f"no CUDA graph: {str(e).splitlines()[0]}"
                found = None
            back()
            if found is None:
                return None
            found.logits = self.sampler.logits
            self.captured[key] = found
        return self.captured[key]


def passes(
    batch: int,
    known: int,
    longest: int,
    piece: int = sys.maxsize,
    whole: Sequence[tuple[int, int]] = (),
    most: int | None = None,
) -> list[tuple[slice, slice]]:
    """(sequences, tokens) of each pass over prompts, from token `known` on: up to `most` (CHUNK) tokens, whole texts if
    they fit.

    piece: tokens of a text at most. whole: first tokens and ends that stay in one pass. Raises UnsupportedError where they do
    not fit into one.
    """
    most = most or CHUNK
    at_once = max(1, most // (longest - known))
    groups = [slice(b, min(b + at_once, batch)) for b in range(0, batch, at_once)]
    step, cuts, t = min(most, piece), list[slice](), known
    while t < longest:
        end = end_of_pass(t, min(t + step, longest), whole)
        if end <= t:
            raise UnsupportedError(f"a picture is longer than the {step} tokens that are read at once; make it smaller")
        cuts.append(slice(t, end))
        t = end
    return [(g, cut) for g in groups for cut in cuts]


def shared(held: list[int], prompt: list[int]) -> int:
    """Leading tokens that both have, short of the whole prompt: its last token is always read, for its logits."""
    most = min(len(held), len(prompt) - 1)
    return next((i for i in range(most) if held[i] != prompt[i]), most)
