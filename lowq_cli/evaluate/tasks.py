"""Tasks of lm-eval (arc_easy, hellaswag, gsm8k, ... or a YAML file of one's own) answered by a model as it decodes here.

lm-eval makes the questions and counts the answers; `Judge` is what it asks. Probabilities are read from whole texts as for
perplexity, rows of one length at a time, so that nothing is padded; texts are written by the same engine as
`generate --prompts`. lm-eval is an extra, and imported only where tasks are loaded.
"""

import contextlib
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from lowq_cli.engine.prompts import context_limit
from lowq_cli.evaluate.logits import logits_of, warm_reading
from lowq_cli.evaluate.perplexity import LOGITS_AT_ONCE
from lowq_cli.evaluate.task_names import YAML, check_names
from lowq_cli.models import CausalModel, Tokenizer
from lowq_kernels.decode.kv import PLAIN
from lowq_packers.errors import NotFoundError, UnsupportedError, UsageError, library_errors, one_line

SEED = 1234  # lm-eval's own: which examples are shown before a question
NEW_TOKENS = 256  # of an answer whose task does not say, as lm-eval has it
LONGEST = 4096  # tokens of a window where a whole document's likelihood is asked for
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # of which tasks use one
DRAWN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}  # where a task says do_sample
Progress = Callable[[str, int], AbstractContextManager[Callable[[int, str], None]]]  # as `console.progress`
Answers = Callable[[Any, Any, list[list[int]], dict[str, Any]], Iterator[Any]]  # as `serving.offline.answers`


@dataclass(frozen=True)
class Score:
    """One metric of a task. stderr None: there is no formula for it."""

    task: str
    metric: str
    value: float
    stderr: float | None
    questions: int
    fewshot: int


@dataclass(frozen=True)
class Loaded:
    """Tasks ready to be asked: what lm-eval gave, and (name, kind, questions, examples before each) of every one."""

    found: Any
    rows: tuple[tuple[str, str, int, int], ...]


def load_tasks(names: Sequence[str], fewshot: int | None = None, limit: int | None = None) -> Loaded:
    """Tasks, groups and tags by lm-eval's names, or YAML files of its kind; data files in them are relative to their folder.

    fewshot: examples before each question, where a task leaves that open. limit: questions of each task.
    Raises UsageError for a name that lm-eval does not know, NotFoundError where a task's data cannot be had.
    """
    check_names(names)
    if sys.modules.get("sklearn", sys) is None:  # `main` keeps it from transformers, to start sooner; F1 is counted by it
        del sys.modules["sklearn"]
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its lines and bars would stand between ours
    from datasets import disable_progress_bars
    from lm_eval.api import metrics, task
    from lm_eval.tasks import TaskManager

    disable_progress_bars()
    task.tqdm = lambda rows, **_: rows
    metrics.bootstrap_stderr = lambda f, xs, iters: math.nan  # it prints on stdout, and forks a process that holds a model
    files = [name for name in names if name.endswith(YAML)]
    manager = TaskManager(include_defaults=len(files) < len(names))  # their index takes 20 s
    found: dict[str, Any] = defaultdict(dict)
    for name in names:
        here = Path(name).expanduser().absolute()
        if name not in files and name not in manager.all_tasks:
            near = get_close_matches(name, manager.all_tasks, 3)
            raise UsageError(f"lm-eval has no task {name!r}{'; near it: ' + ', '.join(near) if near else ''}")
        missing = library_errors(NotFoundError, f"the task {name} cannot be loaded")  # for want of a file, a network, a field
        with missing, contextlib.chdir(here.parent if name in files else "."):
            loaded = manager.load([str(here) if name in files else name])
            for kind, things in loaded.items():
                found[kind] |= things
            for task in loaded["tasks"].values():
                len(task.eval_docs)  # fetched now
    rows = []
    for name, task in found["tasks"].items():
        fixed = task.get_config("num_fewshot")
        if fixed != 0:  # a task that says 0 means it
            task.set_config(key="num_fewshot", value=fewshot if fewshot is not None else fixed or 0)
        task.set_fewshot_seed(seed=SEED)
        questions = len(task.eval_docs) if limit is None else min(limit, len(task.eval_docs))
        rows.append((str(name), str(task.OUTPUT_TYPE), questions, int(task.get_config("num_fewshot"))))
    return Loaded(dict(found), tuple(rows))


