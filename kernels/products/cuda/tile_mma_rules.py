"""The configs of cuda/tile_mma, and which of them dispatch takes without a table."""

import math

from lowq_kernels.dispatch.registry import Call, Config
from lowq_packers.layouts.tile import padded_rows

KEYS = ("WARPS", "NT", "STEP", "UNROLL", "BLOCKS", "DIGITS")


def config_of(*values: int) -> Config:
    """The config of these values, in the order of KEYS; DIGITS, where it is left out, is 0."""
    return dict(zip(KEYS, (*values, 0), strict=False))


HALVES: tuple[Config, ...] = tuple(
    config_of(*values)
    for values in (
        (16, 1, 128, 1, 2),
        (16, 1, 128, 1, 1),
        (16, 1, 128, 2, 1),
        (16, 1, 256, 1, 2),
        (16, 2, 128, 1, 1),
        (16, 2, 128, 2, 1),
        (16, 2, 256, 1, 1),
        (16, 2, 256, 2, 1),
        (12, 2, 128, 2, 1),
        (8, 1, 128, 2, 1),
        (8, 1, 128, 2, 4),
        (8, 1, 256, 1, 3),
        (8, 1, 256, 1, 1),
        (8, 1, 256, 2, 1),
        (8, 2, 128, 1, 1),
        (8, 2, 128, 2, 2),
        (8, 2, 128, 2, 1),
        (8, 2, 256, 1, 2),
        (8, 2, 256, 2, 1),
        (8, 2, 256, 2, 2),
        (4, 1, 128, 1, 1),
        (4, 1, 128, 1, 7),
        (4, 1, 128, 2, 1),
        (4, 1, 256, 1, 8),
        (4, 1, 256, 2, 4),
        (4, 1, 256, 2, 5),
        (4, 1, 256, 1, 1),
        (4, 2, 128, 1, 1),
        (4, 2, 128, 1, 4),
        (4, 2, 128, 1, 7),
        (4, 2, 128, 2, 1),
        (4, 2, 128, 2, 4),
        (4, 2, 256, 1, 1),
        (4, 2, 256, 1, 5),
        (4, 2, 256, 2, 1),
        (4, 2, 256, 2, 4),
        (2, 1, 256, 1, 1),
        (2, 2, 128, 1, 8),
        (2, 2, 128, 2, 1),
        (2, 4, 128, 1, 1),
        (2, 2, 256, 1, 1),
        (2, 4, 256, 1, 1),
    )
)
BYTES: tuple[Config, ...] = tuple(
    config_of(*values, 1)
    for values in (
        (16, 1, 256, 1, 1),
        (16, 1, 512, 1, 1),
        (16, 2, 256, 1, 1),
        (16, 2, 256, 2, 1),
        (16, 2, 512, 1, 1),
        (8, 1, 256, 1, 1),
        (8, 1, 512, 1, 1),
        (8, 2, 256, 1, 1),
        (8, 2, 256, 2, 1),
        (8, 2, 512, 1, 1),
        (8, 2, 512, 2, 1),
        (8, 4, 256, 1, 1),
        (8, 4, 256, 2, 1),
        (8, 4, 512, 1, 1),
        (4, 1, 256, 1, 1),
        (4, 1, 512, 1, 1),
        (4, 2, 256, 1, 1),
        (4, 2, 256, 2, 1),
        (4, 2, 512, 1, 5),
        (4, 4, 256, 1, 1),
        (4, 4, 256, 2, 1),
        (4, 4, 512, 1, 1),
        (2, 2, 512, 2, 1),
    )
)
# What to take without a table, from H100 sweeps (benchmarks/notes/tile_mma.md): within 4% of the best in most cells.
# Each line: kinds of weight (bits; g: 4 bits in groups under 128), how many row tiles of 16 there are (as `tiles_of`
# names it), rows of x a block up to, what `config_of` takes. The first line that matches, is legal and not `idle` holds.
RULES = (
    ("4", "short", 2, (8, 4, 256, 1, 1, 1)),
    ("2", "short", 1, (16, 2, 256, 2, 1, 1)),
    ("4g", "flat", 1, (4, 1, 256, 1, 1, 1)),
    ("2", "flat", 1, (4, 4, 512, 1, 1, 1)),
    ("4", "flat", 16, (8, 2, 128, 2, 2)),
    ("4g21", "tall", 1, (16, 2, 512, 1, 1, 1)),
    ("4g2", "few", 1, (8, 4, 512, 1, 1, 1)),
    # alone (8, 2, 512, 1, 1, 1) takes 4.7 for 5.4 us, but in a step of 8B 2.6 more
    ("4", "fit", 1, (8, 1, 256, 1, 3)),
    ("21", "fit", 1, (8, 2, 512, 1, 1, 1)),
    ("4", "some", 2, (8, 2, 256, 2, 1, 1)),
    ("4g", "some deep", 1, (16, 1, 256, 1, 1, 1)),
    ("g", "some", 2, (8, 4, 256, 2, 1, 1)),
    ("g", "some deep", 2, (8, 2, 512, 1, 1, 1)),
    ("41", "uneven", 2, (4, 4, 256, 1, 1, 1)),
    ("2", "uneven", 2, (4, 4, 256, 2, 1, 1)),
    ("42", "uneven", 8, (4, 2, 256, 2, 1)),
    ("4g", "many", 2, (4, 4, 256, 2, 1, 1)),
    ("g", "many", 2, (8, 1, 256, 1, 1, 1)),
    ("4g2", "long", 1, (16, 2, 512, 1, 1, 1)),
    ("4", "long", 2, (16, 2, 256, 2, 1, 1)),
    ("g", "few long", 2, (8, 2, 256, 2, 1, 1)),
    ("2", "long", 2, (16, 2, 256, 2, 1, 1)),
    ("1", "some", 2, (8, 2, 512, 2, 1, 1)),
    ("2", "some", 1, (16, 2, 256, 1, 1, 1)),
    ("2", "deep", 1, (16, 2, 256, 1, 1, 1)),
    ("2", "many", 1, (8, 2, 256, 1, 1, 1)),
    ("1", "many", 1, (4, 4, 512, 1, 1, 1)),
    ("1", "deep", 1, (4, 2, 512, 1, 5, 1)),
    ("3", "fit some", 2, (8, 2, 256, 1, 1, 1)),
    ("3", "deep", 2, (4, 1, 512, 1, 1, 1)),
    ("3", "few", 2, (8, 2, 256, 2, 1, 1)),
    ("3", "long", 1, (16, 2, 256, 1, 1, 1)),
    ("3", "long", 2, (8, 2, 512, 2, 1, 1)),
    ("3", "many", 2, (4, 1, 256, 1, 1, 1)),
    ("4", "few some fit", 2, (8, 4, 512, 1, 1, 1)),
    ("4", "deep", 2, (8, 1, 512, 1, 1, 1)),
    ("1", "few long", 2, (16, 2, 256, 2, 1, 1)),
    ("2", "few", 2, (16, 2, 256, 1, 1, 1)),
    ("1", "many deep", 2, (4, 4, 256, 2, 1, 1)),
    ("2", "many", 2, (8, 4, 256, 1, 1, 1)),
    ("2", "deep", 2, (8, 2, 512, 1, 1, 1)),
    ("2", "deep", 2, (4, 2, 256, 2, 1, 1)),  # where the last is idle
    ("21", "some fit", 2, (8, 2, 512, 1, 1, 1)),
    ("4g3", "many deep", 4, (4, 1, 256, 2, 5)),
    ("4", "long", 8, (16, 1, 128, 2, 1)),
    ("4", "many", 8, (4, 2, 128, 1, 7)),
    ("4", "deep", 8, (8, 1, 128, 2, 1)),
    ("4g3", "few", 8, (8, 2, 256, 2, 1)),
    ("4", "tall", 16, (16, 1, 128, 2, 1)),
    ("4", "short", 16, (8, 2, 128, 2, 1)),
    ("4g3", "few", 16, (12, 2, 128, 2, 1)),
    ("4g3", "long", 16, (16, 2, 128, 2, 1)),
    ("4", "many", 16, (2, 2, 128, 2, 1)),
    ("4g", "fit", 8, (8, 1, 256, 1, 3)),
    ("3", "fit", 4, (8, 1, 256, 1, 3)),
    ("g", "many deep", 8, (8, 1, 128, 2, 4)),
    ("g", "many deep", 8, (8, 1, 256, 1, 3)),
    ("4g3", "fit some", 16, (8, 2, 128, 2, 2)),
    ("4g", "deep", 16, (8, 2, 128, 2, 2)),
    ("3", "many deep", 16, (4, 2, 128, 2, 4)),
    ("2", "fit", 4, (8, 1, 256, 1, 3)),
    ("21", "some", 8, (8, 2, 256, 2, 2)),
    ("2", "fit", 8, (8, 2, 256, 2, 2)),
    ("2", "fit", 16, (4, 2, 256, 2, 1)),
    ("2", "some", 16, (8, 2, 128, 2, 2)),
    ("1", "some", 16, (8, 2, 256, 2, 1)),
    ("2", "many deep", 8, (4, 2, 256, 2, 4)),
    ("8", "long few fit some many deep", 8, (16, 1, 128, 1, 2)),
    ("8", "long", 16, (16, 2, 128, 1, 1)),
    ("8", "many deep", 16, (4, 2, 128, 1, 1)),
    ("8", "few", 16, (8, 2, 128, 2, 1)),
    ("4g", "long few", 8, (16, 1, 128, 1, 2)),
    ("1", "few", 8, (16, 2, 256, 1, 1)),
    ("1", "few", 16, (8, 2, 256, 2, 1)),
    ("1", "long", 8, (16, 2, 256, 2, 1)),
    ("21", "long few", 16, (8, 2, 256, 2, 1)),
    ("4g3", "long", 16, (16, 2, 128, 1, 1)),
    ("84g3", "long few", 8, (8, 1, 256, 1, 1)),
    ("2", "few", 24, (8, 2, 128, 2, 1)),
    ("4", "fit", 24, (8, 2, 128, 2, 1)),
    ("21", "long few", 24, (8, 2, 256, 2, 1)),
    ("21", "long few", 32, (4, 2, 256, 2, 1)),
    ("84g32", "long few", 32, (8, 2, 128, 2, 1)),
    ("4g321", "fit", 4, (8, 1, 256, 1, 3)),
    ("1", "fit", 16, (8, 2, 256, 1, 2)),
    ("84g32", "fit", 8, (8, 1, 128, 2, 1)),
    ("4g321", "some", 4, (8, 2, 256, 1, 2)),
    ("1", "some", 16, (4, 2, 256, 1, 1)),
    ("g", "some", 16, (4, 2, 256, 2, 1)),
    ("84g32", "fit some", 16, (8, 2, 128, 1, 1)),
    ("1", "deep", 2, (4, 2, 256, 1, 5)),
    ("1", "many deep", 2, (4, 1, 256, 1, 8)),
    ("1", "many deep", 8, (4, 2, 256, 2, 1)),
    ("3", "many deep", 2, (4, 1, 256, 1, 1)),
    ("21", "many deep", 2, (4, 1, 256, 1, 8)),
    ("2", "many deep", 8, (2, 2, 256, 1, 1)),
    ("g", "many", 8, (4, 1, 128, 1, 7)),
    ("3", "many deep", 8, (4, 1, 256, 1, 1)),
    ("g", "many deep", 8, (4, 2, 128, 1, 1)),
    ("43", "many deep", 16, (4, 2, 128, 1, 4)),
    ("2", "many", 16, (2, 2, 128, 1, 8)),
    ("4g3", "many deep", 16, (4, 2, 128, 1, 1)),
    ("1", "many deep", 8, (4, 2, 256, 1, 1)),
    ("2", "deep", 16, (2, 2, 128, 2, 1)),
    ("2", "deep", 16, (8, 2, 128, 2, 2)),  # where the last is idle
    ("1", "deep", 16, (4, 2, 256, 1, 1)),
    ("1", "many deep", 16, (2, 4, 256, 1, 1)),
    ("21", "fit some many deep", 32, (4, 2, 256, 1, 1)),
    ("84g3", "fit some many deep", 32, (4, 2, 128, 2, 1)),
    ("84g321", "long few fit some many deep", 32, (8, 1, 256, 1, 1)),
    ("84g321", "long few fit some many deep", 32, (4, 2, 256, 1, 1)),
    ("84g321", "long few fit some many deep", 32, (4, 1, 256, 1, 1)),
    ("84g32", "long few fit some many deep", 32, (4, 1, 128, 1, 1)),
)


