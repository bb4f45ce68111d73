"""The interfaces that clients speak, one file each: a body becomes an `Asked`, the parts of an answer become its events."""
