"""What is odd in published folders and has broken other tools: each read as the same model, or refused by name."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from dialects import TEMPLATES
from making import write
from published import FAMILIES
from walking import GREEDY, NEW, PROMPT, Walk, _command, _json, run

from lowq_packers.errors import DamagedError


def facts(folder, name="config.json", **changed):
    """Change fields of a JSON file; of text_config where it has one and the field is there."""
    path = folder / name
    found = json.loads(path.read_text())
    for key, value in changed.items():
        table = found["text_config"] if key in found.get("text_config", {}) else found
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
    path.write_text(json.dumps(found))


def weights(folder, change):
    """Rewrite a folder's weights as one file."""
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(found)
    save_file({k: v.contiguous() for k, v in found.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def named(**tensors):
    """Add tensors: name, with __ for a dot, -> shape."""
    return lambda folder: weights(
        folder, lambda w: w.update({n.replace("__", "."): torch.randn(s) for n, s in tensors.items()})
    )


def mtp_layer(folder):
    """DeepSeek and GLM: the draft is one more layer, with a second embedding and head."""

    def change(w):
        w |= {n.replace("layers.1.", "layers.2."): v * 0.5 for n, v in w.items() if ".layers.1." in n}
        w["model.layers.2.embed_tokens.weight"] = w["model.embed_tokens.weight"] * 2
        w["model.layers.2.shared_head.head.weight"] = w["lm_head.weight"] * 2
        w |= {f"model.layers.2.{n}.weight": torch.ones(64) for n in ("enorm", "hnorm", "shared_head.norm")}
        w["model.layers.2.eh_proj.weight"] = torch.randn(64, 128)

    weights(folder, change)


def without_vision(folder):
    weights(folder, lambda w: [w.pop(n) for n in [*w] if "visual" in n])
    facts(folder, vision_config=None)


def shared_heads(folder):
    """Gemma 4's last layers share keys and values with others, and have some of their own in the file all the same."""

    def change(w):
        last = "model.language_model.layers.3.self_attn."
        w |= {n.replace("layers.1.", "layers.3."): v * 3 for n, v in w.items() if "layers.1.self_attn.k" in n}
        assert f"{last}k_proj.weight" in w

    weights(folder, change)


def second_copy(folder):
    """Mistral's own format beside, under names of its own."""
    save_file({"layers.0.attention.wq.weight": torch.randn(64, 64)}, folder / "consolidated.safetensors")


SAME = {  # number in the list, what -> (family, what is done to its folder)
    "1 extra special tokens as a table": ("qwen3.5", lambda f: facts(f, "tokenizer_config.json", extra_special_tokens={"image_token": "<|image_pad|>"})),
    "1 extra special tokens as an old list": ("qwen3", lambda f: facts(f, "tokenizer_config.json", extra_special_tokens=["<|im_start|>"], additional_special_tokens=None)),
    "3 no list in generation_config": ("qwen3", lambda f: facts(f, "generation_config.json", eos_token_id=json.loads((f / "config.json").read_text())["eos_token_id"])),
    "6 a draft in tensors of its own": ("qwen3-next", named(mtp__fc__weight=(64, 128), mtp__norm__weight=(64,))),
    "6 a draft that config.json names and no file has": ("qwen3.5", lambda f: facts(f, mtp_num_hidden_layers=3)),
    "14 Infinity as transformers 5 writes it": ("nemotron-h", lambda f: facts(f, time_step_limit=[0.0, {"__float__": "Infinity"}])),
    "16 a draft as one more layer, DeepSeek": ("deepseek-v3", mtp_layer),
    "16 a draft as one more layer, GLM": ("glm-4.5", mtp_layer),
    "17 buffers, old Llama": ("llama-3.1", named(model__layers__0__self_attn__rotary_emb__inv_freq=(8,))),
    "17 buffers, Kimi K2": ("kimi-k2", named(model__layers__0__self_attn__rotary_emb__inv_freq=(8,))),
    "17 buffers, GPT-2": ("gpt2", named(h__0__attn__bias=(1, 1, 8, 8), h__0__attn__masked_bias=())),
    "17 buffers, NeoX": ("pythia", named(gpt_neox__layers__0__attention__bias=(1, 1, 8, 8), gpt_neox__layers__0__attention__masked_bias=(), gpt_neox__layers__0__attention__rotary_emb__inv_freq=(2,))),
    "18 keys of layers that share others'": ("gemma-4-e", shared_heads),
    "19 rope in the new form": ("llama-3.2", lambda f: facts(f, rope_theta=None, rope_scaling=None, rope_parameters=FAMILIES["llama-3.2"].config["rope_scaling"] | {"rope_theta": 5e5})),
    "19 type beside rope_type": ("llama-3.2", lambda f: facts(f, rope_scaling=FAMILIES["llama-3.2"].config["rope_scaling"] | {"type": "llama3"})),
    "20 dtype beside torch_dtype": ("qwen3", lambda f: facts(f, dtype="bfloat16")),
    "20 two names of the number of experts": ("qwen3-moe", lambda f: facts(f, num_local_experts=4)),
    "21 a vision_config without a type": ("qwen3-vl", lambda f: facts(f, vision_config={k: v for k, v in json.loads((f / "config.json").read_text())["vision_config"].items() if k != "model_type"})),
    "23 text alone under a class of images": ("qwen3.5", without_vision),
    "30 one large file and no index": ("qwen3-moe", lambda f: weights(f, lambda w: None)),
    "31 a class that transformers 4 lacks": ("qwen3", lambda f: facts(f, "tokenizer_config.json", tokenizer_class="TokenizersBackend")),
    "32 nothing but eos and a length": ("qwen3", lambda f: (f / "generation_config.json").write_text(json.dumps({"max_length": 99, "eos_token_id": json.loads((f / "generation_config.json").read_text())["eos_token_id"]}))),
    "a head beside a tied embedding": ("llama-3.2", lambda f: weights(f, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))),
    "the weights a second time": ("mistral-nemo", second_copy),
    "no quantization, said so": ("qwen3", lambda f: (f / "config.json").write_text(json.dumps(json.loads((f / "config.json").read_text()) | {"quantization_config": None}))),
}  # fmt: skip
_made: dict[str, list[int]] = {}


def said(folder):
    return _json("generate", folder, "--prompt", PROMPT, "--max-new-tokens", NEW, *GREEDY)["tokens"]


@pytest.mark.parametrize("odd", SAME)
def test_an_odd_folder_is_the_model_that_it_is_without_the_oddity(tmp_path, odd):
    family, change = SAME[odd]
    plain = write(FAMILIES[family], tmp_path / "plain")
    if family not in _made:
        _made[family] = said(plain)
    change(plain)
    assert said(plain) == _made[family]
    run(
        "quantize",
        plain,
        "--bits",
        8,
        "--group",
        32,
        "--method",
        "rtn",
        "--lm-head",
        "keep",
        "--out",
        tmp_path / "q",
        "--quiet",
    )
    assert len(said(tmp_path / "q")) > 0


@pytest.mark.parametrize("tower", [False, True], ids=["text alone", "with its tower"])
def test_experts_of_a_derivative_under_other_names_are_read_or_refused(tmp_path, tower):
    """7: a Qwen 3.5 mixture under the names of a text model; others made its experts anew, and wrote noise."""
    folder = write(FAMILIES["qwen3.5-moe"], tmp_path / "m")
    before = said(folder)

    def change(w):
        for name in [*w]:
            if name.startswith("model.language_model."):
                w["model." + name.removeprefix("model.language_model.")] = w.pop(name)
            elif not tower and "visual" in name:
                del w[name]

    weights(folder, change)
    if not tower:
        assert said(folder) == before
        return
    code, _, err = _command("generate", folder, "--prompt", PROMPT, "--device", "cpu")
    assert code == DamagedError.exit_code
    assert "model.language_model.embed_tokens.weight is missing" in err


@pytest.mark.parametrize("mended", [True, False])
def test_a_split_that_was_published_wrong_is_mended_where_the_folder_says_so(tmp_path, mended):
    walk = Walk("mistral-nemo", tmp_path)
    facts(walk.published, "tokenizer_config.json", fix_mistral_regex=mended)
    walk.theirs = type(walk.theirs).from_pretrained(str(walk.published), fix_mistral_regex=mended)
    walk._tokens()


def test_templates_in_a_folder_of_their_own_are_read_as_transformers_reads_them(tmp_path):
    walk = Walk("command-r7b", tmp_path)
    facts(walk.published, "tokenizer_config.json", chat_template=None)
    (walk.published / "chat_template.jinja").write_text(TEMPLATES["cohere"])
    (walk.published / "additional_chat_templates").mkdir()
    (walk.published / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATES["cohere-tools"])
    walk.theirs = type(walk.theirs).from_pretrained(str(walk.published))
    assert sorted(walk.theirs.chat_template) == ["default", "tool_use"]
    walk._tokens()
