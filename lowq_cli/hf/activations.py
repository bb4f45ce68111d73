"""How the linear layers of a loaded model take their activations."""

from typing import TypeVar

from lowq_cli.hf.embedding import TiedHead
from lowq_cli.models import CausalModel
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.errors import UsageError
from lowq_packers.scheme import Act

AnyModel = TypeVar("AnyModel", bound=CausalModel)


def quantized_linears(model: CausalModel) -> list[QuantLinear]:
    """The packed and fp8 linear layers, but for the output head, whose rounding every logit would see."""
    head = model.get_output_embeddings()
    return [m for m in model.modules() if isinstance(m, QuantLinear) and m is not head and not isinstance(m, TiedHead)]


def set_activations(model: AnyModel, act: Act) -> AnyModel:
    """The model, its quantized linears rounding activations as `act` says.

    Raises UsageError where there are none, UnsupportedError for int8 against fp8 weights.
    """
    layers = quantized_linears(model)
    if not layers and act != "none":
        raise UsageError(f"act={act}: this model has no quantized linear layers; quantize it first")
    for layer in layers:
        layer.set_act(act)
    return model


def modes(model: CausalModel) -> list[Act]:
    """The modes that the model's layers take; just "none" where nothing is quantized."""
    layers = quantized_linears(model)
    if not layers:
        return ["none"]
    return ["none", "fp8"] if any(m.in_blocks for m in layers) else ["none", "int8", "fp8"]
