"""Every format read once more, from its definition, in numpy: what a bent file means. No line of lowq's readers is used.

GGUF is read by the gguf package. A reader raises, whatever it likes, where a file means nothing.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

Tensors = dict[str, torch.Tensor]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the nibbles of a word
GGUF_NAMES = {
    **{"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm"},
    **{"ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"},
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
HQQ_SLABS = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}


def reading(name: str, folder: Path) -> dict[str, torch.Tensor] | None:
    """The weights (fp32) of a model folder in the format `name`, without ".weight"; None where it means nothing."""
    try:
        config = json.loads((folder / "config.json").read_text())
        (path,) = folder.glob("*.safetensors")
        with safe_open(path, framework="pt") as file:
            tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118  (not a dict)
        found: dict[str, torch.Tensor] = {}
        for n in tensors:
            module, _, leaf = n.rpartition(".")
            if leaf == LEAF[name] and (made := READERS[name](config, tensors, module)) is not None:
                found[module] = made
        return {n.removesuffix(".weight"): t.float() for n, t in tensors.items()} | found
    except Exception:
        return None


def gguf(path: Path) -> dict[str, torch.Tensor] | None:
    """What the gguf package reads of a file, under Hugging Face's names and in its order of rows; None where it refuses."""
    from gguf import GGUFReader, dequantize

    try:
        found = GGUFReader(path)
        facts = {name: field.contents() for name, field in found.fields.items() if "attention.head_count" in name}
        heads = next(v for name, v in facts.items() if name.endswith("head_count"))
        of_keys = next((v for name, v in facts.items() if name.endswith("head_count_kv")), heads)
        read = {}
        for t in found.tensors:
            w = torch.from_numpy(dequantize(t.data, t.tensor_type).copy()).float()
            _, _, stem = t.name.removesuffix(".weight").rpartition(".")
            if stem in ("attn_q", "attn_k"):
                n = heads if stem == "attn_q" else of_keys
                w = w.reshape(n, -1, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)
            name = GGUF_NAMES.get(stem, stem)
            layer = t.name.split(".")[1] if t.name.startswith("blk.") else ""
            read[f"model.layers.{layer}.{name}" if layer else name] = w
        return read
    except Exception:
        return None


def stream(words: torch.Tensor, bits: int, count: int) -> np.ndarray:
    """(R, count) codes of rows of words: bit b of code k is bit b + bits * k of the row."""
    raw = np.ascontiguousarray(words.view(torch.int32).numpy()).view(np.uint8)
    each = np.unpackbits(raw, axis=1, bitorder="little")[:, : bits * count]
    return (each.reshape(len(raw), count, bits).astype(np.int64) << np.arange(bits)).sum(-1)


def grouped(codes: np.ndarray, zeros: Any, scales: torch.Tensor, groups: Any = None) -> torch.Tensor:
    """(q - z) * s, scales (N, G) along K; groups (K,): of each k, equal ones in order if left out."""
    s = scales.float().numpy()
    each = np.arange(codes.shape[1]) // (codes.shape[1] // s.shape[1]) if groups is None else groups
    z = np.asarray(zeros, np.float32)
    with np.errstate(all="ignore"):
        return torch.from_numpy((codes.astype(np.float32) - (z[:, each] if z.ndim else z)) * s[:, each])


