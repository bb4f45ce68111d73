"""Plan a run from a recipe: the scheme of every matrix, and the output file that holds it."""
