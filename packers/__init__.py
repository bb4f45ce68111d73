"""What the bytes mean: schemes, quantized tensors, memory layouts, foreign formats. Pure torch; needs no GPU."""
