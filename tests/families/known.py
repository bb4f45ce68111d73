"""Families that are not quantized whole, each with the reason. A family that is must be removed from this list."""

SAVED = "transformers 5.23 cannot read back what it saved: the keys of per_layer_config become text in config.json"
DRAFT = "a draft for another model, whose states its forward takes: it has no logits of its own"
NO_DECODER = "transformers cannot build its causal class from its default config, which is that of text to music"
EXCEPTIONS = {
    "blt": "packed and right; transformers 5.23 cannot generate with it either: its cache asks for a field its config lacks",
    "cpmant": "packed and right; its cache counts prompt tokens of its own, which lowq's decoder does not feed",
    "dots3_note": SAVED,
    "dots3_note_text": SAVED,
    "gemma3n": "its vision tower is of the package timm; gemma3n_text, its language model, comes through",
    "gemma4_assistant": DRAFT,
    "gemma4_unified_assistant": DRAFT,
    "hrm_text": "transformers cuts a tensor of its files into several parameters, which packed rows cannot follow yet",
    "inkling2_text": "its files interleave gate and up, which transformers undoes in loading: packed rows cannot follow yet",
    "inkling_text": "its shared experts stand in a module of their own: 15% of the tiny model, which has 4 experts",
    "kimi_linear": "packed and right; 8 bits move its random router's choices, and with them the median token, by 7%",
    "musicgen": NO_DECODER,
    "musicgen_melody": NO_DECODER,
    "rwkv": "its model divides the weights of three layers of each block in place; those stay as they are",
}
