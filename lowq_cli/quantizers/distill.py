"""yaqa, gptq or learn, then all layers and norms follow the model's KL divergence: best, slowest. Needs a calibration text."""

from lowq_cli.quantizers.yaqa import quantize

__all__ = ["quantize"]

TEXT = True
CARRIES = True
CURVATURE = True  # at the widths of calibrate/requirements.py's BOTH_SIDES
LEARN = True  # at other widths than those and STRAIGHT: `calibrate` trains each layer in calibrate/learn.py
DISTILL = True  # then `calibrate` trains all layers together in calibrate/end_to_end.py
