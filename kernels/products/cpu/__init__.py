"""Products on the CPU: `cpu/packed`, C++ over the layout `cpu`, and `cpu/int4`, torch's, if there is no compiler."""
