"""Continuous batching: requests join and leave between passes of the native decoder's plan, over a paged cache.

One thread decides, launches and reads. It runs one pass ahead of what it has read, so that the device never waits for the host;
the price is a row of one pass after a text ends. An error in it ends every open request with that error, and the engine takes
no more.

Greedy text of a request depends on who else is there through the kernels alone: a pass of another number of rows may take
others, whose sums differ in their last bits. `deterministic` computes every step with the same number of rows, every piece of a
prompt too, shares nothing, and so always takes the same kernels; a text that had to give back its blocks is drawn again from
its prompt on, not read as one.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lowq_cli.engine import plan as plans
from lowq_cli.engine.drafts.drafter import PagedDrafter
from lowq_cli.engine.drafts.drafter_choice import settled
from lowq_cli.engine.drafts.drafting import AGAIN, BEFORE, step_s
from lowq_cli.engine.drafts.ngram import NGram
from lowq_cli.engine.sampling import drawable, not_finite
from lowq_cli.engine.state import BLOCK
from lowq_cli.serving.block_pool import START
from lowq_cli.serving.cache_allocator import PIECE, make_cache
from lowq_cli.serving.cache_manager import CacheManager
from lowq_cli.serving.device_drafts import DeviceDrafts, Rows
from lowq_cli.serving.device_drafts import why_not as drafter_why_not
from lowq_cli.serving.draft_passes import SAME, Checked, DraftPasses
from lowq_cli.serving.drafting import Answers, choose, rounds
from lowq_cli.serving.guessing import Guessed, Rates, TextDrafter
from lowq_cli.serving.host_cache import HostCache, places
from lowq_cli.serving.host_memory import Kept, Lent
from lowq_cli.serving.image_encoding import Seeing
from lowq_cli.serving.model_runner import Piece
from lowq_cli.serving.prompt_queries import PromptReader
from lowq_cli.serving.request import Busy, Event, Limits, Request, Sink, Stats, check, check_unstarted, failed
from lowq_cli.serving.sampler import LogProbs, Logs, Special, fetch
from lowq_cli.serving.scheduler import Scheduler, StepPlan
from lowq_cli.serving.sequence import Sequence
from lowq_cli.serving.token_budget import PREFER
from lowq_kernels.decode.kv import PLAIN
from lowq_kernels.decode.kv import check as check_kind
from lowq_kernels.decode.reference import MOST_DRAFTS
from lowq_packers.errors import UnsupportedError, UsageError, device_lost, log_error, one_line

MOST = {"cuda": 128, "cpu": 8}  # texts that run at once
MOST_RUNNING = 1024
LOOK = 16  # steps of a GPU from one look at all logits to the next: NaN stays in its text's keys, so none is missed for long
SERVED_DRAFTS = ("ngram", "none")  # and "auto"
GAP_S = 4e-4  # from the end of a pass until one with drafts is launched, until it is known
LIKELY = 0.3  # chance of a guess below which it is not looked at: of 64 texts that would take the host a pass's time
ROW = 0.4  # of a plain pass, that one with twice the rows takes longer, until it is known
SLOPES = 15  # of the last passes with drafts on a CPU, whose median counts: other processes take their time of single ones
NEWEST = 0.1  # weight of the newest in averages
AHEAD = 1  # passes that are launched before the oldest is read
EARLY_S = 0.0015  # before the end of a pass the next is launched: prompts that come until then ride in it
SURE = 0.9  # of the seconds that a pass is expected to take: one that ends sooner would leave the device idle


def why_not(model: Any) -> str | None:
    """The reason this engine does not take a model, or None."""
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return "its weights are spread over processes"
    return plans.why_not(model)


class Flight:
    """A pass on its way, made before it is launched: who draws, in which rows; its size as `TokenBudget.note` takes it."""

    def __init__(self, device: torch.device) -> None:
        self.began = self._now(device)
        self.rows: list[int] = []  # of each text, of a pass with drafts
        self.guessed: list[Sequence] = []

    def launched(
        self,
        places: list[tuple[int, Sequence]],
        token: torch.Tensor,
        logs: list[LogProbs],
        sound: torch.Tensor | None,
        size: tuple[int, int],
    ) -> "Flight":
        """Itself, with what was launched: texts and their rows of the logits, and which of those rows are `drawable`."""
        self.drew, self.logs, self.size = [(t, t.row, i) for i, t in places], logs, size
        self.tokens, self.sound = fetch(token), None if sound is None else fetch(sound)
        self.ended = self._now(token.device)
        return self

    def guess(self, texts: list[Sequence], guesses: torch.Tensor | None) -> None:
        """What a drafter guesses (n, K) that each of some texts goes on with; None: it was not asked."""
        if guesses is not None:
            self.guessed, self.guesses, self.after = texts, fetch(guesses), self._now(guesses.device)

    def over(self) -> bool:
        """Whether it has ended."""
        return isinstance(self.ended, float) or self.ended.query()

    def read(self) -> tuple[list[int], float]:
        """The newest token of every row, and the pass's seconds; waits for this pass alone."""
        if isinstance(self.ended, float) or isinstance(self.began, float):
            return self.tokens.tolist(), self.ended - self.began  # type: ignore[operator]
        self.ended.synchronize()
        return self.tokens.tolist(), self.began.elapsed_time(self.ended) / 1e3

    @staticmethod
    def _now(device: torch.device) -> "torch.cuda.Event | float":
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class ContinuousEngine:
    """Many requests side by side.

    Args:
        model: one that `why_not` has nothing against.
        waiting: requests in the queue at most.
        running: requests computed at once at most; None: as the device is good for.
        cache_tokens: tokens whose keys and values are held at most; None: as memory allows. cache_bytes: of them all.
        deterministic: see above.
        kv: what keys and values are held in (`decode.kv.KINDS`).
        draft: "ngram" has passes check what texts are guessed to go on with, so does a head or model that drafts (n-grams
            beside it), "none" nothing; "auto" is "ngram" or "none" (`settled`).
        reads: prompt tokens that will come in all, if that is known. Passes are then recorded as they are met, not before: 16
            texts of 256 tokens of an 8B were decoded in 0.7 s after 3.3 s of preparing for 128 of any length.
        host: host memory for what the cache has no room for, None for none; without effect if `deterministic`.
        prefer: even streams, or early first tokens (`token_budget.PREFER`).
    Raises DoesNotFitError where the device has no room for a cache, UsageError for more than MOST_RUNNING.
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
    ) -> None:
        self.reason, self._brief = "", reads is not None
        plan = plans.plan_of(model)
        self.device, self.vocabulary = plan.device, plan.vocabulary
        drafter = None if isinstance(draft, str) else draft
        draft = settled(draft, self.device.type) if isinstance(draft, str) else draft.name
        if drafter is None and draft not in SERVED_DRAFTS:
            raise UnsupportedError(f"the server drafts by {' or '.join(SERVED_DRAFTS)}, or by a head or model, not by {draft}")
        why = "as asked" if draft == "none" or reads is not None else SAME if deterministic else ""
        reason = "" if drafter is None or why else drafter_why_not(drafter, plan)
        self._only_ngrams = f" ({drafter.name} does not: {reason})" if drafter is not None and reason else ""
        drafter = None if why or reason else drafter
        if drafter is not None:
            plan.tap(tuple(i for i in drafter.layers if i >= 0))
        most = running or MOST[self.device.type]
        if not 1 <= most <= MOST_RUNNING:
            raise UsageError(f"{most} requests side by side; from 1 to {MOST_RUNNING} can be")
        host = None if deterministic else host
        beside = 0 if host is None else host.room
        wanted = (most, cache_tokens, deterministic, reads, cache_bytes, draft != "none", beside)
        cache = make_cache(model, plan, check_kind(kv), *wanted, drafter=None if drafter is None else drafter.plan)
        self.passes, rows = cache.passes, cache.passes.rows
        self._digests: list[bytes] = [] if plan.adapters is None else plan.adapters.digests
        self._everywhere = 0 if plan.adapters is None else plan.adapters.all
        self.passes.token_budget.prefer = prefer
        self.rows, self.special = rows, Special(rows, self.vocabulary, plan.ops.choose_rows)
        held = (BLOCK, PIECE, cache.slots, cache.snapshots)
        self._lent, self._host, self._broken, there = host, None, False, list[int]()
        if host is not None:
            there = list(host.kept.places) if host.kept else places(host.room, *cache.shares)
            self._host = HostCache(host.path, plan, self.passes.state, there, cache.drafter)
        manager = CacheManager(list(cache.groups), cache.blocks, *held, not deterministic, cache.copies, there)
        if host is not None and host.kept is not None:
            manager.restore(host.kept.records)
        self.scheduler = Scheduler(manager, most, self.passes.bucket, deterministic)
        drafts = None if why else DraftPasses(self.passes)
        self.why_no_drafts = why if drafts is None else drafts.reason
        self.drafts = None if self.why_no_drafts else drafts
        self.guesses: DeviceDrafts | None = None
        if self.drafts is not None and drafter is not None:
            self.guesses = DeviceDrafts(drafter, rows, cache.drafter, self.passes.slots)
            self.passes.noted, self.scheduler.beyond = {}, drafter.reach
        self._answers = Answers()
        self._rates = Rates([BEFORE] * (0 if drafter is None else drafter.most))
        self._guess_costs = deque([0.0 if drafter is None else step_s(drafter.plan) / step_s(plan)] * 3, maxlen=SLOPES)
        self._unguessed = 0  # passes since the last for which the drafter guessed
        self._gap_s = GAP_S if self.device.type == "cuda" else 0.0
        self._slopes = deque([ROW] * 3, maxlen=SLOPES)
        self._drafted = self._accepted = 0
        self.limits = Limits(cache.longest, most, waiting, cache.tokens, cache.bytes)
        self._changed = threading.Condition()
        self._incoming: list[Sequence] = []
        self._cancelled: set[int] = set()
        self._texts: dict[int, Sequence] = {}
        self._unseen: set[int] = set()  # of them those whose pictures have not been seen yet
        self._seeing = Seeing(model, self._seen)
        self._number, self.closed, self._ending = 0, "the server has not started yet", False
        self._reader, self._to_read = PromptReader(model, kv), deque[Sequence]()
        self._flights: deque[Flight] = deque()
        self._ahead = AHEAD if self.device.type == "cuda" else 0
        self._prompt_tokens = self._new_tokens = self._steps = 0
        self._busy_s = self._due = 0.0  # due: when the pass on the device is expected to end
        self._thread: threading.Thread | None = None

    def drafter(self) -> TextDrafter:
        """What guesses for a text that begins."""
        ngram = NGram(self._answers)
        return ngram if self.guesses is None else Guessed(self._rates, ngram)

    def start(self, sink: Sink, done: Callable[[int, int], None] = lambda n, of: None) -> None:
        """Record the passes, then begin to compute. `done(n, of)` is told of each recording."""
        check_unstarted(self._thread)
        if self.device.type == "cuda":
            with torch.inference_mode():
                self.rows.flush()
                self.passes.record_when_met() if self._brief else self.passes.record(done)
                self.reason = self.passes.reason
                if self.drafts is not None and not self.reason:
                    self.drafts.record()
                    self.why_no_drafts = self.drafts.reason
                if self.reason or self.why_no_drafts:
                    self.drafts = self.guesses = self.passes.noted = None
        self.passes.token_budget.begin()
        self._sink, self.closed = sink, ""
        self._thread = threading.Thread(target=self._work, name="lowq-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> int:
        """Queue a request; its number."""
        check(request, self.limits.longest, self.vocabulary, len(self._digests))
        if self._everywhere and not request.adapter:
            request = replace(request, adapter=self._everywhere)
        drafter = self.drafter() if self.drafts is not None and not request.special else None
        if drafter is not None:
            drafter.begin(request.prompt)  # here, not where passes wait for it
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
            text.drafter = drafter
            if request.pictures:
                self._unseen.add(text.number)
                self._seeing.add(text)
            else:
                self._incoming.append(text)
                self._changed.notify()
            return text.number

    def _seen(self, text: Sequence, why: Exception | None) -> None:
        """The pictures of a text have been seen, or cannot be; told by the thread that shows them."""
        text.failed = why
        with self._changed:
            self._unseen.discard(text.number)
            if text.number in self._texts:
                self._incoming.append(text)
            self._changed.notify()

    def cancel(self, number: int) -> None:
        """End a request before its next token."""
        with self._changed:
            if number in self._texts:
                self._cancelled.add(number)
                self._changed.notify()

    def stats(self) -> Stats:
        """Where it stands now."""
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
            steps=self._steps,
            drafted=self._drafted,
            accepted=self._accepted,
            host_hits=held.brought,
            host_bytes=0 if self._host is None else self._host.bytes(held.in_host()),
            busy_s=self._busy_s,
        )

    @property
    def drafts_by(self) -> str:
        """What drafts, or why nothing does."""
        if self.drafts is None:
            return f"none ({self.why_no_drafts})"
        return f"ngram{self._only_ngrams}" if self.guesses is None else f"{self.guesses.drafter.name}, ngram"

    def stop(self, seconds: float) -> None:
        """Finish what there is within `seconds`, cancel the rest."""
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

    def keep(self) -> Kept | None:
        """What is left in host memory for a later engine that is the same, once this one has stopped; None without any."""
        if self._host is None or self._lent is None or self._broken:
            return None
        cache = self.scheduler.cache
        with torch.inference_mode():
            cache.store_all()
            self._swap()
        return Kept(self._lent.key, self._host.places, cache.records(), self._host.bytes(cache.in_host()))

    def _swap(self) -> None:
        """Copy what the scheduler has moved to and from host memory."""
        swaps, self.scheduler.cache.swaps = self.scheduler.cache.swaps, []
        if swaps and self._host is not None:
            self._host.run(swaps)

    def _work(self) -> None:
        """The thread."""
        try:
            with torch.inference_mode():
                while self._take():
                    began = time.monotonic()
                    self._turn()
                    self._read_one()
                    self._busy_s += time.monotonic() - began
        except Exception as e:  # the engine's own: no text can go on, and each is told
            self._broken = True
            log_error("the engine has stopped", e)
            message = f"the engine has stopped: {one_line(e)}"
            with self._changed:
                self.closed, numbers = message, list(self._texts)
                self._texts.clear()
                self._changed.notify_all()
            self._sink([(n, Event(finish_reason="error", message=message)) for n in numbers])

    def _take(self) -> bool:
        """What came in since the last turn; waits where there is nothing to do. False at the end."""
        with self._changed:
            while not (self._incoming or self._cancelled or self._flights or len(self._texts) > len(self._unseen)):
                if self._ending:
                    return False
                self._changed.wait()
            if not (self._incoming or self._cancelled or self._ending or self._to_read) and (left := self._spare()) > 0:
                self._changed.wait(left)
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
        """Tell what is asked of a prompt itself, for one that waits for that."""
        if not self._to_read:
            return
        text = self._to_read.popleft()
        if not text.done:
            assert text.request.read is not None
            try:
                event = Event(finish_reason="stop", read=self._reader(text.tokens, text.request.read, text.request.adapter))
            except Exception as e:  # this prompt's: there may be no room for it
                if device_lost(e):
                    raise  # no text can go on
                event = failed(e)
            self._end(text)
            self._sink([(text.number, event)])
        if not self._to_read:
            self._reader.release()

    def _spare(self) -> float:
        """Seconds that the next pass can wait for a prompt that may come: until shortly before the one on the device ends."""
        s = self.scheduler
        if not self._flights or s.waiting or s.reading or len(s.active) == len(s.running):
            return 0.0
        return self._due - EARLY_S - time.monotonic()

    def _turn(self) -> None:
        """One pass more, and what the one before it drew."""
        if any(t.request.mask is not None or t.drafting for t in self.scheduler.active):
            self._land(0)  # a grammar has to know the last token, and who has drafts under way what came of them
        asked = self._asked()
        if asked and self._flights:
            self._land(0)  # guesses go on from the newest token
            asked = self._asked()
        began = time.perf_counter()
        plan = self.scheduler.plan(self._budget, self._pauses)
        if plan is None:
            self._land(0)
            return
        drafts = {} if plan.pieces else self._draft(plan, asked)
        self._write(plan)
        launched = bool(plan.steps or plan.pieces)
        self._swap()
        self.passes.zero(plan.zero)
        self.passes.copy(plan.copies)
        if launched:
            K = self._wanted()
            self._flights.append(self._check(plan, drafts, K) if drafts else self._launch(plan, K))
            if drafts and self._ahead:
                self._gap_s += NEWEST * (time.perf_counter() - began - self._gap_s)
            self.passes.copy(plan.snapshots)
            self.passes.token_budget.stepped(len(plan.steps))
            self._steps += 1
        for text in plan.finishing:
            for group, table in enumerate(text.tables):  # not before: a step of this pass may have run in that row
                self.rows.set_table(group, text.row, table.blocks)
            self.rows.set_slot(text.row, text.slot)
        self._land(self._ahead if launched else 0)

    def _asked(self) -> dict[int, int]:
        """Drafts of texts by number, as many as make the next pass bring the most tokens a second."""
        s = self.scheduler
        if self.drafts is None or s.admits:  # prompts are read by passes without drafts
            return {}
        texts = [t for t in s.running if t is not None and t.remaining > 0]
        if any(t.request.pictures for t in texts) and not self.drafts.shows():
            return {}
        likely = [t for t in texts if t.drafter is not None and t.remaining > 1 and t.drafter.chance >= LIKELY]
        n, apart = len(texts), self._gap_s
        plain = self.passes.token_budget.seconds(self.passes.bucket(n), self.passes.bucket(n))
        if not likely or not plain:
            return {}
        guesses = ((t.number, t.drafter.guess(min(MOST_DRAFTS, t.remaining - 1)).chances) for t in likely)  # type: ignore[union-attr]
        apart += self._guess_s(plain) * max((len(t.drafter.given) for t in likely if isinstance(t.drafter, Guessed)), default=0)
        return choose(guesses, n, self.drafts.sizes, lambda rows: self._seconds(rows, n, plain) + apart, plain)

    def _wanted(self) -> int:
        """Guesses that the drafter is to make after the pass that is launched now, for those that run: as many as make the
        next ones bring the most tokens a second."""
        s = self.scheduler
        if self.guesses is None or self.drafts is None or s.admits:
            return 0
        texts = [t for t in s.running if t is not None]
        n = len(texts)
        plain = self.passes.token_budget.seconds(self.passes.bucket(n), self.passes.bucket(n))
        if not plain:
            return 0
        chances = [(t.number, t.drafter.rates.chances[: t.remaining]) for t in texts if isinstance(t.drafter, Guessed)]
        seconds = lambda rows: self._seconds(rows, n, plain) + self._gap_s  # noqa: E731
        K = rounds(chances, n, self.drafts.sizes, seconds, plain, self._guess_s(plain))
        self._unguessed = 0 if K else self._unguessed + 1
        if self._unguessed == AGAIN:  # what comes may be easier to guess than what came
            self._unguessed = 0
            for rates in (self._rates, *(t.drafter.rates for t in texts if isinstance(t.drafter, Guessed))):
                rates.begin([BEFORE] * len(rates.tried))
        return K

    def _guess_s(self, plain: float) -> float:
        """What one guess for each text takes where a plain pass takes so long."""
        return plain * statistics.median(self._guess_costs)

    def _seconds(self, rows: int, texts: int, plain: float) -> float:
        """What a pass of so many rows with drafts takes."""
        assert self.drafts is not None
        if rows in self.drafts.seconds:
            return self.drafts.seconds[rows] + self.passes.token_budget.extra
        return plain * (1 + statistics.median(self._slopes) * (rows / texts - 1))

    def _draft(self, plan: StepPlan, asked: dict[int, int]) -> dict[int, tuple[list[int], list[int]]]:
        """By number, the drafts of texts that step in this plan, and the slots for their recurrent states after each row."""
        found = {}
        for text in plan.steps:
            n = asked.get(text.number, 0)
            n = self.scheduler.cache.most_drafts(n)
            tokens = list(text.drafter.guess(n).tokens) if n and text.drafter is not None else []
            slots = self.scheduler.draft(plan, text, len(tokens)) if tokens else None
            if slots is not None:
                found[text.number] = tokens, slots
        return found

    def _check(self, plan: StepPlan, drafts: dict[int, tuple[list[int], list[int]]], K: int) -> Flight:
        """A pass in which some texts check drafts; the others step in it."""
        assert self.drafts is not None
        null, texts = self.rows.null_row, list[Checked]()
        for text in plan.steps:
            tokens, slots = drafts.get(text.number, ([], []))
            target = null if text.request.special else text.row
            texts.append(Checked(text.row, len(text.tokens) - 1, target, [text.tokens[-1], *tokens], text.slot, slots))
        flight = Flight(self.device)
        result, logits = self.drafts.run(texts)
        firsts = np.cumsum([0, *(len(t.tokens) for t in texts)]).tolist()
        places = list(zip(firsts, plan.steps, strict=False))
        special = [(i, t) for i, t in places if t.request.special]
        logs = self.special.draw(logits, special) if special else []
        looks = self.device.type == "cpu" or not self._steps % LOOK
        flight.rows = [len(t.tokens) for t in texts]
        newest = torch.cat((result, self.rows.token))
        flight.launched(places, newest, logs, drawable(logits) if looks else None, (0, firsts[-1]))
        if self.guesses is not None and self.passes.noted is not None:
            rows = [Rows(t.row, t.pos, first, t.tokens, row=t.row) for t, first in zip(texts, firsts, strict=False)]
            flight.guess(plan.steps, self.guesses.checked(rows, self.passes.noted, result, K))
        return flight

    def _checked(self, flight: Flight, found: list[int], sound: list[bool] | None) -> list[tuple[Sequence, list[int]]]:
        """The texts of a pass with drafts and what each goes on with: what was drawn after its rows that were right."""
        assert self.drafts is not None
        M, told = self.drafts.size(flight.size[1]), []
        for i, ((text, row, first), rows) in enumerate(zip(flight.drew, flight.rows, strict=True)):
            if text.done:
                continue
            accepted = found[M + i]
            if rows > 1:
                self.scheduler.rewind(text, len(text.tokens) + accepted)
                text.drafted, text.accepted = text.drafted + rows - 1, text.accepted + accepted
                self._drafted, self._accepted = self._drafted + rows - 1, self._accepted + accepted
                if isinstance(text.drafter, Guessed):
                    text.drafter.checked(rows - 1, accepted)
            if sound is not None and not all(sound[first : first + accepted + 1]):
                text.failed = not_finite(self.passes.plan.dtype)
            told.append((text, [found[2 * M + row]] if text.request.special else found[first : first + accepted + 1]))
        return told

    def _budget(self, high: int, waiting: int) -> int:
        return self.passes.token_budget.prompt_tokens(*self._load(high, waiting))

    def _pauses(self, high: int, waiting: int) -> bool:
        return self.passes.token_budget.pauses(*self._load(high, waiting))

    def _load(self, high: int, waiting: int) -> tuple[int, int, int, int, int]:
        """What a TokenBudget asks for, for a pass in which the first `high` rows step."""
        p, s = self.passes, self.scheduler
        running = sum(t is not None for t in s.running) if high else 0  # 0: none of them steps in this pass
        texts = running + len(s.reading) + len(s.waiting)
        return p.bucket(min(texts, len(s.running))), p.riding(high), waiting, running, texts

    def _write(self, plan: StepPlan) -> None:
        """Send what the plan changes on the device."""
        rows = self.rows
        for source, target in plan.moves:
            rows.move(source, target)
            self.special.move(source, target)
        for row in plan.freed:
            rows.clear(row)
        for text, slot in plan.placed:
            self._place(text, slot)
        for group, row, first, held in plan.tables:
            rows.set_table(group, row, held, first)
        for row, slot in plan.slots:
            rows.set_slot(row, slot)
        for text, row, _, _ in plan.pieces:
            rows.set_adapter(row, text.request.adapter)
        for text in plan.finishing:
            self._place(text, len(text.tokens) - 1)  # which the draw moves on
            if text.request.special:
                self.special.begin(text)
        rows.set_order([t.row for t in sorted(plan.steps, key=lambda t: -t.computed)])
        rows.flush()

    def _place(self, text: Sequence, pos: int) -> None:
        d = text.request.draw
        shift = text.shown.shift if text.shown is not None else 0
        self.rows.set_adapter(text.row, text.request.adapter)
        self.rows.place(text.row, d.seed, d.temperature, pos, drawn=not text.request.special, shift=shift)

    def _launch(self, plan: StepPlan, K: int) -> Flight:
        """The pass of a plan, and the draws that are apart from it."""
        n, null, ends = max((t.row + 1 for t in plan.steps), default=0), self.rows.null_row, set(map(id, plan.finishing))
        pieces, drawn = [], np.full(n, null, np.int32)
        for text in plan.steps:
            drawn[text.row] = null if text.request.special else text.row
        for text, row, first, end in plan.pieces:
            own = null if text.request.special else text.row
            pieces.append(Piece(row, first, text.tokens[first:end], own if id(text) in ends else -1, text.slot, text.shown))
        flight = Flight(self.device)
        before = self.rows.token.clone() if self.guesses is not None and not self.guesses.shifted else None
        logits = self.passes.run(n, pieces, drawn)
        riding = self.passes.riding(n)
        places = [(t.row, t) for t in plan.steps] + [(riding + i, t) for i, t in enumerate(plan.finishing)]
        special = [(i, t) for i, t in places if t.request.special]
        logs = self.special.draw(logits, special) if special and logits is not None else []
        steps, rows = self.passes.size(n, pieces)
        size = (steps if steps == rows or self.passes.padded else 0, rows)  # of any size on a CPU: as if none did
        looks = bool(plan.finishing) or self.device.type == "cpu" or not self._steps % LOOK
        sound = drawable(logits) if looks and logits is not None else None
        flight.launched(places, self.rows.token, logs, sound, size)
        if self.guesses is not None and self.passes.noted is not None:
            stepped = [Rows(t.row, t.computed - 1, t.row, [0], row=t.row) for t in plan.steps]
            read, at = list[Rows](), steps
            for (text, row, first, end), piece in zip(plan.pieces, pieces, strict=True):
                own = text.row if id(text) in ends else -1
                read.append(Rows(row, first, at, piece.tokens, text.tokens[first + 1 : end + 1], own))
                at += end - first
            through = [text for text, *_ in plan.pieces if id(text) in ends]
            flight.guess([*plan.steps, *through], self.guesses.passed(stepped, read, self.passes.noted, before, K))
        return flight

    def _land(self, most: int) -> None:
        """Read passes until at most so many are on their way, and tell what they drew."""
        while len(self._flights) > most:
            flight, events = self._flights.popleft(), list[tuple[int, Event]]()
            behind = flight.over()  # then the next one has begun at an unknown time
            tokens, seconds = flight.read()
            if self._flights:
                expected = self.passes.token_budget.seconds(*self._flights[0].size)
                self._due = 0.0 if behind else time.monotonic() + SURE * expected
            logs = {number: found for part in flight.logs for number, found in part.read().items()}
            sound = None if flight.sound is None else flight.sound.tolist()
            if flight.rows:
                self._note(len(flight.rows), sum(flight.rows), seconds)
                told = self._checked(flight, tokens, sound)
            else:
                self.passes.token_budget.note(*flight.size, seconds)
                told = [(text, [tokens[row]]) for text, row, _ in flight.drew]
                for text, _, place in flight.drew:
                    if sound is not None and not sound[place]:
                        text.failed = not_finite(self.passes.plan.dtype)
            for text, drawn in told:
                for token in drawn:
                    if not text.done and (event := self._event(text, token, logs)) is not None:
                        events.append((text.number, event))
            self._give(flight)
            if events:
                self._sink(events)

    def _give(self, flight: Flight) -> None:
        """What was guessed behind a pass, to its texts."""
        if not flight.guessed:
            return
        if not isinstance(flight.after, float):
            flight.after.synchronize()
        for text, guesses in zip(flight.guessed, flight.guesses.tolist(), strict=True):
            if isinstance(text.drafter, Guessed) and not text.done:
                text.drafter.give(guesses)
        n, K = flight.guesses.shape
        plain = self.passes.token_budget.seconds(n, n)
        if self.guesses is not None and plain and self.device.type == "cpu":
            self._guess_costs.append(self.guesses.seconds / (K * plain))

    def _note(self, texts: int, rows: int, seconds: float) -> None:
        """A pass of so many texts in so many rows took so long."""
        plain = self.passes.token_budget.seconds(texts, texts)
        if plain and not self.passes.padded:
            self._slopes.append(max(0.0, seconds / plain - 1) / (rows / texts - 1))

    def _event(self, text: Sequence, token: int, logs: dict[int, Logs]) -> Event | None:
        """What a token means for its text; None where it was drawn before."""
        again = text.repeated is not None
        if text.request.mask is not None and not text.failed and not again:
            try:
                text.request.mask.accept(token)
            except Exception as e:  # its own grammar's, a library in Rust: the text ends, with this as its reason
                text.failed = e
        if text.failed:
            self._end(text)
            return failed(text.failed)
        finish = self.scheduler.on_token(text, token)
        if text.drafter is not None:
            text.drafter.extend((token,))
        if again:
            return None
        self._new_tokens += 1
        logprob, top = logs.get(text.number, (None, ())) if logs else (None, ())
        cached, text.started = (0 if text.started else text.cached), True
        if not finish:
            return Event(token, logprob, top, cached=cached)
        if text.drafter is not None:
            self._answers.add(text.tokens[text.prompt :])
        self._end(text)
        return Event(token, logprob, top, finish, cached=cached, drafted=(text.accepted, text.drafted - text.accepted))

    def _end(self, text: Sequence) -> None:
        self.scheduler.end(text)
        with self._changed:
            self._texts.pop(text.number, None)
            self._unseen.discard(text.number)
            self._changed.notify_all()
