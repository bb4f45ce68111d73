"""The memory and text that a calibration needs, and the progress events it yields. Does not import calibration.py."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from lowq_cli import quantizers
from lowq_cli.calibrate import texts
from lowq_cli.plan.plan import Item, Plan
from lowq_cli.plan.recipe import CALIB_TOKENS
from lowq_packers.scheme import Scheme

# `learn` also reads windows of random tokens, one for every UNSEEN windows of text: otherwise it unlearns tokens that the text
# lacks (the bundled text lacks a third of story's vocabulary). Perplexity of story, 2 bits g128, WikiText-2 / mix: 77.6 / 67.4
# with them, 89.6 / 69.8 without.
UNSEEN = 8

# Bits -> Adam's learning rates where all layers are trained together: one for the scales' logarithms and the zeros (in codes),
# one for the norms, one for the codes (0: not trained). Perplexity of base, g64, own text, WikiText-2 / mix, 2 bits, 524,288
# tokens: 40.10 / 47.94 with (1e-3, 0, 0), 39.25 / 47.42 with these. For 3 and 4 bits see BOTH_SIDES; there no code changed in
# 288 steps at the rates 1e-3 and 2e-3.
TOGETHER = {1: (2e-3, 5e-4, 3e-3), 2: (2e-3, 5e-4, 2e-3), 3: (1e-3, 2e-4, 1e-2), 4: (1e-3, 2e-4, 1e-2)}
WIDER = (1e-3, 0.0, 0.0)
# Bits at which `distill` starts from codes that `yaqa` rounded (no layer is trained alone) and then trains codes, too. Base
# g64, 262,144 tokens of its own text, KL on WikiText-2 / mix. 3 bits: 0.115 / 0.133; without yaqa 0.126 / 0.141; without
# training codes 0.128 / 0.143; from learn's result with fixed codes 0.139 / 0.157. 4 bits: 0.0314 / 0.0355, and from learn's
# result with fixed codes 0.0338 / 0.0375. 2 bits, story, 32,768 tokens, two texts: over gptq's start
# 1.01 / 1.00 and 1.01 / 1.00. Not measured at 1 bit.
BOTH_SIDES: tuple[int, ...] = (3, 4)
# Bits at which `distill` trains all layers together right from gptq's codes, each of which starts where its weight lies between
# two codes, in MORE_PASSES. Base, 2 bits g64, 524,288 tokens of own text, perplexity on WikiText-2 / mix: 36.65 / 45.26; from
# learn's result, codes in the middle of their intervals, PASSES: 38.68 / 47.08. At 3 bits KL is that of yaqa's start, for which
# tables with scales in bytes take too long: base in groups of 16 was not done after 235 s on an H200, gptq after 50. By
# `--bpw 3.5` such tables, all from gptq's codes, have a KL of 0.0747 / 0.0814; 3 bits in groups of 16 have 0.0833 / 0.0886.
STRAIGHT, STRAIGHT_BYTES = (2,), (2, 3, 4)
STRAIGHT_CODES = 2e-3  # the codes' rate then. Base, 2 bits: KL 0.290 / 0.321, by 5e-3 0.304 / 0.336 (table-e4m3 g16, own text)
FARTHEST = 1.17  # Adam's longest step in learning rates at betas of 0.9 and 0.95: sqrt(0.2 / (1 - 0.81 / 0.95)), rounded up
TABLES = 1e-3  # the rate of embedding and head, as a share of their root mean square
PASSES, MORE_PASSES = 4, 8
MOST_CODES = 2 * 10**9  # max. weights whose codes are trained together: each takes 12 bytes of memory, and of disk after a pass
ALONE_TOKENS = 131072  # max. tokens that a layer is trained on alone if all layers are trained together afterwards

CURVED_TOKENS = 262144  # max. tokens for measuring the curvature: the number used for base (at most 1,408 rows)
HELD_BYTES = 1 << 32  # max. bytes of hidden states that a forward pass of this measurement keeps for the backward pass

MOST_TOKENS, COST = 524288, 5e14  # limits where all layers are trained together on a GPU: tokens, weights x tokens


@dataclass(frozen=True)
class LayerDone:
    """One decoder layer is quantized. error: mean over its linears of ||W X' - W_q X'||^2 / ||W X'||^2, 0 where resumed.

    before: the same mean with the matrices of another tool's file as they were, None without such a file.
    notes: checkpoint name -> why it was not quantized as the recipe says. unscaled: modules whose inputs take no scale.
    """

    index: int
    total: int
    error: float
    seconds: float
    resumed: bool
    notes: dict[str, str] = field(default_factory=dict)
    unscaled: tuple[str, ...] = ()
    before: float | None = None


@dataclass(frozen=True)
class CurvatureDone:
    """The curvature of one layer is measured on a batch of windows for `yaqa`: step `index` of `total`."""

    index: int
    total: int


@dataclass(frozen=True)
class MatrixDone:
    """Matrix `index` of `total` of a layer is rounded; the layer is not finished."""

    name: str
    index: int
    total: int


@dataclass(frozen=True)
class PassDone:
    """One pass over the text that trains all layers together is done. loss: KL divergence in nats per token; losses over
    different parts of the text do not compare. part: the one that the pass read; 0: the whole text."""

    index: int
    total: int
    loss: float
    part: int = 0


def rates(bits: int, weights: int) -> tuple[float, float, float]:
    """The learning rates of TOGETHER; the codes' rate is 0 if more than MOST_CODES weights would be trained."""
    scales, norms, codes = TOGETHER.get(bits, WIDER)
    return scales, norms, codes if weights <= MOST_CODES else 0.0


