"""The interface between HTTP and the engine: requests and tokens. The engine knows nothing of texts, templates and HTTP.

An engine computes in a separate thread, in this process or in another one (`engine_process`), which is possible because
requests are plain data. They come in by `submit` from any thread. Their events go out once a step, for all requests of the
step together, through the `sink` given to `start`: a Python object per token is affordable at 64 sequences and 200 steps/s, a
lock or a wake-up per token is not.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
from lowq_cli.serving.measurements import Measurements
from lowq_packers.errors import LowqError, UsageError, log_error, one_line

MOST_LOGPROBS = 20  # max. alternatives per token, as in OpenAI's API
BIAS = Range(-100, 100, off=0)  # range of a bias added to a token's logit, as in OpenAI's API
MinP = Annotated[float, Range(0, 1, off=0)]
Penalty = Annotated[float, Range(-2, 2, off=0)]
LogProbs = Annotated[int | None, Range(0, MOST_LOGPROBS, whole=True)]


class Busy(LowqError):
    """The queue is full: try again later."""


@dataclass(frozen=True)
class Draw(Sampling):
    """How a request's tokens are sampled: Sampling, and the further settings of OpenAI's API.

    The order is bias, penalties, temperature, top_k, top_p, min_p. min_p: min. probability, as a fraction of the likeliest
    token's; 0 is off. presence_penalty, frequency_penalty: subtracted from the logit of a token generated before, once, and
    once per occurrence (repetition_penalty also counts the prompt's tokens). logit_bias: token id -> value added to its logit.
    logprobs: how many of the likeliest tokens each Event lists, 0 for only the sampled one; None for no log-probabilities.
    They are those of the model, before bias, penalties and temperature.

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


Words = npt.NDArray[np.int32]  # one bit per token, (ceil(V / 32),), lowest bit first


class Mask(ABC):
    """The tokens that a grammar allows next, for one request; called from the engine's thread.

    recipe: text from which an engine in another process makes an equal mask. takes_drafts: whether it also knows the tokens
    that are allowed after draft tokens.
    """

    recipe: str = ""
    takes_drafts: bool = False

    def ask(self, drafts: Sequence[int] = ()) -> None:
        """Announce a `fill`, or a `fill_drafts` with these drafts: another process computes all masks announced at once."""
        return

    @abstractmethod
    def fill(self, words: Words) -> None:
        """Set the bit of every token that may come next."""

    def fill_drafts(self, words: Words, drafts: Sequence[int]) -> int:
        """Fill rows (1 + n, ceil(V / 32)): the tokens that may come next, and those after each of n draft tokens.

        Return the number of drafts after which the row was filled; a later draft must count as wrong.
        """
        self.fill(words[0])
        return 0

    @abstractmethod
    def accept(self, token: int) -> None:
        """Advance the grammar by the sampled token."""


def allow(words: Words, token: int) -> None:
    """Set a token's bit, in the layout of `Mask.fill`."""
    words[token // 32] |= -(1 << 31) if token % 32 == 31 else 1 << token % 32


Likelihood = tuple[float, tuple[tuple[int, float], ...]]  # log-probability of the token; ids and those of the likeliest ones
POOLINGS = ("last", "first", "mean")


@dataclass(frozen=True)
class Read:
    """A query about the prompt itself (`prompt_queries`): log-probabilities of its tokens or of the next one, or a vector.

    top: number of likeliest tokens to list for each token. pooling: one of POOLINGS, for a vector.
    """

    kind: Literal["likelihoods", "next", "hidden"]
    top: int = 0
    pooling: str = "last"


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Args:
        prompt: token ids, at least one.
        max_tokens: max. new tokens, at least 1; together with the prompt at most `Limits.longest`.
        stop_ids: tokens that end the answer; such a token is delivered, with finish_reason "stop".
        draw: sampling settings.
        mask: the mask of a grammar, or None.
        client: the client's address, "" if unknown; it matters for the order of waiting requests (`fairness`).
        read: a query about the prompt only: its single event has the result, and no token is sampled.
        pictures: the images whose tokens are in the prompt, in order.
        adapter: number of the LoRA adapter to use, 0 for none.
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
        """Whether it needs more than a temperature (`sampler.Special` then samples it). Cached, because every pass reads it."""
        d = self.draw
        plain = Draw(temperature=d.temperature, seed=d.seed)
        if d.greedy:  # top_k, top_p and min_p do not change an argmax
            plain = Draw(seed=d.seed, top_k=d.top_k, top_p=d.top_p, min_p=d.min_p)
        return d != plain or self.mask is not None

    @cached_property
    def undrafted(self) -> bool:
        """Whether it takes no drafts: its mask does not know what may follow one."""
        return self.mask is not None and not self.mask.takes_drafts


def check(request: Request, longest: int, vocabulary: int, adapters: int = 0) -> None:
    """Raise UsageError for a request that can never be answered: too long, or with unknown tokens or an unknown adapter."""
    if not 0 <= request.adapter <= adapters:
        raise UsageError(f"adapter={request.adapter}; this model has {adapters}")
    tokens = len(request.prompt)
    if not tokens or request.max_tokens < 1:
        raise UsageError(f"{tokens} prompt tokens and {request.max_tokens} new ones; both must be at least 1")
    if tokens + request.max_tokens > longest:
        raise UsageError(f"{tokens} prompt tokens and {request.max_tokens} new ones are more than the {longest} that fit")
    check_ids((*request.prompt, *request.draw.logit_bias), vocabulary)


@dataclass(slots=True)  # not frozen: to make one takes 0.7 us instead of 4, and a pass with drafts makes a hundred
class Event:
    """One token of a request, or its end, or both; only the last event of a request has a finish_reason.

    finish_reason: "stop" (a stop id, or the mask's end), "length" (max_tokens), "cancelled", "refused" (its own mask cannot
    continue) or "error"; with the last three there is no token. message: the error in one line. cached: in a request's first
    event, the prompt tokens found in the cache. read: the result of a query about the prompt. drafted: in a request's last
    event, the numbers of right and of wrong drafts.
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
    """Raise RuntimeError if an engine's thread has been started already: two threads would compute the same requests."""
    if thread is not None:
        raise RuntimeError("an engine is started once")


def failed(why: Exception) -> Event:
    """Return the last event of a request that cannot continue because of an error."""
    if not isinstance(why, LowqError):
        log_error("a request cannot go on", why)
    return Event(finish_reason="refused" if isinstance(why, UsageError) else "error", message=one_line(why))


Done = Callable[[int, int], None]
Sink = Callable[[list[tuple[int, Event]]], None]  # takes the (number, event) pairs of one step, in order; must not block


@dataclass(frozen=True)
class Limits:
    """The limits of an engine, fixed from its start on.

    longest: max. tokens of a prompt and its answer. running, waiting: max. requests computed at once, and in the queue.
    cache_tokens, cache_bytes: max. tokens whose keys and values are stored for all requests together, and their bytes.
    stuck_s: seconds without a step that mean a hung device.
    """

    longest: int
    running: int
    waiting: int
    cache_tokens: int
    cache_bytes: int
    stuck_s: float = 60.0


@dataclass(frozen=True)
class Stats:
    """The state of an engine (running, waiting, used and total blocks), and counters that only grow."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefix_hits: int = 0  # prompt tokens that were found in the cache
    preemptions: int = 0  # requests put back into the queue, for lack of blocks or to give way
    steps: int = 0
    drafted: int = 0  # tokens that were guessed and checked
    accepted: int = 0  # drafted tokens that were right
    host_hits: int = 0  # tokens of prefix_hits that came back from host memory
    host_bytes: int = 0  # bytes of cache blocks in host memory
    busy_s: float = 0.0
    stalled: str = ""  # why it sends no tokens now, though it has not ended


class Engine(Protocol):
    """Computes the tokens of many requests.

    name, reason: its name, and why no faster engine was chosen ("" if it is the fastest). limits: known before `start`.
    closed: why it takes no requests, "" while it does.
    """

    name: str
    reason: str
    closed: str
    limits: Limits
    vocabulary: int  # number of logits per token

    def start(self, sink: Sink, done: Done = lambda n, of: None) -> None:
        """Start the engine's thread; events of requests go to `sink`, from that thread.

        `done(n, of)` is called after each part of the slow preparation, such as recording CUDA graphs. Raises RuntimeError if
        the engine has been started before.
        """
        ...

    def submit(self, request: Request) -> int:
        """Queue a request and return its number. Its events may come before this returns.

        Raises UsageError for a request that can never be answered (too long, an unknown token), Busy for a full queue.
        """
        ...

    def cancel(self, number: int) -> None:
        """Cancel a request before its next token; a number that has ended or is unknown is ignored.

        A request that had not ended gets a last event, "cancelled"; tokens in flight may come before it.
        """
        ...

    def stats(self) -> Stats:
        """Return its current state and counters; can be called from any thread."""
        ...

    @property
    def measurements(self) -> Measurements | None:
        """What a later engine of the same model need not measure, as far as it is known now; None for nothing."""
        ...

    def keep(self) -> Any:
        """Return state for a later engine of the same model to start from, after this one has stopped; None for nothing."""
        ...

    def stop(self, seconds: float) -> None:
        """Take no more requests, wait up to `seconds` for open ones to finish, cancel the rest, end the thread."""
        ...
