"""How a module of transformers holds a mixture's experts, by the facts that it states about itself.

And the names of their files: where transformers keeps all experts of a layer in one tensor, lowq writes them one by one, as
`experts.3.gate_proj.weight`: the names that most mixtures have.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowq_cli.files.source import Cut

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter

DOWN = "down_proj"
LEAVES = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), DOWN: (DOWN,)}  # parameter -> an expert's matrices
EVERY_TOKEN = ("Llama4TextExperts",)  # given (experts * tokens, H): every token, zero where it does not visit
LISTED = ("JetMoeParallelExperts",)  # one stack, called with rows in the order of their experts and a list of how many each has
IDENTITIES = ("LongcatFlashExperts",)  # experts behind the last that has weights give back what they are given


@dataclass(frozen=True)
class Kind:
    """Experts as two stacks of matrices, the second of them down_proj, or (of the list above) one called "weight".

    first: the other: "gate_up_proj", or "up_proj" where nothing gates. transposed: transformers holds (E, K, N).
    interleaved: it holds rows gate 0, up 0, gate 1, ...; here all of gate come before up. bias: both have one (E, N).
    every_token, identities: as the lists above say.
    """

    first: str = "gate_up_proj"
    transposed: bool = False
    interleaved: bool = False
    bias: bool = False
    every_token: bool = False
    identities: bool = False

    @property
    def stacks(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return (self.first,) if self.first == "weight" else (self.first, DOWN)

    def shape(self, stack: torch.Tensor) -> tuple[int, int, int]:
        """E, N, K of a parameter of transformers'."""
        E, N, K = stack.shape
        return (E, K, N) if self.transposed else (E, N, K)

    def rows(self, name: str, stack: torch.Tensor) -> torch.Tensor:
        """A parameter of transformers' as (E, N, K), gate before up."""
        return self.in_order(name, stack.mT if self.transposed else stack)

    def in_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows along dim 1, gate before up."""
        return torch.cat([rows[:, 0::2], rows[:, 1::2]], 1) if self.interleaved and name == self.first else rows

    def as_held(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `rows`."""
        if self.interleaved and name == self.first:
            rows = torch.stack(rows.chunk(2, 1), 2).flatten(1, 2)
        return rows.mT if self.transposed else rows

    def as_gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Values (..., 2I), gate before up, in the order that the module's own gate takes."""
        return torch.stack(gate_up.chunk(2, -1), -1).flatten(-2) if self.interleaved else gate_up

    def cut(self, name: str, cut: Cut) -> Cut:
        """Some rows of `rows` as a cut of transformers' parameter."""
        if self.interleaved and name == self.first and cut.rows:
            first, last = cut.rows
            start, end = (0, 2 * last) if first == 0 else (1, last)
            cut = replace(cut, rows=(start, end), step=2)
        return replace(cut, transposed=self.transposed)


def kind_of(module: nn.Module) -> Kind | str:
    """How a module holds its experts, or the reason why it is no kind that lowq knows."""
    own = type(module).__name__
    if own in LISTED:
        return Kind("weight")
    known = own in (*EVERY_TOKEN, *IDENTITIES)
    if not known and not callable(getattr(module, "_apply_gate", None)):
        return f"experts of a kind lowq does not know ({own})"
    if getattr(module, "has_post_expert_norm", False):
        return "experts with has_post_expert_norm=True"
    kind = Kind(
        "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj",
        own in EVERY_TOKEN or bool(getattr(module, "is_transposed", False)),
        not getattr(module, "is_concatenated", True),
        bool(getattr(module, "has_bias", False)),
        own in EVERY_TOKEN,
        own in IDENTITIES,
    )
    wanted = {*kind.stacks, *(f"{n}_bias" for n in kind.stacks if kind.bias)}
    held = {name for name, _ in module.named_parameters()} | {n for n, _ in module.named_buffers() if n in kind.stacks}
    if odd := held ^ wanted:
        return f"experts with further parameters ({min(odd)})" if odd - wanted else f"experts without {min(odd)}"
    return kind


def between(module: Any, h: torch.Tensor) -> torch.Tensor:
    """What a module of transformers computes between both products of an expert: h (S, 2I), in the order it takes -> (S, I)."""
    if not getattr(module, "has_gate", True):
        return module.act_fn(h)
    if callable(gate := getattr(module, "_apply_gate", None)):
        return gate(h)
    first, up = h.chunk(2, -1)
    return module.act_fn(first) * up


def converters(stacks: Iterable[tuple[str, bool]], known: Sequence["WeightConverter"]) -> list["WeightConverter"]:
    """What stacks the experts of lowq's files where transformers has no such rule of its own, and cuts them up for saving.

    Args:
        stacks: path of every parameter of a model's experts, and whether it is packed.
        known: transformers' rules for the model.
    """
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        WeightConverter,
    )  # 3 s that decoding can do without

    own: dict[str, list[str]] = defaultdict(list)
    dense = set()
    for path, packed in stacks:
        if any(path.endswith(t.strip("^$")) for c in known for t in c._original_target_patterns):
            continue
        suffix = ".".join(path.split(".")[-3:])
        own[suffix] += [path] if packed else []
        dense |= set() if packed else {suffix}
    found = []
    for suffix, paths in own.items():  # one rule for all layers, unless some of them keep theirs as they are
        for target in paths if suffix in dense else [suffix] * bool(paths):
            parent, _, name = target.rpartition(".")
            files = [f"{parent}.*.{leaf}.weight" for leaf in LEAVES[name]] if name in LEAVES else [f"{parent}.*.{name}"]
            merge = [MergeModulelist(dim=0), *([Concatenate(dim=1)] if len(files) > 1 else [])]
            found.append(WeightConverter(files, target, merge))
    return found
