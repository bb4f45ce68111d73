"""`model.dequantize()`: replaces packed modules with transformers' modules that hold the dequantized weights.

The modules come from a second model of the same config on the meta device, so that each has the class that its family uses (a
Conv1D, a scaled embedding, transposed experts). `save_pretrained` then writes an ordinary model.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lowq_cli.hf.embedding import QuantEmbedding, TiedHead
from lowq_cli.hf.experts import QuantExperts
from lowq_cli.hf.parallel import ranks
from lowq_cli.hf.shared import SharedLinear
from lowq_kernels.modules.joined import JoinedRows, weight_of
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.errors import UnsupportedError
from lowq_packers.layouts import unpack

WRAPPED = ".base_layer"  # PEFT's name for the layer that an adapter is added to


def dequantize(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Make the packed weights dense in `dtype` and return the model. Only one module at a time is held in both forms.

    Raises UnsupportedError for a tensor-parallel model.
    """
    if ranks(model) > 1:
        raise UnsupportedError("a model that is spread over processes is not dequantized; load it in one process")
    with torch.device("meta"):
        twin = type(model)(model.config)
    kinds = QuantLinear | QuantExperts | QuantEmbedding | JoinedRows | SharedLinear
    packed = {path: module for path, module in model.named_modules() if isinstance(module, kinds)}
    tied = [path for path, module in packed.items() if isinstance(module, TiedHead | SharedLinear)]
    for path in [*(path for path in packed if path not in tied), *tied]:
        dense: Any = twin.get_submodule(path.replace(WRAPPED, ""))
        if path not in tied:
            _fill(dense, packed[path], dtype)
        elif isinstance(head := packed[path], TiedHead):
            dense.weight = model.get_input_embeddings().weight
            dense.bias = None if head.bias is None else _parameter(head.bias, dtype)
        else:
            whole = packed[path].__dict__["whole"]
            dense = model.get_submodule(next(p for p, module in packed.items() if module is whole))
        model.set_submodule(path, dense.train(model.training))
    model._tied_weights_keys = twin._tied_weights_keys
    model.all_tied_weights_keys = twin.all_tied_weights_keys
    vars(model).pop("_weight_conversions", None)  # they are for lowq's files
    return nn.Module.to(model, dtype) if model.dtype != dtype else model


def _fill(dense: Any, packed: nn.Module, dtype: torch.dtype) -> None:
    """Give a module on the meta device the weights of a packed one."""
    if isinstance(packed, QuantExperts):
        for name in packed.kind.stacks:
            setattr(dense, name, _parameter(_stack(packed, name), dtype))
            if packed.kind.bias:
                setattr(dense, f"{name}_bias", _parameter(getattr(packed, f"{name}_bias"), dtype))
        return
    if isinstance(packed, JoinedRows):
        rows, whole = slice(packed.begin, packed.end), packed.whole
    else:
        assert isinstance(packed, QuantLinear | QuantEmbedding)
        rows, whole = slice(None), packed  # type: ignore[assignment]
    W = (weight_of(whole, torch.float32) if isinstance(whole, QuantLinear) else unpack(whole.packed).dequantize())[rows]
    dense.weight = _parameter(W.T if type(dense) is Conv1D else W, dtype)
    if isinstance(whole, QuantLinear):
        dense.bias = None if whole.bias is None or dense.bias is None else _parameter(whole.bias[rows], dtype)
    elif hasattr(dense, "embed_scale"):
        dense.embed_scale = torch.tensor(whole.scale, dtype=torch.float32, device=W.device)


def _stack(packed: QuantExperts, name: str) -> torch.Tensor:
    """The experts' matrices in transformers' form."""
    stack = packed.stack(name)
    if stack.scheme is None:
        return getattr(packed, name)
    values = torch.stack([unpack(stack.expert(e)).dequantize() for e in range(stack.words.shape[0])])
    return packed.kind.as_held(name, values)


def _parameter(values: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(values.detach().to(dtype).contiguous(), requires_grad=False)
