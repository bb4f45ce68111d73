"""A step of `generate` with drafts: a sequence's newest token and the drafts after it. Server: serving/draft_passes.py."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lowq_cli.engine.batch import Batch, Chain, KeyValues, States
from lowq_cli.engine.graph import Captured, capture_unchanged
from lowq_cli.engine.sampling import Sampling, penalise, restrict
from lowq_cli.engine.slices import Sliced
from lowq_cli.engine.state import tensors_of
from lowq_kernels.products.cpu.repeated import Repeated


class Verification:
    """Steps of `T` rows of a decoder's only sequence; kept as long as the decoder's cache.

    Attributes:
        drawn (T,) int64: the token that the model draws after each row. accepted (1,) int64: the number of right drafts, so
        that drawn[: accepted + 1] are the sequence's next tokens. new: whether the last step was recorded first, which takes as
        long as many steps.
    """

    def __init__(self, decoder: Any, T: int) -> None:
        self.decoder, self.T, self.device = decoder, T, decoder.device
        empty = torch.zeros(T, dtype=torch.int64, device=self.device)
        self.ids, self.offsets = empty, torch.arange(T, dtype=torch.int32, device=self.device)
        self.pos, self.rows = self.offsets.clone(), self.offsets.clone()
        self.result = torch.zeros(T + 1, dtype=torch.int64, device=self.device)  # `accepted` and `drawn`, for the host
        self.accepted, self.drawn, self.first = self.result[:1], self.result[1:], empty[:1].clone()
        self.given = torch.zeros(T - 1, dtype=torch.int64, pin_memory=self.device.type == "cuda")  # drafts on the host
        self.count = torch.full((1,), T, dtype=torch.int64, device=self.device)
        self.state = [self._of_rows(one) for one in decoder.state]
        self.others = torch.arange(1, T, device=self.device)
        self.chain = Chain(0, T, decoder.places, self.others.clone())
        self.lazy = self.device.type == "cpu"  # whether drawing stops at the first wrong draft
        self.repeated = Repeated(decoder.repeated) if self.lazy else None
        self.plain = not tensors_of(decoder.state)
        self.captured: dict[tuple[Sampling, bool], Captured] = {}
        self.new = False
        self.pause: Callable[[], None] | None = None  # as of `Batch`

    @property
    def ready(self) -> bool:
        """Whether the step is recorded for the present sampling settings."""
        return self._key in self.captured

    @property
    def _key(self) -> tuple[Sampling, bool]:
        return replace(self.decoder.sampler.sampling, seed=0), self.decoder.turns

    def record(self, key: tuple[Sampling, bool], pool: Any, slices: Sliced) -> None:
        """Record the step for the settings `key` without running it; afterwards it is `ready`. pool: as of `capture_aside`."""
        self.pause = slices.pause
        try:
            graph: Captured = self.decoder.capture_aside(self.compute, pool, slices.go_on)
        finally:
            self.pause = None
        graph.logits = self.logits
        self.captured[key] = graph

    def _of_rows(self, one: KeyValues | States) -> KeyValues | States:
        """A layer's state with a block table row for each of the T rows, all of the first sequence."""
        if not isinstance(one, KeyValues):
            return one
        table = one.table[:1] if one.table is not None else torch.zeros(1, 1, dtype=torch.int32, device=self.device)
        return KeyValues(one.k, one.v, table.repeat(self.T, 1))

    @torch.inference_mode()
    def step(self, drafts: Sequence[int]) -> None:
        """Check up to T - 1 drafts; missing ones repeat the last. `drafts` is empty with an attached device drafter."""
        if drafts:  # safe to overwrite: the previous step's copy is done, as its result was read
            self.given.numpy()[:] = [*drafts, *[drafts[-1]] * (self.T - 1 - len(drafts))]
            self.ids[1:].copy_(self.given, non_blocking=True)
        d = self.decoder
        run = self._graph() if d.graphs else None
        if run is None:
            self.compute()
        else:
            run.replay()
        d.sampler.logits = self.logits if run is None else run.logits

    def compute(self) -> None:
        """Compute the step, and set `logits` (1, V) to those after the last right row; all tensors stay at fixed addresses."""
        d, sampler = self.decoder, self.decoder.sampler
        self.ids[:1].copy_(sampler.token)
        if d.attached is not None:
            self.ids[1:].copy_(d.attached.guesses[: self.T - 1])
        torch.add(self.offsets, sampler.pos, out=self.pos)
        if not self.plain:  # the recurrent states after the rows go to slots other than the sequence's own
            torch.add(self.others, self.others >= d.places, out=self.chain.copies)
        x = d.plan.embed(self.ids)
        logits = self.repeated(self._whole, x) if self.repeated and not d.turns else self._whole(x)
        logits = d.plan.capped(logits)
        if self.lazy:  # draw after the rows in order, as plain steps do, until a drawn token differs from the next row's draft
            tokens = sampler.follow(logits, self.ids[1:].tolist())
            self.result[: len(tokens) + 1] = torch.tensor([len(tokens) - 1, *tokens])
            self.logits = sampler.logits
        else:
            self._at_once(logits)
        if not self.plain:  # the state after the last right row is the sequence's from now on, wherever it is
            d.places.copy_(torch.cat((self.chain.copies, d.places)).index_select(0, self.accepted))
        if d.attached is not None:
            d.attached.guess(self.drawn, self.hidden, self.pos, self.accepted, self.T - 1)

    def _at_once(self, logits: torch.Tensor) -> None:
        """Draw after every row, then count the right drafts; all shapes are fixed, so the step can be recorded."""
        sampler, ops = self.decoder.sampler, self.decoder.ops
        self._draw(logits)
        ops.accept(self.drawn, self.ids, self.first, self.count, self.first, sampler.token, sampler.pos, self.accepted)
        if sampler.seen is not None and sampler.sampling.repetition_penalty != 1:
            came = torch.where(self.offsets <= self.accepted, self.drawn, self.drawn[:1])
            sampler.seen.scatter_(1, came[None], True)
        self.logits = logits.index_select(0, self.accepted)

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        d = self.decoder
        groups, pictures = (self.first, self.count, self.T), d.pictures_of(self.pos)
        batch = Batch(
            d.ops, self.ids, self.T, self.pos, d.angles, drafted=True, chains=[self.chain], groups=groups, pictures=pictures,
            pause=self.pause,
        )  # fmt: skip
        if d.attached is None:
            return d.plan.logits(d.plan.hidden(x, batch, self.state))
        taps = list[torch.Tensor]()
        y = d.plan.hidden(x, batch, self.state, taps)
        self.hidden = d.attached.hidden(y, taps)  # the same tensors in every replay
        return d.plan.logits(y)

    def _draw(self, logits: torch.Tensor) -> None:
        """Draw a token after each row, as `Sampler.choose` would for a sequence that ends there."""
        sampler, s = self.decoder.sampler, self.decoder.sampler.sampling
        temperature = s.temperature
        if sampler.seen is not None and s.repetition_penalty != 1:
            marks = torch.zeros_like(logits, dtype=torch.int8).scatter_(1, self.ids[:, None], 1)
            seen = sampler.seen | marks.cummax(0).values.bool()
            logits = penalise(logits.float(), seen, s.repetition_penalty)
        if not s.greedy and (s.top_k or s.top_p < 1):
            logits, temperature = restrict(logits.float() / s.temperature, s.top_k, s.top_p), 1.0
        how = torch.full((self.T,), temperature, dtype=torch.float32, device=self.device)
        seeds = sampler.seed.expand(self.T).contiguous()
        self.decoder.ops.choose_rows(logits.contiguous(), self.rows, self.drawn, self.pos.clone(), seeds, how)

    def _graph(self) -> Captured | None:
        """The step as a CUDA graph; None, with the decoder's `reason` set, where it cannot be recorded."""
        d = self.decoder
        key = self._key
        self.new = key not in self.captured
        if self.new:
            guesses = [] if d.attached is None else [d.attached.guesses]
            state = [*d.sampler.state, *tensors_of(d.state), d.places, self.result, *guesses]
            graph, why = capture_unchanged(self.compute, state)
            if graph is None:
                d.reason = f"no CUDA graph of steps with drafts: {why}"
                return None
            graph.logits = self.logits
            self.captured[key] = graph
        return self.captured[key]
