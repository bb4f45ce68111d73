"""Drafts in the engine: who guesses, how many guesses the next pass checks, and what became of them."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from lowq_cli.engine.batch import KeyValues
from lowq_cli.engine.drafts.balance import NEWEST
from lowq_cli.engine.drafts.drafter import GUESSED, Guess, PagedDrafter
from lowq_cli.engine.drafts.drafter_choice import settled
from lowq_cli.engine.drafts.drafting import AGAIN
from lowq_cli.engine.drafts.ngram import NGram
from lowq_cli.engine.drafts.rates import BEFORE, Rates
from lowq_cli.engine.plan import Plan
from lowq_cli.engine.sampling import drawable, not_finite
from lowq_cli.serving.device_drafts import DeviceDrafts, Rows, recorded
from lowq_cli.serving.device_drafts import why_not as drafter_why_not
from lowq_cli.serving.draft_budget import Answers, Choice, choose
from lowq_cli.serving.draft_costs import DraftCosts
from lowq_cli.serving.draft_passes import SAME, Checked, DraftPasses
from lowq_cli.serving.draft_trials import Trials
from lowq_cli.serving.flight import Flight
from lowq_cli.serving.guessing import Guessed, TextDrafter, better
from lowq_cli.serving.model_runner import ModelRunner
from lowq_cli.serving.prompt_chunk import Piece
from lowq_cli.serving.sampler import Special
from lowq_cli.serving.scheduler import Scheduler, StepPlan
from lowq_cli.serving.sequence import Sequence
from lowq_cli.serving.special_drafts import draw_special
from lowq_kernels.decode.reference import MOST_DRAFTS
from lowq_packers.errors import UnsupportedError, log_error

SERVED = ("ngram", "none")  # and "auto"
LIKELY = 0.3  # drafts less likely than this are not considered: for 64 sequences that would take the host as long as a pass
FEEDS = 2  # max. sequences per pass whose drafter is given a long text: 0.7 ms for 1,000 tokens
# Max. time, in plain passes, that a sequence may lose to the drafts of others: one that copies nothing gets one token of each
# pass, and passes with drafts take up to 1.9 times as long. Simulated with base's texts and an H200's passes, 16 users get 1.06
# to 1.18 times the tokens per second, and their p99 time per token rises by 2 to 4%; without a limit 1.14 to 1.41 times and by
# 9 to 28%. One user keeps the gain. An H200 gave 16 users 1.00 to 1.08 times the tokens per second at 0.96 to 1.13 of the p99,
# which without drafts varies as much (benchmarks/notes/drafts.md).
BEHIND = 2.0
# Rows since the last pass that might have had drafts, of sizes for which these do not pay, that a drafter goes on reading: a
# second user may come for a short answer, and a sequence whose rows it has missed gets no more guesses of it. To read a pass
# takes 0.1 to 0.3 ms, a plain pass of an 8B 1.4 to 3.6 (H200): in passes of 64 sequences this is not worth it.
SHORT = 128
# Passes of a trial without any guess, since the drafter has missed rows of most sequences, after which drafts are turned off:
# it can guess only for sequences that begin later. To read the passes of 64 sequences takes 2 to 5% of their time (H200).
MISSED = 256


class DraftChoice(NamedTuple):
    """What an engine drafts by.

    Attributes:
        name: what was asked for, with the meaning of "auto". drafter: a head or model, or None. why: the reason why nothing
            drafts, or "". why_not_drafter: the reason why only n-grams draft although a drafter was asked for, or "".
    """

    name: str
    drafter: PagedDrafter | None
    why: str
    why_not_drafter: str

    @classmethod
    def of(cls, draft: str | PagedDrafter, plan: Plan, deterministic: bool, brief: bool) -> "DraftChoice":
        """Return the choice for a model's plan. brief: the engine answers known prompts once, too few to record passes for.
        Raises UnsupportedError for a name that is not served."""
        drafter = None if isinstance(draft, str) else draft
        name = settled(draft, plan.device.type) if isinstance(draft, str) else draft.name
        if drafter is None and name not in SERVED:
            raise UnsupportedError(f"the server drafts by {' or '.join(SERVED)}, or by a head or model, not by {name}")
        why = "as asked" if name == "none" or brief else SAME if deterministic else ""
        reason = "" if drafter is None or why else drafter_why_not(drafter, plan)
        missing = f" ({drafter.name} does not: {reason})" if drafter is not None and reason else ""
        return cls(name, None if why or reason else drafter, why, missing)

    def begin(
        self, runner: ModelRunner, scheduler: Scheduler, special: Special, state: list[KeyValues]
    ) -> tuple["DraftRounds | None", str]:
        """Return the rounds of an engine, or None and the reason. state: keys and values of the drafter's own layers."""
        passes = None if self.why else DraftPasses(runner)
        if passes is None or passes.reason:
            return None, self.why if passes is None else passes.reason
        guesses = None
        if self.drafter is not None:
            state = [*state, *self.drafter.lent(runner.state)]
            guesses = DeviceDrafts(self.drafter, runner.rows, state, runner.slots)
            if runner.device.type == "cuda":
                rows = recorded(self.drafter, state, passes.sizes, runner.sizes.totals)
                guesses.record(runner, *rows, runner.sizes.most)
        return DraftRounds(passes, scheduler, special, guesses), ""


