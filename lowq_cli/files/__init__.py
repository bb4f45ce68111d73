"""Model folders: the sources of weights, the contents of a lowq checkpoint, and the checks of files before they are used."""
