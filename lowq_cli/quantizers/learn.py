"""gptq, then each layer's codes, scales and zeros follow its error's gradient: slow, for few bits. Needs a calibration text."""

from lowq_cli.quantizers.gptq import quantize

__all__ = ["quantize"]

TABLES = True
TEXT = True
CARRIES = True
LEARN = True  # `calibrate` trains each layer in calibrate/learn.py
