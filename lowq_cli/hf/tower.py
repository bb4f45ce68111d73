"""The vision tower of a model: transformers' module with a checkpoint's tensors, separate from the text model.

transformers' class of the whole model is built with a text model of one small layer and loaded with the tensors of the tower
and its projector, so that it computes the same features as in the whole model.
"""

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch

from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.family_tensors import outside_text_prefixes
from lowq_cli.files.source import Source
from lowq_cli.files.storage import METHOD, method
from lowq_cli.hf.fused_tower import fuse
from lowq_cli.hf.pictures import PIXELS, normalised
from lowq_cli.hf.quiet import quiet
from lowq_cli.hf.skeleton import config_object, model_class
from lowq_packers.errors import DamagedError, library_errors

SMALL = {  # config of the small text model
    "num_hidden_layers": 1, "num_kv_shared_layers": 0, "vocab_size": 8, "vocab_size_per_layer_input": 8, "intermediate_size": 8,
}  # fmt: skip
LISTS = ("layer_types", "per_layer_config", "no_rope_layers", "moe_layers", "mlp_layer_types", "mlp_only_layers")
FEW = {"num_experts": 1, "num_local_experts": 1, "n_routed_experts": 1, "moe_intermediate_size": 8, "intermediate_size_mlp": 8}
STRATEGY = "vision_feature_select_strategy"  # an argument of get_image_features
AUDIO = ("audio_tower", "embed_audio")


class Tower:
    """Computes features of images.

    Args:
        model: transformers' model of the wrapper's class; its text model is never called.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.device, self.dtype = model, model.device, model.dtype
        if self.device.type == "cuda":
            fuse(model)

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The features (n, H) of one image, and those for each of the first layers, from the processor's output."""
        return self.run(self.arguments(inputs))

    def arguments(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The processor's output on the device, as `run` takes it."""
        pinned = {k: t.pin_memory() if self.device.type == "cuda" and not t.is_cuda else t for k, t in inputs.items()}
        there = normalised({k: t.to(self.device, non_blocking=True) for k, t in pinned.items()})
        there[PIXELS] = there[PIXELS].to(self.dtype)
        return there

    def run(self, there: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """As `__call__`, from `arguments`; they depend on the pixels and on the image's size alone."""
        more = {}
        parameter = signature(self.model.get_image_features).parameters.get(STRATEGY)
        if (
            parameter is not None and parameter.default is parameter.empty
        ):  # required but unused by Llama 4 in transformers 5.17
            more[STRATEGY] = "default"
        out = self.model.get_image_features(**there, **more, return_dict=True)
        rows = out.pooler_output
        if hasattr(self.model, "multi_modal_projector"):  # Llama 4 calls it in its forward
            rows = self.model.multi_modal_projector(out.last_hidden_state.flatten(0, -2))
        rows = rows if isinstance(rows, torch.Tensor) else torch.cat([*rows])
        first = getattr(out, "deepstack_features", None) or ()
        layers = (layer if isinstance(layer, torch.Tensor) else torch.cat([*layer]) for layer in first)
        return rows.flatten(0, -2), tuple(layer.flatten(0, -2) for layer in layers)


def load_tower(source: Source, device: torch.device, dtype: torch.dtype) -> Tower:
    """The tower of an open source. Raises DamagedError if its files lack tensors of the tower."""
    cls = model_class(source.config)
    prefixes = outside_text_prefixes(source.config, source.headers)
    names = [n for n in source.headers if n.startswith(prefixes) and not any(part in n for part in AUDIO)]
    tensors = _dense(source, names, dtype)
    model: Any
    info: dict[str, Any]
    with library_errors(DamagedError, f"the tower of {source.name} cannot be built"), quiet():
        config = _config(source.config)
        model, info = cls.from_pretrained(  # type: ignore[misc]  # a pair, with output_loading_info
            None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    text = ("language_model.", "lm_head.")
    missing = sorted(n for n in map(str, info["missing_keys"]) if not any(part in n for part in (*text, *AUDIO)))
    if missing or info["mismatched_keys"]:
        what = missing or sorted(str(m[0]) for m in info["mismatched_keys"])
        raise DamagedError(f"the tower of {source.name} is incomplete: {what[0]} is missing or has another shape")
    return Tower(model.to(device).eval())


def _dense(source: Source, names: list[str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of a source by name; tensors that lowq quantized are dequantized."""
    if method(source.config) != METHOD or source.folder is None:
        return {n: source.read(n).reshape(source.headers[n].shape) for n in names}
    checkpoint, tensors = open_checkpoint(source.folder), dict[str, torch.Tensor]()
    with checkpoint.source:
        for t in checkpoint.tensors:
            name = f"{t.name}.weight" if t.scheme else t.name
            if name in names:
                tensors[name] = checkpoint.read_matrix(t).dequantize().to(dtype) if t.scheme else checkpoint.read_plain(t)
    return tensors


def _config(raw: Mapping[str, Any]) -> Any:
    """The config of the whole model with a tiny text model."""
    fields = dict(raw)
    inside = {k: v for k, v in (fields.get("text_config") or {}).items() if k not in LISTS}
    small = {k: v for k, v in (SMALL | FEW).items() if k in inside or k == "num_hidden_layers"}
    fields["text_config"] = inside | small | {"pad_token_id": None}  # may exceed the small vocabulary
    if "audio_config" in fields:
        fields["audio_config"] = None
    return config_object(fields)
