"""The APIs that clients speak, one file each: a dialect parses a body into `Params` and writes the parts of an answer."""
