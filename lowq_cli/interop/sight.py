"""Whether a model on disk takes pictures, by its config and by the files next to it: before it is imported or loaded."""

from lowq_cli.interop.foreign import open_foreign
from lowq_cli.state import user_path
from lowq_packers.arch.config import NotPlain, read_config
from lowq_packers.errors import UnsupportedError


def check_sight(model: str) -> None:
    """Raise UnsupportedError for a local model without a tower, and as `open_foreign`; other models are not examined."""
    path = user_path(model)
    if model != "demo" and not path.exists():
        return
    with open_foreign(model, headers_only=True) as source:
        try:
            images = read_config(source.config)[1].images
        except NotPlain:  # the decoder says why it does not support it
            return
        if images is not None:
            return
        if path.suffix == ".gguf":
            why = source.notes[0] if source.notes else f"there is no mmproj*.gguf that fits it in {path.parent}"
            raise UnsupportedError(
                f"{model} takes no pictures: {why}; put its mmproj file into that folder, or leave the pictures out"
            )
        raise UnsupportedError(f"{model} takes no pictures ({source.config.get('model_type')} has no tower); leave them out")
