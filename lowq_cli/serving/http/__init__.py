"""The HTTP server in front of an engine: it parses bodies, detokenizes answers, and sends them whole or as a stream."""
