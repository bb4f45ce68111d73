"""Answering many requests on one model: an engine that computes tokens, and HTTP in front of it."""
