"""grouped_experts8: a mixture layer of many tokens on 8-bit tensor cores; it never waits for the device.

place           as in grouped_experts.py
two products    act_rows.cu rounds each token's row of x once and writes it to the rows of its slots, then cuda/tile_wgmma8,
                grouped; before the second product the launch that rounds also computes act(gate) * up
weigh           as in grouped_experts.py
"""

import torch

from lowq_kernels.decode.grouped_experts import ACTS, between, place, weighed
from lowq_kernels.decode.mixture import ExpertsCall
from lowq_kernels.dispatch.registry import Config, configs_of, register
from lowq_kernels.modules.stack import Stack
from lowq_kernels.products.cuda import tile_wgmma8
from lowq_packers.scheme import Act, Scheme

SMALL, LARGE = configs_of(tile_wgmma8.KEYS, ((2, 64, 1), (2, 128, 1)))
# Max. rows of an average expert for tiles of 64 rows. A layer of A3B on an H200 by tiles of 64 / 128 rows: 221 / 243 us where
# an expert has 64 rows, 349 / 354 at 128, 631 / 565 at 256. One of gpt-oss's shape in groups of 64: 246 / 315 at 32 rows,
# 334 / 323 at 64, 497 / 479 at 128; in MXFP4, whose codes take more instructions: 264 / 309, 372 / 324, 607 / 487.
MOST_IN_SMALL, OF_NARROW_GROUPS = 128, 48
# Min. rows of an average expert. At 16 reading the experts' weights takes the time (151 us, in 16 bits 130), at 32 162 and 188.
# A layer of gpt-oss in MXFP4 on an H200, us in 16 / 8 bits: 251 / 264 where an expert has 32 rows, 336 / 324 at 64.
LEAST_ROWS, OF_MXFP4 = 24, 64


def config_for(rows: float, s: Scheme) -> Config:
    """The tiles where an average expert has so many rows and weights of scheme s."""
    return SMALL if rows <= (MOST_IN_SMALL if s.group_size % 128 == 0 else OF_NARROW_GROUPS) else LARGE


def _rows(call: ExpertsCall) -> float:
    return call.M * call.top_k / call.E


def _refuse(call: ExpertsCall, act: Act) -> str | None:
    if call.act != act:
        return f"takes activations as {act}, not {call.act}"
    if call.shared:
        return "takes no shared expert"
    if call.activation not in ACTS:
        return f"takes the activations {', '.join(ACTS)}, not {call.activation}"
    for _, K, scheme, layout in (call.gate_up, call.down):
        if layout != "tile" or scheme is None or scheme.bits == 1:
            return "takes experts packed in the layout tile in 2 bits and more"
        least = OF_MXFP4 if scheme.table else LEAST_ROWS
        if _rows(call) < least:
            return f"takes {least} rows of an average expert and more, not {_rows(call):.0f}"
        if why := tile_wgmma8.why_not(scheme, K, act, call.capability):
            return why
    return None


def layer(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: Stack, down: Stack, act: str, config: Config, int8: bool
) -> torch.Tensor:
    """As `grouped_experts`; what both products multiply is rounded to int8, or e4m3, with a scale per row."""
    if x.shape[0] == 0:
        return torch.empty_like(x)
    row, tokens, *tiles = place(ids.contiguous(), up.words.shape[0], config["BLOCK_M"])
    of_up, of_down = up.side_by_side(), down.side_by_side()
    h = tile_wgmma8.multiply(
        tile_wgmma8.rounded(x.contiguous(), of_up, int8, tokens=tokens, slots=row), of_up, up.bias, config, up.N, tuple(tiles)
    )
    gate = act if act in tile_wgmma8.GATES and tile_wgmma8.block_of(of_down.K)[0] else ""
    h8 = tile_wgmma8.rounded(h if gate else between(h, act), of_down, int8, gate, tokens)
    return weighed(tile_wgmma8.multiply(h8, of_down, down.bias, config, down.N, tuple(tiles)), row, weights)


def _config(call: ExpertsCall, legal: list[Config]) -> Config:
    assert call.gate_up[2] is not None
    return config_for(_rows(call), call.gate_up[2])


@register(
    "cuda/grouped_fp8", op="experts", rank=19, acts=("fp8",), configs=(SMALL, LARGE), default_config=_config,
    refuse=lambda call: _refuse(call, "fp8"),
)  # fmt: skip
def grouped_fp8(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Stack, down: Stack, act: str, config: Config
) -> torch.Tensor:
    """A mixture's layer whose products round what they multiply to e4m3 per row."""
    return layer(x, ids, weights, gate_up, down, act, config, False)


@register(
    "cuda/grouped_int8", op="experts", rank=19, acts=("int8",), configs=(SMALL, LARGE), default_config=_config,
    refuse=lambda call: _refuse(call, "int8"),
)  # fmt: skip
def grouped_int8(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Stack, down: Stack, act: str, config: Config
) -> torch.Tensor:
    """A mixture's layer whose products round what they multiply to int8 per row."""
    return layer(x, ids, weights, gate_up, down, act, config, True)
