"""Kernels: y = x @ dequantize(W)^T and the other operations of a decode step. Importing this package needs no GPU.

`QuantLinear` holds a packed weight; `registry.select` chooses the kernel for a call; each kernel family is a file that
registers itself. Families that need an absent library (triton, NVRTC) are skipped, and `registry.skipped` says so.
"""
