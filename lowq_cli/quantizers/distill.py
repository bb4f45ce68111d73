"""yaqa, gptq or learn, then all layers and norms follow the model's KL divergence: best, slowest. Needs a calibration text.

What a matrix starts from (`starts_straight`, `rounds_both_sides` and `learns_alone` of calibrate/requirements.py):
    scales in floats: yaqa at 4 and 3 bits (learn for experts), gptq at 2, learn at 8 and 1
    scales in bytes, as in table-e4m3: gptq at 4, 3 and 2 bits, learn at 8 and 1
    a model of more than MOST_CODES weights: learn in the place of gptq
"""

from lowq_cli.quantizers.yaqa import quantize

__all__ = ["quantize"]

TABLES = True
TEXT = True
CARRIES = True
CURVATURE = True  # at the widths of calibrate/requirements.py's BOTH_SIDES
LEARN = True  # `calibrate` trains each layer in calibrate/learn.py, except where requirements.py's learns_alone says no
DISTILL = True  # then `calibrate` trains all layers together in calibrate/end_to_end.py
