"""Parses a model's output into thoughts, answer and tool calls. Each syntax of calls has one file.

`read.Reader` turns text into `parts.Part`s; `syntaxes.syntax_of` detects a model's syntax from its chat template.
"""
