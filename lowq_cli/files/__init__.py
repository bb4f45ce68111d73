"""Model folders: where weights come from, what a lowq checkpoint holds, and how files are checked before they are believed."""
