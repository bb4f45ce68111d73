"""What a calibration needs, and what it tells as it goes: known without importing what it works with."""

import re
from dataclasses import dataclass, field

from lowq_cli import quantizers
from lowq_cli.calibrate import texts
from lowq_cli.plan.plan import Item, Plan
from lowq_cli.plan.recipe import CALIB_TOKENS

# `learn` also reads windows of random tokens, one to so many of text: what a text never shows (the bundled one lacks a third of
# story's vocabulary) is else free to be forgotten. Story, 2 bits g128, WikiText-2 / mix: 77.6 / 67.4, without them 89.6 / 69.8.
UNSEEN = 8

# Width -> Adam's rates where all layers learn together: of the scales' logarithms and of the zeros (in codes); of the norms; of
# the codes. 0: they stay. Base g64, own text, WikiText-2 / mix. 2 bits, 524,288 tokens: (1e-3, 0, 0) 40.10 / 47.94, these
# 39.25 / 47.42. 3 and 4 bits: see BOTH_SIDES; codes at 1e-3 and 2e-3 did not move in 288 steps.
TOGETHER = {1: (2e-3, 5e-4, 3e-3), 2: (2e-3, 5e-4, 3e-3), 3: (1e-3, 2e-4, 1e-2), 4: (1e-3, 2e-4, 1e-2)}
WIDER = (1e-3, 0.0, 0.0)
# Widths at which all layers start from codes that `yaqa` rounded, none having learnt alone, and codes move. Base g64, 262,144
# tokens of its own text, KL on WikiText-2 / mix: 3 bits 0.115 / 0.133; without yaqa 0.126 / 0.141, and without moving codes
# 0.128 / 0.143; as learn leaves them, codes fixed, 0.139 / 0.157. 4 bits 0.0314 / 0.0355, and 0.0338 / 0.0375. Not measured
# at 2 bits and 1.
BOTH_SIDES = (3, 4)
MOST_CODES = 2 * 10**9  # weights whose codes learn together: 12 bytes each of memory, and of disk after each pass
ALONE_TOKENS = 131072  # that a layer learns from alone, where all learn together from more

CURVED_TOKENS = 262144  # from which the curvature is measured, at most: as many as for base, whose widest matrix has 1,408 rows
HELD_BYTES = 1 << 32  # of hidden states that one pass of that may leave for its way back

MOST_TOKENS, COST = 524288, 5e14  # where all layers learn together on a GPU, and the most weights times tokens


@dataclass(frozen=True)
class LayerDone:
    """One decoder layer is quantized. error: mean over its linears of ||W X' - W_q X'||^2 / ||W X'||^2, 0 where resumed.

    notes: checkpoint name -> why it was not quantized as the recipe says. unscaled: modules whose inputs take no scale.
    """

    index: int
    total: int
    error: float
    seconds: float
    resumed: bool
    notes: dict[str, str] = field(default_factory=dict)
    unscaled: tuple[str, ...] = ()


@dataclass(frozen=True)
class CurvatureDone:
    """One more layer of some windows of the text is measured for `yaqa`, the `index`-th of `total`."""

    index: int
    total: int


@dataclass(frozen=True)
class MatrixDone:
    """One matrix of a layer is rounded, the `index`-th of `total`; the layer is not finished."""

    name: str
    index: int
    total: int


@dataclass(frozen=True)
class PassDone:
    """All layers learnt together in one pass over the text. loss: KL divergence, nats a token."""

    index: int
    total: int
    loss: float


def rates(bits: int, weights: int) -> tuple[float, float, float]:
    """A line of TOGETHER for a model of so many weights that learn."""
    scales, norms, codes = TOGETHER.get(bits, WIDER)
    return scales, norms, codes if weights <= MOST_CODES else 0.0


def tokens_for(plan: Plan) -> int:
    """How many tokens all layers of a plan learn from on a GPU where nobody says: a power of two."""
    weights = sum(i.params for i in plan.items if i.scheme)
    return min(MOST_TOKENS, max(CALIB_TOKENS, 1 << int(COST / max(weights, 1)).bit_length() - 1))


