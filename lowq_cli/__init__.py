"""The application: commands, model reading and writing, quantizers, decode engine."""
