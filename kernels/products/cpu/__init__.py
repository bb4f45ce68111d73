"""Products on the CPU: `cpu/packed`, own C++ over the layout `cpu`, and `cpu/int4`, torch's, where no compiler is."""
