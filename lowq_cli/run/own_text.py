"""`--calib self`: the model generates its own calibration text with the decoder, many sequences in parallel.

A sequence begins with the model's beginning-of-text token, is sampled at temperature 1 and continues to its end or to the
length of a window. A chat model generates half of the tokens as conversations: it generates opening turns and answers them.
Each round of sequences is a file in the user's cache, named by model, device, seed and round number. A killed run therefore
resumes after its last round, and a longer text begins with the shorter one. Self-calibration: arXiv:2410.17170; opening turns
from the template alone: arXiv:2406.08464.
"""

import gc
import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from lowq_cli import quantizers
from lowq_cli.calibrate import texts
from lowq_cli.calibrate.calibration import operations
from lowq_cli.calibrate.expert_usage import Visits
from lowq_cli.console import duration
from lowq_cli.engine import open_model
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.prompts import encode, stop_ids
from lowq_cli.engine.sampling import Sampling
from lowq_cli.files import memo
from lowq_cli.files.folder import sweep, unfinished
from lowq_cli.files.source import Source, open_source
from lowq_cli.interop.importer import runnable
from lowq_cli.memory import available_memory
from lowq_cli.plan.planner import make_plan
from lowq_cli.plan.recipe import Recipe, make_recipe
from lowq_cli.quantizers import FEW_TOKENS
from lowq_cli.run.events import TextStep
from lowq_cli.state import writing
from lowq_packers.atomic import write_whole
from lowq_packers.errors import DoesNotFitError, LowqError, NotFoundError, UnsupportedError
from lowq_packers.home import cache_dir
from lowq_packers.regular import opened

SIDE = {"cpu": 32, "cuda": 128}  # sequences per batch
PLAIN, CHAT, GREEDY = "text", "chat", "greedy"
OPENINGS = 8, 32, 16, 64  # tokens of the prompts of greedy rounds; successive rounds take these in turn
# Cost of a step in random values drawn: per token of the vocabulary (noise, softmax, copies), and per position and layer of
# attention. The models story and base on one core: 3,107 and 1,953 tokens/s measured, 4,576 and 5,340 from matmuls alone.
DRAWN, ATTENDED = 2.0, 3.0
TURN = 64  # max. tokens of an opening turn
LOOK = 64  # steps between two checks whether all sequences have ended
FEW = 8  # min. mean tokens per sequence of a round: below, the model ends its sequences at once and cannot generate a text
# Operations per weight and generated token, sampling and attention included, in units of a calibration's matmul operations:
# one core with matmuls of 97e9 operations/s generates 1,953 tokens/s with 21.9 M weights and 3,107 tokens/s with 6.8 M.
WRITING = 4.0
SMALL_OPS = 12  # operations of a layer besides its matmuls: norms, rotary embedding, attention, sums
SPARE, ROUNDS, MORE = 50_000, 4, 4  # number of the first round for experts, max. rounds; they add at most 1/MORE of the text
COPY = "copy"  # name of the quick copy's folder, next to the rounds
MARK = "XQZ7"  # placeholder for the user's message in a template
COPIES = {8: 0.55, 4: 0.3}  # bits -> size of a quick copy relative to the 16-bit model; embedding and head are not quantized
Result = TypeVar("Result")
Make = Callable[[Recipe, Path], None]  # quantizes the model by a recipe into a folder


@dataclass(frozen=True)
class Outlook:
    """The plan of a text. bits: of the generating model; tokens: requested; seconds: estimate, 0 if the cache has all."""

    model: str
    folder: Path  # in the user's cache
    device: torch.device
    bits: int
    side: int
    tokens: int
    seed: int
    seconds: float
    held: int  # bytes of the generating model
    cached: int  # tokens in the cache

    @property
    def summary(self) -> str:
        """The text as a line of the printed plan."""
        by = "" if self.bits == 16 else f" by a quick {self.bits}-bit copy"
        when = f"about {duration(self.seconds)} to write" if self.seconds else "already written"
        return f"calibrated on the model's own text, {self.tokens:,} tokens{by}, seed {self.seed}: {when}"


def decide(model: str, source: Source, recipe: Recipe, device: torch.device) -> tuple[Recipe, Outlook | None, str]:
    """The recipe with its calibration text chosen, the plan of generating that text, and a line about it.

    Without --calib, a calibrated method takes the model's own text unless generating costs more than quantizing with it. Both
    costs are counted, not timed, so the same command chooses the same text on every machine, whatever its load or cache.
    Raises as `outlook` for `--calib self`.
    """
    calibrated = recipe.method != "auto" and quantizers.needs_text(recipe.method)
    if not calibrated or recipe.calib not in (None, texts.SELF) or source.folder is None:  # no folder: a dry run on headers
        return recipe, None, ""
    why = ""
    try:
        plan = outlook(model, source, recipe, device)
        if recipe.calib is None:
            writing, quantizing = WRITING * source.params * recipe.tokens, operations(make_plan(source, _plain(recipe)))
            if writing > quantizing:
                times = writing / max(quantizing, 1)
                why = f"writing its own text would take {times:.1f} times as long as quantizing; --calib self writes it"
    except (DoesNotFitError, NotFoundError) as e:
        if recipe.calib == texts.SELF:
            raise
        why = str(e)
    if why:
        return replace(recipe, calib=texts.BUNDLED), None, f"calibrated on the bundled text: {why}"
    return replace(recipe, calib=texts.SELF), plan, plan.summary


