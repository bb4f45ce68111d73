"""The quantization config "lowq": which of vLLM's layers are packed, and in which scheme.

vLLM fuses q, k, v into one layer, and gate, up into another. A checkpoint packs each of them separately, so the members of a
layer must have the same scheme. vLLM's module names can differ from the checkpoint's; it passes a mapper for them.
"""

import json
import re
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
from lowq_cli.files.tensor_parallel import family_problem
from lowq_cli.vllm_plugin.embedding import LowqTableMethod, LowqTiedHeadMethod
from lowq_cli.vllm_plugin.experts import LowqExpertsMethod
from lowq_cli.vllm_plugin.linear import LowqLinearMethod
from lowq_packers.errors import UnsupportedError
from lowq_packers.formats import FUSED
from lowq_packers.layouts import DISK
from lowq_packers.scheme import Scheme

TABLES = ("embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings")  # names of token embeddings in checkpoints
MIXER = (r"\.mixer\.", ".mamba.")  # vLLM's name of Granite 4's recurrent mixers, and theirs in checkpoints
EXPERT_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # the second triple: Mixtral's names


@register_quantization_config(METHOD)
class LowqVllmConfig(QuantizationConfig):
    """The `quantization_config` of a lowq checkpoint (`lowq_cli.files.quant_config`), in vLLM's interface."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = json.loads(json.dumps(config))
        self.tied = False
        self.table_shape: tuple[int | None, int | None] = (None, None)
        self.table: torch.nn.Module | None = None  # the packed token embedding, set when vLLM creates it
        expand_stored(self.config, self._named())  # a malformed config is refused here, before any layer is made
        self.act = self.config.get("activations", "none")

    @classmethod
    def get_name(cls) -> str:
        """The quant_method."""
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """The activation dtypes that the kernels support."""
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """The compute capability of the oldest GPUs for which Triton compiles the kernels: Turing."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No files: the quantization config is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LowqVllmConfig":
        """Make the config from config.json's section. Raises DamagedError or UnsupportedError, like `expand_stored`."""
        return cls(config)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Record whether the head is tied, and the shape of the token embedding. Raises UnsupportedError for OTHER_LAYERS."""
        text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        if problem := family_problem(getattr(text, "model_type", None)):
            raise UnsupportedError(f"vLLM cannot serve a lowq checkpoint of this model: {problem}")
        self.tied = bool(getattr(text, "tie_word_embeddings", False))
        self.table_shape = getattr(text, "vocab_size", None), getattr(text, "hidden_size", None)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the modules of the config to vLLM's names."""
        self.config["tensors"] = hf_to_vllm_mapper.apply_dict(self.config["tensors"])

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method that computes `layer`. Raises UnsupportedError if its members are packed differently."""
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return self._table(layer, prefix)
        if isinstance(layer, LinearBase):
            scheme = self.scheme(prefix, self._members(self._in_checkpoint(prefix)))
            return UnquantizedLinearMethod() if scheme is None else LowqLinearMethod(scheme, prefix, self.act)
        return None

    def scheme(self, prefix: str, members: Iterable[str]) -> Scheme | None:
        """The common scheme of a layer's members, None if they are dense. Raises UnsupportedError if they differ."""
        members = list(members)
        stored = expand_stored(self.config, {*self._named(), *members})
        for name in members:
            if name in stored and stored[name].layout != DISK:
                raise UnsupportedError(f"{name} is stored in layout {stored[name].layout}; vLLM loads {DISK}: quantize again")
        schemes = {name: stored[name].scheme if name in stored else None for name in members}
        if len(set(schemes.values())) > 1:
            spelled = ", ".join(f"{n.rpartition('.')[2]} {s or 'dense'}" for n, s in list(schemes.items())[:3])
            raise UnsupportedError(f"vLLM makes one layer of {prefix}, but its parts are {spelled}; give them one scheme")
        return next(iter(schemes.values()))

    def _named(self) -> list[str]:
        """The names in the config, without patterns."""
        tensors = self.config.get("tensors")
        return [key for key in tensors if "*" not in key.split(".")] if isinstance(tensors, dict) else []

    def _tables(self) -> list[str]:
        """The names of packed token embeddings."""
        return [key for key in self.config["tensors"] if key.rpartition(".")[2] in TABLES]

    def _in_checkpoint(self, prefix: str) -> str:
        """The checkpoint's name of a linear layer."""
        renamed = re.sub(*MIXER, prefix)
        return renamed if self.scheme(renamed, [renamed]) else prefix

    def _members(self, prefix: str) -> list[str]:
        """Checkpoint names of the modules that vLLM fuses into the layer `prefix`."""
        if self.scheme(prefix, [prefix]):  # fused in the checkpoint already, as in GLM-4
            return [prefix]
        stem, dot, leaf = prefix.rpartition(".")
        usual = [part for part, fused in FUSED.items() if fused == leaf]  # StableLM's class, for example, names no parts
        return [f"{stem}{dot}{part}" for part in self.packed_modules_mapping.get(leaf) or usual or [leaf]]

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
        """The method of an embedding or head. vLLM creates the embedding before the head, and often without a prefix."""
        is_head = isinstance(layer, ParallelLMHead)
        unnamed = not prefix and not is_head and (layer.org_vocab_size, layer.embedding_dim) == self.table_shape
        name = "".join(self._tables()[:1]) if unnamed else prefix
        scheme = self.scheme(name, [name])
        if scheme is None:
            return LowqTiedHeadMethod(self.table, prefix) if is_head and self.tied and self.table is not None else None
        if is_head:
            return LowqLinearMethod(scheme, prefix)
        method = LowqTableMethod(scheme, name)
        self.table, method.tied = layer, self.tied
        return method
