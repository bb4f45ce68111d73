"""Measures of quantization error: perplexity, distance from another model, errors per layer, tasks."""
