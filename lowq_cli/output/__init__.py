"""What a model writes, taken apart: its thoughts, its answer, its calls of tools. One file a way of writing calls.

`read.Reader` takes text and gives `parts.Part`s; which ways a model has is read off its chat template (`ways.of`).
"""
