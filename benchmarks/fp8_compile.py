"""Everything that fp8_speed.py times, compiled beforehand: a share of it in each of several processes."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from fp8_speed import ACTS, CODES, DEVICE, GEMMS, SIZES, block_pairs, compile_quantizer

from lowq_kernels.cuda import nvrtc
from lowq_kernels.dispatch.registry import Call, kernels, named
from lowq_kernels.fp8 import block_quant, gemm_triton, gemm_wgmma
from lowq_kernels.fp8.block_quant import fp8_block_quant
from lowq_kernels.fp8.call import Fp8Call
from lowq_kernels.products.cuda import tile_wgmma8
from lowq_packers import fp8
from lowq_packers.fp8 import FP8, Fp8Matrix
from lowq_packers.scheme import Scheme


def compile_share(index: int, of: int, parts: Sequence[str]) -> None:
    """Compile one share of everything that these parts will time, on rubbish."""
    x = torch.randn(512, 512, device=DEVICE, dtype=torch.bfloat16)
    work: list[Callable[[], object]] = [partial(fp8_block_quant, x, b) for b in ((128, 128), (256, 256), (1, 128), (1, 512))]
    if "quantizer" in parts:
        plans = [*block_quant.TILE_PLANS, block_quant.STRIDE_PLANS[0], *(block_quant.plan_for(n, n, (256, 256)) for n in SIZES)]
        work += [partial(fp8_block_quant, x, (256, 256), p) for p in plans]
    if "codes" in parts:
        for N, K, bits, group, Ms in CODES:
            for act, M in ((a, m) for a in ACTS for m in Ms):
                spec = kernels()[f"cuda/tile_{act}"]
                call = Call(M, N, K, Scheme(bits, group, "float"), "tile", torch.float16, "cuda", (9, 0), act)
                if spec.why_not(call) is None:
                    for c in spec.legal_configs(call):
                        instance = tile_wgmma8.expression(bits, 0, act == "int8", group, True, c)
                        work.append(partial(nvrtc.compiled, "tile_wgmma8.cu", instance, "sm_90a"))
    if "gemm" in parts:
        work += gemm_compilations()
    for thunk in work[index::of]:
        thunk()


def gemm_compilations() -> list[Callable[[], object]]:
    """Launches and NVRTC's work, one for each binary that `gemm_rows` needs, on matrices of those sizes."""
    launches: dict[str, Callable[[], object]] = {}
    instances = set()

    def quantize(M: int, K: int, block: fp8.Block) -> Fp8Matrix:
        return fp8_block_quant(torch.ones(M, K, device=DEVICE, dtype=torch.bfloat16), block)

    def multiply_once(M: int, N: int, K: int, config: dict[str, int]) -> torch.Tensor:
        w = Fp8Matrix(torch.zeros(N, K, device=DEVICE, dtype=FP8), torch.ones(N // 128, K // 128, device=DEVICE), (128, 128))
        return gemm_triton.fp8_gemm(quantize(M, K, (1, 128)), w, None, torch.bfloat16, config)

    for N, K, Ms in GEMMS:
        for M in Ms:
            config = gemm_triton.config_for(M, N, K)
            launches.setdefault(f"{config} {M == 1}", partial(multiply_once, M, N, K, config))
            for name, x_block, w_block in block_pairs(K):
                a, b = meta_matrix(M, K, x_block), meta_matrix(N, K, w_block)
                plan = f"{name} {block_quant.plan_for(M, K, x_block)} {M == 1} {K // 256 % 16} {min(x_block[1], 4096)}"
                launches.setdefault(plan, partial(quantize, M, K, x_block))
                call = Fp8Call.of(a, b, torch.bfloat16)
                c = gemm_wgmma.config_for(call, named("cuda/fp8_gemm").legal_configs(call))
                modes = (gemm_wgmma.mode_of(a), gemm_wgmma.mode_of(b))
                instances.add(gemm_wgmma.expression(c, 1, modes[::-1] if c["SWAP"] else modes))
    return [*launches.values(), *(partial(nvrtc.compiled, "fp8_gemm.cu", i, "sm_90a") for i in sorted(instances))]


def meta_matrix(M: int, K: int, block: fp8.Block) -> Fp8Matrix:
    """A matrix with a shape and no numbers."""
    q = torch.empty(M, K, dtype=FP8, device="meta")
    return Fp8Matrix(q, torch.empty(fp8.scale_shape(q.shape, block), device="meta"), block)


def compile_inductor(n: int) -> None:
    """Compile torch.compile's quantizer for n x n."""
    torch.compile(compile_quantizer, dynamic=False)(torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16))
