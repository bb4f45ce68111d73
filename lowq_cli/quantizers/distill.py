"""yaqa, gptq or learn, then all layers and norms follow the model's KL divergence: best, slowest. Needs a calibration text."""

from lowq_cli.quantizers.yaqa import quantize

__all__ = ["quantize"]

TEXT = True
CARRIES = True
CURVATURE = True  # at the widths of calibrate/requirements.py's BOTH_SIDES
LEARN = True  # `calibrate` trains each layer in calibrate/learn.py, except where requirements.py's learns_alone says no
DISTILL = True  # then `calibrate` trains all layers together in calibrate/end_to_end.py
