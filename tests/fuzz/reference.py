"""A second reader of every format, from its definition, in numpy, for altered files. It uses no line of lowq's readers.

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
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171229224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
BNB = {"nf4": np.array(_NF4), "fp4": np.array([*_FP4, *(-v for v in _FP4)])}  # by the sign first
HQQ_SLABS = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}


def reading(name: str, folder: Path) -> dict[str, torch.Tensor] | None:
    """The weights (fp32) of a model folder in the format `name`, without ".weight"; None where it means nothing."""
    try:
        config = json.loads((folder / "config.json").read_text())
        (path,) = folder.glob("*.safetensors")
        with safe_open(path, framework="pt") as file:
            tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118  (not a dict)
        result: dict[str, torch.Tensor] = {}
        for n in tensors:
            module, _, leaf = n.rpartition(".")
            if leaf in LEAF[name] and (made := SECOND_READERS[name](config, tensors, module)) is not None:
                result |= made if isinstance(made, dict) else {module: made}
        return {n.removesuffix(".weight"): t.float() for n, t in tensors.items()} | result
    except Exception:
        return None


def gguf(path: Path) -> dict[str, torch.Tensor] | None:
    """A file as the gguf package reads it, under Hugging Face's names and in its row order; None if the package refuses it."""
    from gguf import GGMLQuantizationType, GGUFReader, dequantize

    try:
        result = GGUFReader(path)
        facts = {name: field.contents() for name, field in result.fields.items() if "attention.head_count" in name}
        heads = next(v for name, v in facts.items() if name.endswith("head_count"))
        of_keys = next((v for name, v in facts.items() if name.endswith("head_count_kv")), heads)
        read = {}
        for t in result.tensors:
            one_bit = t.tensor_type == GGMLQuantizationType.Q1_0  # which the package has no reader of
            w = torch.from_numpy(_signs(t.data) if one_bit else dequantize(t.data, t.tensor_type).copy()).float()
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