def tiles_of(call: Call) -> set[str]:
    """How the row tiles fill 132 SMs: two a SM are few (short: over K up to 2048; tall: above 4096; long: above 8192), three
    and four fit and are some; above: many (flat: over K up to 2048; deep: above 4096; uneven: eight a SM, as blocks of four,
    two at a time, would leave over a quarter of their last round empty: there two steps in flight lose least, 24576x4096,
    M = 8, 20.8 us by many small blocks and 17.7)."""
    tiles = padded_rows(call.N) // 16
    if tiles <= 264:
        return {"long"} if call.K > 8192 else {"few"} | ({"tall"} if call.K > 4096 else {"short"} if call.K <= 2048 else set())
    if tiles <= 528:
        return {"fit"} if tiles <= 396 else {"some"}
    if call.K > 4096:
        return {"deep"}
    uneven = math.ceil(tiles / 1056) * 1056 > 1.25 * tiles
    return {"many"} | ({"flat"} if call.K <= 2048 else set()) | ({"uneven"} if uneven else set())


def idle(call: Call, config: Config) -> bool:
    """Whether, of a layer with many row tiles, over a fifth of a block's warps would have no step of the last round along K
    (27648x5120, M = 1, takes 29.3 us by 16 warps with steps of 256, 24.5 by what comes next), or whether all blocks together
    are under seven warps an SM with little each under way (2 bits, M = 16, by two warps a block with two tiles of 128 k:
    10240x8192 takes 36 us and 14336x4096 21, where tile_digits takes 15 and 10)."""
    tiles, steps, warps = padded_rows(call.N) // 16, math.ceil(call.K / config["STEP"]), config["WARPS"]
    few = tiles // config["NT"] * warps < 7 * 132 and tiles * warps * config["STEP"] * config["UNROLL"] < 5000 * 132
    return tiles > 396 and (few or math.ceil(steps / warps) * warps > 1.3 * steps)