def scores(tasks: Loaded, judge: "Judge", limit: int | None = None) -> list[Score]:
    """Ask a model; a row for every metric of every task and of the groups that count their tasks together.

    Raises UsageError where lm-eval refuses a task (code that it would run, pictures), and as `Judge`.
    """
    from lm_eval import evaluator

    try:
        found = evaluator.evaluate(lm=judge, task_dict=tasks.found, limit=limit, log_samples=False)
    except ValueError as e:
        raise UsageError(f"lm-eval refuses: {one_line(e)}") from e
    sizes = {name: n["effective"] for name, n in found["n-samples"].items()}
    rows = []
    for name, metrics in (found["results"] | found.get("groups", {})).items():
        parts = [n for n in found.get("group_subtasks", {}).get(name, []) if n in sizes]
        questions = sizes.get(name, sum(sizes[n] for n in parts))
        for key, value in metrics.items():
            metric, comma, kept = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                stderr = metrics.get(f"{metric}_stderr,{kept}")
                stderr = float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None
                shown = metric if kept == "none" else f"{metric} ({kept})"
                rows.append(Score(name, shown, float(value), stderr, questions, int(found["n-shot"].get(name, 0) or 0)))
    return rows


class Judge:
    """What lm-eval asks: how likely a continuation is, how likely a document is, and what a text goes on with.

    Args:
        model, tokenizer: of `engine.open_model.ready`. answers: writes texts. progress: shows how far each kind of question is.
        kv: what keys and values are held in (`decode.kv.KINDS`).
    Raises UsageError for a context that leaves no room for an answer, UnsupportedError for another way to draw.
    """

    rank, world_size = 0, 1  # what lm-eval asks besides

    def __init__(self, model: CausalModel, tokenizer: Tokenizer, answers: Answers, progress: Progress, kv: str = PLAIN) -> None:
        self.model, self.tokenizer, self.answers, self.progress, self.kv = model, tokenizer, answers, progress, kv
        self.limit = context_limit(model)
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        self.start = 0 if start is None else int(start)  # what a text without context goes on from
        self.spelled_start = "" if start is None else tokenizer.decode([start])

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Of (context, continuation): ln of the continuation's probability, and whether each token of it is the likeliest."""
        return self._read([self._pair(*r.args) for r in requests], "likelihoods")

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Of (document,): ln of its probability, in windows of at most LONGEST tokens that share one; the last is full too."""
        longest = min(self.limit or LONGEST, LONGEST)
        asked, whose = [], []
        for i, r in enumerate(requests):
            ids = self._encode(r.args[0])
            for at in range(0, len(ids), longest):
                end = min(at + longest, len(ids))
                context = [self.start] if at == 0 else ids[max(0, end - longest - 1) : at]
                asked.append((context, ids[at:end]))
                whose.append(i)
        sums = [0.0] * len(requests)
        for i, (found, _) in zip(whose, self._read(asked, "documents"), strict=True):
            sums[i] += found
        return sums

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Of (context, settings): what the model goes on with, up to a text of `until` or so many tokens."""
        alike: dict[str, list[int]] = defaultdict(list)
        for i, r in enumerate(requests):
            alike[repr(sorted(r.args[1].items()))].append(i)
        found, done = [""] * len(requests), 0
        with self.progress("texts", len(requests)) as advance:
            for those in alike.values():
                settings = _settings(requests[those[0]].args[1]) | {"kv": self.kv}
                prompts = [self._cut(requests[i].args[0], settings["max_new_tokens"]) for i in those]
                for i, answer in zip(those, self.answers(self.model, self.tokenizer, prompts, settings), strict=True):
                    found[i], done = answer.text, done + 1
                    advance(done, f"{done} of {len(requests)} texts")
        return found

    def _cut(self, text: str, room: int) -> list[int]:
        """A prompt's tokens; of one too long for so many new ones the end, as lm-eval cuts."""
        if self.limit is not None and room >= self.limit:
            raise UsageError(f"a task asks for {room} new tokens and the model's context ends at {self.limit}")
        ids = self._encode(text) or [self.start]
        return ids if self.limit is None else ids[room - self.limit :]

    def _encode(self, text: str) -> list[int]:
        """Its tokens, with the start that the tokenizer adds, but not twice."""
        again = bool(self.spelled_start) and text.startswith(self.spelled_start)
        return list(self.tokenizer(text, add_special_tokens=not again)["input_ids"])

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of both, cut where the context's own tokens end; spaces between them belong to the continuation."""
        bare = context.rstrip()
        if not bare:
            ids = list(self.tokenizer(context + continuation, add_special_tokens=False)["input_ids"])
            return ([self.start], ids) if ids[:1] != [self.start] else (ids[:1], ids[1:])
        whole, first = self._encode(context + continuation), len(self._encode(bare))
        return whole[:first] or [self.start], whole[first:]

    @torch.inference_mode()
    def _read(self, asked: Sequence[tuple[list[int], list[int]]], what: str) -> list[tuple[float, bool]]:
        """For each (context, continuation) in tokens: ln of the probability, and whether it is what the model would write.

        Contexts too long for the model lose their beginning; continuations of one context that differ in their last token
        are read once.
        """
        rows: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, (context, continuation) in enumerate(asked):
            if not continuation:
                raise UsageError("a task asks for the likelihood of no token; its continuation is empty")
            read = (context + continuation)[:-1]
            if self.limit is not None and len(continuation) > self.limit:
                raise UsageError(f"a task's continuation of {len(continuation)} tokens exceeds the context of {self.limit}")
            rows[tuple(read if self.limit is None else read[-self.limit :])].append(i)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(asked)
        by_length: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for row in rows:
            by_length[len(row)].append(row)
        total, done = sum(map(len, rows)), 0
        vocabulary = self.model.config.get_text_config().vocab_size
        with self.progress(what, total) as advance:
            for length, alike in sorted(by_length.items(), reverse=True):  # what does not fit is known at once
                most = max(1, LOGITS_AT_ONCE // (length * vocabulary))
                warm_reading(self.model, min(most, len(alike)) * length, self.kv)
                for at in range(0, len(alike), most):
                    part = alike[at : at + most]
                    for row, logits in zip(part, logits_of(self.model, torch.tensor(part), self.kv), strict=True):
                        for i in rows[row]:
                            found[i] = _likelihood(logits, asked[i][1])
                    done += len(part) * length
                    advance(done, f"{done} of {total} tokens")
        return found


def _likelihood(logits: torch.Tensor, continuation: list[int]) -> tuple[float, bool]:
    """Of the last tokens, from the logits (T, V) before each: ln of their probability, and whether each is the likeliest."""
    target = torch.tensor(continuation, device=logits.device)
    log_p = torch.log_softmax(logits[-len(target) :].float(), -1)
    return float(log_p.gather(1, target[:, None]).double().sum()), bool((log_p.argmax(1) == target).all())


def _settings(asked: dict[str, Any]) -> dict[str, Any]:
    """A task's settings for a text, as `serving.offline.answers` takes them. Raises UnsupportedError for others."""
    given = dict(asked)
    until = given.pop("until", None) or []
    lengths = [n for n in (given.pop(name, None) for name in LENGTHS) if n is not None]
    drawn = given.pop("do_sample", None)
    settings = {name: given.pop(name, value) for name, value in DRAWN.items()} if drawn else DRAWN | {"temperature": 0.0}
    for name in DRAWN:
        if (value := given.pop(name, None)) is not None and name == "repetition_penalty":
            settings[name] = value  # it changes the likeliest token too
        elif name == "temperature" and value and drawn is None:
            settings[name] = value  # lm-eval draws by a temperature alone
    if others := {k: v for k, v in given.items() if v not in (None, False) and (k, v) != ("num_beams", 1)}:
        raise UnsupportedError(f"a task draws its texts by {', '.join(f'{k}={v}' for k, v in others.items())}; lowq does not")
    stop = [s for s in ([until] if isinstance(until, str) else until) if s]
    return {**settings, "stop": stop, "seed": 0, "max_new_tokens": int(lengths[0] if lengths else NEW_TOKENS)}
