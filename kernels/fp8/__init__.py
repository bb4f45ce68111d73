"""8-bit floats (e4m3) with one scale per two-dimensional block: quantizing on the fly, and matrix products of the result."""
