"""The quantization config "lowq": which of vLLM's layers are packed, and with which scheme.

vLLM makes one layer of q, k, v and one of gate, up; a checkpoint packs them one by one, so they must have one scheme. Its
names for modules may differ from the checkpoint's: it hands a mapper for those.
"""

import json
from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from lowq_cli.files.quant_config import METHOD, expand_stored
from lowq_cli.files.tensor_parallel import DENSE_TABLE
from lowq_cli.vllm_plugin.embedding import LowqTableMethod, LowqTiedHeadMethod
from lowq_cli.vllm_plugin.experts import LowqExpertsMethod
from lowq_cli.vllm_plugin.linear import LowqLinearMethod
from lowq_packers.errors import UnsupportedError
from lowq_packers.layouts import DISK
from lowq_packers.scheme import Scheme

TABLE = "embed_tokens"
EXPERT_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # the second: Mixtral's


@register_quantization_config(METHOD)
class LowqVllmConfig(QuantizationConfig):
    """The `quantization_config` of a lowq checkpoint (`lowq_cli.files.quant_config`) as vLLM asks for it."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = json.loads(json.dumps(config))
        self.tied = False
        self.table: torch.nn.Module | None = None  # the packed token embedding, once vLLM has made it
        expand_stored(self.config, self._named())  # a malformed config is refused here, before any layer is made
        self.act = self.config.get("activations", "none")

    @classmethod
    def get_name(cls) -> str:
        """The quant_method."""
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """What the kernels take."""
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPUs that Triton compiles the kernels for: Turing."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: it is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LowqVllmConfig":
        """Raises DamagedError, UnsupportedError as `expand_stored`."""
        return cls(config)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Note whether the output head is the embedding's table. Raises UnsupportedError for a table that vLLM takes dense."""
        text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        self.tied = bool(getattr(text, "tie_word_embeddings", False))
        if getattr(text, "model_type", None) in DENSE_TABLE and self._tables():
            raise UnsupportedError(f"vLLM's {text.model_type} takes no packed token embedding; quantize with --embedding keep")

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take over vLLM's names for modules."""
        self.config["tensors"] = hf_to_vllm_mapper.apply_dict(self.config["tensors"])

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """What computes `layer`. Raises UnsupportedError where its members are packed differently."""
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return self._table(layer, prefix)
        if isinstance(layer, LinearBase):
            scheme = self.scheme(prefix, self._members(prefix))
            return UnquantizedLinearMethod() if scheme is None else LowqLinearMethod(scheme, prefix, self.act)
        return None

    def scheme(self, prefix: str, members: Iterable[str]) -> Scheme | None:
        """The one scheme of a layer's members, None where they are dense."""
        members = list(members)
        found = expand_stored(self.config, {*self._named(), *members})
        for name in members:
            if name in found and found[name].layout != DISK:
                raise UnsupportedError(f"{name} is stored in layout {found[name].layout}; vLLM loads {DISK}: quantize again")
        schemes = {name: found[name].scheme if name in found else None for name in members}
        if len(set(schemes.values())) > 1:
            spelled = ", ".join(f"{n.rpartition('.')[2]} {s or 'dense'}" for n, s in list(schemes.items())[:3])
            raise UnsupportedError(f"vLLM makes one layer of {prefix}, but its parts are {spelled}; give them one scheme")
        return next(iter(schemes.values()))

    def _named(self) -> list[str]:
        """The exact names in the config."""
        tensors = self.config.get("tensors")
        return [key for key in tensors if "*" not in key.split(".")] if isinstance(tensors, dict) else []

    def _tables(self) -> list[str]:
        """Packed token embeddings."""
        return [key for key in self.config["tensors"] if key.rpartition(".")[2] == TABLE]

    def _members(self, prefix: str) -> list[str]:
        """Checkpoint names of what vLLM fuses into the layer `prefix`."""
        stem, dot, leaf = prefix.rpartition(".")
        return [f"{stem}{dot}{part}" for part in self.packed_modules_mapping.get(leaf, [leaf])]

    def _experts(self, layer: Any, prefix: str) -> Any:
        experts = [f"{prefix}.{e}." for e in range(layer.global_num_experts)]
        for gate, up, down in EXPERT_PARTS:
            parts = {"w13": (gate, up), "w2": (down,)}
            schemes = {w: self.scheme(prefix, [e + leaf for e in experts for leaf in leaves]) for w, leaves in parts.items()}
            if any(schemes.values()):
                break
        packed = {weight: scheme for weight, scheme in schemes.items() if scheme}
        if not packed:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if len(packed) < len(schemes):
            raise UnsupportedError(f"{prefix}: vLLM needs all of an expert's weights packed, or none")
        return LowqExpertsMethod(layer.moe_config, packed, prefix)

    def _table(self, layer: torch.nn.Module, prefix: str) -> Any:
        """vLLM makes the table before its head, and Llama's without a prefix."""
        is_head = isinstance(layer, ParallelLMHead)
        name = prefix if prefix or is_head else "".join(self._tables()[:1])
        scheme = self.scheme(name, [name])
        if scheme is None:
            return LowqTiedHeadMethod(self.table, prefix) if is_head and self.tied and self.table is not None else None
        if is_head:
            return LowqLinearMethod(scheme, prefix)
        method = LowqTableMethod(scheme, name)
        self.table, method.tied = layer, self.tied
        return method
