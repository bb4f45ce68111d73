"""The precision in which the linear layers of a loaded model take their activations."""

from typing import TypeVar

from lowq_cli.hf.embedding import TiedHead
from lowq_cli.hf.experts import QuantExperts
from lowq_cli.models import CausalModel
from lowq_kernels.modules.joined import JoinedRows
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.errors import UsageError
from lowq_packers.scheme import Act

AnyModel = TypeVar("AnyModel", bound=CausalModel)


def linears_by_name(model: CausalModel) -> dict[str, QuantLinear]:
    """The packed and fp8 linear layers without the output head, whose rounding would change every logit.

    Layers that a decoder has joined are one, by the name of the first.
    """
    head, found = model.get_output_embeddings(), dict[QuantLinear, str]()
    for name, m in model.named_modules():
        layer = m.whole if isinstance(m, JoinedRows) else m
        if isinstance(layer, QuantLinear) and layer is not head and not isinstance(layer, TiedHead):
            found.setdefault(layer, name)
    return {name: layer for layer, name in found.items()}


def quantized_linears(model: CausalModel) -> list[QuantLinear]:
    """The layers of `linears_by_name`."""
    return list(linears_by_name(model).values())


def mixtures(model: CausalModel) -> list[QuantExperts]:
    """The packed experts of its layers."""
    return [m for m in model.modules() if isinstance(m, QuantExperts) and m.schemes]


def is_quantized(model: CausalModel) -> bool:
    """Whether the model has layers that can round their activations."""
    return bool(quantized_linears(model) or mixtures(model))


def activations_of(model: CausalModel) -> Act:
    """The mode of those of the model's layers that round activations; "none" if none does."""
    layers: list[QuantLinear | QuantExperts] = [*quantized_linears(model), *mixtures(model)]
    return next((layer.act for layer in layers if layer.act != "none"), "none")


def act_facts(model: CausalModel, act: str | None) -> dict[str, str]:
    """What results say of activations: `act`, the mode in use, and `act_from`."""
    return {"act": activations_of(model), "act_from": act_from(act)}


def act_from(act: str | None) -> str:
    """Whether the mode in use was "given" as `--act`, was chosen by "auto", or is the "checkpoint"'s."""
    return "checkpoint" if act is None else "auto" if act == "auto" else "given"


def set_activations(model: AnyModel, act: Act) -> AnyModel:
    """Make the model's quantized linears and experts round activations to `act`, and return the model.

    Raises UsageError if there are no quantized linears, UnsupportedError for int8 activations with fp8 weights.
    """
    if not is_quantized(model) and act != "none":
        raise UsageError(f"activations in {act}: this model has no quantized linear layers; quantize it first")
    for layer in quantized_linears(model):
        layer.set_act(act)
    for experts in mixtures(model):
        experts.set_act(act)
    return model


def modes(model: CausalModel) -> list[Act]:
    """The modes that the model's layers support; only "none" if nothing is quantized."""
    layers = quantized_linears(model)
    if not layers:
        return ["none"]
    return ["none", "fp8"] if any(m.in_blocks for m in layers) else ["none", "int8", "fp8"]