def table_rate(weights: int) -> float:
    """The rate of embedding and head where `trains_table`: 0 in a model of more than MOST_CODES weights."""
    return TABLES if weights <= MOST_CODES else 0.0


def tokens_for(plan: Plan) -> int:
    """The default number of tokens for training all layers of a plan together on a GPU: a power of two."""
    weights = sum(i.params for i in plan.items if i.scheme)
    return min(MOST_TOKENS, max(CALIB_TOKENS, 1 << int(COST / max(weights, 1)).bit_length() - 1))


def pass_count(items: Iterable[Item], weights: int) -> int:
    """The number of passes over the text that train all layers of `distill` together."""
    return MORE_PASSES if any(starts_straight(i, weights) for i in items) else PASSES


def part_count(items: Iterable[Item], weights: int) -> int:
    """The number of parts, of as many tokens each, of a text that the model writes itself: one for each of MORE_PASSES.

    The training learns a text by heart. Base, by the bits that `--bpw 2.5` places, 4 passes over 524,288 tokens: KL 0.237 on
    that text in the last pass, 0.302 on other text of the model; WikiText-2 / mix 0.257 / 0.284 and 0.256 / 0.288 (two texts).
    In as many steps, each pass with its own part: 0.248 / 0.272 and 0.255 / 0.275. With a random token behind the beginning of
    every second sequence, too: 0.248 / 0.269 and 0.251 / 0.271. Not measured from yaqa's codes.
    """
    return MORE_PASSES if any(starts_straight(i, weights) for i in items) else 1


def starts_straight(item: Item, weights: int) -> bool:
    """Whether all layers train a matrix together right from gptq's codes: not where so many weights keep their codes."""
    if not item.scheme or not quantizers.needs_distilling(str(item.method)):
        return False
    return _in_straight_widths(item.scheme) and rates(item.scheme.bits, weights)[2] > 0


def _in_straight_widths(scheme: Scheme) -> bool:
    return scheme.bits in (STRAIGHT if scheme.scale == "float" else STRAIGHT_BYTES)


def can_move(code_rate: float, steps: int) -> bool:
    """Whether a code that starts in the middle of its interval can leave it in so many steps, whose rates fall to 0."""
    return FARTHEST * code_rate * (steps + 1) / 2 > 0.5


def trains_codes(item: Item, weights: int, steps: int) -> bool:
    """Whether all layers trained together for so many steps may change a matrix's codes."""
    code_rate = rates(item.scheme.bits, weights)[2] if item.scheme else 0.0
    return starts_straight(item, weights) or can_move(code_rate, steps)


def trains_table(item: Item) -> bool:
    """Whether all layers trained together change an embedding or a head: those in 16 bits, and embeddings of 8 bits, which are
    rounded again afterwards. They change none in a model for which `table_rate` is 0."""
    return item.scheme is None or (item.kind == "embedding" and item.scheme.bits == 8)


