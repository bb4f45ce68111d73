"""The quantizer that transformers calls while it loads and saves a lowq checkpoint. Importing this file registers it.

This file is imported while transformers is being imported, so that transformers' models and loading are imported in functions.
"""

from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowq_cli.files.quant_config import METHOD, VERSION
from lowq_packers.errors import UnsupportedError


@register_quantization_config(METHOD)
class LowqConfig(QuantizationConfigMixin):
    """`quantization_config` of a lowq checkpoint, as `lowq_cli.files.quant_config` describes it; unknown keys are kept."""

    def __init__(
        self,
        quant_method: str = METHOD,
        version: int = VERSION,
        schemes: dict[str, Any] | None = None,
        tensors: dict[str, str] | None = None,
        **others: Any,
    ) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]  # the base means its own enum
        self.version = version
        self.schemes = {} if schemes is None else schemes
        self.tensors = {} if tensors is None else tensors
        self.__dict__.update(others)


@register_quantizer(METHOD)
class LowqQuantizer(HfQuantizer):
    """Replaces modules whose weights the checkpoint holds packed with QuantLinear, QuantExperts and QuantEmbedding."""

    def __init__(self, quantization_config: LowqConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise UnsupportedError("from_pretrained does not quantize; run `lowq quantize MODEL` and load the folder it writes")
        self._model: Any = None  # the model being loaded
        self._dtypes: dict[str, torch.dtype] = {}

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """transformers' rules, and lowq's for experts that transformers keeps stacked in files; with copies for companions."""
        from transformers.core_model_loading import WeightRenaming

        from lowq_cli.files.packed_tensors import OF_BLOCKS, SCALE
        from lowq_cli.hf.conversions import with_companions
        from lowq_cli.hf.skeleton import Skeleton

        model = self._model if model is None else model  # transformers before 5.21 passes no model
        of_files = [] if self.is_serializable() else [WeightRenaming(OF_BLOCKS + "$", SCALE)]
        return with_companions(weight_conversions + Skeleton(model).own, model) + of_files

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse to offload packed weights to disk, where nothing would repack them."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise UnsupportedError("lowq does not offload packed weights to disk; use device_map='auto', 'cuda' or 'cpu'")

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        """Check the checkpoint against config and model, then swap the modules (all on the meta device)."""
        from lowq_cli.hf.conversions import dtypes
        from lowq_cli.hf.swap import swap

        swap(model, self.quantization_config.to_dict(), checkpoint_files)
        self._model, self._dtypes = model, dtypes(model)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Check scales and zeros, freeze the weights, and repack them for the devices they are on."""
        from lowq_cli.hf.activations import set_activations
        from lowq_cli.hf.conversions import cast
        from lowq_cli.hf.swap import finish

        cast(model, self._dtypes)
        self._model, self._dtypes = None, {}
        return set_activations(finish(model), getattr(self.quantization_config, "activations", "none"))

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """`model.dequantize()`."""
        from lowq_cli.hf.dequantize import dequantize

        return dequantize(model, model.dtype if dtype is None else dtype)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """No state dict; updates the config to be saved with the tensors' names in the saved files."""
        if not self.is_serializable():
            raise UnsupportedError("a loaded fp8 checkpoint is not saved again; copy its folder")
        from lowq_cli.hf.swap import saved_config

        saved = saved_config(model)
        self.quantization_config.version = saved["version"]  # type: ignore[attr-defined]
        self.quantization_config.schemes = saved["schemes"]  # type: ignore[attr-defined]
        self.quantization_config.tensors = saved["tensors"]  # type: ignore[attr-defined]
        return None, {}

    def is_serializable(self) -> bool:
        """Whether `save_pretrained` works: it writes the same format, except for fp8."""
        from lowq_cli.files.storage import FP8

        return not hasattr(self.quantization_config, FP8)

    @property
    def is_trainable(self) -> bool:
        """False: packed weights are not trained."""
        return False

    @property
    def is_compileable(self) -> bool:
        """True: `generate` may compile the decode step."""
        return True
