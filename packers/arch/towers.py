"""Names of the parts outside the text model: image and sound towers, and the projectors of their features."""

import re

TOWERS = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|multi_?modal\w*|mm_\w+|embed_vision|embed_audio)\.")
PROJECTORS = re.compile(r"merger|projector|(^|\.)(mm_\w+|embed_vision|embed_audio)\.")


def anywhere(name: str) -> str:
    """A regular expression for a tower's module at either place: files call the tower visual, transformers
    model.visual."""
    match = TOWERS.search(name)
    assert match, name
    return rf"(.*\.)?{re.escape(name[match.start(2) :])}$"