def learns_alone(item: Item) -> bool:
    """Whether a matrix learns with its layer alone (calibrate/learn.py)."""
    method = str(item.method)
    return quantizers.needs_learning(method) and not (quantizers.needs_curvature(method) and rounds_both_sides(item))


def rounds_both_sides(item: Item) -> bool:
    """Whether a matrix is rounded by the curvature of its outputs, too (calibrate/curvature.py); experts have none."""
    method = str(item.method)
    if not quantizers.needs_curvature(method) or item.kind == "expert":
        return False
    return not quantizers.needs_learning(method) or bool(item.scheme and item.scheme.bits in BOTH_SIDES)


def is_calibrated(plan: Plan) -> bool:
    """Whether a plan holds matrices whose method reads a text."""
    return any(i.method and quantizers.needs_text(i.method) for i in plan.items)


def identity(plan: Plan, text: texts.Text | None) -> str:
    """A hash of the text and the number of tokens, for the name of the run; "" where nothing is calibrated."""
    return f"{text.digest} {plan.recipe.tokens}" if text else ""


def working_bytes(plan: Plan) -> int:
    """Bytes that calibrating takes on the device: a layer's weights twice, its moments, both streams, a slab being rounded."""
    items = [i for i in plan.items if i.method and quantizers.needs_text(i.method)]
    if not items:
        return 0
    layers: dict[str, int] = {}
    for i in items:
        number = re.search(r"\.(\d+)\.", i.name)
        layers[number[1] if number else ""] = layers.get(number[1] if number else "", 0) + i.params
    widest = max(i.shape[1] for i in items)
    hidden = min(i.shape[1] for i in items)
    inputs = 8 * texts.BATCH * texts.WINDOW * widest
    copies = 4 if any(i.kind == "expert" for i in items) else 2  # a mixture's inputs are held besides
    learns = any(quantizers.needs_learning(str(i.method)) for i in items)
    tokens = plan.recipe.tokens * (UNSEEN + 1) // UNSEEN if learns else plan.recipe.tokens
    streams = copies * tokens * hidden
    if learns:
        # codes, their gradient and Adam's two averages, the weights and theirs; what a batch leaves for the way back; outputs
        inputs += 8 * max(layers.values()) + texts.BATCH * texts.WINDOW * (16 * widest + 24 * hidden) + tokens * hidden
    slab = min(quantizers.GPTQ_SLAB, max(i.params for i in items))
    alone = 4 * (2 * max(layers.values()) + 5 * widest**2 + inputs + streams + 4 * slab)
    if any(rounds_both_sides(i) for i in items):
        left = min(HELD_BYTES, 4 * min(plan.recipe.tokens, CURVED_TOKENS) * hidden * (len(layers) + 2))
        alone = max(alone, 4 * (2 * max(layers.values()) + inputs + texts.BATCH * texts.WINDOW * 16 * widest) + left)
    distills = any(quantizers.needs_distilling(str(i.method)) for i in items)
    return max(alone, _together(plan, items, layers, 4 * streams)) if distills else alone


def _together(plan: Plan, items: list[Item], layers: dict[str, int], streams: int) -> int:
    """Bytes that learning all layers together takes: codes, a byte each; of what is learnt value, gradient, Adam's averages.

    Codes that are learnt have a gradient while their layer has: 12 bytes each. Besides, a layer's weights and their gradients,
    a batch's hidden states before every layer, the tables and some logits.
    """
    tables = [i for i in plan.items if i.kind in ("embedding", "head")]
    rows, hidden = max((i.shape[0] for i in tables), default=0), min(i.shape[1] for i in items)
    weights = sum(i.params for i in items)
    grids = sum(
        i.params * (1 + 2 * 16 / i.scheme.group_size + (12 if rates(i.scheme.bits, weights)[2] else 0))
        for i in items
        if i.scheme
    )
    batch = texts.BATCH * texts.WINDOW * hidden * (len(layers) + 24)
    return (
        int(grids) + streams + 4 * (4 * max(layers.values()) + batch + sum(i.params for i in tables) + 6 * texts.WINDOW * rows)
    )
