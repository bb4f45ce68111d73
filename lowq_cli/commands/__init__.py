"""One file per verb: a function of the file's name. Nothing heavy is imported at a file's top."""

EXIT_INTERRUPTED = 130  # of a command that Ctrl-C ended
