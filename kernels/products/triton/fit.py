"""Which configs of the dot kernels can run a call, and which one to use without measurements."""

import triton

from lowq_kernels import gpu
from lowq_kernels.dispatch import policy
from lowq_kernels.dispatch.registry import Call, Config
from lowq_kernels.products.triton.decode import codes_per_step

NATURAL_STEPS = (32, 128)  # min. and max. k per step in natural order: fewer cost loop overhead, more cost shared memory
POSITION_ROWS = 16  # the depth of one tensor-core product
SLACK = 8 << 10  # max. bytes that the compiler takes beyond the tiles, for odd N and groups, in the tests' cases
MOST_CODES = 512  # max. decoded codes per thread and step; 2 warps of 512 were twice as fast as 4 of 256 at 1 and 3 bits


def shared_bytes(call: Call, config: Config) -> int:
    """Bytes of shared memory that a tile product's pipelined loads and operands take, rounded up a little.

    Where rows of words begin off a 64-byte boundary, they are loaded in another order than tensor cores read weights, and
    all codes of a step change places through shared memory: 208 KiB at 3 bits where an even N takes 96.
    """
    rows, stages = config["ROWS"], max(config["num_stages"], 2)
    k = rows * codes_per_step(call.scheme.bits)
    words = rows * config["BLOCK_N"] * 4 * (3 if call.scheme.bits == 3 else 1)
    x = config["BLOCK_M"] * k * 2
    meta = rows * config["BLOCK_N"] * 4
    operands = x if config["BLOCK_M"] >= 64 else 0  # wgmma reads x while the next stage is already being filled
    if config["NATURAL"]:
        operands += config["BLOCK_N"] * k * 2
    tiles = (stages - 1) * (words + x + meta) + operands
    if call.N % 16 and not config["NATURAL"]:
        tiles = max(tiles, (stages - 1) * (words + x) + operands + k * config["BLOCK_N"] * 2)
    return tiles + (SLACK if call.N % 16 or call.scheme.group_size % k else 0)


def tile_refusal(call: Call, config: Config) -> str | None:
    """Why a tile product cannot run this call with this config, or None."""
    E = codes_per_step(call.scheme.bits)
    k = config["ROWS"] * E
    if config["NATURAL"]:
        if not NATURAL_STEPS[0] <= k <= NATURAL_STEPS[1]:
            return f"steps of {k} codes; natural order takes {NATURAL_STEPS[0]} to {NATURAL_STEPS[1]}"
    elif config["ROWS"] < POSITION_ROWS:
        return f"products of depth {config['ROWS']}; tensor cores take {POSITION_ROWS}"
    elif config["BLOCK_N"] * k > MOST_CODES * 32 * config["num_warps"] or (config["BLOCK_M"] >= 64 and E > 8):
        return "decoded codes do not fit the registers"
    if call.device != "cuda":
        return None
    limit = gpu.of(call.capability).smem_block
    need = max(shared_bytes(call, config), 4 * config["BLOCK_M"] * config["BLOCK_N"])
    return None if need <= limit else f"needs {triton.cdiv(need, 1024)} KiB of shared memory, a block has {limit >> 10}"


def imbalance(call: Call, config: Config, model: dict[str, float]) -> float:
    """How far a config's programs are from the model's `programs` a multiprocessor, fewer weighing more; least 1/4."""
    tiles = triton.cdiv(call.M, config.get("BLOCK_M", 1)) * triton.cdiv(call.N, config["BLOCK_N"])
    fill = tiles * max(config.get("SPLIT_K", 1), 1) / (model["programs"] * gpu.of(call.capability).sms)
    return 1 / fill if fill < 1 else fill / 4


def closest_config(call: Call, legal: list[Config]) -> Config:
    """A config for a call without measurements: tiles that fit M, programs that fill the GPU, and the model's penalties for
    8-row tiles and for many warps with 32 codes per word (1 and 3 bits)."""
    model = policy.model("triton/gemm", gpu.of(call.capability))
    wide = codes_per_step(call.scheme.bits) == 32

    def cost(c: Config) -> float:
        tiles_m = triton.cdiv(call.M, c["BLOCK_M"])
        padding = tiles_m * c["BLOCK_M"] / max(call.M, 16)
        lesson = model["8_rows"] * (c["BLOCK_M"] == 8) + model["many_warps"] * (
            wide and not c["NATURAL"] and c["num_warps"] > 2
        )
        return 2 * tiles_m + padding / 2 + imbalance(call, c, model) + lesson

    return min(legal, key=cost)
