"""The plan of `lowq draft train`: the head's sizes, how much text it learns from, and about how long text and training take."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowq_cli.calibrate import texts
from lowq_cli.calibrate.cost import fastest_s
from lowq_cli.console import duration
from lowq_cli.devices import pick_device
from lowq_cli.engine import open_model
from lowq_cli.engine.plan import plan_of, why_not
from lowq_cli.files.source import HEAD, open_source
from lowq_cli.interop.importer import runnable
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import own_text_plan
from lowq_cli.run.draft_head import KINDS, Sizes, sizes
from lowq_packers.errors import UnsupportedError

# The head uses a vocabulary of up to FULL_VOCABULARY tokens whole, and REDUCED tokens of a larger one.
FULL_VOCABULARY, REDUCED = 65_536, 32_000
TOKENS = {"cuda": 4_194_304, "cpu": 262_144}  # tokens of training text; heads of the models story and base gain little beyond
PASSES = 3
ROWS = 1 << 27  # max. logits per step: 0.5 GB in fp32; a step holds about 3 such tensors per guess
MOST_WINDOWS = {"cuda": 32, "cpu": 1}  # max. windows per step
HELD_OUT = 16  # windows of each half held out from training
TRAINING = 3.0  # operations of the forward and backward pass, relative to the forward pass
FLOPS = 0.35  # FLOP/s of a whole step, relative to those of a single matmul
BIG = Sizes(4096, 14336, 32, 8, 128, 128_256, REDUCED, layers=32, eps=1e-5, theta=5e5, positions=8192, taps=(2, 16, 29))
BIG_PARAMS = 8.0e9


@dataclass(frozen=True)
class Training:
    """The plan of a training.

    inputs: the identity of the model and of a given text. seconds: estimate for text and training; big_seconds: the same for an
    8B model on this device.
    """

    model: str
    inputs: str
    out: Path
    device: torch.device
    of: Sizes
    text: str
    tokens: int
    seed: int
    steps: int
    windows: int  # per step
    seconds: float
    big_seconds: float
    own: own_text_plan.Outlook | None

    @property
    def summary(self) -> list[tuple[str, str]]:
        """The plan's lines."""
        o = self.of
        share = "all" if o.guesses == o.vocab else f"{o.guesses:,} of {o.vocab:,}"
        big = f"an 8B model with {TOKENS['cuda']:,} tokens:"
        source = "the model's own, half drawn and half greedy" if self.own else self.text
        return [
            ("model", self.model),
            ("head", f"{o.kind}, layers: {len(o.names)}, {o.params / 1e6:.1f}M weights, guesses among {share} tokens"),
            ("reads", f"what enters layers {', '.join(map(str, o.taps))} of {o.layers}"),
            ("text", f"{self.tokens:,} tokens: {source}"),
            ("learning", f"{PASSES} passes, {self.steps:,} steps, seed {self.seed}"),
            ("takes", f"about {duration(self.seconds)} on {self.device} ({big} about {duration(self.big_seconds)})"),
            ("out", str(self.out)),
        ]  # fmt: skip


def plan_training(
    model: str,
    out: str | None,
    tokens: int | None,
    text: str,
    vocabulary: int | None,
    seed: int,
    device: str,
    kind: str = KINDS[0],
) -> tuple[Training, Any, Any]:  # fmt: skip
    """The plan of a training, the model and its tokenizer. Raises LowqError."""
    on = pick_device(device)
    # read before the model: a plan of a text that cannot be read helps no user
    contents = None if text == texts.SELF else given_text(text)
    digest = texts.SELF if contents is None else contents.digest
    loaded, tokenizer = open_model.ready(model, device)
    if why := why_not(loaded):
        raise UnsupportedError(f"draft heads are trained only for models that lowq's native decoder runs: {why}")
    plan = plan_of(loaded)
    whole = plan.model.vocab
    guesses = vocabulary or (whole if whole <= FULL_VOCABULARY else REDUCED)
    of, count = sizes(plan, guesses, kind), tokens or TOKENS[on.type]
    window = texts.window_of(loaded)
    side = max(1, min(MOST_WINDOWS[on.type], ROWS // (window * of.guesses)))
    least = (2 * HELD_OUT + side) * window
    count = max(count // window * window, least if on.type == "cuda" else 4 * window)
    if contents is not None:  # the file may hold less
        count = contents.windows(tokenizer, count, loaded).numel()
    steps = max(1, (count // window - held_out(count // window)) // side) * PASSES
    outlook = None
    params = sum(p.numel() for p in loaded.parameters())
    with open_source(runnable(model)) as source:
        inputs = f"{source.identity} {digest}"
        if text == texts.SELF:
            recipe = make_recipe(bits=4, method="gptq", calib=texts.SELF, calib_tokens=max(4096, count // 2), calib_seed=seed)
            outlook, params = own_text_plan.outlook(model, source, recipe, on), source.params
    rate = _flops(on, plan.dtype)
    seconds = _seconds(of, params, count, rate) + (2 * outlook.seconds if outlook else 0.0)
    writing = TOKENS["cuda"] * 2 * BIG_PARAMS / (0.5 * rate)
    big_seconds = _seconds(BIG, BIG_PARAMS, TOKENS["cuda"], rate) + writing
    folder = Path(out) if out else _default_out(model)
    training = Training(model, inputs, folder, on, of, text, count, seed, steps, side, seconds, big_seconds, outlook)
    return training, loaded, tokenizer


def given_text(text: str) -> texts.Text:
    """The text that `--text` names, other than the model's own. Raises the errors of `texts.read_text`."""
    return texts.Text.read(None if text == texts.BUNDLED else text, "text")


def held_out(windows: int) -> int:
    """How many windows of a text are held out from training, from both halves together."""
    return 2 * min(HELD_OUT, max(1, windows // 8))


def _default_out(model: str) -> Path:
    folder = Path(model).expanduser()
    return folder / HEAD if folder.is_dir() else Path(f"{Path(model).name}-draft")


def _seconds(of: Sizes, params: float, tokens: int, rate: float) -> float:
    """Seconds of training: in each pass the model reads each token once, and the head runs each guess forward and backward."""
    return PASSES * tokens * 2 * (params + TRAINING * of.in_a_row * of.params) / (FLOPS * rate)


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    """The measured FLOP/s of a matmul."""
    n = 4096 if device.type == "cuda" else 512
    x = torch.zeros(n, n, dtype=dtype, device=device)
    return 2 * n**3 / fastest_s(lambda: x @ x)