def step_count(tokens: int, passes: int) -> int:
    """The number of steps of passes over so many tokens, in windows of full length, and the windows of random tokens."""
    windows = tokens // texts.WINDOW
    return passes * -(-(windows + windows // UNSEEN // texts.BATCH * texts.BATCH) // texts.BATCH)


def notes_of_codes(plan: Plan) -> list[str]:
    """What a plan says where `distill` has too few steps to move the codes of some matrices; nothing elsewhere."""
    items = [i for i in plan.items if i.method and quantizers.needs_distilling(i.method) and i.kind != "expert"]
    weights = sum(i.params for i in plan.items if i.method and quantizers.needs_text(i.method))
    steps = step_count(plan.recipe.tokens, pass_count(items, weights))
    still = [i for i in items if i.scheme and rates(i.scheme.bits, weights)[2] and not trains_codes(i, weights, steps)]
    return [f"distill trains no codes of {len(still)} of {len(items)} matrices: {steps} steps cannot move one"] if still else []


def learns_alone(item: Item, weights: int) -> bool:
    """Whether a matrix is trained with its layer alone (calibrate/learn.py). weights: number of those that are calibrated."""
    method = str(item.method)
    if starts_straight(item, weights) or (quantizers.needs_distilling(method) and rounds_both_sides(item)):
        return False
    return quantizers.needs_learning(method)


def rounds_both_sides(item: Item) -> bool:
    """Whether rounding a matrix also uses the curvature of its outputs (calibrate/curvature.py); never for experts."""
    method = str(item.method)
    if not quantizers.needs_curvature(method) or item.kind == "expert":
        return False
    if not quantizers.needs_learning(method):
        return True
    return bool(item.scheme and item.scheme.bits in BOTH_SIDES and not _in_straight_widths(item.scheme))


def is_calibrated(plan: Plan) -> bool:
    """Whether a plan holds matrices whose method reads a text."""
    return any(i.method and quantizers.needs_text(i.method) for i in plan.items)


def identity(plan: Plan, text: texts.Text | None) -> str:
    """A hash of the text and the number of tokens, which are part of the run's hash; "" without calibration."""
    return f"{text.digest} {plan.recipe.tokens}" if text else ""


def working_bytes(plan: Plan) -> int:
    """Bytes of device memory for calibrating: a layer's weights twice, its moments, both streams, the slab in work."""
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
    copies = 4 if any(i.kind == "expert" for i in items) else 2  # a mixture's inputs are held, too
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


def layers_bytes(plan: Plan) -> int:
    """Bytes on disk of the calibrated layers until the checkpoint holds them: a byte per code, scales, zeros and tables.

    `distill` writes each layer a second time, and after each pass the codes that it trains, with Adam's two averages.
    """
    items = [i for i in plan.items if i.method and quantizers.needs_text(i.method)]
    once = sum(i.params + sum(header.nbytes for _, header in i.outputs[1:]) for i in items)
    if not any(quantizers.needs_distilling(str(i.method)) for i in items):
        return once
    weights = sum(i.params for i in items)
    steps = step_count(plan.recipe.tokens, pass_count(items, weights))
    return 2 * once + sum(12 * i.params for i in items if trains_codes(i, weights, steps))


def _together(plan: Plan, items: list[Item], layers: dict[str, int], streams: int) -> int:
    """Bytes for training all layers together: a byte per code; value, gradient and Adam's averages of trained parameters.

    Trained codes take 12 bytes each; they have a gradient only while their layer is processed. Then come a layer's weights and
    their gradients, a batch's hidden states before every layer, the tables and some logits. A trained table is there as the
    original has it, as it is trained and as it will be stored, with its gradient and two averages.
    """
    tables = [i for i in plan.items if i.kind in ("embedding", "head")]
    rows, hidden = max((i.shape[0] for i in tables), default=0), min(i.shape[1] for i in items)
    weights = sum(i.params for i in items)
    steps = step_count(plan.recipe.tokens, pass_count(items, weights))
    grids = sum(
        i.params * (1 + 2 * 16 / i.scheme.group_size + (12 if i.kind == "expert" or trains_codes(i, weights, steps) else 0))
        for i in items
        if i.scheme
    )
    batch = texts.BATCH * texts.WINDOW * hidden * (len(layers) + 24)
    around = sum(i.params * (6 if table_rate(weights) and trains_table(i) else 1) for i in tables)
    return int(grids) + streams + 4 * (4 * max(layers.values()) + batch + around + 6 * texts.WINDOW * rows)
