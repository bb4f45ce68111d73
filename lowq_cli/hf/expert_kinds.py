"""The form in which a module of transformers holds a mixture's experts, from the module's attributes.

It also has the experts' names in files: where transformers keeps all experts of a layer in one tensor, lowq writes them one by
one with the names that most mixtures have, e.g. `experts.3.gate_proj.weight`.
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
EVERY_TOKEN = ("Llama4TextExperts",)  # called with (experts * tokens, H), zero where a token does not visit the expert
LISTED = ("JetMoeParallelExperts",)  # one stack, called with rows sorted by expert and a list of rows per expert
IDENTITIES = ("LongcatFlashExperts",)  # experts with higher indices than those with weights return their input


@dataclass(frozen=True)
class Kind:
    """Experts as two stacks of matrices, the second called down_proj, or (classes in LISTED) one stack called "weight".

    first: the first stack's name: "gate_up_proj", or "up_proj" without a gate. transposed: transformers holds (E, K, N).
    interleaved: transformers orders rows gate 0, up 0, gate 1, ...; in lowq all of gate come before up. bias: both stacks have
    a bias (E, N). every_token, identities: the class is in EVERY_TOKEN or IDENTITIES.
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
        """E, N, K of a parameter in transformers' form."""
        E, N, K = stack.shape
        return (E, K, N) if self.transposed else (E, N, K)

    def rows(self, name: str, stack: torch.Tensor) -> torch.Tensor:
        """A parameter in transformers' form as (E, N, K), gate before up."""
        return self.in_order(name, stack.mT if self.transposed else stack)

    def in_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows in transformers' order along dim 1, reordered to gate before up."""
        return torch.cat([rows[:, 0::2], rows[:, 1::2]], 1) if self.interleaved and name == self.first else rows

    def as_held(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `rows`."""
        if self.interleaved and name == self.first:
            rows = torch.stack(rows.chunk(2, 1), 2).flatten(1, 2)
        return rows.mT if self.transposed else rows

    def as_gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Values (..., 2I), gate before up, reordered for the module's own gate function."""
        return torch.stack(gate_up.chunk(2, -1), -1).flatten(-2) if self.interleaved else gate_up

    def cut(self, name: str, cut: Cut) -> Cut:
        """The cut of transformers' parameter that holds these rows of `rows`."""
        if self.interleaved and name == self.first and cut.rows:
            first, last = cut.rows
            start, end = (0, 2 * last) if first == 0 else (1, last)
            cut = replace(cut, rows=(start, end), step=2)
        return replace(cut, transposed=self.transposed)


def kind_of(module: nn.Module) -> Kind | str:
    """The `Kind` of a module of experts, or the reason why lowq does not support the module."""
    class_name = type(module).__name__
    if class_name in LISTED:
        return Kind("weight")
    known = class_name in (*EVERY_TOKEN, *IDENTITIES)
    if not known and not callable(getattr(module, "_apply_gate", None)):
        return f"experts of a kind lowq does not know ({class_name})"
    if getattr(module, "has_post_expert_norm", False):
        return "experts with has_post_expert_norm=True"
    kind = Kind(
        "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj",
        class_name in EVERY_TOKEN or bool(getattr(module, "is_transposed", False)),
        not getattr(module, "is_concatenated", True),
        bool(getattr(module, "has_bias", False)),
        class_name in EVERY_TOKEN,
        class_name in IDENTITIES,
    )
    expected = {*kind.stacks, *(f"{n}_bias" for n in kind.stacks if kind.bias)}
    names = {name for name, _ in module.named_parameters()} | {n for n, _ in module.named_buffers() if n in kind.stacks}
    if odd := names ^ expected:
        return f"experts with further parameters ({min(odd)})" if odd - expected else f"experts without {min(odd)}"
    return kind


def between(module: Any, h: torch.Tensor) -> torch.Tensor:
    """An expert's computation between its two matmuls: h (S, 2I), in the module's order -> (S, I)."""
    if not getattr(module, "has_gate", True):
        return module.act_fn(h)
    if callable(gate := getattr(module, "_apply_gate", None)):
        return gate(h)
    first, up = h.chunk(2, -1)
    return module.act_fn(first) * up


def converters(stacks: Iterable[tuple[str, bool]], known: Sequence["WeightConverter"]) -> list["WeightConverter"]:
    """The rules that stack the experts of lowq's files, and split them for saving, where transformers has no such rule.

    Args:
        stacks: the path of every parameter of a model's experts, and whether it is packed.
        known: transformers' rules for the model.
    """
    # here, because the import takes 3 s that decoding can do without
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    targets: dict[str, list[str]] = defaultdict(list)
    dense = set()
    for path, packed in stacks:
        if any(path.endswith(t.strip("^$")) for c in known for t in c._original_target_patterns):
            continue
        suffix = ".".join(path.split(".")[-3:])
        targets[suffix] += [path] if packed else []
        dense |= set() if packed else {suffix}
    rules = []
    for suffix, paths in targets.items():  # one rule for all layers, unless some layers have dense experts
        for target in paths if suffix in dense else [suffix] * bool(paths):
            parent, _, name = target.rpartition(".")
            files = [f"{parent}.*.{leaf}.weight" for leaf in LEAVES[name]] if name in LEAVES else [f"{parent}.*.{name}"]
            merge = [MergeModulelist(dim=0), *([Concatenate(dim=1)] if len(files) > 1 else [])]
            rules.append(WeightConverter(files, target, merge))
    return rules
