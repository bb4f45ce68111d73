"""LLaVA and InternVL: a language model of any described family and a vision tower, whose features replace image tokens."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import of_vision, token_of, wrapper
from lowq_packers.arch.mistral import TOWERS, text
from lowq_packers.arch.parts import Images


def side(value: Any) -> int:
    """One side of a size, which configs give as a number or as a pair."""
    return int(value if isinstance(value, int) else value[0])


def llava(c: Any) -> Images:
    token, kind, patch = token_of(c, "image", 32000), of_vision(c, "model_type", CLIP), side(of_vision(c, "patch_size", 14))
    if kind == "pixtral":  # Pixtral 12B
        return Images(token, "rows", patch=patch)
    first = getattr(c, "vision_feature_select_strategy", "default") == "default"  # the tower's first row is left out
    rows = (side(of_vision(c, "image_size", 336)) // patch) ** 2 + (kind == CLIP) - first
    return Images(token, rows=rows, patch=patch)


def internvl(c: Any) -> Images:
    token = token_of(c, "image", 151667)  # the id after those of the tokens that frame an image; config.json names neither
    frame = token_of(c, "boi", token - 2), token_of(c, "eoi", token - 1)
    rows, merge = getattr(c, "image_seq_length", None) or 256, round(1 / (getattr(c, "downsample_ratio", None) or 0.5))
    return Images(token, "framed", *frame, rows=rows, patch=side(of_vision(c, "patch_size", 14)), merge=merge)


CLIP = "clip_vision_model"
FAMILIES = (
    Family("llava", wrapper(text, *TOWERS, images=llava), {"tie_word_embeddings": False}, text="llama"),
    Family("internvl", wrapper(text, *TOWERS, images=internvl), {"tie_word_embeddings": True}, text="qwen2"),
)
