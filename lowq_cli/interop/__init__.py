"""Checkpoints of other tools read and written, and what serves them."""
