"""Parts of the commands that generate text: files of prompts, answers of a running server, the report on an answer."""
