"""learn, then the scales and zeros of all layers follow the whole model's KL divergence: slowest. Needs a calibration text."""

from lowq_cli.quantizers.gptq import quantize

__all__ = ["quantize"]

CARRIES = True
LEARN = True  # `calibrate` hands a layer's results to calibrate/learn.py
DISTILL = True  # and all layers' to calibrate/end_to_end.py
