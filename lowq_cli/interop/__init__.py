"""Read and write checkpoints of other tools, and serve checkpoints with vLLM."""
