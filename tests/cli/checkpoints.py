"""Tiny random checkpoints of ten families with a tokenizer of bytes, and quantized copies written without the pipeline."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowq_packers.scheme import Scheme

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MOE = {"num_experts_per_tok": 2, "router_jitter_noise": 0.0}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 160, "bos_token_id": 1, "eos_token_id": 2}
Family = tuple[str, dict[str, Any]]  # a model's type and the fields of its config
FAMILIES: dict[str, Family] = {
    "llama": ("llama", SMALL),
    "llama-tied": ("llama", SMALL | {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", SMALL),
    "qwen3": ("qwen3", SMALL),
    "mistral": ("mistral", SMALL),
    "gemma3": ("gemma3_text", SMALL | {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 32}),
    "phi3": ("phi3", SMALL),
    "gpt2": ("gpt2", GPT2),
    "mixtral": ("mixtral", SMALL | MOE | {"num_local_experts": 4}),
    "qwen3-moe": ("qwen3_moe", SMALL | MOE | {"num_experts": 4, "moe_intermediate_size": 48, "decoder_sparse_step": 1}),
}
WORDS: Family = ("llama", SMALL | {"vocab_size": 2048})  # most of its weights are in the embedding and the head
RARE: Family = ("mixtral", SMALL | MOE | {"num_local_experts": 11, "intermediate_size": 32})  # see `write_dense`
SCHEMES = {
    "attention": Scheme(4, 32, "float"),
    "mlp": Scheme(3, 16, "none"),
    "expert": Scheme(2, 16, "int"),
    "head": Scheme(8, 64, "float"),
}
MIXTURES = ("mixtral", "qwen3-moe")
BYTES = [chr(b) if chr(b).isprintable() and b != 32 else chr(256 + b) for b in range(127)]  # as ByteLevel writes bytes
LEAVES = (".weight", ".weight_scale", ".weight_zero")


def write_byte_tokenizer(folder: Path, template: str | None = None) -> Path:
    """Tokens 3 to 126 are the bytes of ASCII; 0, 1, 2 and 159 are special; no text has the rest."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    special = {"<pad>": 0, "<s>": 1, "</s>": 2, "<last>": 159}
    tokenizer = Tokenizer(
        models.BPE(special | {f"<{i}>": i for i in range(127, 159)} | {BYTES[i]: i for i in range(3, 127)}, [])
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    facts |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


@dataclass(frozen=True)
class Checkpoints:
    """Three folders of one model: dense, packed, and dense with the values that the packed weights stand for."""

    dense: Path
    packed: Path
    dequantized: Path
    schemes: dict[str, Scheme]


def write_dense(folder: Path, family: str | Family, dtype: str = "float32", positions: int = 128) -> Path:
    """A random model of a family, as transformers saves it; its context of `positions` tokens is a window of calibration.

    Of RARE's last two experts, each gets about one token in 50.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    model_type, fields = FAMILIES[family] if isinstance(family, str) else family
    fields = fields | {k: positions for k in ("max_position_embeddings", "n_positions") if k in fields}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**fields)).to(getattr(torch, dtype))
    for p in model.parameters():  # norms and biases too, so that one that is dropped shows
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 and p.mean() == 1 else 0.0, 0.2 if p.dim() == 1 else 0.05)
    for name, p in model.named_parameters() if family == RARE else ():
        if name.endswith("gate.weight"):  # of the router: others are larger than a number near 0
            p.data[-2:] *= 0.05
    model.save_pretrained(folder)
    return folder


def write_packed(dense: Path, folder: Path, schemes: dict[str, Scheme], dtype: str | None = None) -> Checkpoints:
    """Round every tensor that has parts and a scheme for its kind; write it packed, and dequantized in a second folder."""
    import torch
    from safetensors.torch import save_file

    from lowq_cli.files.quant_config import compact
    from lowq_cli.files.source import open_source
    from lowq_cli.hf.structure import roles
    from lowq_cli.quantizers import rtn
    from lowq_packers.layouts import pack

    packed, used = {}, {}
    with open_source(dense) as source:
        config = source.config
        for name, role in roles(config, source.headers).items():
            W = source.read(name).reshape(source.headers[name].shape)
            scheme = schemes.get(role.kind) if role.parts else None
            if scheme is None:
                packed[name] = W
            for part in role.parts if scheme else ():
                q = rtn.quantize(part.cut.of(W).contiguous(), scheme, W.dtype if dtype is None else getattr(torch, dtype))
                p = pack(q)
                tensors = {"weight": p.words, "weight_scale": p.scales, "weight_zero": p.zeros}
                packed |= {f"{part.name}.{leaf}": t for leaf, t in tensors.items() if t is not None}
                used[part.name] = scheme
    kept = {n.removesuffix(".weight") for n in packed if n.endswith(".weight")} - used.keys()
    out = folder / "packed"
    shutil.copytree(dense, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({k: v.contiguous() for k, v in packed.items()}, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": compact(used, kept)}))
    return Checkpoints(dense, out, write_dequantized(dense, out, folder / "dequantized"), used)


def write_dequantized(dense: Path, packed: Path, out: Path) -> Path:
    """A dense checkpoint of the values that a packed one stands for, in the names and dtypes of the dense source."""
    from safetensors.torch import save_file

    from lowq_cli.files.quant_config import expand
    from lowq_cli.files.source import open_source
    from lowq_cli.hf.structure import roles
    from lowq_packers.layouts import PackedWeight, unpack

    tensors = {}
    with open_source(dense) as source, open_source(packed) as other:
        config = dict(other.config)
        stems = [n.removesuffix(".weight") for n in other.headers if n.endswith(".weight")]
        schemes = expand(config.pop("quantization_config"), stems)

        def values(stem: str) -> Any:
            names = {leaf: stem + leaf for leaf in (*LEAVES, ".weight_table")}
            read = {leaf: other.read(n).reshape(other.headers[n].shape) for leaf, n in names.items() if n in other.headers}
            K = read[".weight_scale"].shape[1] * schemes[stem].group_size
            N = read[".weight"].shape[0]
            table = read.get(".weight_table")
            packed = PackedWeight(*map(read.get, LEAVES), schemes.pop(stem), N, K, "rowstream", table=table)
            return unpack(packed).dequantize()

        for name, role in roles(source.config, source.headers).items():
            W = source.read(name).reshape(source.headers[name].shape)
            for part in role.parts:
                if part.name in schemes:
                    part.cut.of(W).copy_(values(part.name))
            tensors[name] = W
        tensors |= {f"{stem}.weight": values(stem) for stem in list(schemes)}  # a head that the source kept tied
    shutil.copytree(dense, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out
