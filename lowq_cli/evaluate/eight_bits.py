"""Chooses the layers that round their inputs to 8 bits (`--act auto`): those that change the model's predictions least.

The model itself writes the text, by sampling at temperature 1. On such text the increase in loss is the KL divergence between
the predictions: LIMIT nats per token raise perplexity by 0.1%. Each group of layers is measured alone; groups are then sorted
by KL divergence per work, and as many are rounded as together stay below the limit.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowq_cli.calibrate.texts import window_of
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.prompts import encode
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.tokenizer import LoadedTokenizer
from lowq_cli.evaluate.logits import logits_of, warm_reading
from lowq_cli.hf.activations import is_quantized, linears_by_name, mixtures, set_activations
from lowq_cli.hf.experts import QuantExperts
from lowq_cli.models import CausalModel
from lowq_kernels.activations import STEPS, check_act
from lowq_kernels.dispatch.registry import Call, after_rounding
from lowq_kernels.fp8.matmul import has_fp8
from lowq_kernels.gpu import capability
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.errors import UsageError
from lowq_packers.scheme import ACTS, Act

AUTO = "auto"
Layer = QuantLinear | QuantExperts  # what rounds, or does not
LIMIT = 0.001  # max. KL divergence of all rounding together, in nats per token
TEXTS, TOKENS = 8, 256  # sequences that the model writes, tokens of each: 2,048 rows per matmul
ALONE = 32  # max. layers to measure one by one; more are grouped by kind and quarter of the depth
PARTS = 4
ROWS = 1024  # rows of a prompt's matmul, for choosing its kernel
SAVED: dict[Act, int] = {"fp8": 17, "int8": 14}  # ms saved by all layers of an 8B model, of 102 for 4,400 prompt tokens (H200)


@dataclass(frozen=True)
class Choice:
    """The layers that round their inputs to `act` (`rounded`) and those that do not (`kept`). share: the rounded layers' share
    of the work; kl: the KL divergence in nats per token."""

    act: Act
    rounded: tuple[str, ...]
    kept: tuple[str, ...]
    share: float
    kl: float

    def __str__(self) -> str:
        if self.act == "none":
            return "activations stay in 16 bits: " + (
                "every layer loses too much" if self.kept else "no kernel is faster with 8"
            )
        exceptions = f"; 16 bits in these layers: {', '.join(_short(self.kept))}" if self.kept else ""
        return (
            f"activations in {self.act} for {self.share:.0%} of a prompt's products, KL divergence {self.kl:.5f} nats a token "
            f"(at most {LIMIT}){exceptions}"
        )


def apply_act(
    model: CausalModel,
    tokenizer: LoadedTokenizer,
    act: str | None,
    say: Callable[[str], None] = lambda text: None,
    tokens: int = TOKENS,
) -> None:
    """Set the model's layers to the mode of `--act`: a mode, "auto", or None for the mode of its checkpoint.

    tokens: of each text that "auto" measures on.
    Raises UsageError if nothing is quantized, UnsupportedError for int8 activations with fp8 weights.
    """
    if act not in (None, AUTO, *ACTS):
        raise UsageError(f"--act {act} must be one of {', '.join(ACTS)}, {AUTO}")
    if act not in (None, "none") and not is_quantized(model):
        raise UsageError(f"--act {act}: this model has no quantized linear layers; quantize it first")
    if act == AUTO:
        say("--act auto: the model writes texts, on which rounding is measured; without a GPU this takes a while")
        say(str(choose(model, own_text(model, tokenizer, tokens))))
    elif act is not None:
        set_activations(model, check_act(act))
        if act == "fp8" and not has_fp8(model.device) and not any(m.in_blocks for m in linears_by_name(model).values()):
            say(f"{model.device} has no FP8: activations are rounded to fp8 in software, which takes time instead of saving it")


@torch.inference_mode()
def own_text(model: CausalModel, tokenizer: LoadedTokenizer, tokens: int = TOKENS) -> torch.Tensor:
    """Token ids (TEXTS, T) that the model samples, T up to `tokens`."""
    room = min(tokens, window_of(model)) - 1
    start, decoder = encode(tokenizer, "")[:1], decoder_of(model)
    steps = [decoder.start([start] * TEXTS, Sampling(temperature=1.0, seed=1), room).clone()]
    steps += [decoder.step().clone() for _ in range(room - 1)]
    texts = torch.stack(steps, 1).cpu().long()
    return torch.cat([torch.tensor([start] * TEXTS), texts], 1)


@torch.inference_mode()
def choose(model: CausalModel, ids: torch.Tensor, limit: float = LIMIT) -> Choice:
    """Choose and set the layers' modes so that they cost at most `limit` on texts (B, T) of the model; return the choice.

    Raises UsageError if nothing is quantized.
    """
    set_activations(model, "none")
    names = {m: n for n, m in model.named_modules()}
    layers: dict[str, Layer] = {name: m for name, m in linears_by_name(model).items() if not m.in_blocks}
    layers |= {names[m]: m for m in mixtures(model)}
    warm_reading(model, ids.numel())
    expected = _log_probabilities(model, ids)
    best = Choice("none", (), tuple(layers), 0.0, 0.0)
    modes = {act: [n for n, m in layers.items() if _gains(m, act)] for act in SAVED}
    for act, able in modes.items():
        choice = (
            _taken(model, ids, expected, {n: layers[n] for n in able}, act, limit) if able and ids.numel() > STEPS else None
        )
        if choice is not None:
            rounded, kl = choice
            share = sum(_work(layers[n]) for n in rounded) / sum(map(_work, layers.values()))
            if share * SAVED[act] > best.share * SAVED.get(best.act, 0):
                best = Choice(act, tuple(rounded), tuple(n for n in layers if n not in rounded), share, kl)
    _set(layers, dict.fromkeys(best.rounded, best.act))
    return best if any(modes.values()) else Choice("none", (), (), 0.0, 0.0)


def _taken(
    model: CausalModel, ids: torch.Tensor, expected: torch.Tensor, layers: dict[str, Layer], act: Act, limit: float
) -> tuple[list[str], float] | None:
    """The names of the layers that may round, and their KL divergence together; None if none may."""

    def cost(names: Sequence[str]) -> float:
        _set(layers, dict.fromkeys(names, act))
        return float((expected.exp() * (expected - _log_probabilities(model, ids))).sum(-1).mean())

    groups = _groups(list(layers))
    alone = [cost(group) for group in groups]
    per_work = [kl / sum(_work(layers[n]) for n in group) for kl, group in zip(alone, groups, strict=True)]
    order = [groups[i] for i in sorted(range(len(groups)), key=per_work.__getitem__)]
    best, low, high = None, 0, len(order)
    while low < high:  # bisection: the most groups that together stay below the limit
        n = (low + high + 1) // 2
        names = [name for group in order[:n] for name in group]
        if (kl := cost(names)) <= limit:
            best, low = (names, kl), n
        else:
            high = n - 1
    return best


def _groups(names: list[str]) -> list[list[str]]:
    """The names of the layers in groups that are measured together."""
    if len(names) <= ALONE:
        return [[n] for n in names]
    depth = 1 + max(_depth(n) for n in names)
    groups: dict[tuple[str, int], list[str]] = {}
    for n in names:
        groups.setdefault((n.rpartition(".")[2], _depth(n) * PARTS // depth), []).append(n)
    return list(groups.values())


def _depth(name: str) -> int:
    match = re.search(r"\.(\d+)\.", name)
    return int(match[1]) if match else 0


def _gains(m: Layer, act: Act) -> bool:
    """Whether the layer's matmul for a prompt has a kernel with 8-bit activations on this device."""
    if isinstance(m, QuantExperts):
        return m.takes(act, ROWS)
    device = m.weight.device
    call = Call(
        ROWS, m.out_features, m.in_features, m.scheme, m.layout, m.dtype, device.type, capability(device), act
    )  # fmt: skip
    return after_rounding(call, m.kernel).act == act


def _work(m: Layer) -> int:
    """Weights that multiply a token."""
    if isinstance(m, QuantExperts):
        return m.top_k * sum(N * K for _, N, K in m.shapes.values())
    return m.out_features * m.in_features


def _set(layers: Mapping[str, Layer], acts: dict[str, Act]) -> None:
    for name, layer in layers.items():
        layer.set_act(acts.get(name, "none"))


def _log_probabilities(model: CausalModel, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits_of(model, ids)[:, :-1].float(), dim=-1)


def _short(names: Sequence[str]) -> list[str]:
    """Layer names by kind with their depths, e.g. "down of 4, 24-31"."""
    kinds: dict[str, list[int]] = {}
    for n in names:
        kinds.setdefault(n.rpartition(".")[2], []).append(_depth(n))
    return [f"{kind} of {_ranges(sorted(depths))}" for kind, depths in kinds.items()]


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for i in numbers:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
