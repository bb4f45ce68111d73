"""`--calib self`: the model generates its own calibration text with the decoder, many sequences in parallel.

A sequence begins with the model's beginning-of-text token, is sampled at temperature 1 and continues to its end or to the
length of a window. A chat model generates half of the tokens as conversations: it generates opening turns and answers them.
Training all layers together reads further parts, which nothing else reads. There a random token follows the beginning of every
second sequence: what begins a document is mostly a title or a heading, and any token is amid one (LLM-QAT, arXiv:2305.17888).
Each round of sequences is a file in the user's cache, named by model, device, seed and round number. A killed run therefore
resumes after its last round, and a longer text begins with the shorter one. Self-calibration: arXiv:2410.17170; opening turns
from the template alone: arXiv:2406.08464.
"""

import gc
import json
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save

from lowq_cli.calibrate import texts
from lowq_cli.calibrate.expert_usage import Visits
from lowq_cli.engine import open_model
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.model_record import owned
from lowq_cli.engine.prompts import encode, stop_ids
from lowq_cli.engine.sampling import Sampling
from lowq_cli.files.folder import sweep, unfinished
from lowq_cli.files.source import Source, open_source
from lowq_cli.interop.importer import runnable
from lowq_cli.plan.plan import Plan
from lowq_cli.plan.recipe import Recipe, make_recipe
from lowq_cli.quantizers import FEW_TOKENS, needs_text
from lowq_cli.run.events import TextStep
from lowq_cli.run.own_text_plan import BEGUN, CHAT, GREEDY, PLAIN, Outlook, kept_round
from lowq_cli.state import writing
from lowq_kernels.graphs import empty_cache
from lowq_packers.atomic import write_whole
from lowq_packers.errors import UnsupportedError

OPENINGS = 8, 32, 16, 64  # tokens of the prompts of greedy rounds; successive rounds take these in turn
TURN = 64  # max. tokens of an opening turn
LOOK = 64  # steps between two checks whether all sequences have ended
FEW = 8  # min. mean tokens per sequence of a round: below, the model ends its sequences at once and cannot generate a text
SPARE, ROUNDS, MORE = 50_000, 4, 4  # number of the first round for experts, max. rounds; they add at most 1/MORE of the text
COPY = "copy"  # name of the quick copy's folder, next to the rounds
MARK = "XQZ7"  # placeholder for the user's message in a template
Result = TypeVar("Result")
Steps = Generator[TextStep, None, texts.Text]
Make = Callable[[Recipe, Path], None]  # quantizes the model by a recipe into a folder


def write(plan: Outlook, make: Make | None, visits: Visits | None = None) -> Steps:
    """The calibration text; rounds that the cache lacks are generated.

    Args:
        make: makes the quantized copy that generates the text if the model does not fit.
        visits: counts the visits of a mixture's experts; the text is extended for experts with few visits.

    Raises UnsupportedError for a model that ends its texts at once, and as `engine.open_model.ready`.
    """
    author = _Author(plan, make)
    try:
        parts = []
        for number in range(plan.parts):
            pieces = []
            for kind, count in author.shares(number):
                pieces.append((yield from author.take(kind, count)))
            parts.append(torch.cat(pieces)[: plan.tokens])
        ids, *later = parts
        if visits:
            ids = torch.cat([ids, *(yield from author.more(ids, visits))])
    finally:
        author.close()
    return texts.Text(texts.SELF, ids=ids, later=torch.stack(later) if later else None)


def continued(plan: Outlook, make: Make | None) -> Generator[TextStep, None, torch.Tensor]:
    """(T,) tokens of greedy continuations, whose prompts are the first tokens of sampled sequences."""
    author = _Author(plan, make)
    try:
        parts, done, number = [], 0, 0
        while done < plan.tokens:
            parts.append((yield from author.round(GREEDY, number, done)))
            number, done = number + 1, done + len(parts[-1])
    finally:
        author.close()
    return torch.cat(parts)[: plan.tokens]


def whole(plan: Outlook, make: Make | None, visits: Visits | None = None) -> texts.Text:
    """The return value of `write`, without its progress events."""
    return result(write(plan, make, visits))


def chosen(plan: Outlook, make: Make | None, source: Source, quantized: Plan, given: bool) -> Steps:
    """The text that calibrates a run: that of `write`, made longer for the experts whose method in `quantized` reads it.

    given: whether the user chose this text; if not, and the model ends its texts at once, it is the bundled one.
    """
    experts = any(i.kind == "expert" and i.method and needs_text(i.method) for i in quantized.items)
    try:
        return (yield from write(plan, make, Visits(source, plan.device) if experts else None))
    except UnsupportedError:
        if given:
            raise
        return texts.Text.read(texts.BUNDLED)