def _signs(rows: np.ndarray) -> np.ndarray:
    """Q1_0: blocks of an fp16 and 128 bits; a bit says whether it is added or taken away."""
    blocks = rows.reshape(len(rows), -1, 18)
    d = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    return np.where(np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little") == 1, d, -d).reshape(len(rows), -1)


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


def _scheme(config: Any, p: str) -> Any:
    q, parts = config["quantization_config"], p.split(".")
    fitting = [k for k in q["tensors"] if all(a in ("*", b) for a, b in zip(k.split("."), parts, strict=False))]
    return q["schemes"][q["tensors"][min((k for k in fitting if k.count(".") == p.count(".")), key=lambda k: k.count("*"))]]


def _lowq(config: Any, t: Tensors, p: str) -> torch.Tensor:
    scheme = _scheme(config, p)
    assert scheme.get("layout", "rowstream") == "rowstream"
    bits, scales = scheme["bits"], t[f"{p}.weight_scale"]
    zeros = t[f"{p}.weight_zero"].float().numpy() if scheme["zero"] != "none" else float(1 << bits) / 2
    zeros = 0.5 if bits == 1 and scheme["zero"] == "none" else zeros
    return grouped(stream(t[f"{p}.weight"], bits, scheme["group_size"] * scales.shape[1]), zeros, scales)


def e2m1(codes: np.ndarray) -> np.ndarray:
    """Sign, two bits of exponent (bias 1, none: a subnormal), a bit of mantissa."""
    sign, exponent, mantissa = np.where(codes & 8, -1.0, 1.0), codes >> 1 & 3, codes & 1
    return sign * np.where(exponent == 0, mantissa / 2, 2.0 ** (exponent - 1.0) * (1 + mantissa / 2))


def nibbles(stored: torch.Tensor) -> np.ndarray:
    """(..., 2 n) codes of bytes (..., n), the low half first."""
    raw = stored.view(torch.uint8).numpy()
    return np.stack((raw & 15, raw >> 4), -1).reshape(*raw.shape[:-1], -1)


def _blocks_of_16(t: Tensors, codes: str, scales: str, factor: torch.Tensor) -> torch.Tensor:
    return grouped(e2m1(nibbles(t[codes])), 0, t[scales].view(torch.float8_e4m3fn).float() * factor.float().reshape(()))


def _blocks_of_32(codes: np.ndarray, exponents: torch.Tensor) -> torch.Tensor:
    raw = exponents.view(torch.uint8)
    assert int(raw.max()) < 255
    return grouped(e2m1(codes), 0, torch.from_numpy(np.ldexp(np.float64(1), raw.numpy().astype(np.int32) - 127)))


def _modelopt(config: Any, t: Tensors, p: str) -> torch.Tensor:
    return _blocks_of_16(t, f"{p}.weight", f"{p}.weight_scale", t[f"{p}.weight_scale_2"])


def _compressed_e2m1(config: Any, t: Tensors, p: str) -> torch.Tensor:
    (group,) = config["quantization_config"]["config_groups"].values()
    form = group.get("format") or config["quantization_config"]["format"]
    if form == "nvfp4-pack-quantized":
        return _blocks_of_16(t, f"{p}.weight_packed", f"{p}.weight_scale", 1 / t[f"{p}.weight_global_scale"])
    assert form == "mxfp4-pack-quantized"
    return _blocks_of_32(nibbles(t[f"{p}.weight_packed"]), t[f"{p}.weight_scale"])


def _gpt_oss(config: Any, t: Tensors, p: str) -> dict[str, torch.Tensor]:
    result = {}
    for leaf in ("gate_up_proj", "down_proj"):
        for e, of in enumerate(t.get(f"{p}.{leaf}_blocks", ())):
            W = _blocks_of_32(nibbles(of.flatten(1)), t[f"{p}.{leaf}_scales"][e])
            parts = {"gate_proj": W[0::2], "up_proj": W[1::2]} if leaf == "gate_up_proj" else {"down_proj": W}
            result |= {f"{p}.{e}.{name}": w for name, w in parts.items()}
    return result


def _bitsandbytes(config: Any, t: Tensors, p: str) -> torch.Tensor:
    kind = config["quantization_config"]["bnb_4bit_quant_type"]
    output = json.loads(bytes(t[f"{p}.weight.quant_state.bitsandbytes__{kind}"].tolist()))
    assert output["quant_type"] == kind
    table, scales = BNB[kind], t[f"{p}.weight.absmax"]
    if scales.dtype == torch.uint8:
        shared = t[f"{p}.weight.nested_absmax"].repeat_interleave(output["nested_blocksize"])[: len(scales)]
        scales = t[f"{p}.weight.nested_quant_map"][scales.long()] * shared + output["nested_offset"]
    raw = t[f"{p}.weight"].flatten().numpy()
    values = table[np.stack((raw >> 4, raw & 15), -1).flatten()].reshape(-1, output["blocksize"])
    return grouped(values, 0, scales.reshape(-1, 1)).reshape(output["shape"])


def _gemlite(config: Any, t: Tensors, p: str) -> torch.Tensor:
    meta, (N, K) = t[f"{p}.metadata"].tolist(), t[f"{p}.orig_shape"].tolist()
    bits, group, channel, mode = meta[1], meta[2], meta[9], meta[10]
    words = t[f"{p}.W_q"].T.contiguous()
    raw = words.view(torch.uint8).reshape(N, -1).numpy()
    each = np.unpackbits(raw, axis=1, bitorder="little").reshape(N, K, bits)
    codes = (each.astype(np.int64) << np.arange(bits)).sum(-1).astype(np.float32)
    scales, zeros = (t[f"{p}.{n}"].float() for n in ("scales", "zeros"))
    scales, zeros = (x.T if x.dim() == 2 else x.reshape(1, 1) for x in (scales, zeros))

    def wide(x: torch.Tensor) -> np.ndarray:
        rows = x.expand(N, x.shape[1]).numpy()
        return rows[:, np.arange(K) // (group if x.shape[1] > 1 else K)]

    with np.errstate(all="ignore"):
        made = codes - wide(zeros) if mode in (1, 3) else codes
        made = made * wide(scales) if mode in (2, 3, 4) else made
        made = made + wide(zeros) if mode == 4 else made
        return torch.from_numpy(made * wide(scales) if channel in (1, 3) else made)


def _lowq_table(config: Any, t: Tensors, p: str) -> torch.Tensor:
    scheme, scales = _scheme(config, p), t[f"{p}.weight_scale"]
    codes = stream(t[f"{p}.weight"], scheme["bits"], scheme["group_size"] * scales.shape[1])
    if scheme["table"] == "fitted":
        return grouped(t[f"{p}.weight_table"].numpy().reshape(-1)[codes], 0, scales)
    assert (scheme["table"], scheme["scale"]) == ("e2m1", "e4m3")
    return grouped(e2m1(codes), 0, scales.view(torch.float8_e4m3fn).float() * t[f"{p}.weight_table"].reshape(()))


def _if(leaf: str, read: Callable[[Any, Tensors, str], torch.Tensor]) -> Callable[[Any, Tensors, str], torch.Tensor | None]:
    """Only modules that have a tensor of this name too are packed."""
    return lambda config, t, p: read(config, t, p) if f"{p}.{leaf}" in t else None


LEAF: dict[str, tuple[str, ...]] = {
    **{"gptq": ("qweight",), "awq": ("qweight",), "compressed-tensors": ("weight_packed",), "hqq": ("W_q",)},
    **{"humming": ("weight",), "mlx": ("weight",), "fp8": ("weight",), "lowq": ("weight",), "dense": ()},
    **{"modelopt": ("weight",), "bitsandbytes": ("weight",), "compressed-tensors, e2m1": ("weight_packed",)},
    **{"gemlite": ("W_q",), "mxfp4": ("gate_up_proj_blocks", "down_proj_blocks"), "lowq, a table": ("weight",)},
}
Made = torch.Tensor | dict[str, torch.Tensor] | None
SECOND_READERS: dict[str, Callable[[Any, Tensors, str], Made]] = {
    **{"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "hqq": _hqq},
    **{"humming": _if("weight_scale", _humming), "mlx": _if("scales", _mlx)},
    **{"fp8": _if("weight_scale_inv", _fp8), "lowq": _if("weight_scale", _lowq), "dense": lambda *_: None},
    **{"modelopt": _if("weight_scale", _modelopt), "bitsandbytes": _if("weight.absmax", _bitsandbytes)},
    **{"compressed-tensors, e2m1": _compressed_e2m1, "gemlite": _gemlite, "lowq, a table": _if("weight_scale", _lowq_table)},
    "mxfp4": _gpt_oss,
}
