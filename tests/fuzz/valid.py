"""Tiny valid model files of every format, each with its weights, and the result of its own reader."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowq_cli.files.checkpoint import is_checkpoint, open_checkpoint
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import open_decoded
from lowq_cli.run.pipeline import quantize
from lowq_packers.formats import FORMATS

SIZES = {
    **{"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": True},
}
WIDER = SIZES | {"intermediate_size": 192, "tie_word_embeddings": False}  # of the second file of a format
SECOND = {  # format -> bits, group, zero of that
    **{"lowq": (3, 64, "int"), "gptq": (3, 32, "int"), "awq": (4, 64, "int"), "compressed-tensors": (3, 64, "none")},
    **{"hqq": (2, 64, "float"), "humming": (8, 32, "int"), "mlx": (3, 32, "float"), "gguf": (8, 32, "none")},
}
BESIDE = {"modelopt", "bitsandbytes"}  # written in valid_tables.py
SCHEMES = {"awq": "int", "compressed-tensors": "int", "gptq": "none", "gguf": "none", "hqq": "float"}  # the others: none


@dataclass(frozen=True)
class Valid:
    """A folder, or a GGUF file in one, and the weights that it stands for."""

    format: str
    model: Path
    weights: dict[str, torch.Tensor]


def dense(folder: Path, sizes: dict[str, Any] = SIZES) -> Path:
    """A random Llama of one layer, with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).half()
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def weights(model: Path) -> dict[str, torch.Tensor]:
    """Every tensor that lowq reads of a model, dense."""
    if is_checkpoint(model):
        with (result := open_checkpoint(model)).source:
            read = {t.name: result.read_matrix(t).dequantize() for t in result.tensors if t.scheme}
            return read | {t.name.removesuffix(".weight"): result.read_plain(t).float() for t in result.tensors if not t.scheme}
    with open_decoded(model) as source:
        return {n.removesuffix(".weight"): source.read(n).reshape(h.shape).float() for n, h in source.headers.items()}


def all_valid(folder: Path) -> list[Valid]:
    """One of each format: dense, lowq's own, fp8, and all that lowq writes."""
    made = {"dense": dense(folder / "dense")}
    made["lowq"], made["fp8"] = folder / "lowq", folder / "fp8"
    quantize(made["dense"], made["lowq"], bits=4, group=32, method="rtn", lm_head="keep")
    quantize(made["dense"], made["fp8"], format="fp8")
    for name in sorted(f.name for f in FORMATS.values() if f.export and f.name not in BESIDE):
        zero = SCHEMES.get(name, "none")
        packed = folder / f"packed-{zero}"
        if not packed.exists():
            quantize(made["dense"], packed, bits=4, group=32, method="rtn", zero=zero, lm_head="keep")
        made[name] = folder / name / ("model.gguf" if name == "gguf" else "")
        made[name].parent.mkdir(exist_ok=True)
        export(packed, name, made[name])
    shutil.rmtree(folder / "packed-none")
    return [Valid(name, path, weights(path)) for name, path in made.items()]


def second_of_each(folder: Path) -> dict[str, Valid]:
    """Another file of each format: other widths, groups, zeros and sizes, and a head of its own."""
    model = dense(folder / "dense", WIDER)
    result = {"dense": Valid("dense", model, weights(model))}
    quantize(model, folder / "fp8", format="fp8")
    result["fp8"] = Valid("fp8", folder / "fp8", weights(folder / "fp8"))
    for name, (bits, group, zero) in SECOND.items():
        packed = folder / f"packed-{name}"
        quantize(model, packed, bits=bits, group=group, method="rtn", zero=zero, lm_head="keep")
        path = packed
        if name != "lowq":
            path = folder / name / ("model.gguf" if name == "gguf" else "")
            path.parent.mkdir(exist_ok=True)
            export(packed, name, path, rounding=True)
            shutil.rmtree(packed)
        result[name] = Valid(name, path, weights(path))
    return result
