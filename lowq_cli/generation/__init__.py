"""What the commands that generate text share: files of prompts, answers of a running server, and what is said of an answer."""
