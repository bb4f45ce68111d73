"""Names of the parts outside the text model: image and sound towers, and the projectors of their features."""

import re

TOWERS = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|multi_?modal\w*|mm_\w+|embed_vision|embed_audio)\.")
PROJECTORS = re.compile(r"merger|projector|(^|\.)(mm_\w+|embed_vision|embed_audio)\.")


def anywhere(name: str) -> str:
    """A regular expression of a tower's module wherever its reader puts the tower: files have it as visual, transformers as
    model.visual."""
    match = TOWERS.search(name)
    assert match, name
    return rf"(.*\.)?{re.escape(name[match.start(2) :])}$"