class DraftRounds:
    """The drafts of an engine's sequences: rounds of guesses, checked by passes that compute several rows of a sequence.

    Args:
        passes: the model's passes with drafts. scheduler: the engine's. special: what samples for special requests. guesses:
            the drafter on the device, or None for n-grams alone.
    Attributes:
        costs: the seconds of its passes. on: whether drafts pay with the present number of sequences. follows: whether the
            drafter on the device reads the rows of passes. unpaid: rows as SHORT counts them. drafted, accepted:
            numbers of guesses that were checked, and of right ones.
        ahead: whether passes are launched while the result of one with drafts is not known yet. The guesses of n-grams then
            follow those that are in flight, as if these were right; those of a drafter on the device were made after them.
        needs_result: whether the drafts of `counts` can be launched only after the passes in flight are read.
        flying: by sequence number, the drafts in the pass that was launched last, if `ahead`.
    """

    def __init__(self, passes: DraftPasses, scheduler: Scheduler, special: Special, guesses: DeviceDrafts | None) -> None:
        self.passes, self.runner, self.scheduler = passes, passes.passes, scheduler
        self.special, self.guesses = special, guesses
        self.device, self.rows = passes.device, passes.passes.rows
        drafter = None if guesses is None else guesses.drafter
        if drafter is not None:
            self.runner.noted, scheduler.beyond = {}, drafter.reach
        self.costs = DraftCosts(passes, drafter, self.runner.plan)
        # on a CPU the seconds of passes with drafts are measured one by one, and the host's work is part of them
        self._trials = Trials(self.costs.plain_s) if self.device.type == "cuda" else None
        self._away_s, self._away_tokens = 0.0, 0  # of passes with prompt tokens that were read in this turn
        self._answers = Answers()
        self._rates = Rates([BEFORE] * (0 if drafter is None else drafter.most))
        self._best: dict[int, Guess] = {}  # by sequence number, the guesses that `counts` chose from
        self._once = False  # whether a drafter was given a long text in this turn
        self._waits: dict[int, float] = {}  # size -> mean seconds that sequences wait for a plain pass while drafts are off
        self._unguessed = 0  # passes since the last one for which the drafter ran
        self._used, self._missed = False, 0  # whether the last pass checks or guesses anything; passes as MISSED counts them
        self._timed: Flight | None = None  # one whose drafter is not timed yet
        self._left: Iterator[bool] | None = None  # of `DeviceDrafts.combinations`, those not recorded yet
        self.on, self.follows, self.ahead, self.unpaid, self.needs_result = True, True, False, 0, False
        self.flying: dict[int, list[int]] = {}
        self.drafted = self.accepted = 0
        if self.device.type == "cuda":
            self.go_ahead()

    @property
    def name(self) -> str:
        """The names of what guesses."""
        return "ngram" if self.guesses is None else f"{self.guesses.drafter.name}, ngram"

    def drafter(self) -> TextDrafter:
        """Return the drafter of a new sequence."""
        ngram = NGram(self._answers)
        return ngram if self.guesses is None else Guessed(self._rates, ngram)

    def go_ahead(self) -> None:
        """Launch passes ahead of results, where neither blocks nor states depend on which drafts were wrong: without recurrent
        layers and windows."""
        cache = self.scheduler.cache
        self.ahead = cache.states is None and not any(g.window for g in cache.pages)
        self.scheduler.waits = not self.ahead

    def warm(self) -> None:
        """Compile and load the drafter's kernels, on a GPU whose passes are recorded. Else they are when they come the first
        time: an H200 gave the first 8 answers of an 8B with an EAGLE-3 head at 213 tokens/s, and later ones at 961."""
        recorded = self.passes.captured.get((self.passes.sizes[-1], False))
        if self.guesses is not None and recorded is not None and (hidden := recorded[0].noted) is not None:
            self._left = self.guesses.combinations(hidden)
            self._unless_full(partial(self.guesses.warm, hidden))

    def record_next(self) -> bool:
        """Record one of the drafter's computations that are left; return False if there is none. No pass may be in flight."""
        return self._left is not None and self._unless_full(partial(next, self._left, False))

    def _unless_full(self, compute: Callable[[], bool | None]) -> bool:
        """Return the result of `compute`; False where the device has no memory for it, which passes may do without."""
        try:
            return bool(compute())
        except torch.OutOfMemoryError as e:
            log_error("the drafter's kernels are not all loaded and recorded beforehand", e)
            self._left = None
            return False

    def begin_turn(self, size: int, adapted: bool) -> None:
        """Decide whether the next pass may have drafts. size: the rows of a plain pass. adapted: whether it has adapters."""
        self.costs.adapted = adapted
        self.on = not self.passes.reason and (self._trials is None or self._trials.allows(size))
        if self.on:
            self.unpaid = 0
        elif self._trials is not None and self._trials.waits(size):
            self.unpaid += size
        self.follows = self.unpaid <= SHORT

    def end_turn(self, plan: StepPlan | None, size: int, tokens: int) -> None:
        """Record what a turn launched and how many tokens came in it, for the decision of `begin_turn`."""
        if self._trials is not None and (plan is None or not plan.steps):
            self._trials.interrupted()
        elif self._trials is not None and plan is not None:
            counted, n = tokens - self._away_tokens, len(plan.steps)
            # plain passes take this longer only so that there can be drafts later
            away_s = self._away_s + (0.0 if self.on or not self.follows else self.costs.read_s(self.costs.plain_s(n)))
            missed = self.guesses is not None and self.on and not self._used and self._misses_most(plan)
            self._trials.passed(size, counted, n, time.perf_counter(), self._once or missed, away_s)
            self._missed = self._missed + missed if self.on else 0
            if missed and self._missed == MISSED:
                self._trials.give_up(size)
        self._once, self._away_s, self._away_tokens = False, 0.0, 0

    @staticmethod
    def _misses_most(plan: StepPlan) -> bool:
        """Return whether the drafter on the device has missed rows of most sequences that step."""
        guessed = [text.drafter for text in plan.steps if isinstance(text.drafter, Guessed)]
        return 2 * sum(drafter.followed for drafter in guessed) < len(guessed)

    def away(self, flight: Flight, seconds: float) -> None:
        """Record a pass with prompt tokens that was read."""
        self._away_s, self._away_tokens = self._away_s + seconds, self._away_tokens + len(flight.drew)

    def counts(self) -> dict[int, int]:
        """Return the number of draft tokens by sequence number that makes the next pass yield the most tokens per second."""
        s = self.scheduler
        if not self.on or s.admits:  # prompts are prefilled by passes without drafts
            return {}
        texts = [t for t in s.running if t is not None and t.remaining > 0]
        fed = 0
        for text in texts:
            fed += text.behind
            self._once |= text.behind
            if not text.behind or fed <= FEEDS:
                text.feed()
        if any(t.request.pictures for t in texts) and not self.passes.shows():
            return {}
        likely = [
            (t, t.drafter)
            for t in texts
            if t.drafter is not None and not t.behind and t.remaining > 1 and t.drafter.chance >= LIKELY
        ]
        n = len(texts)
        if not likely or not (plain := self.costs.plain_s(n)):
            return {}
        latest = self._latest(texts)

        def choice(guesses: dict[int, Guess], gap_s: float) -> Choice:
            seconds = lambda rows: self.costs.pass_s(rows, n, plain) + gap_s  # noqa: E731
            chances = [(number, guess.chances) for number, guess in guesses.items()]
            return choose(chances, n, self.passes.sizes, seconds, self._plain_s(n), latest)

        self._best = {t.number: self._guess(t, drafter) for t, drafter in likely}
        self.needs_result = not self.ahead
        ahead = self.ahead and (self.guesses is None or any(t.ahead for t in texts))
        if not ahead or not (waiting := [t for t, _ in likely if self._needs_result(t)]):
            chosen = choice(self._best, self.costs.late_s if ahead else self.costs.gap_s)
        else:
            at_once = self._best | {t.number: self._at_once(t) for t in waiting}
            first, later = choice(at_once, self.costs.late_s), choice(self._best, self.costs.gap_s)
            self.needs_result = later.rate > first.rate
            self.costs.waited(self.needs_result)
            chosen, self._best = (later, self._best) if self.needs_result else (first, at_once)
        self.costs.chosen(bool(chosen.counts))
        return chosen.counts

    def _needs_result(self, text: Sequence) -> bool:
        """Return whether a sequence's guess can be checked only after the passes in flight are read: n-grams do not know what
        follows tokens that the host has not read, and special requests are drawn with the tokens of their drafts."""
        unread = GUESSED in self._best[text.number].tokens[:1]
        return text.ahead > 0 and (text.request.special if unread else GUESSED in self.flying.get(text.number, []))

    def _at_once(self, text: Sequence) -> Guess:
        """Return a guess of a sequence that can be checked before the passes in flight are read."""
        own = isinstance(text.drafter, Guessed) and not text.request.special
        return text.drafter.unread(self._most(text)) if own else Guess()  # type: ignore[union-attr]

    def _plain_s(self, n: int) -> float:
        """Return the seconds of a plain pass of n sequences, with the host's time where it was measured."""
        timed = self._trials.plain_s(self.runner.sizes.bucket(n)) if self._trials is not None else 0.0
        return max(self.costs.plain_s(n), timed)

    def _wait_s(self, n: int) -> float:
        """Return the seconds that sequences wait for a plain pass of n of them."""
        return self._waits.get(self.runner.sizes.bucket(n)) or self._plain_s(n)

    def _latest(self, texts: list[Sequence]) -> dict[int, float] | None:
        """Return `latest` of `choose`; None on a CPU, where drafts of several users were not measured."""
        most = (1 + BEHIND) * self._wait_s(len(texts))
        return None if self._trials is None else {t.number: t.lead_s + most for t in texts}

    def _most(self, text: Sequence) -> int:
        """Return how many drafts of a sequence the next pass may check."""
        return max(0, min(MOST_DRAFTS, text.remaining - 1 - self.ahead))

    def _guess(self, text: Sequence, drafter: TextDrafter) -> Guess:
        """Return the guesses of a sequence after its tokens in flight. Where drafts in flight differ from our guesses, we
        assume that the first differing draft will be rejected and that the model will draw our guess there; if not, the later
        drafts are rejected, too."""
        most, flying = self._most(text), self.flying.get(text.number, [])
        if not text.ahead or GUESSED in flying:
            return drafter.guess(most)
        if isinstance(drafter, Guessed):
            return better(drafter.unread(most), self._guess(text, drafter.ngram))
        guess = drafter.guess(len(flying) + 1 + most)
        right = next((i for i, (a, b) in enumerate(zip(flying, guess.tokens, strict=False)) if a != b), len(flying))
        sure, chances = math.prod(guess.chances[: right + 1]), guess.chances[right + 1 :][:most]
        return Guess(guess.tokens[right + 1 :][:most], [chance * (1 if i else sure) for i, chance in enumerate(chances)])

    def wanted(self, drafted: bool) -> int:
        """Return how many tokens the drafter is to guess for each running sequence after the pass being launched: the number
        that makes the next passes yield the most tokens per second. drafted: whether that pass has drafts."""
        s, self._used = self.scheduler, drafted or self.scheduler.admits  # where prompts come, passes tell nothing of guesses
        if self.guesses is None or not self.on or s.admits:
            return 0
        texts = [t for t in s.running if t is not None]
        n = len(texts)
        if not (plain := self.costs.plain_s(n)):
            return 0
        chances = [
            (t.number, t.drafter.rates.chances[: t.remaining])
            for t in texts
            if isinstance(t.drafter, Guessed) and t.drafter.followed
        ]
        apart = self.costs.late_s if self.ahead else self.costs.gap_s
        seconds = lambda rows: self.costs.pass_s(rows, n, plain) + apart  # noqa: E731
        chosen = choose(chances, n, self.passes.sizes, seconds, plain, self._latest(texts), self.costs.guess_s(plain))
        K = max(chosen.counts.values(), default=0)
        self._unguessed, self._used = 0 if K else self._unguessed + 1, drafted or K > 0
        self.costs.chosen(bool(K))
        if self._unguessed == AGAIN:  # try again: later tokens may be easier to guess than earlier ones
            self._unguessed = 0
            for rates in (self._rates, *(t.drafter.rates for t in texts if isinstance(t.drafter, Guessed))):
                rates.begin([BEFORE] * len(rates.tried))
        return K

    def draft(self, plan: StepPlan, counts: dict[int, int]) -> dict[int, tuple[list[int], list[int]]]:
        """Return by sequence number the drafts in this plan and the slots for the recurrent states after each of their rows."""
        drafts = {}
        for text in plan.steps:
            n = self.scheduler.cache.most_drafts(counts.get(text.number, 0))
            tokens = list(self._best[text.number].tokens[:n]) if n else []
            slots = self.scheduler.draft(plan, text, len(tokens)) if tokens else None
            if slots is not None:
                drafts[text.number] = tokens, slots
        return drafts

    def launch(self, plan: StepPlan, drafts: dict[int, tuple[list[int], list[int]]], K: int, looks: bool) -> Flight:
        """Launch a pass in which some sequences check drafts and the rest take one step.

        K: number of guesses that the drafter makes for each sequence afterwards. looks: whether its logits are checked for NaN.
        """
        null, texts, flight = self.rows.null_row, list[Checked](), Flight(self.device)
        for text in plan.steps:
            tokens, slots = drafts.get(text.number, ([], []))
            target = null if text.request.special else text.row
            texts.append(Checked(text.row, target, [text.tokens[-1], *tokens], text.slot, slots))
            flight.own.append(min(len(tokens), self._best[text.number].own) if tokens else 0)
        self._forget(plan)
        adapted = self.runner.adapted(0, (t.state_row for t in texts))
        result, logits = self.passes.run(texts)
        firsts = np.cumsum([0, *(len(t.tokens) for t in texts)]).tolist()
        places = list(zip(firsts, plan.steps, strict=False))
        each = zip(range(len(texts)), firsts, texts, plan.steps, strict=False)
        drawn_again = [place for place in each if place[-1].request.special and not place[-1].request.undrafted]
        logs = draw_special(self.runner, self.special, result, logits, drawn_again) if drawn_again else []
        special = [(i, t) for i, t in places if t.request.undrafted]
        logs += self.special.draw(logits, special) if special else []
        flight.rows = [len(t.tokens) for t in texts]
        M = len(result) // 3
        newest, size = torch.cat((result[: 2 * M], self.rows.token)), (0, firsts[-1], adapted)
        flight.launched(places, newest, logs, drawable(logits) if looks else None, size)
        if self.guesses is not None and self.runner.noted is not None:
            read = [i for i, text in enumerate(plan.steps) if self._read(text)]
            rows = [Rows(t.state_row, first, t.state_row, len(t.tokens)) for t, first in zip(texts, firsts, strict=False)]
            if read:
                guesses = self.guesses.checked([rows[i] for i in read], read, self.runner.noted, result, K)
                self._guessing([plan.steps[i] for i in read], flight, guesses)
        return flight

    def _read(self, text: Sequence, first: int = -1) -> bool:
        """Return whether the drafter on the device reads a sequence's rows of the pass being launched. Where drafts do not pay
        it reads nothing, and then none of later rows of these sequences, as rows between them are missing. first: the position
        of the first row, where these are of a prompt."""
        if not isinstance(text.drafter, Guessed):
            return self.follows
        text.drafter.followed = self.follows and (text.drafter.followed or first == 0)
        return text.drafter.followed

    def guess_after(
        self, flight: Flight, plan: StepPlan, pieces: list[Piece], steps: int, before: torch.Tensor | None, K: int
    ) -> None:
        """Let the drafter on the device read a plain pass, and guess K tokens of each sequence that sampled in it.

        pieces: those of the plan. steps: rows of the pass before them. before: the newest tokens before the pass, None where
        the drafter reads the tokens after the rows.
        """
        self._forget(plan)
        if self.guesses is None or self.runner.noted is None:
            return
        ends = set(map(id, plan.finishing))
        going = [text for text in plan.steps if self._read(text)]
        stepped = [Rows(t.row, t.row, t.row) for t in going]
        read, through, at = list[Rows](), list[Sequence](), steps
        for (text, row, first, end), piece in zip(plan.pieces, pieces, strict=True):
            row_of_output = text.row if id(text) in ends else -1
            if self._read(text, first):
                after = text.tokens[first + 1 : end + 1]
                read.append(Rows(row, at, row_of_output, end - first, first, piece.tokens, after))
                through += [text] * (row_of_output >= 0)
            at += end - first
        if stepped or read:
            self._guessing([*going, *through], flight, self.guesses.passed(stepped, read, self.runner.noted, before, K))

    @staticmethod
    def _forget(plan: StepPlan) -> None:
        """Forget the guesses that were made before the pass of a plan."""
        for text in (*plan.steps, *plan.finishing):
            if isinstance(text.drafter, Guessed):
                text.drafter.made = 0

    def _guessing(self, texts: list[Sequence], flight: Flight, guesses: torch.Tensor | None) -> None:
        fresh = self.guesses is not None and self.guesses.fresh
        flight.guess(texts, guesses, fresh)
        for text in flight.guessed:
            if isinstance(text.drafter, Guessed):
                text.drafter.made = flight.K
        self._once |= fresh

    def newest_tokens(self) -> torch.Tensor | None:
        """Return a copy of the rows' newest tokens if the drafter needs those from before the next pass, else None."""
        return self.rows.token.clone() if self.guesses is not None and not self.guesses.shifted else None

    def landed(
        self, flight: Flight, tokens: list[int], sound: list[bool] | None, seconds: float, waited: float
    ) -> list[tuple[Sequence, list[int]]]:
        """Return the sequences of a pass with drafts, each with its new tokens: those sampled after its accepted rows. seconds:
        those of the device. waited: those since the pass before was read, with the host's work."""
        M, new_tokens, n = self.passes.size(flight.size[1]), [], len(flight.rows)
        wait_s = self._wait_s(n)
        self.costs.passed(n, sum(flight.rows), seconds, flight.size[2])
        for i, ((text, row, first), rows) in enumerate(zip(flight.drew, flight.rows, strict=True)):
            if text.done:
                continue
            accepted = tokens[M + i]
            text.lead_s += (1 + accepted) * wait_s - waited
            if rows > 1:
                self.scheduler.wrong(text, rows - 1 - accepted, accepted + 1)
                text.drafted, text.accepted = text.drafted + rows - 1, text.accepted + accepted
                self.drafted, self.accepted = self.drafted + rows - 1, self.accepted + accepted
                if isinstance(text.drafter, Guessed):
                    text.drafter.checked(flight.own[i], accepted)
            if sound is not None and not all(sound[first : first + accepted + 1]):
                text.failed = not_finite(self.runner.plan.dtype)
            new_tokens.append((text, [tokens[2 * M + row]] if text.request.undrafted else tokens[first : first + accepted + 1]))
        return new_tokens

    def stepped(self, size: int, waited: float) -> None:
        """Record the seconds between reading a plain pass without prompt tokens and the one before it."""
        if not self.on:
            before = self._waits.get(size, waited)
            self._waits[size] = before + NEWEST * (waited - before)

    def give(self, flight: Flight) -> None:
        """Hand the guesses that the drafter made after a pass to those of its sequences that are in no later pass; the guesses
        of the others after it are on the device only."""
        if (before := self._timed) is not None:
            self.costs.followed(len(before.drew), before.K, before.drafter_s())
        short = bool(flight.rows) or flight.size[0] == flight.size[1]  # without prompt tokens
        self._timed = flight if flight.followed and short and not flight.once else None
        read = [not (text.done or text.ahead) for text in flight.guessed]
        if not any(read):
            return
        if not isinstance(flight.after, float):
            flight.after.synchronize()
        for text, guesses in itertools.compress(zip(flight.guessed, flight.guesses.tolist(), strict=True), read):
            if isinstance(text.drafter, Guessed):
                text.feed()
                text.drafter.give(guesses)

    def ended(self, text: Sequence) -> None:
        """Keep a finished answer, from which other sequences' n-grams may go on."""
        if text.drafter is not None and self.on:
            self._answers.add(text.tokens[text.prompt :])
