"""Quantization schemes, quantized tensors, memory layouts, foreign formats and model families. Pure torch; needs no GPU."""