class _Author:
    """The generating model, loaded when a round is missing."""

    def __init__(self, plan: Outlook, make: Make | None) -> None:
        self.plan, self.make = plan, make
        self.model: Any = None
        self.threads = torch.get_num_threads()  # loading a decoder changes the thread count, on which calibrated bytes depend
        self.spent, self.made = 0.0, 0
        self.rounds = dict.fromkeys((PLAIN, BEGUN, CHAT), 0)  # of each kind, that `take` has read
        self.left = dict.fromkeys(self.rounds, torch.empty(0, dtype=torch.int32))  # of these rounds' tokens
        self.drawn = 0  # their number of tokens
        self.copy = ExitStack()  # a copy is private to a process; rounds have the same bytes from every process
        with open_source(runnable(plan.model)) as source:
            self.tokenizer = open_model.tokenizer(source)

    def kinds(self) -> tuple[str, ...]:
        """The kinds of text that it generates, in equal parts."""
        return (PLAIN, CHAT) if _opening(self.tokenizer) else (PLAIN,)

    def shares(self, part: int) -> list[tuple[str, int]]:
        """The kinds of text in a part, and the number of tokens of each. Half of the plain text of later parts is BEGUN."""
        kinds = self.kinds()
        each = -(-self.plan.tokens // len(kinds))
        begun = each // 2 if part else 0
        return [(PLAIN, each - begun), (BEGUN, begun), *((kind, each) for kind in kinds[1:])]

    def take(self, kind: str, count: int) -> Generator[TextStep, None, torch.Tensor]:
        """The next tokens (count,) of a kind."""
        while len(self.left[kind]) < count:
            ids = yield from self.round(kind, self.rounds[kind], self.drawn)
            self.rounds[kind], self.drawn = self.rounds[kind] + 1, self.drawn + len(ids)
            self.left[kind] = torch.cat([self.left[kind], ids])
        taken, self.left[kind] = self.left[kind][:count], self.left[kind][count:]
        return taken

    def round(self, kind: str, number: int, before: int) -> Generator[TextStep, None, torch.Tensor]:
        """One round of sequences (T,), from the cache or generated and stored there. before: tokens of earlier rounds."""
        path = self.plan.folder / f"{kind}-{number:05d}.safetensors"
        if (ids := kept_round(path)) is not None:
            return ids
        text = (yield from self.round(PLAIN, number, before)) if kind == GREEDY else None
        if self.model is None:
            yield TextStep(min(before, self.plan.total), self.plan.total)
            self._load()
        began = time.monotonic()
        start = [encode(self.tokenizer, "")[:1]] * self.plan.side
        seed = 4 * (self.plan.seed * 1_000_000 + number) + {BEGUN: 1, CHAT: 2}.get(kind, 0)
        if kind == BEGUN:
            words = set(self.tokenizer.get_vocab().values()) - {t.token for t in self.tokenizer.added_tokens().values()}
            first = texts.random_tokens(words, self.model.config.get_text_config().vocab_size, (self.plan.side, 1), seed)
            start = [begin + token for begin, token in zip(start, first.tolist(), strict=True)]
        if kind == CHAT:
            opening = _opening(self.tokenizer)
            assert opening
            turns = [self._words(t) for t in self._draw([opening] * self.plan.side, seed, TURN)]
            turns = [t for t in turns if t] or [""]
            start = [self._asked(turns[i % len(turns)]) for i in range(self.plan.side)]
            seed += 1
        window = texts.window_of(self.model)
        if text is not None:
            cut = texts.windows(text.long(), window)[: self.plan.side].tolist()
            length = min(OPENINGS[number % len(OPENINGS)], window // 4)  # one length per round: sequences fill their windows
            start = [row[:length] for row in cut]
        room = max(1, window - max(map(len, start)))
        rows = yield from self._drawn(start, seed, room, before, 0.0 if kind == GREEDY else 1.0)
        ids = torch.tensor([t for s, row in zip(start, rows, strict=True) for t in (*s, *row)], dtype=torch.int32)
        if sum(map(len, rows)) < min(FEW, room) * len(rows):
            raise UnsupportedError("the model writes only empty texts; give a text with --calib, or --calib bundled")
        owned(self.model).check_files()  # the cache keeps the text for the model as it was
        self.spent, self.made = self.spent + time.monotonic() - began, self.made + len(ids)
        with writing(path):  # the round's file is written last: after a kill here, the next process repeats both
            write_whole(self.plan.folder / "rate.json", json.dumps({"tokens_per_s": self.made / self.spent}).encode())
        _keep(path, ids)
        return ids

    def more(self, ids: torch.Tensor, visits: Visits) -> Generator[TextStep, None, list[torch.Tensor]]:
        """Windows of further rounds that visit experts with fewer than FEW_TOKENS visits; at most a quarter of the text."""
        path = self.plan.folder / f"experts-{self.plan.tokens}.safetensors"
        if (rounds := kept_round(path)) is not None:
            return [rounds]
        seen = visits(ids.long()).sum(0)
        most = len(ids) // visits.window // MORE // texts.BATCH * texts.BATCH
        batches: list[torch.Tensor] = []
        for number in range(SPARE, SPARE + ROUNDS):
            if len(batches) >= most or bool((seen >= FEW_TOKENS).all()):
                break
            new = texts.windows((yield from self.round(PLAIN, number, self.plan.total)), visits.window)
            for window, counts in zip(new, visits(new.long().flatten()), strict=True):
                if len(batches) < most and bool(counts[seen < FEW_TOKENS].any()):
                    batches.append(window)
                    seen = seen + counts
        batches = batches[: len(batches) // texts.BATCH * texts.BATCH]
        added = torch.cat(batches) if batches else ids[:0]
        _keep(path, added)
        return [added]

    def _draw(self, prompts: list[list[int]], seed: int, room: int) -> list[list[int]]:
        return result(self._drawn(prompts, seed, room, 0))

    def _drawn(
        self, prompts: list[list[int]], seed: int, room: int, before: int, temperature: float = 1.0
    ) -> Generator[TextStep, None, list[list[int]]]:
        """The continuation of each prompt, up to and including its end token, or of `room` tokens."""
        stops = stop_ids(self.model, self.tokenizer)
        decoder = decoder_of(self.model)
        pieces = [decoder.start(prompts, Sampling(temperature=temperature, seed=seed), room).tolist()]
        waiting: list[torch.Tensor] = []
        ended = [t in stops for t in pieces[0]]
        for n in range(1, room):
            waiting.append(decoder.step().clone())
            if len(waiting) == LOOK or n + 1 == room:
                for tokens in torch.stack(waiting).tolist():
                    pieces.append(tokens)
                    ended = [e or t in stops for e, t in zip(ended, tokens, strict=True)]
                waiting = []
                yield TextStep(min(before + n * len(prompts), self.plan.total), self.plan.total)
                if all(ended):
                    break
        rows = [list(r) for r in zip(*pieces, strict=True)]
        return [r[: next((i for i, t in enumerate(r) if t in stops), len(r)) + 1] for r in rows]

    def _words(self, turn: list[int]) -> str:
        stops = stop_ids(self.model, self.tokenizer)
        return self.tokenizer.decode([t for t in turn if t not in stops], skip_special_tokens=True).strip()

    def _asked(self, turn: str) -> list[int]:
        return encode(self.tokenizer, turn, chat=True)

    def _load(self) -> None:
        with writing(self.plan.folder):  # before the text is written, which would be lost
            self.plan.folder.mkdir(parents=True, exist_ok=True)
        name = self.plan.model
        if self.plan.bits < 16:
            assert self.make
            folder = self.copy.enter_context(unfinished(self.plan.folder / COPY)) / "copy"
            self.make(make_recipe(bits=self.plan.bits, method="rtn", lm_head="keep"), folder)
            name = str(folder)
        self.model = open_model.ready(name, str(self.plan.device))[0]

    def close(self) -> None:
        """Free the memory, and delete the copy from disk."""
        if self.model is not None:
            self.model = None
            gc.collect()
            if self.plan.device.type == "cuda":
                empty_cache()
            torch.set_num_threads(self.threads)
        self.copy.close()
        if self.plan.folder.is_dir():
            sweep(self.plan.folder / COPY)  # left by a killed process


def result(steps: Generator[TextStep, None, Result], watch: Callable[[TextStep], object] = lambda step: None) -> Result:
    """The return value of a generator of progress events, each of which is passed to `watch`."""
    while True:
        try:
            watch(next(steps))
        except StopIteration as e:
            return e.value


def _opening(tokenizer: Any) -> list[int] | None:
    """The tokens of a conversation up to the user's first message; None if the template does not define them."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    before, mark, _ = tokenizer.decode(encode(tokenizer, MARK, chat=True)).partition(MARK)
    return list(tokenizer(before, add_special_tokens=False)["input_ids"]) if mark and before else None


def _keep(path: Path, ids: torch.Tensor) -> None:
    with writing(path):
        write_whole(path, save({"ids": ids}, {"digest": texts.Text("", ids=ids).digest}))
