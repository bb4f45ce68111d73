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


def set_activations(model: AnyModel, act: Act) -> AnyModel:
    """Make the model's quantized linears and experts round activations to `act`, and return the model.

    Raises UsageError if there are no quantized linears, UnsupportedError for int8 activations with fp8 weights.
    """
    layers = quantized_linears(model)
    if not layers and not mixtures(model) and act != "none":
        raise UsageError(f"act={act}: this model has no quantized linear layers; quantize it first")
    for layer in layers:
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
