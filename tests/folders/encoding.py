"""Weights as publishers quantize them: the tensors that files hold, and the matrix that the format's definition makes."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Encoded = tuple[dict[str, torch.Tensor], torch.Tensor]  # leaf of the module -> tensor, and the dense matrix
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of e2m1


def fp8(
    block: tuple[int, int] | None, dtype: torch.dtype = torch.float32, leaf: str = "weight_scale_inv", powers: bool = False
):
    """e4m3 with a scale for each block, or (None) one for all, and one of activations; powers: of two, as in ue8m0."""

    def encode(W: torch.Tensor) -> Encoded:
        (N, K), W = W.shape, W.float()
        rows, columns = block or (N, K)
        G = math.ceil(N / rows), math.ceil(K / columns)
        padded = torch.zeros(G[0] * rows, G[1] * columns)
        padded[:N, :K] = W
        scale = padded.view(G[0], rows, G[1], columns).abs().amax((1, 3)) / 448
        scale = (torch.exp2(scale.log2().ceil()) if powers else scale).to(dtype)
        spread = scale.float().repeat_interleave(rows, 0)[:N].repeat_interleave(columns, 1)[:, :K]
        codes = (W / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        result = {"weight": codes, leaf: scale if block else scale.reshape(())}
        return result | ({} if block else {"activation_scale": torch.tensor(0.5)}), codes.float() * spread

    return encode


def rows8(W: torch.Tensor) -> Encoded:
    """compressed-tensors' float-quantized: e4m3 with a scale for each row."""
    scale = (W.float().abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    codes = (W.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def nvfp4(names: tuple[str, str, str], divided: bool) -> Callable[[torch.Tensor], Encoded]:
    """e2m1 in groups of 16 with e4m3 scales and a factor, which multiplies them or divides them; the names of the three."""

    def encode(W: torch.Tensor) -> Encoded:
        groups = W.float().unflatten(1, (-1, 16))
        factor = torch.tensor([2.0**-6])
        scale = (groups.abs().amax(2) / 6 / factor).to(torch.float8_e4m3fn)
        step = (scale.float() * factor).clamp(min=1e-9).unsqueeze(2)
        code = ((groups / step).abs().unsqueeze(-1) - LEVELS).abs().argmin(-1)
        dense = (LEVELS[code] * groups.sign() * scale.float().unsqueeze(2) * factor).flatten(1)
        code = (code + 8 * (groups < 0)).flatten(1).to(torch.uint8)
        stored = 1 / factor if divided else factor
        return dict(zip(names, (code[:, ::2] | code[:, 1::2] << 4, scale, stored), strict=True)), dense

    return encode


MODELOPT = nvfp4(("weight", "weight_scale", "weight_scale_2"), divided=False)
COMPRESSED = nvfp4(("weight_packed", "weight_scale", "weight_global_scale"), divided=True)


def int4(W: torch.Tensor) -> Encoded:
    """compressed-tensors' pack-quantized: 4 bits in groups of 32, without a zero."""
    groups = W.float().unflatten(1, (-1, 32))
    scale = (groups.abs().amax(2) / 7).to(torch.bfloat16)
    codes = (groups / scale.float().unsqueeze(2)).round().clamp(-8, 7)
    eights = (codes.flatten(1).to(torch.int64) + 8).unflatten(1, (-1, 8))
    words = (eights << (4 * torch.arange(8))).sum(2)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    result = {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(W.shape)}
    return result, (codes * scale.float().unsqueeze(2)).flatten(1)


def quantize(folder: Path, how: Callable[[str], Callable[[torch.Tensor], Encoded] | None], **config) -> dict[str, torch.Tensor]:
    """Rewrite a folder with the matrices that `how` has an encoding for (by module), and these fields in config.json; what
    its tensors mean, under the names of the dense model."""
    result: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        result |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    stored, dense = {}, {}
    for name, value in result.items():
        module = name.removesuffix(".weight")
        encode = how(module) if name != module and value.dim() == 2 else None
        if encode is None:
            stored[name] = dense[name] = value
            continue
        tensors, matrix = encode(value)
        stored |= {f"{module}.{leaf}": t.contiguous() for leaf, t in tensors.items()}
        dense[name] = matrix.to(torch.bfloat16)
    assert stored.keys() != result.keys()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | config))
    return dense
