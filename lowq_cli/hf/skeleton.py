"""A model without weights, built from its config on the meta device, and its parameters' names in checkpoints.

transformers renames, stacks and concatenates checkpoint tensors while it loads them. This file applies transformers' own rules
instead of copies of them: its renaming gives the parameter of a tensor, and sending row numbers through the conversion of
`save_pretrained` gives the tensors of a parameter.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from lowq_cli.files.checked_view import known_type
from lowq_cli.files.source import Cut
from lowq_cli.hf.expert_kinds import LISTED, Kind, converters, kind_of
from lowq_cli.hf.experts import QuantExperts
from lowq_packers.errors import DamagedError, UnsupportedError, library_errors


def model_class(config: dict[str, Any]) -> type[PreTrainedModel]:
    """The transformers class that a config.json asks for. Raises UnsupportedError for one that transformers does not have,
    DamagedError for a config that names none.
    """
    model_type = _model_type(config)
    if model_type is None:
        raise DamagedError("config.json has no model_type; give the folder of a Hugging Face model")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        code = " (the code it names in auto_map is never run)" if config.get("auto_map") else ""
        version = transformers.__version__
        raise UnsupportedError(
            f"model_type {model_type!r} is not one that transformers {version} has{code}; upgrade transformers"
        )
    named = config.get("architectures")
    for name in named if isinstance(named, list) else ():
        cls = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.config_class is CONFIG_MAPPING[model_type]:
            return cls  # not a class of another model_type
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[model_type], None)
    if causal is None:
        raise UnsupportedError(f"model_type {model_type!r} has no language model in transformers {transformers.__version__}")
    return causal


def _model_type(config: dict[str, Any]) -> Any:
    """The config as AutoConfig reads it: Mistral with layer_types becomes Ministral, with a window in some layers only."""
    kind = known_type(config)
    return "ministral" if kind == "mistral" and "layer_types" in config else kind


def build(config: dict[str, Any]) -> PreTrainedModel:
    """The model of a config.json on the meta device. Raises DamagedError for invalid values."""
    cls = model_class(config)
    refused = library_errors(DamagedError, f"config.json does not describe a {config['model_type']} model")
    with refused, torch.device("meta"):
        return cls(config_object({**config, "model_type": _model_type(config)}))


def config_object(config: Mapping[str, Any]) -> PreTrainedConfig:
    """transformers' config of a config.json, made of a copy: its classes write into the dicts that they are given."""
    fields = {k: _untagged(v) for k, v in config.items() if k != "quantization_config"}
    return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)


def _untagged(value: Any) -> Any:
    """The field, with transformers' {"__float__": "Infinity"} replaced by infinity (Mamba 2's time_step_limit)."""
    if isinstance(value, dict):
        if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {k: _untagged(v) for k, v in value.items()}
    return [_untagged(v) for v in value] if isinstance(value, list) else value


def is_linear(module: nn.Module) -> bool:
    """Whether a module is nn.Linear or computes the same from weight and bias, like Falcon's linear; tested by running it."""
    cls: Any = type(module)
    return cls is nn.Linear or (isinstance(module, nn.Linear) and _multiplies(cls))


@cache
def _multiplies(cls: Any) -> bool:
    """The same for a subclass of nn.Linear."""
    probe = cls.__new__(cls)
    nn.Linear.__init__(probe, 3, 2)
    x = torch.tensor([[1.0, -2.0, 0.5]], device="cpu")
    try:
        with torch.no_grad(), torch.device("cpu"):
            probe.to_empty(device="cpu")
            probe.weight.copy_(torch.arange(6.0).reshape(2, 3))
            probe.bias.copy_(torch.tensor([7.0, -9.0]))
            return torch.allclose(probe(x), nn.functional.linear(x, probe.weight, probe.bias))
    except (TypeError, AttributeError, RuntimeError):  # its arguments differ
        return False


@dataclass(frozen=True)
class Place:
    """The parameter `param` into which transformers loads a checkpoint tensor, alone or (merged) with other tensors."""

    param: str
    merged: bool = False
    why_not: str | None = None  # why packed rows cannot be loaded likewise


def _only_turns(rule: Any) -> bool:
    """Whether a rule of transformers only transposes tensors that files may hold either way (Qwen3-VL's experts)."""
    same_names = isinstance(rule, WeightConverter) and rule.source_patterns == rule.target_patterns
    return same_names and all(isinstance(op, Transpose) for op in rule.operations)


