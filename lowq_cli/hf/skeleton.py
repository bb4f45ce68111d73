"""A model without weights, built from its config on the meta device, and the names its checkpoints use for its parameters.

transformers renames, stacks and concatenates checkpoint tensors while it loads them. Rather than keep a second list of
those rules, this asks transformers itself: forwards through its renaming, backwards by sending row numbers through the
conversion that `save_pretrained` would apply.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lowq_cli.files.source import Cut
from lowq_packers.errors import DamagedError, UnsupportedError, one_line


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
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, PreTrainedModel) and found.config_class is CONFIG_MAPPING[model_type]:
            return found  # a class of another model_type is what no one else would take
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[model_type], None)
    if causal is None:
        raise UnsupportedError(f"model_type {model_type!r} has no language model in transformers {transformers.__version__}")
    return causal


def _model_type(config: dict[str, Any]) -> Any:
    """As transformers' AutoConfig reads it: Mistral with layer_types is Ministral, whose window holds in some layers only."""
    found = config.get("model_type")
    return "ministral" if found == "mistral" and "layer_types" in config else found


def build(config: dict[str, Any]) -> PreTrainedModel:
    """The model of a config.json on the meta device. Raises DamagedError for values no such model can have."""
    cls = model_class(config)
    fields = {k: _untagged(v) for k, v in config.items() if k != "quantization_config"} | {"model_type": _model_type(config)}
    try:
        parsed = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
        with torch.device("meta"):
            return cls(parsed)
    except Exception as e:  # each config class has its own ways of refusing a value
        raise DamagedError(f"config.json does not describe a {config['model_type']} model: {one_line(e)}") from e


def _untagged(value: Any) -> Any:
    """A field with its infinities, which transformers writes as {"__float__": "Infinity"} (Mamba 2's time_step_limit)."""
    if isinstance(value, dict):
        if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {k: _untagged(v) for k, v in value.items()}
    return [_untagged(v) for v in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Place:
    """Where transformers puts one checkpoint tensor: into the parameter `param`, alone or (merged) with others."""

    param: str
    merged: bool = False
    why_not: str | None = None  # the reason packed rows cannot follow the same way


class Skeleton:
    """A model (on any device; its weights are never read) with its checkpoint names."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        conversions = get_model_conversion_mapping(model)
        self.renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self.converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._by_pattern = {p: c for c in self.converters for p in c.source_patterns}

    @cached_property
    def params(self) -> dict[str, torch.Tensor]:
        """Name -> parameter or saved buffer. Only for models on the meta device: packed modules would be repacked."""
        return self.model.state_dict()

    def place(self, name: str) -> Place | None:
        """Where the checkpoint tensor `name` goes; None if the model does not know it."""
        prefix = self.model.base_model_prefix
        param, pattern = rename_source_key(name, self.renamings, self.converters, prefix, self.params)
        if param not in self.params and name in self.params:
            param, pattern = rename_source_key(name, [], [], prefix, self.params)
        if param not in self.params:
            return None
        if pattern is None:
            return Place(param)
        return Place(param, True, self._why_not(self._by_pattern[pattern], param))

    def _why_not(self, converter: WeightConverter, param: str) -> str | None:
        """Why rows of int32 words cannot go through a converter as rows of floats do, or None."""
        row_dim = self.params[param].dim() - 2
        for op in converter.operations:
            if not isinstance(op, MergeModulelist) and not (isinstance(op, Concatenate) and op.dim == row_dim):
                return f"transformers rearranges it while loading ({type(op).__name__})"
        return None

    def module(self, param: str) -> nn.Module:
        """The module that owns a parameter."""
        return self.model.get_submodule(param.rpartition(".")[0])

    @cached_property
    def tied(self) -> dict[str, str]:
        """Parameter -> the parameter it shares its values with, e.g. {"lm_head.weight": "model.embed_tokens.weight"}."""
        return dict(self.model.all_tied_weights_keys)

    def split(self, param: str) -> dict[str, Cut]:
        """The checkpoint tensors that `save_pretrained` would cut a parameter into, by name.

        Empty if what comes out is not made of whole runs of its rows.
        """
        shape = self.params[param].shape
        rows = shape[-2]
        numbers = torch.arange(shape[:-1].numel(), device="cpu").reshape(*shape[:-1], 1)
        found = {}
        for name, piece in self._revert({param: numbers}).items():
            ids = piece.flatten()
            first, last = int(ids[0]), int(ids[-1])
            if piece.dim() != 2 or last - first != len(ids) - 1 or first // rows != last // rows:
                return {}
            expert = first // rows if len(shape) == 3 else None
            found[name] = Cut(expert, (first % rows, last % rows + 1))
        return found

    def saved_names(self, param: str, rows: tuple[int, ...]) -> list[str]:
        """The names under which `save_pretrained` writes a parameter of that many rows (experts, rows)."""
        return list(self._revert({param: torch.zeros(*rows, 1, device="cpu")}))

    @cached_property
    def _saving(self) -> list[Any]:
        """What `revert_weight_conversion` uses for a model that was never loaded."""
        return [c for c in get_model_conversion_mapping(self.model, add_legacy=False) if not isinstance(c, PrefixChange)]

    def _revert(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if getattr(self.model, "_weight_conversions", None) is not None:  # loaded: what saving will really use
            return revert_weight_conversion(self.model, tensors)
        if not self._saving:
            return tensors
        self.model._weight_conversions = self._saving  # type: ignore[assignment]  # or it would work them out anew, 0.1 s a call
        try:
            return revert_weight_conversion(self.model, tensors)
        finally:
            del self.model._weight_conversions
