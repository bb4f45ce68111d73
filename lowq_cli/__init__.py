"""What a person runs: commands, model reading and writing, quantizers, decode engine."""
