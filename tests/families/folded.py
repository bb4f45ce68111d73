"""Products with their neighbours folded in, on a CPU."""

from types import SimpleNamespace

import torch

from lowq_kernels.decode import reference


class Fold:
    """What `lowq_kernels.decode.fold` does, by plain operations."""

    NORMED, ADDED, SQUARES, ACTS = 1, 2, 16, {"silu": 4, "gelu_tanh": 8}

    @staticmethod
    def why_not(layer, M, dtype, fold):
        return ""

    @staticmethod
    def config_of(layer, M, dtype, fold):
        return {"WARPS": 4, "ROW_TILES": 2}

    @staticmethod
    def product_add(layer, x, residual, weight, eps, scale):
        residual += layer(x)
        return SimpleNamespace(x=residual * weight * scale[:, None], mean=residual.square().mean(-1), scale=scale, eps=eps)

    @staticmethod
    def norm_product(layer, s):
        inverse = torch.rsqrt(s.mean + s.eps)
        return layer(s.x * (inverse / s.scale)[:, None]), inverse

    @staticmethod
    def product_gate(layer, x, act):
        return reference.gated(layer(x), act)

    @staticmethod
    def norm_product_gate(layer, s, act):
        y, inverse = Fold.norm_product(layer, s)
        return reference.gated(y, act), inverse
