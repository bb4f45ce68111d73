"""`quantize --max-kl 0.02` or `--max-ppl 1%`: find the smallest checkpoint whose measured loss stays under a bound.

Mixed widths (calibrate/mixed.py) give the best allocation for every size, and its expected loss. The measured loss decides:
trials are quantized as the checkpoint will be and compared with the unquantized model on a held-out text, and each measurement
corrects the expected loss of the next trial. The search ends after a few rounds within NEAR of the bound, or at the smallest or
largest widths. Measurements are kept in the user's cache, so a killed run resumes after its last trial. The best trial becomes
the checkpoint.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import exp, log, log1p
from pathlib import Path
from typing import Any

from lowq_cli.calibrate.mixed import Allocation, Spread
from lowq_cli.console import size
from lowq_cli.devices import pick_device
from lowq_cli.engine import bandwidth
from lowq_cli.evaluate.perplexity import Report, measure
from lowq_cli.files import memo
from lowq_cli.files.folder import held
from lowq_cli.plan.planner import make_plan
from lowq_cli.plan.recipe import Recipe
from lowq_cli.run.own_text import Make
from lowq_cli.state import writing
from lowq_packers.atomic import write_whole
from lowq_packers.errors import QualityError, UsageError
from lowq_packers.home import cache_dir

ROUNDS = 8
NEAR, AIM = 0.9, 0.96  # fractions of the bound: a loss above NEAR ends the search; trials aim at AIM
TOKENS = 16384  # max. tokens of the held-out text that a trial is measured on
LEAST = 1e-6  # nats; floor for losses, below the rounding error of 16 bits
NEW_TOKENS, TIMES = 48, 3  # tokens of a timed decode, and repeats; the fastest counts, as other processes may use the machine
Watch = Callable[[int, int, str], None]  # called with (rounds done, max. rounds, description of the result)


@dataclass(frozen=True)
class Trial:
    """One measured checkpoint. bpw: bits per allocated weight; kl: nats; ppl: percent above the original model's perplexity.

    tps: tokens per second when it decodes one sequence; None unless a speed was requested.
    """

    bpw: float
    nbytes: int
    expected: float
    kl: float
    ppl: float
    tps: float | None = None


@dataclass(frozen=True)
class Bound:
    """The result of a search. limit, measured, more, less: nats of KL divergence, or percent of perplexity.

    binding: the limit that stopped the search: "max_kl" or "max_ppl"; "tokens_per_s" if a smaller checkpoint met the loss bound
    but was too slow; "widths" if the smallest allowed widths meet the bound. more, less: the expected loss with one bit per
    weight more, and with one less. tps: tokens per second, measured, and estimated for one bit per weight more and one less if
    the time to read the weights bounds decoding; None unless a speed was requested.
    """

    flag: str
    limit: float
    measured: float
    binding: str
    more: float | None
    less: float | None
    trials: tuple[Trial, ...]
    tokens_per_s: float | None = None
    tps: tuple[float, float, float] | None = None

    @property
    def unit(self) -> str:
        """The unit to print after a loss."""
        return " nats of KL divergence" if self.flag == "max_kl" else "% more perplexity"

    @property
    def summary(self) -> str:
        """The result as a line of the printed plan."""
        named = f"--{self.flag.replace('_', '-')} {self.limit:g}"
        why = f"the limit is {named}" if self.binding == self.flag else f"the smallest widths are good enough for {named}"
        if self.binding == "tokens_per_s":
            why = f"the limit is --tokens-per-s {self.tokens_per_s:g}: smaller checkpoints meet {named} but are slower"
        bounds = [(way, loss) for way, loss in (("more", self.more), ("less", self.less)) if loss is not None]
        others = [f"with one bit per weight {way} about {loss:.3g}" for way, loss in bounds]
        line = f"measured {self.measured:.4g}{self.unit} in {len(self.trials)} rounds: {why}; {', '.join(others)}"
        if self.tps is None:
            return line
        here, slower, faster = self.tps
        return f"{line}; {here:.4g} tokens/s here, about {slower:.4g} with one bit per weight more, {faster:.4g} with one less"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Search:
    """The search for the smallest checkpoint. After `run`, `best` is its folder, if this or an earlier process made it.

    Args:
        model: the model as named by the user. spread: the possible allocations of bits. requested: the recipe with the bound.
        texts: the hash of the calibration text, and the evaluation text. make: quantizes the model by a recipe.
        measure: evaluates a folder: (folder, text, original, device, max. tokens) -> report.
    """

    def __init__(
        self,
        model: str,
        spread: Spread,
        requested: Recipe,
        texts: tuple[str, str],
        device: str,
        make: Make,
        watch: Watch,
        measure: Callable[..., Report] = measure,
    ) -> None:
        self.measure = measure
        self.model, self.spread, self.bound, self.device, self.make, self.watch = model, spread, requested, device, make, watch
        self.flag = "max_kl" if requested.max_kl is not None else "max_ppl"
        self.limit = requested.max_kl if requested.max_kl is not None else float(requested.max_ppl or 0)
        calibrated, self.judge = texts
        facts = [version("lowq"), spread.source.identity, spread.plain.to_json(), calibrated, self.judge, TOKENS]
        facts += [device.split(":")[0], *(["timed"] if requested.tokens_per_s else [])]
        self.folder = cache_dir() / "bounds" / memo.key(facts)
        self.known: dict[str, dict[str, float]] = memo.recall(self.folder / "measured.json")
        self.trials: dict[int, Trial] = {}  # bytes of the groups -> measurement
        self.best: Path | None = None
        self.most = self._most()

    def run(self) -> tuple[Recipe, Allocation, Bound]:
        """The recipe, its allocation of bits, and the measurements.

        Raises QualityError if no allowed allocation meets the bound, BusyError if another process runs the same search.
        """
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with held(self.folder):
            return self._run()

    def _run(self) -> tuple[Recipe, Allocation, Bound]:
        goal, low, high = log(AIM * self._nats(self.limit)), self.spread.least, self.most
        at = self._within(exp(goal)) if not self.spread.why_not_nats else (low + high) // 2
        for _ in range(ROUNDS):
            trial = self._try(at)
            loss = self._loss(trial)
            if NEAR * self._nats(self.limit) <= loss <= self._nats(self.limit):
                break
            if loss <= self._nats(self.limit):
                high = min(high, trial.nbytes)
            else:
                low = max(low, trial.nbytes + 1)
            if low >= high:
                break
            at = self._next(goal, low, high)
            if self._allocated(at)[1] in self.trials:  # there is no other allocation in between
                break
        met = [t for t in self.trials.values() if self._loss(t) <= self._nats(self.limit)]
        if not met:
            last = self._try(high)
            met = [last] if self._loss(last) <= self._nats(self.limit) else []
        if not met:
            raise QualityError(self._unmet())
        best = min(filter(self._fast, met), key=lambda t: t.nbytes, default=None)
        if best is None:
            raise QualityError(self._too_slow(met))
        recipe, mixed = self.spread.at(best.nbytes)
        self.best = self._folder(recipe)
        binding = "widths" if best.nbytes == self.spread.least else self.flag
        binding = "tokens_per_s" if min(t.nbytes for t in met) < best.nbytes else binding
        a_bit = self.spread.params // 8
        more, less = (self._foretold(best.nbytes + d) for d in (a_bit, -a_bit))
        tps = None if best.tps is None else (best.tps, self._tps(best.tps, a_bit), self._tps(best.tps, -a_bit))
        trials, speed_bound = tuple(self.trials.values()), self.bound.tokens_per_s
        return recipe, mixed, Bound(self.flag, self.limit, self._said(best), binding, more, less, trials, speed_bound, tps)

    def _fast(self, trial: Trial) -> bool:
        return trial.tps is None or trial.tps >= (self.bound.tokens_per_s or 0)

    def _tps(self, tps: float, nbytes: int) -> float:
        """Estimated tokens per second after adding `nbytes` of weights (negative: removing), from this machine's bandwidth."""
        read = nbytes / bandwidth.measured(pick_device(self.device))
        return 1 / max(1 / tps + read, 0.1 / tps)

    def _most(self) -> int:
        """Max. bytes that the groups may take. Raises UsageError if --fit leaves too few."""
        if self.bound.fit is None:
            return self.spread.most
        room = min(self.spread.most, self.spread.budget(self.bound.fit))
        while room >= self.spread.least:
            over = make_plan(self.spread.source, self.spread.at(room)[0]).nbytes - self.bound.fit
            if over <= 0:
                return room
            room -= over  # the size of headers varies by a few bytes with the numbers in them
        least = self.bound.fit - room + self.spread.least
        raise UsageError(f"--fit {size(self.bound.fit)} is too little: the smallest widths take {size(least)}")

    def _nats(self, loss: float) -> float:
        """A loss converted to nats: of KL divergence, or of the logarithm of perplexity."""
        return loss if self.flag == "max_kl" else log1p(loss / 100)

    def _said(self, trial: Trial) -> float:
        return trial.kl if self.flag == "max_kl" else trial.ppl

    def _loss(self, trial: Trial) -> float:
        return max(self._nats(max(self._said(trial), -99.0)), LEAST)

    def _allocated(self, budget: int) -> tuple[float, int]:
        """(expected error, bytes) of the best allocation."""
        mixed = self.spread.at(budget)[1]
        return max(mixed.error, LEAST), sum(s.nbytes for s in mixed.shares)

    def _within(self, error: float) -> int:
        """The fewest bytes whose expected error is at most `error`; the maximum allowed if there are none."""
        low, high = self.spread.least, self.most
        while high - low > max(1, self.spread.params // 4096):  # 0.002 bits per weight
            middle = (low + high) // 2
            low, high = (low, middle) if self._allocated(middle)[0] <= error else (middle, high)
        return high

    def _next(self, goal: float, low: int, high: int) -> int:
        """The size where the loss should reach the goal: interpolated between the nearest two trials, or shifted from one."""
        seen = sorted((log(max(t.expected, LEAST)), log(self._loss(t))) for t in self.trials.values())
        below, above = [s for s in seen if s[1] <= goal], [s for s in seen if s[1] > goal]
        if below and above:
            (x0, y0), (x1, y1) = below[-1], above[0]
            x = x0 + (x1 - x0) * (goal - y0) / max(y1 - y0, 1e-9)
        else:
            x0, y0 = below[-1] if below else above[0]
            x = x0 + goal - y0
        at = min(max(self._within(exp(x)), low), high)
        if self._allocated(at)[1] in self.trials:
            at = (low + high) // 2
        return at

    def _foretold(self, budget: int) -> float | None:
        """The expected loss of another size, corrected by the nearest trial; None outside the allowed sizes."""
        if not self.spread.least <= budget <= self.spread.most:
            return None
        expected = self._allocated(budget)[0]
        near = min(self.trials.values(), key=lambda t: abs(log(max(t.expected, LEAST)) - log(expected)))
        nats = expected * self._loss(near) / max(near.expected, LEAST)
        return nats if self.flag == "max_kl" else 100 * (exp(min(nats, 50.0)) - 1)

    def _try(self, budget: int) -> Trial:
        """Quantize and measure the best allocation, or return its earlier measurement."""
        recipe, mixed = self.spread.at(budget)
        nbytes = sum(s.nbytes for s in mixed.shares)
        folder = self._folder(recipe)
        if folder.name not in self.known:
            self.make(recipe, folder)
            report = self.measure(folder, self.judge, self.model, self.device, TOKENS)
            self.known[folder.name] = {"kl": float(report.kl or 0.0), "ppl": float(report.ppl_increase_pct or 0.0)}
            if self.bound.tokens_per_s:
                self.known[folder.name]["tps"] = speed(folder, self.judge, self.device)
            write_whole(self.folder / "measured.json", json.dumps(self.known).encode())
        trial = Trial(mixed.bpw, nbytes, mixed.error, **self.known[folder.name])
        self.trials[nbytes] = trial
        self._drop(keep=self._smallest())
        self.watch(n := len(self.trials), ROUNDS, f"round {n}: {self._said(trial):.4g} at {mixed.bpw:.3f} bits per weight")
        return trial

    def _folder(self, recipe: Recipe) -> Path:
        return self.folder / memo.key(recipe.to_json())

    def _smallest(self) -> Path | None:
        met = [t.nbytes for t in self.trials.values() if self._loss(t) <= self._nats(self.limit) and self._fast(t)]
        return self._folder(self.spread.at(min(met))[0]) if met else None

    def _too_slow(self, met: list[Trial]) -> str:
        """The error message when no trial meets both bounds: the best speed within the loss bound, and the reverse."""
        named = f"--{self.flag.replace('_', '-')} {self.limit:g}"
        best = max(met, key=lambda t: t.tps or 0)
        line = f"--tokens-per-s {self.bound.tokens_per_s:g} is not met: {named} leaves {best.tps:.4g} at {best.bpw:.3f} bits"
        fast = [t for t in self.trials.values() if self._fast(t)]
        least = min(fast, key=self._loss, default=None)
        more = f"; at {least.bpw:.3f} bits {least.tps:.4g}, with {self._said(least):.4g}" if least else ""
        return f"{line} per weight{more}; allow more loss, or ask for less"

    def _drop(self, keep: Path | None) -> None:
        for path in self.folder.iterdir():
            if path.is_dir() and path != keep:
                shutil.rmtree(path, ignore_errors=True)

    def _unmet(self) -> str:
        best = min(self.trials.values(), key=self._loss)
        named = f"--{self.flag.replace('_', '-')} {self.limit:g}"
        what = f"{self._said(best):.4g} at {best.bpw:.3f} bits per weight, the most that "
        if self.bound.fit is not None and self.most < self.spread.most:
            return f"{named} is not met: it is {what}--fit {size(self.bound.fit)} leaves; allow more bytes or more loss"
        return f"{named} is not met: it is {what}--widths {','.join(map(str, self.bound.widths))} allow; allow more loss"


def speed(folder: Path, text: str, device: str) -> float:
    """Tokens per second at which a checkpoint decodes one sequence on a device."""
    from lowq_cli.calibrate.texts import tokenize
    from lowq_cli.engine.open_model import ready
    from lowq_cli.evaluate.comparison import decode_tps

    model, tokenizer = ready(folder, device)
    return decode_tps(model, tokenizer, tokenize(tokenizer, text), NEW_TOKENS, TIMES)


def adopt(trial: Path, out: Path) -> bool:
    """Rename the trial's folder to `out`; False if that fails (another disk, `out` exists) and it must be quantized again."""
    if out.exists() or not trial.is_dir():
        return False
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        os.rename(trial, out)
    except OSError:
        return False
    return True
