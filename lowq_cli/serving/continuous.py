"""Continuous batching: requests join and leave between passes of the native decoder's plan, over a paged cache.

One thread plans passes, launches them and reads their results (`PassPipeline`). An error in this thread ends every open request
with that error, and the engine then takes no further requests.

The greedy output of a request depends on the other requests only through the choice of kernels: a pass with another number of
rows may run other kernels, whose sums differ in their last bits. `deterministic` computes every step and every piece of a
prompt with a fixed number of rows and shares no cache blocks, so that the same kernels always run; a preempted sequence is
generated again from its prompt on, instead of prefilling the tokens it had.
"""

import gc
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lowq_cli.engine import plan as plans
from lowq_cli.engine.drafts.drafter import PagedDrafter
from lowq_cli.engine.model_record import owned
from lowq_cli.engine.state import BLOCK
from lowq_cli.serving.block_pool import START
from lowq_cli.serving.cache_allocator import PIECE, make_cache
from lowq_cli.serving.cache_manager import CacheManager
from lowq_cli.serving.draft_rounds import DraftChoice
from lowq_cli.serving.host_cache import HostCache, places
from lowq_cli.serving.host_memory import Kept, Lent
from lowq_cli.serving.image_encoding import Seeing
from lowq_cli.serving.measurements import Measurements
from lowq_cli.serving.pass_pipeline import PassPipeline
from lowq_cli.serving.prompt_queries import PromptReader
from lowq_cli.serving.request import Busy, Event, Limits, Request, Sink, Stats, check, check_unstarted, failed
from lowq_cli.serving.sampler import NO_LOGS, Logs, Special
from lowq_cli.serving.scheduler import Scheduler, StepPlan
from lowq_cli.serving.sequence import Sequence
from lowq_cli.serving.token_budget import PREFER
from lowq_kernels.decode.kv import PLAIN
from lowq_kernels.decode.kv import check as check_kind
from lowq_kernels.graphs import empty_cache
from lowq_packers.errors import UnsupportedError, UsageError, device_lost, log_error, one_line

MOST = {"cuda": 128, "cpu": 8}  # default limit of sequences that run at once
MOST_RUNNING = 1024


def why_not(model: Any) -> str | None:
    """Return the reason why this engine cannot serve a model, or None."""
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return "its weights are spread over processes"
    return plans.why_not(model)


