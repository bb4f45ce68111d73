"""The plan of a text that the model writes itself: who writes it, how long that takes, and what of it the cache holds."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lowq_cli import quantizers
from lowq_cli.calibrate import texts
from lowq_cli.calibrate.cost import fastest_s, operations
from lowq_cli.calibrate.requirements import part_count
from lowq_cli.console import duration
from lowq_cli.files import memo
from lowq_cli.files.source import Source
from lowq_cli.memory import available_memory
from lowq_cli.plan.plan import Plan
from lowq_cli.plan.planner import make_plan
from lowq_cli.plan.recipe import Recipe
from lowq_packers.errors import DoesNotFitError, LowqError, NotFoundError
from lowq_packers.home import cache_dir
from lowq_packers.regular import opened

SIDE = {"cpu": 32, "cuda": 128}  # sequences per batch
PLAIN, BEGUN, CHAT, GREEDY = "text", "begun", "chat", "greedy"
# Cost of a step in random values drawn: per token of the vocabulary (noise, softmax, copies), and per position and layer of
# attention. The models story and base on one core: 3,107 and 1,953 tokens/s measured, 4,576 and 5,340 from matmuls alone.
DRAWN, ATTENDED = 2.0, 3.0
# Operations per weight and generated token, sampling and attention included, in units of a calibration's matmul operations:
# one core with matmuls of 97e9 operations/s generates 1,953 tokens/s with 21.9 M weights and 3,107 tokens/s with 6.8 M.
WRITING = 4.0
SMALL_OPS = 12  # operations of a layer besides its matmuls: norms, rotary embedding, attention, sums
COPIES = {8: 0.55, 4: 0.3}  # bits -> size of a quick copy relative to the 16-bit model; embedding and head are not quantized


@dataclass(frozen=True)
class Outlook:
    """The plan of a text. bits: of the generating model; tokens: of each part; seconds: estimate, 0 if the cache has all."""

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
    parts: int = 1  # of the text; passes that train all layers together read one each, everything else reads the first

    @property
    def total(self) -> int:
        """The tokens of all parts."""
        return self.tokens * self.parts

    @property
    def summary(self) -> str:
        """The text as a line of the printed plan."""
        by = "" if self.bits == 16 else f" by a quick {self.bits}-bit copy"
        when = f"about {duration(self.seconds)} to write" if self.seconds else "already written"
        return f"calibrated on the model's own text, {self.total:,} tokens{by}, seed {self.seed}: {when}"


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
        quantized = make_plan(source, recipe.uniform)
        plan = outlook(model, source, recipe, device, parts=_parts(quantized))
        if recipe.calib is None:
            writing, quantizing = WRITING * source.params * plan.total, operations(quantized)
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


def _parts(plan: Plan) -> int:
    items = [i for i in plan.items if i.method and quantizers.needs_text(i.method)]
    return part_count(items, sum(i.params for i in items))


def outlook(
    model: str, source: Source, recipe: Recipe, device: torch.device, room: float | None = None, parts: int = 1
) -> Outlook:
    """The plan of generating a recipe's text. Raises DoesNotFitError if no copy fits, NotFoundError without a home folder.

    room: bytes for the generating model; None: what the device has. parts: of the text, each of the recipe's number of tokens.
    """
    side = _side(source, device)
    bits = generating_bits(source, device, room or _room(device))
    facts = [1, version("lowq"), source.identity, device.type, bits, side, texts.WINDOW, recipe.calib_seed]
    folder = cache_dir() / "own-text" / memo.key(facts)
    kinds = (PLAIN, BEGUN, CHAT) if parts > 1 else (PLAIN, CHAT)
    present = sum(len(r) for kind in kinds for r in kept_rounds(folder, kind))
    left = max(0, recipe.tokens * parts - present)
    seconds = left / _rate(folder, source, side, device) if left else 0.0
    held = int(source.nbytes * COPIES.get(bits, 1.0))
    return Outlook(model, folder, device, bits, side, recipe.tokens, recipe.calib_seed, seconds, held, present, parts)


def kept_rounds(folder: Path, kind: str) -> Iterator[torch.Tensor]:
    """The complete rounds of a kind in the cache, from the first up to the first missing one."""
    number = 0
    while (ids := kept_round(folder / f"{kind}-{number:05d}.safetensors")) is not None:
        yield ids
        number += 1


def kept_round(path: Path) -> torch.Tensor | None:
    """The tokens of one file; None if it is missing or damaged."""
    with (
        suppress(LowqError, SafetensorError, OSError, KeyError, TypeError),
        opened(path) as name,
        safe_open(name, framework="pt") as file,
    ):
        ids = file.get_tensor("ids")
        return ids if texts.Text("", ids=ids).digest == file.metadata()["digest"] else None
    return None


def _rate(folder: Path, source: Source, side: int, device: torch.device) -> float:
    """Tokens per second: as recorded for this model in the cache, else estimated from timing one matmul and one sum."""
    with suppress(ValueError, KeyError, TypeError):
        return float(memo.recall(folder / "rate.json")["tokens_per_s"])
    n = 2048 if device.type == "cpu" else 8192
    dtype = torch.float32 if source.nbytes >= 4 * source.params else torch.bfloat16
    W, x = torch.zeros(n, n, dtype=dtype, device=device), torch.zeros(side, n, dtype=dtype, device=device)
    a_weight = fastest_s(lambda: x @ W) / n**2
    config = _text_config(source)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 1)
    drawn = torch.empty(side, n, device=device)
    words = max((h.shape[0] for h in source.headers.values() if len(h.shape) == 2), default=n)  # size of the vocabulary
    attended = DRAWN * words + ATTENDED * layers * texts.WINDOW
    a_row = fastest_s(lambda: drawn.exponential_()) / n
    return side / (source.params * a_weight + SMALL_OPS * layers * fastest_s(lambda: x + x) + attended * a_row)


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


def _room(device: torch.device) -> float | None:
    """Bytes of a device for a generating model; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory * 0.65  # the rest: caches, activations
    return available_memory()


def generating_bits(source: Source, device: torch.device, room: float | None) -> int:
    """Bits of the generating model: 16, or the largest width of a copy that fits. Raises DoesNotFitError."""
    if room is None or source.nbytes <= room:
        return 16
    for bits, share in COPIES.items() if device.type == "cuda" else ():
        if source.nbytes * share <= room:
            return bits
    raise DoesNotFitError(f"{source.name} does not fit into the memory of {device}, so it cannot write a text of its own")


def _text_config(source: Source) -> dict[str, Any]:
    return source.config.get("text_config") or source.config
