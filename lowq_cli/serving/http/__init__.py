"""OpenAI's HTTP interface in front of an engine: what a body may say, texts from tokens, answers whole and as a stream."""
