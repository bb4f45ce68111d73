"""The host's side of decoding, common to all decoders: it yields text as it is generated, and has the statistics afterwards.

On a GPU the host runs one step behind: it launches step i+1 before it reads token i, so the device never waits for
detokenisation. This costs one wasted step after the end of a generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ReferenceType

from lowq_cli.engine.detokenize import Detokenizer
from lowq_cli.engine.sampling import Sampler, Sampling, check_finite
from lowq_cli.engine.stopping import Stopper
from lowq_cli.models import Tokenizer
from lowq_packers.errors import DamagedError, UsageError
from lowq_packers.lazy import torch

if TYPE_CHECKING:
    from lowq_cli.engine.drafts.drafting import FromHost, OnDevice
    from lowq_cli.engine.pictures import Shown
    from lowq_cli.engine.plan import Plan


def nothing() -> None:
    """Do nothing: the default callback between pieces of prompts."""


class Decoder(Protocol):
    """Reads prompts, then computes the next token of every sequence on the device.

    name, reason: its name, and why no faster decoder was chosen. ahead: whether `step` returns before the device has finished.
    kv: the format of cached keys and values (`decode.kv.KINDS`). user: the generation that uses its cache, or used it last.
    """

    name: str
    reason: str
    kv: str
    device: torch.device
    ahead: bool
    sampler: Sampler  # set by `start`
    user: ReferenceType[Generation]  # set by `engine.prompts.stream`

    def start(
        self, prompts: list[list[int]], sampling: Sampling, room: int, between: Callable[[], None] = nothing
    ) -> torch.Tensor:
        """Read the prompts, with room for `room` new tokens per sequence; returns the first new tokens, (B,).

        between: called before each piece of the prompts; an exception from it ends the reading and drops the prompts' cache.
        """
        ...

    def step(self) -> torch.Tensor:
        """The next tokens, (B,)."""
        ...


class StepDecoder(Decoder, Protocol):
    """A decoder whose step can be recorded and timed without advancing.

    token (B,) int64, pos (B,) int32: the newest tokens and their slots. linears: the layers that a step calls. plan: its steps.
    """

    token: torch.Tensor
    pos: torch.Tensor
    plan: Plan

    @property
    def linears(self) -> torch.nn.Module: ...

    def forward_step(self) -> None:
        """Compute one token for each sequence; all tensors that it reads and writes stay at fixed addresses."""
        ...


class Generation:
    """Iterate over it for pieces of the first sequence's text as they are generated; afterwards read the attributes.

    texts, tokens, finish_reasons: one per sequence; a reason is "stop" (an end token or stop text), "length", "context" or
    "interrupted". ttft_s: seconds from the call to the first token. pictures_s: the part of them that the vision tower
    took. prefill_tps: prompt tokens per second. decode_tps: tokens per second over all sequences, without each one's first
    token; 0 if no step was made.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, prompts: list[list[int]], sampling: Sampling, room: int, **how: Any
    ):
        self.decoder, self.prompts, self.sampling, self.room = decoder, prompts, sampling, room
        self.stop_ids: frozenset[int] = how["stop_ids"]
        self.limited_by: str = how["limited_by"]
        self.began: float = how["began"]
        self.prepare: Callable[[], object] = how.get("prepare", lambda: None)  # compiles the kernels that it needs
        self.check_files: Callable[[], object] = how.get("check_files", lambda: None)  # after each step, before its tokens
        self.drafting: FromHost | OnDevice | None = how.get("drafting")
        self.why_no_drafts: str = how.get("why_no_drafts", "")
        self.shown: list[Shown | None] = how.get("shown", [])  # the images of each prompt
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.texts = ["" for _ in prompts]
        self.finish_reasons = ["interrupted" for _ in prompts]
        self._open = set(range(len(prompts)))
        self.marks: dict[str, Any] | None = how.get("marks")  # the markers of thoughts in a conversation (`prompts.marks_of`)
        shown = self.marks["shown"] if self.marks else {}
        self._text = [Detokenizer(tokenizer, p, shown) for p in prompts]
        self._stoppers = [Stopper(how["stop"]) for _ in prompts]
        self._pictures_s: Callable[[], float] = how.get("pictures_s", float)
        self.ttft_s = self.prefill_s = self.decode_s = self.pictures_s = 0.0
        self.steps = 0
        self.done = False  # whether the decoder is free again

    @property
    def names(self) -> list[list[int]]:
        """The prompts' tokens, where the tokens of an image have numbers made from the image instead of the one image id."""
        shown = self.shown or [None] * len(self.prompts)
        return [p if s is None else s.names for p, s in zip(self.prompts, shown, strict=True)]

    @property
    def text(self) -> str:
        """The first sequence's text."""
        return self.texts[0]

    @property
    def finish_reason(self) -> str:
        """The first sequence's reason for ending."""
        return self.finish_reasons[0]

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens per second."""
        return sum(map(len, self.prompts)) / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second over all sequences, without each one's first token."""
        return (sum(map(len, self.tokens)) - len(self.prompts)) / self.decode_s if self.steps and self.decode_s else 0.0

    def __iter__(self) -> Iterator[str]:
        for i, piece in self.pieces():
            if i == 0 and piece:
                yield piece

    def pieces(self) -> Iterator[tuple[int, str]]:
        """(sequence, piece) of all sequences, as they are generated."""
        try:
            yield from self._checked_pieces()
        except DamagedError:  # logits that are not finite: because of a file that was written over, if one was
            self.check_files()
            raise

    def _checked_pieces(self) -> Iterator[tuple[int, str]]:
        for tokens in self.new_tokens():
            self.check_files()
            for i in sorted(self._open):
                for token in tokens[i]:
                    piece = self._take(i, token)
                    self.texts[i] += piece
                    yield i, piece
                    if i not in self._open:  # drop the tokens that were drawn after the end
                        break
            if not self._open:  # a NaN stays in its sequence's keys, so the last logits show it; steps do not check
                check_finite(self.decoder.sampler.logits)
                return

    def _take(self, i: int, token: int) -> str:
        """Append a token to sequence i; returns the text that it completes."""
        self.tokens[i].append(token)
        stopped = token in self.stop_ids
        ended = stopped or len(self.tokens[i]) == self.room
        piece = "" if stopped else self._text[i].push(token)
        piece, cut = self._stoppers[i].push(piece + self._text[i].flush() if ended else piece)
        if ended and not cut:
            piece += self._stoppers[i].flush()
        if ended or cut:
            self.finish_reasons[i] = "stop" if stopped or cut else self.limited_by
            self._open.discard(i)
        return piece

    def new_tokens(self) -> Iterator[list[list[int]]]:
        """For each step, the new tokens of every sequence: one, or several in a step with drafts. Tokens are read one step
        behind a device that runs ahead."""
        if self.done and self._open and self.room:
            raise UsageError("this generation was interrupted and does not continue; lowq.stream begins another one")
        try:
            if not self.done:
                yield from self._new_tokens()
        finally:
            self.done = True

    def _new_tokens(self) -> Iterator[list[list[int]]]:
        if self.room == 0:
            self.finish_reasons = [self.limited_by for _ in self.prompts]
            return
        self.prepare()
        start = time.perf_counter()
        more: dict[str, Any] = {"shown": self.shown} if self.shown else {}  # only the native decoder takes it
        device = self.decoder.start(self.prompts, self.sampling, self.room, **more)
        waiting = Fetch(device)
        if self.drafting is not None:
            self.drafting.begin(self.prompts[0])  # while the device still reads the prompt
        tokens = waiting.get()
        first = time.perf_counter()
        self.prefill_s, self.ttft_s, self.pictures_s = first - start, first - self.began, self._pictures_s()
        if self.drafting is not None:
            drafted = self._checked if self.drafting.ahead else self._drafted
            yield from drafted(self.drafting, tokens, first)  # type: ignore[arg-type]
            return
        ahead = Fetch(self.decoder.step()) if self.decoder.ahead and self.room > 1 else None
        yield [[t] for t in tokens]
        for n in range(1, self.room):
            fetch = ahead or Fetch(self.decoder.step())
            ahead = Fetch(self.decoder.step()) if self.decoder.ahead and n + 1 < self.room else None
            tokens = fetch.get()
            self.steps, self.decode_s = n, time.perf_counter() - first
            yield [[t] for t in tokens]

    def _checked(self, drafting: OnDevice, tokens: list[int], first: float) -> Iterator[list[list[int]]]:
        """As `new_tokens` after the first token, for one sequence whose drafts are made on the device."""
        count = 1
        yield [tokens]
        waiting: list[tuple[Fetch, int, bool]] = []
        while count < self.room:
            began = drafting.clock()
            while len(waiting) <= (self.decoder.ahead and count + 1 < self.room):
                where, rows, fresh = drafting.launch()
                waiting.append((Fetch(where), rows, fresh))
            fetch, rows, fresh = waiting.pop(0)
            tokens = drafting.read(fetch.get(), rows, fresh)
            count += len(tokens)
            self.steps, self.decode_s = self.steps + 1, time.perf_counter() - first
            yield [tokens]
            drafting.took(len(tokens), drafting.clock() - began)

    def _drafted(self, drafting: FromHost, tokens: list[int], first: float) -> Iterator[list[list[int]]]:
        """As `new_tokens` after the first token, for one sequence. Plain steps run ahead; a step with drafts waits for them.

        A device that runs ahead computes the next step while the tokens of the last one become text.
        """
        decoder, count = self.decoder, 1
        launched = list[tuple[Fetch, int]]()  # steps that were not read yet, and the number of their drafts

        def launch() -> None:
            where, n = drafting.launch(self.room - count)
            launched.append((Fetch(where), n))

        drafting.extend(tokens)
        if decoder.ahead and count < self.room:
            launch()
        yield [tokens]
        while count < self.room:
            began = drafting.clock()
            if not launched:
                launch()
            left, plain = self.room - count - 1, not launched[0][1]
            if decoder.ahead and plain and left and not drafting.wants(left):
                launched.append((Fetch(drafting.plain()), 0))
            fetch, n = launched.pop(0)
            drafting.meanwhile()
            tokens = drafting.read(fetch.get(), n)
            count += len(tokens)
            self.steps, self.decode_s = self.steps + 1, time.perf_counter() - first
            if decoder.ahead and not launched and count < self.room:
                launch()
            yield [tokens]
            drafting.took(len(tokens), drafting.clock() - began)
            drafting.after(len(tokens), self.room - count)


class Fetch:
    """An asynchronous copy of (B,) tokens to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.event = None
        self.host = tokens
        if tokens.is_cuda:
            self.host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self.host.copy_(tokens, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def get(self) -> list[int]:
        """The tokens; waits for this copy only, not for later launches."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()
