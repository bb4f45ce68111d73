"""LoRA over packed layers: importing this file registers them with PEFT. It is imported right after PEFT's LoRA module.

PEFT takes layers of other libraries by a mapping in each LoraConfig, and finds the layers of "all-linear" by class. This file
adds packed layers to both. PEFT's other tuners, and DoRA, compute with dense weights and refuse packed layers.
"""

import sys
from typing import Any

from peft.tuners import tuners_utils
from peft.tuners.lora.layer import Linear
from peft.tuners.lora.model import LoraModel
from torch import nn

from lowq_packers.errors import UnsupportedError


def packed_classes() -> tuple[type[nn.Module], ...]:
    """The classes of packed layers; empty if no packed model was loaded, so that nothing of lowq is imported for it."""
    linear, joined = (sys.modules.get(f"lowq_kernels.modules.{name}") for name in ("linear", "joined"))
    return (linear.QuantLinear, joined.JoinedRows) if linear and joined else ()


class LoraQuantLinear(Linear):
    """A packed layer with adapters: x (..., K) -> (..., N). The packed weight never changes."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Only plain LoRA, because the variants compute with a dense weight."""
        return {(): None}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters, once `model.dequantize()` has made the layer dense. Raises UnsupportedError before that."""
        if isinstance(self.get_base_layer(), packed_classes()):
            raise UnsupportedError(
                "adapters do not merge into packed weights; call dequantize() on the model first, then quantize the result"
            )
        super().merge(safe_merge, adapter_names)


_create, _expand = LoraModel._create_new_module, tuners_utils._maybe_include_all_linear_layers


def _create_new_module(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
    """PEFT's function, with packed classes added to the config's mapping unless the user's mapping has them."""
    given = lora_config._custom_modules or {}
    lora_config._register_custom_module({cls: LoraQuantLinear for cls in packed_classes() if cls not in given})
    return _create(lora_config, adapter_name, target, **kwargs)


def _maybe_include_all_linear_layers(peft_config: Any, model: Any) -> Any:
    """PEFT's function, which now also finds packed layers, except the output layer and layers that have adapters."""
    targets = getattr(peft_config, "target_modules", None)
    expanded: Any = _expand(peft_config, model)
    if isinstance(targets, str) and targets.lower() == tuners_utils.INCLUDE_LINEAR_LAYERS_SHORTHAND:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        packed = {n for n, m in model.named_modules() if isinstance(m, packed_classes()) and m is not head}
        expanded.target_modules |= {name for name in packed if not name.endswith(".base_layer")}
    return expanded


LoraModel._create_new_module = staticmethod(_create_new_module)  # type: ignore[method-assign]
tuners_utils._maybe_include_all_linear_layers = _maybe_include_all_linear_layers
