"""yaqa or learn, then all layers and norms follow the whole model's KL divergence: best, slowest. Needs a calibration text."""

from lowq_cli.quantizers.yaqa import quantize

__all__ = ["quantize"]

TEXT = True
CARRIES = True
CURVATURE = True  # at the widths of calibrate/requirements.py's BOTH_SIDES
LEARN = True  # at the others: `calibrate` hands a layer's results to calibrate/learn.py
DISTILL = True  # and all layers' to calibrate/end_to_end.py
