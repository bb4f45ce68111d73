"""Which layers may round their inputs to 8 bits (`--act auto`): those whose rounding the model's own text hardly notices.

The text is drawn from the model itself at temperature 1. On such text the loss that other predictions add is the KL divergence
to them, so that one number says both: LIMIT nats a token are perplexity 0.1% higher. Each group of layers is measured alone,
and of the cheapest for their work as many are taken as stay below the limit together.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lowq_cli.calibrate.texts import window_of
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.prompts import encode
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.tokenizer import LoadedTokenizer
from lowq_cli.evaluate.logits import logits_of, warm_reading
from lowq_cli.hf.activations import quantized_linears, set_activations
from lowq_cli.models import CausalModel
from lowq_kernels.activations import STEPS, check_act
from lowq_kernels.dispatch.registry import Call, after_rounding
from lowq_kernels.gpu import capability
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.scheme import Act

AUTO = "auto"
LIMIT = 0.001  # nats a token that all rounding together may cost
TEXTS, TOKENS = 8, 256  # of the model's own text: 2,048 products' rows, over a thousand predictions of each kind of place
ALONE = 32  # layers up to which each is measured alone; of more, a kind's in a quarter of the depth are
PARTS = 4
ROWS = 1024  # of a prompt's products, for which kernels are asked
SAVED: dict[Act, int] = {"fp8": 17, "int8": 14}  # ms of the 102 that a prompt of 4,400 takes an 8B (H200), all its layers


@dataclass(frozen=True)
class Choice:
    """What layers do to their inputs: `rounded` names those of `act`, `kept` the others; share: of the work of all that the
    former do; kl: nats a token that it costs."""

    act: Act
    rounded: tuple[str, ...]
    kept: tuple[str, ...]
    share: float
    kl: float

    def __str__(self) -> str:
        if self.act == "none":
            return "activations stay in 16 bits: " + ("every layer costs too much" if self.kept else "no kernel gains by 8")
        kept = f"; 16 bits in {', '.join(_short(self.kept))}" if self.kept else ""
        return f"activations in {self.act} for {self.share:.0%} of a prompt's products, KL divergence {self.kl:.5f}{kept}"


def apply_act(
    model: CausalModel, tokenizer: LoadedTokenizer, act: str | None, say: Callable[[str], None] = lambda text: None
) -> None:
    """Let the model's layers round as `--act` says: a mode, "auto", or None for what its checkpoint says.

    Raises UsageError where nothing is quantized, UnsupportedError for int8 against fp8 weights.
    """
    if act == AUTO:
        say(str(choose(model, own_text(model, tokenizer))))
    elif act is not None:
        set_activations(model, check_act(act))


@torch.inference_mode()
def own_text(model: CausalModel, tokenizer: LoadedTokenizer) -> torch.Tensor:
    """Token ids (TEXTS, T) that the model draws."""
    room = min(TOKENS, window_of(model)) - 1
    start, decoder = encode(tokenizer, "")[:1], decoder_of(model)
    found = [decoder.start([start] * TEXTS, Sampling(temperature=1.0, seed=1), room).clone()]
    found += [decoder.step().clone() for _ in range(room - 1)]
    texts = torch.stack(found, 1).cpu().long()
    return torch.cat([torch.tensor([start] * TEXTS), texts], 1)


@torch.inference_mode()
def choose(model: CausalModel, ids: torch.Tensor, limit: float = LIMIT) -> Choice:
    """Set the layers to what costs at most `limit` on these texts (B, T) of the model's own, and say what was taken.

    Raises UsageError where nothing is quantized.
    """
    set_activations(model, "none")
    names = {m: n for n, m in model.named_modules()}
    layers = {names[m]: m for m in quantized_linears(model) if not m.in_blocks}
    warm_reading(model, ids.numel())
    expected = _log_probabilities(model, ids)
    best = Choice("none", (), tuple(layers), 0.0, 0.0)
    modes = {act: [n for n, m in layers.items() if _gains(m, act)] for act in SAVED}
    for act, able in modes.items():
        found = _taken(model, ids, expected, {n: layers[n] for n in able}, act, limit) if able and ids.numel() > STEPS else None
        if found is not None:
            rounded, kl = found
            share = sum(_work(layers[n]) for n in rounded) / sum(map(_work, layers.values()))
            if share * SAVED[act] > best.share * SAVED.get(best.act, 0):
                best = Choice(act, tuple(rounded), tuple(n for n in layers if n not in rounded), share, kl)
    _set(layers, dict.fromkeys(best.rounded, best.act))
    return best if any(modes.values()) else Choice("none", (), (), 0.0, 0.0)


def _taken(
    model: CausalModel, ids: torch.Tensor, expected: torch.Tensor, layers: dict[str, QuantLinear], act: Act, limit: float
) -> tuple[list[str], float] | None:
    """The names of the layers that may, and what they cost together; None where none may."""

    def cost(names: Sequence[str]) -> float:
        _set(layers, dict.fromkeys(names, act))
        return float((expected.exp() * (expected - _log_probabilities(model, ids))).sum(-1).mean())

    groups = _groups(list(layers))
    alone = [cost(group) for group in groups]
    per_work = [kl / sum(_work(layers[n]) for n in group) for kl, group in zip(alone, groups, strict=True)]
    order = [groups[i] for i in sorted(range(len(groups)), key=per_work.__getitem__)]
    best, low, high = None, 0, len(order)
    while low < high:  # the most of them whose whole stays below
        n = (low + high + 1) // 2
        names = [name for group in order[:n] for name in group]
        if (kl := cost(names)) <= limit:
            best, low = (names, kl), n
        else:
            high = n - 1
    return best


def _groups(names: list[str]) -> list[list[str]]:
    """Layers that are measured together."""
    if len(names) <= ALONE:
        return [[n] for n in names]
    depth = 1 + max(_depth(n) for n in names)
    found: dict[tuple[str, int], list[str]] = {}
    for n in names:
        found.setdefault((n.rpartition(".")[2], _depth(n) * PARTS // depth), []).append(n)
    return list(found.values())


def _depth(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else 0


def _gains(m: QuantLinear, act: Act) -> bool:
    """Whether a prompt's product takes a kernel of 8 bits here."""
    device = m.weight.device
    call = Call(
        ROWS, m.out_features, m.in_features, m.scheme, m.layout, m.dtype, device.type, capability(device), act
    )  # fmt: skip
    return after_rounding(call, m.kernel).act == act


def _work(m: QuantLinear) -> int:
    return m.out_features * m.in_features


def _set(layers: dict[str, QuantLinear], acts: dict[str, Act]) -> None:
    for name, layer in layers.items():
        layer.set_act(acts.get(name, "none"))


def _log_probabilities(model: CausalModel, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits_of(model, ids)[:, :-1].float(), dim=-1)


def _short(names: Sequence[str]) -> list[str]:
    """Names by kind, with the layers they are of: down of 4, 24-31."""
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
