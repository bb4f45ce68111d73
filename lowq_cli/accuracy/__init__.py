"""What is spent to lose less (calibration, rotation, mixed widths), and how the loss is measured."""