class ContinuousEngine:
    """An engine that computes many requests at once.

    Args:
        model: a model for which `why_not` returns None.
        waiting: max. requests in the queue.
        running: max. requests computed at once; None: the default of the device (MOST).
        cache_tokens: max. tokens whose keys and values are stored; None: as memory allows. cache_bytes: their max. bytes.
        deterministic: see the module's docstring.
        kv: storage format of keys and values (`decode.kv.KINDS`).
        draft: "ngram" proposes drafts from n-grams, which passes then check; a drafter head or model proposes its own drafts in
            addition to n-grams; "none" drafts nothing; "auto" is "ngram" or "none" (`DraftChoice`).
        reads: total prompt tokens to come, if known. Passes are then recorded when they first repeat, not at the start: with an
            8B, decoding 16 sequences of 256 tokens took 0.7 s, after 3.3 s of recording for 128 sequences of any length.
        host: host memory for cache blocks that the device has no room for, or None; without effect if `deterministic`.
        prefer: even streams, early first tokens, or some of both (`token_budget.PREFER`).
        earlier: the measurements of an earlier load of this model, empty for the first one; None: those of this load are not
            asked for.
        later: a request waits for this load: on a GPU, passes are recorded and timed when they repeat or nothing is to do.
    Attributes in addition to Engine's:
        host_cache: the cache's blocks in host memory, or None.
    Raises DoesNotFitError where the device has no room for a cache, UsageError for more than MOST_RUNNING requests at once.
    """

    name = "continuous batching"

    def __init__(
        self,
        model: Any,
        waiting: int,
        running: int | None = None,
        cache_tokens: int | None = None,
        deterministic: bool = False,
        kv: str = PLAIN,
        reads: int | None = None,
        cache_bytes: int | None = None,
        prefer: str = PREFER[0],
        draft: str | PagedDrafter = "none",
        host: Lent | None = None,
        earlier: Measurements | None = None,
        later: bool = False,
    ) -> None:
        self.reason, self._brief = "", reads is not None
        plan = plans.plan_of(model)
        self.device, self.vocabulary = plan.device, plan.vocabulary
        choice = DraftChoice.of(draft, plan, deterministic, self._brief)
        drafter, self._why_not_drafter = choice.drafter, choice.why_not_drafter
        if drafter is not None:
            plan.tap(tuple(i for i in drafter.layers if i >= 0))
        most = running or MOST[self.device.type]
        if not 1 <= most <= MOST_RUNNING:
            raise UsageError(f"--max-batch {most} must be from 1 to {MOST_RUNNING}: so many requests are computed at once")
        host = None if deterministic else host
        reserved = 0 if host is None else host.room
        sizes = (most, cache_tokens, deterministic, reads, cache_bytes, choice.name != "none", reserved)
        # recordings of passes with pictures and with a drafter are made at the start alone
        quick = plan.device.type == "cuda" and not deterministic and drafter is None and plan.model.images is None
        self._earlier, self._later = earlier if quick else None, quick and later
        known = earlier if self._later and earlier is not None and earlier.passes else None
        drafter_plan = None if drafter is None else drafter.plan
        cache = make_cache(model, plan, check_kind(kv), *sizes, drafter=drafter_plan, known=known, later=self._later)
        self._beside, self._known_drafts = cache.beside, {} if known is None else known.drafts
        self.passes, special = cache.passes, Special(cache.passes.rows, self.vocabulary, plan.ops.choose_rows)
        self._digests: list[bytes] = [] if plan.adapters is None else plan.adapters.digests
        self._everywhere = 0 if plan.adapters is None else plan.adapters.all
        self.passes.token_budget.prefer = prefer
        held = (BLOCK, PIECE, cache.slots, cache.snapshots)
        self._lent, self.host_cache, self._broken, there = host, None, False, list[int]()
        if host is not None:
            there = list(host.kept.places) if host.kept else places(host.room, *cache.shares)
            self.host_cache = HostCache(host.path, plan, self.passes.state, there, cache.drafter)
        manager = CacheManager(list(cache.groups), cache.blocks, *held, not deterministic, cache.copies, there)
        if host is not None and host.kept is not None:
            manager.restore(host.kept.records)
        self.scheduler = Scheduler(manager, most, self.passes.sizes.bucket, deterministic)
        self.drafts, self.why_no_drafts = choice.begin(self.passes, self.scheduler, special, cache.drafter)
        self.pipeline = PassPipeline(self.passes, special, self.drafts)
        self.limits = Limits(cache.longest, most, waiting, cache.tokens, cache.bytes)
        self._check_files = owned(model).check_files
        self._changed = threading.Condition()
        self._incoming: list[Sequence] = []
        self._cancelled: set[int] = set()
        self._texts: dict[int, Sequence] = {}
        self._unseen: set[int] = set()  # numbers of sequences whose images are not encoded yet
        self._seeing = Seeing(model, self._seen)
        self._number, self.closed, self._ending = 0, "the server has not started yet", False
        self._reader, self._to_read = PromptReader(model, kv), deque[Sequence]()
        self._events: list[tuple[int, Event]] = []  # of passes that were read in this turn
        self._prompt_tokens, self._new_tokens, self._busy_s = 0, 0, 0.0
        self._thread: threading.Thread | None = None
        self._unrecorded = self._later  # whether passes are left to be recorded

    def start(self, sink: Sink, done: Callable[[int, int], None] = lambda n, of: None) -> None:
        """Record the passes, then start the engine's thread. `done(n, of)` is called after each recording."""
        check_unstarted(self._thread)
        if self.device.type == "cuda":
            with torch.inference_mode():
                self.passes.rows.flush()
                self.passes.record_when_met() if self._brief or self._later else self.passes.record(done)
                self.reason = self.passes.reason
                if self.drafts is not None:
                    drafted = self.drafts.passes
                    if not self.reason:
                        drafted.record_when_met(self._known_drafts) if self._later else drafted.record()
                    self.why_no_drafts = self.reason or drafted.reason
                if self.reason or self.why_no_drafts:
                    self.drafts = self.pipeline.drafts = self.passes.noted = None
                if self.drafts is not None:
                    self.drafts.warm()
                    self._unrecorded |= self.drafts.guesses is not None
        self.passes.token_budget.begin()
        # What exists now stays until `stop`: to look through it for garbage took 0.3 s of a pass of 64 sequences with n-grams,
        # whose tables of runs are many new objects (H200).
        gc.freeze()
        self._sink, self.closed = sink, ""
        self._thread = threading.Thread(target=self._work, name="lowq-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> int:
        """Queue a request and return its number."""
        check(request, self.limits.longest, self.vocabulary, len(self._digests))
        if self._everywhere and not request.adapter:
            request = replace(request, adapter=self._everywhere)
        drafter = None if self.drafts is None or request.undrafted else self.drafts.drafter()
        begun = self._feeds
        if drafter is not None and begun:
            drafter.begin(request.prompt)  # in the caller's thread, so that no pass waits for it
        with self._changed:
            if self.closed:
                raise UnsupportedError(self.closed)
            if len(self._incoming) + len(self.scheduler.waiting) + len(self._unseen) >= self.limits.waiting:
                raise Busy(f"{self.limits.waiting} requests wait already; try again later")
            if request.pictures:
                self._seeing.sight()
            self._number += 1
            start = self._digests[request.adapter - 1] if request.adapter else START
            text = self._texts[self._number] = Sequence(self._number, request, start)
            text.drafter, text.fed = drafter, text.prompt * begun
            if request.pictures:
                self._unseen.add(text.number)
                self._seeing.add(text)
            else:
                self._incoming.append(text)
                self._changed.notify()
            return text.number

    def _seen(self, text: Sequence, why: Exception | None) -> None:
        """Queue a sequence whose images are encoded or failed to encode (`why`); called by the thread that encodes images."""
        text.failed = why
        with self._changed:
            self._unseen.discard(text.number)
            if text.number in self._texts:
                self._incoming.append(text)
            self._changed.notify()

    def cancel(self, number: int) -> None:
        """Cancel a request before its next token."""
        with self._changed:
            if number in self._texts:
                self._cancelled.add(number)
                self._changed.notify()

    def stats(self) -> Stats:
        """Return the engine's current counts."""
        s, held = self.scheduler, self.scheduler.cache
        return Stats(
            running=len(s.active),
            waiting=len(s.waiting) + len(self._incoming),
            blocks_used=held.used,
            blocks=held.blocks,
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._new_tokens,
            prefix_hits=s.prefix_hits,
            preemptions=s.preemptions,
            steps=self.pipeline.steps,
            drafted=0 if self.drafts is None else self.drafts.drafted,
            accepted=0 if self.drafts is None else self.drafts.accepted,
            host_hits=held.brought,
            host_bytes=0 if self.host_cache is None else self.host_cache.bytes(held.in_host()),
            busy_s=self._busy_s,
        )

    @property
    def drafts_by(self) -> str:
        """The names of the drafters in use, or the reason why there is none."""
        if self.drafts is None:
            return f"none ({self.why_no_drafts})"
        return self.drafts.name + self._why_not_drafter

    @property
    def _feeds(self) -> bool:
        """Whether sequences' drafters are given the tokens at once; otherwise when drafts pay again."""
        return self.drafts is None or self.drafts.on

    def stop(self, seconds: float) -> None:
        """Wait up to `seconds` for open requests to finish, then cancel the rest and stop the thread."""
        until = time.monotonic() + seconds
        with self._changed:
            self.closed = self.closed or "the server is stopping"
            while self._texts and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            self._cancelled |= set(self._texts)
            self._ending = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=30)
            gc.unfreeze()

    @property
    def measurements(self) -> Measurements | None:
        """The measurements of this load and earlier ones up to now; None where passes are not recorded, or not later."""
        if self._earlier is None or self.reason:
            return None
        drafts = {} if self.drafts is None else self.drafts.passes.seconds
        seconds = dict(self.passes.token_budget.known)
        return replace(self._earlier, beside=self._beside, passes=seconds, drafts=dict(drafts))

    def keep(self) -> Kept | None:
        """Return the host-memory cache for a later engine with the same settings; call after `stop`; None without one."""
        if self.host_cache is None or self._lent is None or self._broken:
            return None
        cache = self.scheduler.cache
        with torch.inference_mode():
            cache.store_all()
            self._swap()
        return Kept(self._lent.key, self.host_cache.places, cache.records(), self.host_cache.bytes(cache.in_host()))

    def _swap(self) -> None:
        """Run the copies to and from host memory that the scheduler has planned."""
        swaps, self.scheduler.cache.swaps = self.scheduler.cache.swaps, []
        if swaps and self.host_cache is not None:
            self.host_cache.run(swaps)

    def _work(self) -> None:
        """Run passes until the engine ends: the main function of its thread."""
        try:
            with torch.inference_mode():
                while self._take():
                    began = time.monotonic()
                    self._turn()
                    self._read_one()
                    self._busy_s += time.monotonic() - began
        except Exception as e:  # an error of the engine itself: every open request ends with it
            self._broken = True
            log_error("the engine has stopped", e)
            message = f"the engine has stopped: {one_line(e)}"
            with self._changed:
                self.closed, numbers = message, list(self._texts)
                self._texts.clear()
                self._changed.notify_all()
            self._sink([(n, Event(finish_reason="error", message=message)) for n in numbers])

    @property
    def _idle(self) -> bool:
        """Whether no pass is in flight and no request is there to compute."""
        return not (self._incoming or self._cancelled or self.pipeline.flights or len(self._texts) > len(self._unseen))

    def _record_passes(self) -> None:
        """While there is nothing to do, record and time the passes that the start has left."""
        while self._unrecorded and self._idle and not self._ending:
            self._pass()  # takes the rows of ended sequences out of use
            drafts = self.drafts
            more = self.passes.record_next() or (drafts is not None and (drafts.passes.record_next() or drafts.record_next()))
            self._unrecorded = more
            if not more:  # gives back what passes took that ran unrecorded
                empty_cache()

    def _take(self) -> bool:
        """Take new requests and cancellations; waits while there is nothing to do. Returns False once the engine ends."""
        self._record_passes()
        with self._changed:
            while self._idle:
                if self._ending:
                    return False
                self._changed.wait()
            flying = self.pipeline.flights and not (self._incoming or self._cancelled or self._ending or self._to_read)
            if flying and (left := self.scheduler.spare(self.pipeline.due, time.monotonic())) > 0:
                self._changed.wait(left)  # the next pass has time to wait for new prompts
            incoming, self._incoming = self._incoming, []
            cancelled, self._cancelled = self._cancelled, set()
        unseen = [t for t in incoming if t.failed is not None]
        incoming = [t for t in incoming if t.failed is None and not t.done]
        self._to_read.extend(t for t in incoming if t.request.read is not None)
        self.scheduler.add(t for t in incoming if t.request.read is None)
        self._prompt_tokens += sum(t.prompt for t in incoming)
        events = [(t.number, failed(t.failed)) for t in unseen if t.failed is not None and not t.done]
        for one in (t for t in unseen if not t.done):
            self._end(one)
        for number in sorted(cancelled):
            text = self._texts.get(number)
            if text is not None and not text.done:
                self._end(text)
                events.append((number, Event(finish_reason="cancelled")))
        if events:
            self._sink(events)
        return True

    def _read_one(self) -> None:
        """Answer one waiting request that asks about the prompt itself (such as log probabilities of its tokens)."""
        if not self._to_read:
            return
        text = self._to_read.popleft()
        if not text.done:
            assert text.request.read is not None
            try:
                event = Event(finish_reason="stop", read=self._reader(text.tokens, text.request.read, text.request.adapter))
            except Exception as e:  # an error of this prompt only, such as too little memory for it
                if device_lost(e):
                    raise  # no sequence can go on
                event = failed(e)
            self._check_files()
            self._end(text)
            self._sink([(text.number, event)])
        if not self._to_read:
            self._reader.release()

    def _turn(self) -> None:
        """Launch one more pass, and read the results of the one before it."""
        size, tokens = self.passes.sizes.bucket(max(1, self.scheduler.stepping)), self._new_tokens
        if self.drafts is not None:
            self.drafts.begin_turn(size, self.scheduler.adapted)
        plan = self._pass()
        events, self._events = self._events, []
        if events:  # only now: while a thread that takes them runs, this one could not launch the pass
            self._check_files()
            self._sink(events)
        if self.drafts is not None:
            self.drafts.end_turn(plan, size, self._new_tokens - tokens)

    def _pass(self) -> StepPlan | None:
        """Launch the next pass and read the results of those before it. Returns its plan, None where there is nothing to do."""
        if any(t.request.mask is not None or t.drafting for t in self.scheduler.active):
            self._land(0)  # a grammar needs the last token, and a sequence with drafts in flight needs their result
        if any(flight.rows for flight in self.pipeline.flights) and self.scheduler.compacts:
            self._land(0)  # a sequence's position has to be known
        counts = {} if self.drafts is None else self.drafts.counts()
        if self.drafts is not None and counts and self.pipeline.flights and self.drafts.needs_result:
            self._land(0)
            counts = self.drafts.counts()
        plan = self.scheduler.plan(self._budget, self._pauses)
        if plan is None:
            self._land(0)
            return None
        drafts = {} if self.drafts is None or plan.pieces else self.drafts.draft(plan, counts)
        self.pipeline.write(plan, bool(drafts))
        self._swap()
        self._land(self.pipeline.ahead if self.pipeline.launch(plan, drafts) else 0)
        return plan

    def _budget(self, high: int, waiting: int) -> int:
        return self.passes.token_budget.prompt_tokens(*self.scheduler.load(high, waiting, self.passes.sizes.riding(high)))

    def _pauses(self, high: int, waiting: int) -> bool:
        return self.passes.token_budget.pauses(*self.scheduler.load(high, waiting, self.passes.sizes.riding(high)))

    def _land(self, most: int) -> None:
        """Read passes until at most `most` are in flight; `_turn` sends the events of their tokens."""
        for drawn_tokens, logs in self.pipeline.land(most):
            for text, drawn in drawn_tokens:
                of_text = logs.get(text.number) or [NO_LOGS] * len(drawn)
                for token, log in zip(drawn, of_text, strict=False):
                    if not text.done and (event := self._event(text, token, log)) is not None:
                        self._events.append((text.number, event))
                if not text.done and self._feeds and not text.behind:
                    text.feed()

    def _event(self, text: Sequence, token: int, log: Logs) -> Event | None:
        """Add a token to its sequence and return its event; None where the token was already sent before a preemption."""
        again = text.repeated is not None
        if text.request.mask is not None and not text.failed and not again:
            try:
                text.request.mask.accept(token)
            except Exception as e:  # an error of the grammar library: this sequence ends with it
                text.failed = e
        if text.failed:
            self._end(text)
            return failed(text.failed)
        finish = self.scheduler.on_token(text, token)
        if again:
            return None
        self._new_tokens += 1
        (logprob, top), cached, text.started = log, (0 if text.started else text.cached), True
        if not finish:
            return Event(token, logprob, top, cached=cached)
        if self.drafts is not None:
            self.drafts.ended(text)
        self._end(text)
        return Event(token, logprob, top, finish, cached=cached, drafted=(text.accepted, text.drafted - text.accepted))

    def _end(self, text: Sequence) -> None:
        self.scheduler.end(text)
        with self._changed:
            self._texts.pop(text.number, None)
            self._unseen.discard(text.number)
            self._changed.notify_all()
