"""transformers' rules for stacking and splitting checkpoint tensors, extended to scales, zeros and tables of packed weights.

A rule merges `experts.*.gate_proj.weight` into `experts.gate_up_proj`; its copies made here merge `weight_scale`, `weight_zero`
and `weight_table` into `gate_up_proj_scale` and so on. transformers 5.21 makes such copies itself. lowq makes them for every
version, because earlier versions have three bugs: a pattern for `weight` also matches `weight_scale` (before 5.21); splitting
a stack drops every dimension of size 1, e.g. that of one scale per row (before 5.23); and tensors that a rule renamed keep
the dtype of their file (before 5.21).
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    ConversionOps,
    MergeModulelist,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
)
from transformers.quantizers.base import HfQuantizer

from lowq_cli.files.packed_tensors import SCALE, TABLE, WEIGHT, ZERO

COMPANIONS = tuple(name.removeprefix(WEIGHT) for name in (SCALE, ZERO, TABLE))
END = "$" if WeightRenaming("weight", "w").rename_source_key("weight_scale")[1] else ""  # where patterns match prefixes
KEEPS_DTYPE_OF_FILE = not hasattr(HfQuantizer, "get_new_dtype")


class Stack(MergeModulelist):
    """Stacks the experts' tensors along a new dimension; splitting the stack restores their shapes."""

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that splits the stack."""
        return Cut(self.dim)


class Cut(SplitModulelist):
    """The inverse of `Stack`."""

    def convert(  # type: ignore[override]  # the base is decorated, and its own types disagree
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Turn {pattern: stack} into {name: tensor}, where the expert's index replaces the pattern's star."""
        pieces: dict[str, torch.Tensor] = {}
        for pattern, tensors in input_dict.items():
            stack = tensors[0] if isinstance(tensors, list) else tensors
            names = self.get_target_patterns(input_dict, pattern, target_patterns, stack.shape[self.dim])
            pieces |= zip(names, stack.unbind(self.dim), strict=True)
        return pieces

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that stacks."""
        return Stack(self.dim)


def with_companions(rules: Sequence[Any], model: PreTrainedModel) -> list[Any]:
    """The rules; a rule for a packed parameter is followed by its copies for the parameter's scales, zeros and tables."""
    names = "\n".join(name for name, _ in model.named_parameters())
    all_rules: list[Any] = []
    for rule in rules:
        packed = isinstance(rule, WeightConverter) and all(s.endswith(WEIGHT) for s in _bare(rule._original_source_patterns))
        target = _bare(rule._original_target_patterns)[0] if packed else ""
        leaves = [leaf for leaf in COMPANIONS if target and re.search(f"{target}{leaf}$", names, re.MULTILINE)]
        all_rules += [_copy(rule, leaf) for leaf in ("", *leaves)] if leaves else [rule]
    return all_rules


def _bare(patterns: Sequence[str]) -> list[str]:
    return [p.removesuffix("$") for p in patterns]


def _copy(rule: WeightConverter, leaf: str) -> WeightConverter:
    """A copy of the rule for tensors whose names have `leaf` appended."""
    sources, targets = (
        [p + leaf + END for p in _bare(ps)] for ps in (rule._original_source_patterns, rule._original_target_patterns)
    )
    operations = [Stack(op.dim) if type(op) is MergeModulelist else op for op in rule.operations]
    copied = WeightConverter(sources, targets, operations, force_cpu=rule.force_cpu)
    copied.scope_prefix, copied.base_model_prefix = rule.scope_prefix, rule.base_model_prefix
    return copied


def dtypes(model: PreTrainedModel) -> dict[str, torch.dtype]:
    """The dtype to load each parameter of a model on the meta device in; empty where transformers casts correctly."""
    if not KEEPS_DTYPE_OF_FILE:
        return {}
    by_name = {name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()}
    if plan := model._get_dtype_plan(model.dtype):
        pattern, globs, _ = build_glob_alternation(list(plan))
        by_name |= {name: plan[globs[m.lastgroup]] for name in by_name if (m := pattern.search(name)) and m.lastgroup}
    return by_name


def cast(model: PreTrainedModel, dtypes: dict[str, torch.dtype]) -> None:
    """Cast the parameters named in `dtypes` to the dtypes given there."""
    for name, p in model.named_parameters():
        if p.dtype != (dtype := dtypes.get(name, p.dtype)):
            p.data = p.data.to(dtype)
