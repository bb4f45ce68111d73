"""How much was lost: perplexity, distance from another model, errors layer by layer."""
