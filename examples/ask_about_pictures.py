"""Ask a model about a picture. This one is tiny and random, so its answer means nothing; a real folder works the same way."""

import json
from pathlib import Path

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, Gemma3Config

import lowq

FOLDER = Path("tiny-gemma3")
SPECIAL = ("<pad>", "<eos>", "<bos>", "<image_soft_token>", "<start_of_image>", "<end_of_image>")
TEMPLATE = """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}
{{- '<start_of_image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"""
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SMALL = {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def write_model() -> None:
    """A folder as Gemma 3's publisher writes it, with two layers, and 4 rows of features for a picture."""
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokens = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    pad, eos, bos, soft, begin, end = map(tokens.token_to_id, SPECIAL)
    text = SMALL | {"vocab_size": 262, "hidden_size": 64, "num_key_value_heads": 2, "head_dim": 16}
    text |= {"pad_token_id": pad, "eos_token_id": eos, "bos_token_id": bos}
    vision = SMALL | {"hidden_size": 32, "patch_size": 4, "image_size": 16}
    ids = {"image_token_index": soft, "boi_token_index": begin, "eoi_token_index": end}
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
    AutoModelForImageTextToText.from_config(config).save_pretrained(FOLDER)
    tokens.save(str(FOLDER / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<bos>"}
    processor = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}} | HALF
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(facts))
    (FOLDER / "preprocessor_config.json").write_text(json.dumps(processor))
    (FOLDER / "chat_template.jinja").write_text(TEMPLATE)


def main() -> None:
    write_model()
    model, tokenizer = lowq.load(FOLDER, device="cpu")
    for colour in ("red", "blue"):
        picture = Image.new("RGB", (40, 30), colour)  # a path, or the bytes of a file, is taken too
        answer = lowq.stream(model, tokenizer, "What is this?", max_new_tokens=8, chat=True, images=[picture])
        list(answer)
        print(f"{colour}: {len(answer.prompts[0])} prompt tokens, answer {answer.tokens[0]}")


if __name__ == "__main__":
    main()