def _plain(recipe: Recipe) -> Recipe:
    """The recipe without its budget of bits, whose widths are only known after calibration."""
    return replace(recipe, bpw=None, size=None, max_kl=None, max_ppl=None, fit=None, tokens_per_s=None)


def outlook(model: str, source: Source, recipe: Recipe, device: torch.device) -> Outlook:
    """The plan of generating a recipe's text. Raises DoesNotFitError if no copy fits, NotFoundError without a home folder."""
    side = _side(source, device)
    bits = _bits(source, device)
    facts = [1, version("lowq"), source.identity, device.type, bits, side, texts.WINDOW, recipe.calib_seed]
    folder = cache_dir() / "own-text" / memo.key(facts)
    present = sum(len(r) for kind in (PLAIN, CHAT) for r in _kept_rounds(folder, kind))
    left = max(0, recipe.tokens - present)
    seconds = left / _rate(folder, source, side, device) if left else 0.0
    held = int(source.nbytes * COPIES.get(bits, 1.0))
    return Outlook(model, folder, device, bits, side, recipe.tokens, recipe.calib_seed, seconds, held, present)


def write(plan: Outlook, make: Make | None, visits: Visits | None = None) -> Generator[TextStep, None, texts.Text]:
    """The calibration text; rounds that the cache lacks are generated.

    Args:
        make: makes the quantized copy that generates the text if the model does not fit.
        visits: counts the visits of a mixture's experts; the text is extended for experts with few visits.

    Raises UnsupportedError for a model that ends its texts at once, and as `engine.open_model.ready`.
    """
    author = _Author(plan, make)
    try:
        kinds = author.kinds()
        per_kind = -(-plan.tokens // len(kinds))
        parts, done = [], 0
        for kind in kinds:
            number = mine = 0
            while mine < per_kind:
                ids = yield from author.round(kind, number, done + mine)
                parts.append(ids[: per_kind - mine])
                number, mine = number + 1, mine + len(ids)
            done += per_kind
        ids = torch.cat(parts)[: plan.tokens]
        if visits:
            ids = torch.cat([ids, *(yield from author.more(ids, visits))])
    finally:
        author.close()
    return texts.Text(texts.SELF, ids=ids)


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
    return _result(write(plan, make, visits))


class _Author:
    """The generating model, loaded when a round is missing."""

    def __init__(self, plan: Outlook, make: Make | None) -> None:
        self.plan, self.make = plan, make
        self.model: Any = None
        self.threads = torch.get_num_threads()  # loading a decoder changes the thread count, on which calibrated bytes depend
        self.spent, self.made = 0.0, 0
        self.copy = ExitStack()  # a copy is private to a process; rounds have the same bytes from every process
        with open_source(runnable(plan.model)) as source:
            self.tokenizer = open_model.tokenizer(source)

    def kinds(self) -> tuple[str, ...]:
        """The kinds of text that it generates, in equal parts."""
        return (PLAIN, CHAT) if _opening(self.tokenizer) else (PLAIN,)

    def round(self, kind: str, number: int, before: int) -> Generator[TextStep, None, torch.Tensor]:
        """One round of sequences (T,), from the cache or generated and stored there. before: tokens of earlier rounds."""
        path = self.plan.folder / f"{kind}-{number:05d}.safetensors"
        if (ids := _kept(path)) is not None:
            return ids
        text = (yield from self.round(PLAIN, number, before)) if kind == GREEDY else None
        if self.model is None:
            yield TextStep(before, self.plan.tokens)
            self._load()
        began = time.monotonic()
        start = [encode(self.tokenizer, "")[:1]] * self.plan.side
        seed = 4 * (self.plan.seed * 1_000_000 + number) + (2 if kind == CHAT else 0)
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
        self.spent, self.made = self.spent + time.monotonic() - began, self.made + len(ids)
        with writing(path):  # the round's file is written last: after a kill here, the next process repeats both
            write_whole(self.plan.folder / "rate.json", json.dumps({"tokens_per_s": self.made / self.spent}).encode())
        _keep(path, ids)
        return ids

    def more(self, ids: torch.Tensor, visits: Visits) -> Generator[TextStep, None, list[torch.Tensor]]:
        """Windows of further rounds that visit experts with fewer than FEW_TOKENS visits; at most a quarter of the text."""
        path = self.plan.folder / f"experts-{self.plan.tokens}.safetensors"
        if (rounds := _kept(path)) is not None:
            return [rounds]
        seen = visits(ids.long()).sum(0)
        most = len(ids) // visits.window // MORE // texts.BATCH * texts.BATCH
        taken: list[torch.Tensor] = []
        for number in range(SPARE, SPARE + ROUNDS):
            if len(taken) >= most or bool((seen >= FEW_TOKENS).all()):
                break
            new = texts.windows((yield from self.round(PLAIN, number, self.plan.tokens)), visits.window)
            for window, counts in zip(new, visits(new.long().flatten()), strict=True):
                if len(taken) < most and bool(counts[seen < FEW_TOKENS].any()):
                    taken.append(window)
                    seen = seen + counts
        taken = taken[: len(taken) // texts.BATCH * texts.BATCH]
        added = torch.cat(taken) if taken else ids[:0]
        _keep(path, added)
        return [added]

    def _draw(self, prompts: list[list[int]], seed: int, room: int) -> list[list[int]]:
        return _result(self._drawn(prompts, seed, room, 0))

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
                yield TextStep(min(before + n * len(prompts), self.plan.tokens), self.plan.tokens)
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
                torch.cuda.empty_cache()
            torch.set_num_threads(self.threads)
        self.copy.close()
        if self.plan.folder.is_dir():
            sweep(self.plan.folder / COPY)  # left by a killed process


def _result(steps: Generator[TextStep, None, Result]) -> Result:
    while True:
        try:
            next(steps)
        except StopIteration as e:
            return e.value


def _opening(tokenizer: Any) -> list[int] | None:
    """The tokens of a conversation up to the user's first message; None if the template does not define them."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    before, mark, _ = tokenizer.decode(encode(tokenizer, MARK, chat=True)).partition(MARK)
    return list(tokenizer(before, add_special_tokens=False)["input_ids"]) if mark and before else None


def _kept_rounds(folder: Path, kind: str) -> Iterator[torch.Tensor]:
    """The complete rounds of a kind in the cache, from the first up to the first missing one."""
    number = 0
    while (ids := _kept(folder / f"{kind}-{number:05d}.safetensors")) is not None:
        yield ids
        number += 1


def _kept(path: Path) -> torch.Tensor | None:
    """The tokens of one file; None if it is missing or damaged."""
    with (
        suppress(LowqError, SafetensorError, OSError, KeyError, TypeError),
        opened(path) as name,
        safe_open(name, framework="pt") as file,
    ):
        ids = file.get_tensor("ids")
        return ids if texts.Text("", ids=ids).digest == file.metadata()["digest"] else None
    return None


def _keep(path: Path, ids: torch.Tensor) -> None:
    with writing(path):
        write_whole(path, save({"ids": ids}, {"digest": texts.Text("", ids=ids).digest}))


def _rate(folder: Path, source: Source, side: int, device: torch.device) -> float:
    """Tokens per second: as recorded for this model in the cache, else estimated from timing one matmul and one sum."""
    with suppress(ValueError, KeyError, TypeError):
        return float(memo.recall(folder / "rate.json")["tokens_per_s"])
    n = 2048 if device.type == "cpu" else 8192
    dtype = torch.float32 if source.nbytes >= 4 * source.params else torch.bfloat16
    W, x = torch.zeros(n, n, dtype=dtype, device=device), torch.zeros(side, n, dtype=dtype, device=device)
    a_weight = _seconds(lambda: x @ W) / n**2
    config = _text_config(source)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 1)
    drawn = torch.empty(side, n, device=device)
    words = max((h.shape[0] for h in source.headers.values() if len(h.shape) == 2), default=n)  # size of the vocabulary
    attended = DRAWN * words + ATTENDED * layers * texts.WINDOW
    a_row = _seconds(lambda: drawn.exponential_()) / n
    return side / (source.params * a_weight + SMALL_OPS * layers * _seconds(lambda: x + x) + attended * a_row)


def _seconds(f: Callable[[], torch.Tensor]) -> float:
    """The fastest of five timings, each synchronised with the device."""
    f()[0, 0].item()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        f()[0, 0].item()
        times.append(time.perf_counter() - began)
    return min(times)


def _side(source: Source, device: torch.device) -> int:
    """Sequences per batch: fewer if their KV caches would take more than a quarter of the GPU's memory."""
    if device.type != "cuda":
        return SIDE[device.type]
    config = _text_config(source)
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or 1
    width = config.get("head_dim") or config.get("hidden_size", 4096) // (config.get("num_attention_heads") or 1)
    a_text = 4 * int(config.get("num_hidden_layers") or 1) * heads * width * texts.WINDOW
    total = torch.cuda.get_device_properties(device).total_memory
    side = SIDE["cuda"]
    while side > 8 and side * a_text > total // 4:
        side //= 2
    return side


def _bits(source: Source, device: torch.device) -> int:
    """Bits of the generating model: 16, or the largest width of a copy that fits. Raises DoesNotFitError."""
    if device.type == "cuda":
        room: float | None = torch.cuda.get_device_properties(device).total_memory * 0.65  # the rest: caches, activations
    else:
        room = available_memory()
    if room is None or source.nbytes <= room:
        return 16
    for bits, share in COPIES.items() if device.type == "cuda" else ():
        if source.nbytes * share <= room:
            return bits
    raise DoesNotFitError(f"{source.name} does not fit into the memory of {device}, so it cannot write a text of its own")


def _text_config(source: Source) -> dict[str, Any]:
    return source.config.get("text_config") or source.config
