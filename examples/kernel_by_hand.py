"""Call one kernel without a model: quantize a matrix, pack its codes, ask which kernels take the product, run one."""

import torch

import lowq
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.registry import Call
from lowq_packers.layouts import pack

M, N, K = 3, 256, 512  # rows of x, outputs, inputs


def main() -> None:
    g = torch.Generator().manual_seed(0)
    W, x = torch.randn(N, K, generator=g), torch.randn(M, K, generator=g).bfloat16()
    q = lowq.quantize_tensor(W, bits=4, group_size=64, dtype=torch.bfloat16)  # one code per byte
    wanted = x.float() @ q.dequantize().float().T  # what every kernel has to compute

    weight = pack(q, "cpu")  # the order of words that the CPU kernels read; "tile" is that of the CUDA kernels
    call = Call.of(x, weight)
    for name, spec in registry.kernels(device="cpu").items():
        print(f"{name:20} {spec.why_not(call) or 'takes this product'}")

    spec, config = registry.select(call)
    y = spec.launch(x, weight, None, config)
    error = (y.float() - wanted).norm() / wanted.norm()
    print(f"{spec.name} computed it; relative error {error:.1e}")
    assert error < 0.012  # of bfloat16

    layer = lowq.QuantLinear.from_quantized(q, dtype=torch.bfloat16)  # a torch module packs and chooses by itself
    assert torch.allclose(layer(x).float(), y.float(), atol=0.5, rtol=0.02)


if __name__ == "__main__":
    main()