def _gptq(config: Any, t: Tensors, p: str) -> torch.Tensor:
    q = config["quantization_config"]
    assert all(rule.startswith("-:") for rule in q.get("dynamic", ()))
    bits, N = q.get("bits", q.get("w_bit")), t[f"{p}.qweight"].shape[1]
    codes = stream(t[f"{p}.qweight"].T.contiguous(), bits, t[f"{p}.qweight"].shape[0] * 32 // bits)
    zeros = stream(t[f"{p}.qzeros"], bits, N)
    if q.get("checkpoint_format", q.get("format", "gptq")) != "gptq_v2":
        zeros = (zeros + 1) % (1 << bits) if bits < 8 else zeros + 1
    index = t[f"{p}.g_idx"].long().numpy() if f"{p}.g_idx" in t else None
    return grouped(codes, zeros.T, t[f"{p}.scales"].T, index)


def _awq(config: Any, t: Tensors, p: str) -> torch.Tensor:
    def columns(words: torch.Tensor) -> np.ndarray:
        nibbles = stream(words, 4, 8 * words.shape[1]).reshape(len(words), -1, 8)
        out = np.empty_like(nibbles)
        out[..., list(AWQ_COLUMNS)] = nibbles
        return out.reshape(len(words), -1).T

    used = config["quantization_config"].get("zero_point", True)
    return grouped(columns(t[f"{p}.qweight"]), columns(t[f"{p}.qzeros"]) if used else 8, t[f"{p}.scales"].T)


def _compressed(config: Any, t: Tensors, p: str) -> torch.Tensor:
    (group,) = config["quantization_config"]["config_groups"].values()
    bits, (N, K) = group["weights"]["num_bits"], t[f"{p}.weight_shape"].tolist()
    zeros: Any = 1 << (bits - 1)
    if group["weights"].get("symmetric", True) is False:
        zeros = stream(t[f"{p}.weight_zero_point"].T.contiguous(), bits, N).T
    index = t[f"{p}.weight_g_idx"].long().numpy() if f"{p}.weight_g_idx" in t else None
    return grouped(stream(t[f"{p}.weight_packed"], bits, K), zeros, t[f"{p}.weight_scale"], index)


def _hqq(config: Any, t: Tensors, p: str) -> torch.Tensor:
    bits, (N, K) = int(t[f"{p}.nbits"]), t[f"{p}.shape"].tolist()
    g = int(t.get(f"{p}.group_size", torch.tensor(K)))
    assert int(t.get(f"{p}.axis", torch.tensor(1))) == 1
    W, E = t[f"{p}.W_q"].numpy(), HQQ_SLABS[bits]
    codes = np.concatenate([(W >> (bits * (E - 1 - i))) & ((1 << bits) - 1) for i in range(E)])[: N * K // g]
    made = grouped(codes.reshape(-1, g), t[f"{p}.zero"].float().reshape(-1, 1).numpy(), t[f"{p}.scale"].reshape(-1, 1))
    return made.reshape(N, K)


def _humming(config: Any, t: Tensors, p: str) -> torch.Tensor:
    q = config["quantization_config"]
    assert not q.get("dynamic")
    bits, N = int(q["dtype"].removeprefix("uint")), len(t[f"{p}.weight"])
    zeros: Any = 1 << (bits - 1)
    if q.get("has_zero_point"):
        stored = t[f"{p}.zero_point"]
        zeros = stored.float().numpy() if q.get("is_fp_zero_point") else stream(stored.T.contiguous(), bits, N).T
    return grouped(stream(t[f"{p}.weight"], bits, t[f"{p}.weight"].shape[1] * 32 // bits), zeros, t[f"{p}.weight_scale"])


def _mlx(config: Any, t: Tensors, p: str) -> torch.Tensor:
    bits = config["quantization"]["bits"]
    codes = stream(t[f"{p}.weight"], bits, t[f"{p}.weight"].shape[1] * 32 // bits)
    biases = t[f"{p}.biases"].float().repeat_interleave(codes.shape[1] // t[f"{p}.biases"].shape[1], 1)
    return grouped(codes, 0, t[f"{p}.scales"]) + biases


def _fp8(config: Any, t: Tensors, p: str) -> torch.Tensor:
    (rows, columns), W = config["quantization_config"]["weight_block_size"], t[f"{p}.weight"].float()
    s = t[f"{p}.weight_scale_inv"].float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return W * s[: W.shape[0], : W.shape[1]]


def _lowq(config: Any, t: Tensors, p: str) -> torch.Tensor:
    q, parts = config["quantization_config"], p.split(".")
    fitting = [k for k in q["tensors"] if all(a in ("*", b) for a, b in zip(k.split("."), parts, strict=False))]
    scheme = q["schemes"][q["tensors"][min((k for k in fitting if k.count(".") == p.count(".")), key=lambda k: k.count("*"))]]
    assert scheme.get("layout", "rowstream") == "rowstream"
    bits, scales = scheme["bits"], t[f"{p}.weight_scale"]
    zeros = t[f"{p}.weight_zero"].float().numpy() if scheme["zero"] != "none" else float(1 << bits) / 2
    zeros = 0.5 if bits == 1 and scheme["zero"] == "none" else zeros
    return grouped(stream(t[f"{p}.weight"], bits, scheme["group_size"] * scales.shape[1]), zeros, scales)


def _if(leaf: str, read: Callable[[Any, Tensors, str], torch.Tensor]) -> Callable[[Any, Tensors, str], torch.Tensor | None]:
    """Only modules that have a tensor of this name too are packed."""
    return lambda config, t, p: read(config, t, p) if f"{p}.{leaf}" in t else None


LEAF = {
    **{"gptq": "qweight", "awq": "qweight", "compressed-tensors": "weight_packed", "hqq": "W_q"},
    **{"humming": "weight", "mlx": "weight", "fp8": "weight", "lowq": "weight", "dense": "none"},
}
READERS: dict[str, Callable[[Any, Tensors, str], torch.Tensor | None]] = {
    **{"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "hqq": _hqq},
    **{"humming": _if("weight_scale", _humming), "mlx": _if("scales", _mlx)},
    **{"fp8": _if("weight_scale_inv", _fp8), "lowq": _if("weight_scale", _lowq), "dense": lambda *_: None},
}
