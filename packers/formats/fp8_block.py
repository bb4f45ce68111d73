"""FP8 with block scales (DeepSeek): weight float8_e4m3fn (N, K), weight_scale_inv (ceil(N/128), ceil(K/128)).

Despite its name, weight_scale_inv multiplies: w = fp8 * weight_scale_inv[n // 128, k // 128]. Blocks keep their stride of 128
if the last one is partial. Deriving the block size as rows / scale rows, as transformers does, gives 96 for 192 rows, and thus
wrong weights. Also supported: one scale per tensor or row (weight_block_size null), e8m0 scales, MXFP8's [1, 32] blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.formats import Config, Fetch, Format, Headers, Matrix, method, register
from lowq_packers.formats import _common as c
from lowq_packers.lazy import torch
from lowq_packers.scheme import ACT_KEY

COMPANIONS = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
USED = ("quant_method", "weight_block_size", "fmt", ACT_KEY)
HARMLESS = (  # settings of other engines that change no weight
    *("activation_scheme", "scale_fmt", "modules_to_not_convert", "ignored_layers", "ignore", "dequantize", "kv_cache_scheme"),
    *("is_checkpoint_fp8_serialized", "kv_cache_quant_algo", "version"),
)
SCALES = ("F32", "F16", "BF16", "F8_E8M0", "U8")


def _matrices(config: Config, headers: Headers, fetch: Fetch | None) -> list[Matrix]:
    q = c.section(config, "quantization_config")
    c.check_fields(q, USED, HARMLESS)
    if q.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn", "fp8_e4m3"):
        raise c.refusal(q, "fmt", reads="e4m3")
    matrices = []
    for name, header in headers.items():
        if not header.dtype.startswith("F8_E4") or not header.shape:
            continue
        p = name.removesuffix(".weight")
        if p == name or len(header.shape) != 2:
            raise UnsupportedError(f"{name} is a stacked fp8 tensor; lowq reads one matrix per tensor")
        scale = next((f"{p}.{leaf}" for leaf in COMPANIONS if f"{p}.{leaf}" in headers), None)
        if scale is None:
            raise DamagedError(f"{p}.weight_scale_inv is missing; fetch the model again")
        matrices.append(_matrix(p, scale, q, headers, c.model_dtype(config, "BF16")))
    return matrices


def _block(q: Mapping[str, Any]) -> tuple[int, int] | None:
    size = q.get("weight_block_size", [1, 32] if q.get("quant_method") == "mxfp8" else None)
    return None if size is None else c.pair(size, "quantization_config has weight_block_size")


def _matrix(p: str, scale: str, q: Mapping[str, Any], headers: Headers, dtype: str) -> Matrix:
    N, K = headers[f"{p}.weight"].shape
    block = _block(q)
    if block is not None:
        c.need(headers, scale, (-(-N // block[0]), -(-K // block[1])), SCALES)
    elif headers[scale].shape not in ((), (1,), (1, 1), (N, 1), (N,)):
        raise DamagedError(f"{scale} has the shape {tuple(headers[scale].shape)}, and the config gives no weight_block_size")

    def read(fetch: Fetch) -> torch.Tensor:
        return dequantize(fetch(f"{p}.weight"), fetch(scale), block, dtype)

    parts = (f"{p}.weight", scale, *(n for leaf in ("activation_scale", "input_scale") if (n := f"{p}.{leaf}") in headers))
    stored = f"fp8 {block[0]}x{block[1]} blocks" if block else "fp8"
    return Matrix(p, (N, K), parts, read, stored, 8, None, dtype)


def dequantize(W: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None, name: str) -> torch.Tensor:
    """(N, K) fp8 times its scales, in fp32, rounded once to safetensors' dtype `name`. Scales in uint8: 2**(byte - 127)."""
    (N, K), dtype = W.shape, getattr(torch, c.TORCH[name])
    s = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    if block is None:
        return (W.float() * s.reshape(-1, 1)).to(dtype)
    wide = s.repeat_interleave(min(block[1], K), 1)[:, :K]  # the config can name a block wider than K
    out = torch.empty(N, K, dtype=dtype)
    for i in range(s.shape[0]):  # one row of blocks at a time: no third fp32 copy of a large matrix
        rows = slice(i * block[0], min(N, (i + 1) * block[0]))
        out[rows] = (W[rows].float() * wide[i]).to(dtype)
    return out


def _claims(config: Config, headers: Headers) -> bool:
    return method(config) in ("fp8", "mxfp8") or (
        method(config) is None and any(n.endswith("weight_scale_inv") for n in headers)
    )


def _engines(config: Config, matrices: Sequence[Matrix]) -> list[str]:
    block = _block(c.section(config, "quantization_config"))
    return ["lowq" if block in ((128, 128), (256, 256)) else "lowq (dense)", "transformers", "vLLM", "SGLang"]


def _notes(config: Config, headers: Headers) -> list[str]:
    block = _block(c.section(config, "quantization_config"))
    names = [n for n, h in headers.items() if h.dtype.startswith("F8_E4") and len(h.shape) == 2]
    partial = [n for n in names if block and (headers[n].shape[0] % block[0] or headers[n].shape[1] % block[1])]
    if not partial:
        return []
    return [f"{partial[0]} and {len(partial) - 1} more end in partial blocks, which transformers 5.23 gets wrong or refuses"]


register(Format("fp8", "FP8, block scales", _matrices, _engines, notes=_notes, claims=_claims))
