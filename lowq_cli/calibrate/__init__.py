"""What is spent to lose less: calibration on a text, rotation, widths chosen by how sensitive a layer is."""
