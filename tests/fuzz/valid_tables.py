"""Valid files of formats whose codes stand for table values, and of those that lowq only reads: two of each."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from valid import SIZES, WIDER, Valid, dense, weights

from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.interop.exporter import export
from lowq_cli.run.pipeline import quantize
from lowq_packers import formats

sys.path.insert(0, str(Path(__file__).parents[1] / "packers" / "formats"))
import gemlite_writer

SQUARE = SIZES | {"hidden_size": 256, "intermediate_size": 256}  # GGUF's ternary blocks are 256 long
GGUF_KINDS = (
    ("IQ4_NL", "MXFP4", "TQ1_0", "TQ2_0", "Q1_0", "MXFP4", "IQ4_NL"),
    ("TQ2_0", "Q1_0", "IQ4_NL", "TQ1_0", "MXFP4", "TQ2_0", "Q1_0"),
)
FORMS = {  # name -> of its two files: the table format that is quantized to, and the format that it is exported to
    "lowq, a table": (("nvfp4", ""), ("table", "")),
    "modelopt": (("nvfp4", "modelopt"), ("nvfp4", "modelopt")),
    "compressed-tensors, e2m1": (("nvfp4", "compressed-tensors"), ("mxfp4", "compressed-tensors")),
}


def all_tables(folder: Path) -> tuple[list[Valid], dict[str, Valid]]:
    """The first file of each, and the second."""
    sizes = SIZES, WIDER
    models = [dense(folder / f"dense{i}", size) for i, size in enumerate(sizes)]
    result: list[list[Valid]] = [[], []]
    for name, files in FORMS.items():
        for i, (form, to) in enumerate(files):
            made = folder / f"{form}-{i}"
            if not made.exists():
                quantize(models[i], made, format=form, lm_head="keep")
            if to:
                export(made, to, out := folder / f"{to}-{form}-{i}", rounding=True)
            path = out if to else made
            result[i].append(Valid(name, path, weights(path)))
    for i, model in enumerate(models):
        group = (32, 64)[i]
        others = {
            "bitsandbytes": _bitsandbytes(model, folder / f"bitsandbytes-{i}", ("nf4", "fp4")[i], bool(i)),
            "gemlite": _gemlite(model, folder / f"gemlite-{i}", (4, 2)[i], group, ("int", "none")[i]),
            "mxfp4": _gpt_oss(folder / f"mxfp4-{i}", (2, 3)[i]),
            "gguf, tables": _gguf(folder / f"gguf-{i}", GGUF_KINDS[i]),
        }
        result[i] += [Valid(name, path, weights(path)) for name, path in others.items()]
    return result[0], {v.format: v for v in result[1]}


def _rewritten(model: Path, out: Path, section: dict[str, Any], packed: Any) -> Path:
    """A copy of a dense model with `packed(name, weight)` for the decoder's matrices."""
    shutil.copytree(model, out)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors |= packed(name.removesuffix(".weight"), tensors.pop(name))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | section))
    return out


def _bitsandbytes(model: Path, out: Path, kind: str, double: bool) -> Path:
    """Random codes in blocks of 64, with scales in bytes of their own if `double`."""
    g = torch.Generator().manual_seed(2)
    table = torch.tensor(formats.bitsandbytes.TABLES[kind])

    def packed(name: str, W: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks, w = W.numel() // 64, f"{name}.weight"
        output: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float16", "shape": list(W.shape)}
        result = {w: torch.randint(256, (W.numel() // 2, 1), generator=g, dtype=torch.uint8), f"{w}.quant_map": table.clone()}
        result[f"{w}.absmax"] = torch.rand(blocks, generator=g) / 8
        if double:
            output |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
            result[f"{w}.absmax"] = torch.randint(256, (blocks,), generator=g, dtype=torch.uint8)
            result[f"{w}.nested_absmax"] = torch.rand(-(-blocks // 256), generator=g) / 8
            result[f"{w}.nested_quant_map"] = torch.linspace(-1, 1, 256)
        state = torch.tensor(list(json.dumps(output).encode()), dtype=torch.uint8)
        return result | {f"{w}.quant_state.bitsandbytes__{kind}": state}

    q = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return _rewritten(model, out, {"quantization_config": q}, packed)


def _gemlite(model: Path, out: Path, bits: int, group: int, zero: str) -> Path:
    """The tensors of GemLite's state_dict."""
    made = out.with_name(f"{out.name}-packed")
    quantize(model, made, bits=bits, group=group, method="rtn", zero=zero, lm_head="keep")
    with (result := open_checkpoint(made)).source:
        read = {t.name: result.read_matrix(t) for t in result.tensors if t.scheme}
    return _rewritten(model, out, {}, lambda name, W: gemlite_writer.write(name, read[name], {}))


def _gpt_oss(out: Path, experts: int) -> Path:
    """A layer of gpt-oss with random blocks."""
    from transformers import AutoModelForCausalLM, GptOssConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32}
    more = {"num_key_value_heads": 2, "vocab_size": 256, "num_local_experts": experts, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(GptOssConfig(**sizes, **more)).bfloat16().save_pretrained(out)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    g = torch.Generator().manual_seed(1)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        E, K, N = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (E, N, K // 32, 16), generator=g, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 130, (E, N, K // 32), generator=g, dtype=torch.uint8)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return out


def _gguf(folder: Path, kinds: tuple[str, ...]) -> Path:
    """A Llama whose matrices are random blocks, each of another type, written by the gguf package."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

    quantize(dense(folder / "dense", SQUARE), folder / "packed", bits=8, group=32, method="rtn", zero="none", lm_head="keep")
    export(folder / "packed", "gguf", folder / "plain.gguf", rounding=True)
    read, g, kind = GGUFReader(folder / "plain.gguf"), np.random.default_rng(3), _turns(kinds)
    path = folder / "file" / "model.gguf"
    path.parent.mkdir()
    writer = GGUFWriter(path, "llama")
    for field in read.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture" and len(field.data):
            of = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], of)
    for t in read.tensors:
        data, stored = t.data, t.tensor_type
        if t.tensor_type == GGMLQuantizationType.Q8_0:
            stored = GGMLQuantizationType[next(kind)]
            K, N = (int(n) for n in t.shape)
            elements, nbytes = GGML_QUANT_SIZES[stored]
            data = _blocks(stored.name, g, N * K // elements, nbytes).reshape(N, -1)
        writer.add_tensor(t.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _turns(kinds: tuple[str, ...]) -> Iterator[str]:
    while True:
        yield from kinds


def _blocks(kind: str, g: np.random.Generator, count: int, nbytes: int) -> np.ndarray:
    """(count, nbytes) random codes with scales that are small numbers."""
    raw = g.integers(0, 256, (count, nbytes), np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = g.integers(110, 130, count)
        return raw
    if kind == "TQ2_0":
        raw[:, :64] = sum(g.integers(0, 3, (count, 64), np.uint8) << 2 * i for i in range(4))
    scales = g.uniform(0.001, 0.1, (count, 1)).astype(np.float16).view(np.uint8)
    at = nbytes - 2 if kind.startswith("TQ") else 0
    raw[:, at : at + 2] = scales
    return raw