class Skeleton:
    """A model (on any device; its weights are never read) with the names of its tensors in checkpoints."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.kinds: dict[str, Kind | str] = {}  # path of an unpacked module of experts -> its Kind, or a reason
        conversions = get_model_conversion_mapping(model)
        self.renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self.converters = [c for c in conversions if isinstance(c, WeightConverter) and not _only_turns(c)]
        self.transposed = [c.source_patterns[0] for c in conversions if isinstance(c, WeightConverter) and _only_turns(c)]
        self.own = self._own_converters()
        self.converters += self.own
        self._by_pattern = {p: c for c in self.converters for p in c.source_patterns}

    @cached_property
    def params(self) -> dict[str, torch.Tensor]:
        """Name -> parameter or saved buffer. Only for models on the meta device: packed modules would be repacked."""
        return self.model.state_dict()

    def _own_converters(self) -> list[WeightConverter]:
        """The rules that stack experts that lowq writes one by one, where transformers has none; also for loaded models."""
        stacks = []
        for path, module in self.model.named_modules():
            if isinstance(module, QuantExperts):
                stacks += [(f"{path}.{name}", name in module.schemes) for name in module.kind.stacks]
            elif path not in self.kinds and (
                isinstance(getattr(module, "down_proj", None), nn.Parameter) or type(module).__name__ in LISTED
            ):
                self.kinds[path] = kind_of(module)
        stacks += [
            (f"{path}.{name}", True) for path, kind in self.kinds.items() if isinstance(kind, Kind) for name in kind.stacks
        ]
        return converters(stacks, self.converters)

    def shape(self, param: str) -> tuple[int, ...]:
        """(N, K) of a matrix, (E, N, K) of a stack of matrices, independent of the form in which transformers holds it."""
        parameter, (path, _, name) = self.params[param], param.rpartition(".")
        if isinstance(kind := self.kinds.get(path), Kind) and name in kind.stacks:
            return kind.shape(parameter)
        return tuple(parameter.shape[::-1] if isinstance(self.module(param), Conv1D) else parameter.shape)

    def place(self, name: str) -> Place | None:
        """The `Place` of the checkpoint tensor `name`; None if the model does not know it."""
        prefix = self.model.base_model_prefix
        param, pattern = rename_source_key(name, self.renamings, self.converters, prefix, self.params)
        if param not in self.params and name in self.params:
            param, pattern = rename_source_key(name, [], [], prefix, self.params)
        if param not in self.params:
            return None
        if pattern is None:
            return Place(param)
        return Place(param, True, self._why_not(self._by_pattern[pattern], param))

    def are_linears(self, names: Iterable[str]) -> bool:
        """Whether each of these tensors alone is the weight of an nn.Linear."""
        places = [self.place(name) for name in names]
        return all(p and not p.merged and type(self.module(p.param)) is nn.Linear for p in places)

    def turns(self, name: str) -> bool:
        """Whether files may hold this stack of experts transposed."""
        return any(re.search(p, name) for p in self.transposed)

    def _why_not(self, converter: WeightConverter, param: str) -> str | None:
        """The reason why a converter for rows of floats cannot convert rows of int32 words, or None."""
        row_dim = self.params[param].dim() - 2
        for op in converter.operations:
            if not isinstance(op, MergeModulelist) and not (isinstance(op, Concatenate) and op.dim == row_dim):
                return f"transformers rearranges it while loading ({type(op).__name__})"
        return None

    def module(self, param: str) -> nn.Module:
        """The module that owns a parameter."""
        return self.model.get_submodule(param.rpartition(".")[0])

    def in_other_head(self, name: str) -> bool:
        """Whether a tensor belongs to the model's head while config.json names a class with a different head."""
        named = self.model.config.architectures
        other = isinstance(named, list) and bool(named) and type(self.model).__name__ not in named
        return other and not name.startswith(f"{self.model.base_model_prefix}.")

    @cached_property
    def tied(self) -> dict[str, str]:
        """Parameter -> the parameter that it is tied to, e.g. {"lm_head.weight": "model.embed_tokens.weight"}."""
        return dict(self.model.all_tied_weights_keys)

    def split(self, param: str) -> dict[str, Cut]:
        """The checkpoint tensors that lowq's files split a parameter into: name -> rows of the parameter, shaped as in `shape`.

        Empty if a tensor is not one run of its rows.
        """
        shape = torch.Size(self.shape(param))
        rows = shape[-2]
        numbers = torch.arange(shape[:-1].numel(), device="cpu").reshape(*shape[:-1], 1)
        numbers = numbers.expand(*shape[:-1], 2)  # transformers before 5.23 would drop a dimension of size 1
        cuts = {}
        for name, piece in self._revert({param: numbers}).items():
            ids = piece[..., 0].flatten()
            first, last = int(ids[0]), int(ids[-1])
            if piece.dim() != 2 or last - first != len(ids) - 1 or first // rows != last // rows:
                return {}
            expert = first // rows if len(shape) == 3 else None
            cuts[name] = Cut(expert, (first % rows, last % rows + 1))
        return cuts

    def inside(self, param: str) -> dict[str, Cut]:
        """`split` as cuts of the parameter itself."""
        path, _, name = param.rpartition(".")
        kind = self.kinds.get(path)
        return {n: kind.cut(name, cut) if isinstance(kind, Kind) else cut for n, cut in self.split(param).items()}

    def saved_names(self, param: str, rows: tuple[int, ...]) -> list[str]:
        """The names under which `save_pretrained` writes a parameter with `rows` = (experts, rows) or (rows,)."""
        return list(self._revert({param: torch.zeros(*rows, 1, device="cpu")}))

    @cached_property
    def _saving(self) -> list[Any]:
        """The rules for `revert_weight_conversion` with a model that was not loaded from files."""
        rules = get_model_conversion_mapping(self.model, add_legacy=False)
        return [c for c in rules if not isinstance(c, PrefixChange) and not _only_turns(c)] + self.own

    def _revert(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if getattr(self.model, "_weight_conversions", None) is not None:  # loaded: the rules that saving will use
            return revert_weight_conversion(self.model, tensors)
        if not self._saving:
            return tensors
        self.model._weight_conversions = self._saving  # type: ignore[assignment]  # otherwise 0.1 s per call
        try:
            return revert_weight_conversion(self.model, tensors)
        finally:
            del self.model._weight_conversions
