"""learn, then all layers and norms follow the KL divergence of the whole model: best, slowest. Needs a calibration text."""

from lowq_cli.quantizers.gptq import quantize

__all__ = ["quantize"]

TEXT = True
CARRIES = True
LEARN = True  # `calibrate` hands a layer's results to calibrate/learn.py
DISTILL = True  # and all layers' to calibrate/end_to_end.py
