"""What the server's two halves say to each other: requests and tokens. Texts, templates and HTTP are not the engine's.

An engine computes in a thread of its own, in this process or in another one (`apart`), for requests are data. They come in by
`submit` from any thread; what happens to them goes out once a step, for all requests of that step together, through the one
`sink` that `start` was given: a Python object per token is affordable at 64 sequences and 200 steps/s, a lock or a wake-up per
token is not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from threading import Thread
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from lowq_cli.calibrate.texts import check_ids
from lowq_cli.engine.ranges import Range
from lowq_cli.engine.sampling import Sampling
from lowq_cli.hf.pictures import Packed
from lowq_packers.errors import LowqError, UsageError, log_error, one_line

MOST_LOGPROBS = 20  # alternatives a token, as OpenAI has it
BIAS = Range(-100, 100, off=0)  # of a token's logit, as OpenAI has it
MinP = Annotated[float, Range(0, 1, off=0)]
Penalty = Annotated[float, Range(-2, 2, off=0)]
LogProbs = Annotated[int | None, Range(0, MOST_LOGPROBS, whole=True)]


class Busy(LowqError):
    """The queue is full: try again later."""


@dataclass(frozen=True)
class Draw(Sampling):
    """How a request's tokens are drawn: Sampling, and what else OpenAI's clients ask for.

    The order: bias, penalties, temperature, top_k, top_p, min_p. min_p: least probability, as a share of the likeliest token's;
    0 is off. presence_penalty and frequency_penalty, of tokens generated so far (repetition_penalty: of the prompt's too):
    subtracted from the logit once, and once per occurrence. logit_bias: token id -> what is added to its logit. logprobs: how
    many of the likeliest tokens each Event names, 0 for the drawn one alone; None for no log-probabilities. They are those of
    the model, before bias, penalties and temperature.

    Raises UsageError for a value out of range.
    """

    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: LogProbs = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for bias in self.logit_bias.values():
            BIAS.check("logit_bias", bias)


Words = npt.NDArray[np.int32]  # a bit a token, (ceil(V / 32),), lowest bit first


class Mask(Protocol):
    """Which tokens may come next, as a grammar says; one request's, called from the engine's thread.

    recipe: from which an engine in another process makes a mask like it.
    """

    recipe: str

    def fill(self, words: Words) -> None:
        """Set the bit of every token that may come next."""
        ...

    def accept(self, token: int) -> None:
        """Note the token that was drawn."""
        ...


def allow(words: Words, token: int) -> None:
    """Set a token's bit as `Mask.fill` does."""
    words[token // 32] |= -(1 << 31) if token % 32 == 31 else 1 << token % 32


Likelihood = tuple[float, tuple[tuple[int, float], ...]]  # of a token, and of the likeliest ones with their ids
POOLINGS = ("last", "first", "mean")


@dataclass(frozen=True)
class Read:
    """What is asked of a prompt itself (`reads`): how likely its tokens are, or the one that comes next; or a vector.

    top: the likeliest tokens named beside each. pooling: of POOLINGS.
    """

    kind: Literal["likelihoods", "next", "hidden"]
    top: int = 0
    pooling: str = "last"


@dataclass(frozen=True)
class Request:
    """One text to go on with.

    Args:
        prompt: token ids, at least one.
        max_tokens: at least 1; with the prompt at most `Limits.longest`.
        stop_ids: tokens that end the text; the one met is delivered, with finish_reason "stop".
        draw: how tokens are drawn.
        mask: what a grammar allows, or None.
        client: who asks, "" for nobody in particular; it matters where requests wait (`turns`).
        read: what is asked of the prompt alone: its one event says that, and no token is drawn.
        pictures: those that the prompt has tokens of, in order.
        adapter: number of the LoRA adapter that computes it, 0 for none.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    draw: Draw = Draw()
    mask: Mask | None = None
    client: str = ""
    read: Read | None = None
    pictures: tuple[Packed, ...] = ()
    adapter: int = 0

    @cached_property
    def special(self) -> bool:
        """Whether it asks for more than a temperature (`special.Special` draws it). Kept: asked for in every pass."""
        d = self.draw
        plain = Draw(temperature=d.temperature, seed=d.seed)
        if d.greedy:  # what restricts a draw changes no argmax
            plain = Draw(seed=d.seed, top_k=d.top_k, top_p=d.top_p, min_p=d.min_p)
        return d != plain or self.mask is not None


def check(request: Request, longest: int, vocabulary: int, adapters: int = 0) -> None:
    """Raise UsageError for a request that can never be answered: too long, with tokens or an adapter that the model has not."""
    if not 0 <= request.adapter <= adapters:
        raise UsageError(f"adapter={request.adapter}; this model has {adapters}")
    tokens = len(request.prompt)
    if not tokens or request.max_tokens < 1:
        raise UsageError(f"{tokens} prompt tokens and {request.max_tokens} new ones; both must be at least 1")
    if tokens + request.max_tokens > longest:
        raise UsageError(f"{tokens} prompt tokens and {request.max_tokens} new ones are more than the {longest} that fit")
    check_ids((*request.prompt, *request.draw.logit_bias), vocabulary)


@dataclass(frozen=True, slots=True)
class Event:
    """One token of a request, or its end, or both: the last event of a request has a finish_reason, and only the last.

    finish_reason: "stop" (a stop id, or the mask's end), "length" (max_tokens), "cancelled", "refused" (its own mask cannot go
    on) or "error", with what is wrong in one line, `message`; with the last three there is no token. cached: in a request's
    first event, prompt tokens that were not computed. read: what was asked of the prompt. drafted: in its last, its drafts that
    were right, and that were wrong.
    """

    token: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None
    message: str = ""
    cached: int = 0
    read: Any = None
    drafted: tuple[int, int] = (0, 0)


def check_unstarted(thread: Thread | None) -> None:
    """Raise RuntimeError where an engine's thread runs already: two would compute the same requests."""
    if thread is not None:
        raise RuntimeError("an engine is started once")


def failed(why: Exception) -> Event:
    """The end of a request that cannot go on."""
    if not isinstance(why, LowqError):
        log_error("a request cannot go on", why)
    return Event(finish_reason="refused" if isinstance(why, UsageError) else "error", message=one_line(why))


Done = Callable[[int, int], None]
Sink = Callable[[list[tuple[int, Event]]], None]  # (number, event) of one step, in order; must return at once


@dataclass(frozen=True)
class Limits:
    """What an engine takes: known from its start on.

    longest: tokens of a prompt and its answer. running, waiting: requests computed at once, and in the queue.
    cache_tokens, cache_bytes: tokens whose keys and values all requests together may hold, and what that takes.
    """

    longest: int
    running: int
    waiting: int
    cache_tokens: int
    cache_bytes: int


@dataclass(frozen=True)
class Stats:
    """Where an engine stands (running, waiting, blocks in use and in all), and counters that only grow."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefix_hits: int = 0  # prompt tokens that were found in the cache
    preemptions: int = 0  # requests put back into the queue for want of blocks
    steps: int = 0
    drafted: int = 0  # tokens that were guessed and checked
    accepted: int = 0  # of those, that were right
    host_hits: int = 0  # of prefix_hits, those that came back from host memory
    host_bytes: int = 0  # in host memory
    busy_s: float = 0.0
    stalled: str = ""  # why nothing comes from it now, though it has not ended


class Engine(Protocol):
    """Computes the tokens of many requests.

    name, reason: what it is, and why nothing faster was taken ("" if it is the fastest). limits: known before `start`.
    closed: why it takes no requests, "" while it does.
    """

    name: str
    reason: str
    closed: str
    limits: Limits
    vocabulary: int  # logits of a token

    def start(self, sink: Sink, done: Done = lambda n, of: None) -> None:
        """Begin to compute, in a thread of the engine's own; what happens to requests goes to `sink`, from that thread.

        `done(n, of)` is told of each part of what takes seconds before: recording CUDA graphs. Once an engine: RuntimeError.
        """
        ...

    def submit(self, request: Request) -> int:
        """Queue a request; its number. Its events may come before this returns.

        Raises UsageError for one that can never be answered (too long, a token that the model has not), Busy for a full queue.
        """
        ...

    def cancel(self, number: int) -> None:
        """End a request before its next token; one that has ended, or is not known, is no error.

        A request that had not ended gets one last event, "cancelled"; tokens that were on their way may come before it.
        """
        ...

    def stats(self) -> Stats:
        """Where it stands now; from any thread."""
        ...

    def keep(self) -> Any:
        """What a later engine of the same model can go on from, once this one has stopped; None for nothing."""
        ...

    def stop(self, seconds: float) -> None:
        """Take no more requests, finish those there are within `seconds`, cancel the rest, end the thread."""
        ...
