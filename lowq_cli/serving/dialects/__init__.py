"""The APIs that clients speak, one file each: a dialect parses a body into an `Asked` and writes the parts of an answer."""
