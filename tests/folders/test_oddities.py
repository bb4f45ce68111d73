"""Oddities of published folders that have broken other tools: each is read as the same model, or refused by name."""

import json
import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from chat_templates import TEMPLATES
from encoding import COMPRESSED, MODELOPT, fp8, int4, quantize, rows8
from making import write
from published import FAMILIES
from walking import GREEDY, HOW, NEW, PROMPT, SAID, Walk, json_of, run, run_command

from lowq_cli.engine.open_model import tokenizer
from lowq_cli.files.source import UNWANTED, WANTED, open_source
from lowq_cli.interop.foreign import open_decoded
from lowq_cli.serving.http import conversation
from lowq_packers.errors import DamagedError, UnsupportedError


def facts(folder, name="config.json", **changed):
    """Change fields of a JSON file; of text_config where it has one and the field is there."""
    path = folder / name
    result = json.loads(path.read_text())
    for key, value in changed.items():
        table = result["text_config"] if key in result.get("text_config", {}) else result
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
    path.write_text(json.dumps(result))


def weights(folder, change):
    """Rewrite a folder's weights as one file."""
    result = {}
    for file in folder.glob("*.safetensors"):
        result |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(result)
    save_file({k: v.contiguous() for k, v in result.items()}, folder / "model.safetensors", metadata={"format": "pt"})


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


def without_towers(w):
    for name in [n for n in w if "vision" in n]:
        del w[name]


def shared_heads(folder):
    """Gemma 4's last layers share keys and values with others, and have some of their own in the file all the same."""

    def change(w):
        last = "model.language_model.layers.3.self_attn."
        w |= {n.replace("layers.1.", "layers.3."): v * 3 for n, v in w.items() if "layers.1.self_attn.k" in n}
        assert f"{last}k_proj.weight" in w

    weights(folder, change)


def second_copy(folder):
    """Also Mistral's own format, under its own names."""
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
    "23 text alone, of a class that does without a tower": ("gemma-4", lambda f: (weights(f, without_towers), facts(f, vision_config=None))),
    "30 one large file and no index": ("qwen3-moe", lambda f: weights(f, lambda w: None)),
    "31 a class that transformers 4 lacks": ("qwen3", lambda f: facts(f, "tokenizer_config.json", tokenizer_class="TokenizersBackend")),
    "32 nothing but eos and a length": ("qwen3", lambda f: (f / "generation_config.json").write_text(json.dumps({"max_length": 99, "eos_token_id": json.loads((f / "generation_config.json").read_text())["eos_token_id"]}))),
    "a head beside a tied embedding": ("llama-3.2", lambda f: weights(f, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))),
    "the weights a second time": ("mistral-nemo", second_copy),
    "no quantization, said so": ("qwen3", lambda f: (f / "config.json").write_text(json.dumps(json.loads((f / "config.json").read_text()) | {"quantization_config": None}))),
}  # fmt: skip
_made: dict[str, list[int]] = {}


def said(folder):
    return json_of("generate", folder, "--prompt", PROMPT, "--max-new-tokens", NEW, *GREEDY)["tokens"]


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
    code, _, err = run_command("generate", folder, "--prompt", PROMPT, "--device", "cpu")
    assert code == DamagedError.exit_code
    assert "model.language_model.embed_tokens.weight is missing; the files have it as model.embed_tokens.weight" in err
    assert "remove the tensors of images" in err
    assert "fetch" not in err
    code, _, err = run_command("quantize", folder, "--bits", 8, "--group", 16, "--out", tmp_path / "q", "--quiet")
    assert code == DamagedError.exit_code
    assert "remove the tensors of images" in err
    weights(folder, lambda w: [w.pop(n) for n in [*w] if "visual" in n])  # the way out
    assert said(folder) == before


@pytest.mark.parametrize("mended", [True, False])
def test_a_split_that_was_published_wrong_is_mended_where_the_folder_says_so(tmp_path, mended):
    walk = Walk("mistral-nemo", tmp_path)
    facts(walk.published, "tokenizer_config.json", fix_mistral_regex=mended)
    walk.theirs = type(walk.theirs).from_pretrained(str(walk.published), fix_mistral_regex=mended)
    walk.step_tokens()


LINEAR = re.compile(r"(?!.*(visual|vision|multi_modal)).*layers.*(_proj|_linear|\.w[123]|in_proj_\w+|out_proj)$")
NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 48], "symmetric": True, "dynamic": False}
ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}


def by(encode, but="(?!)", only=""):
    """Every linear layer of the language model whose name `only` matches and `but` does not, encoded so."""
    return lambda m: encode if LINEAR.match(m) and re.search(only, m) and not re.search(but, m) else None


def blocks(rows=128, columns=128, **more):
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]} | more


def groups(**weights):
    """compressed-tensors: a group of each, by what it targets."""
    result = {f"group_{i}": {"targets": [t], "weights": w} | more for i, (t, (w, more)) in enumerate(weights.pop("of").items())}
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed", "config_groups": result} | weights


PACKED = groups(of={"Linear": ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}, {})},
                format="pack-quantized", ignore=["lm_head", "re:.*visual.*"])  # fmt: skip
FP4 = NVFP4 | {"strategy": "tensor_group", "symmetric": True}
MIXED = groups(
    of={"re:.*experts.*": (FP4, {"format": "nvfp4-pack-quantized"}), "re:.*self_attn.*": (BLOCK, {"format": "float-quantized"})},
    format="mixed-precision", ignore=["lm_head"],
)  # fmt: skip


def modelopt(*left_out, **more):
    groups = {"group_0": {"weights": NVFP4, "targets": ["Linear"]}}
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [*left_out], "config_groups": groups} | more


def in_text(section, top):
    """Where the section is: in text_config alone, or also at the top."""

    def change(folder):
        result = json.loads((folder / "config.json").read_text())
        result["text_config"]["quantization_config"] = section
        result.pop("quantization_config", None)
        (folder / "config.json").write_text(json.dumps(result | ({"quantization_config": top} if top else {})))

    return change


def draft(folder):
    named(mtp__layers__0__mlp__experts__0__up_proj__weight=(48, 64), mtp__fc__weight=(64, 128))(folder)


def nothing(folder):
    pass


NO_MODULES = ["model.layers.0.self_attn.k_proj.bias", "model.layers.0.input_layernorm", "model.norm", "lm_head"]
LEAVES = ["mtp.fc", "mtp.layers.0.mlp.experts.0.up_proj", "lm_head", "*.conv1d", "*.linear_attn*", "*gate"]
QUANTIZED = {  # number in the list, what -> (family, what is encoded and how, its quantization_config, what else is done)
    "9 scales of blocks in float32, the last in part": ("qwen3", by(fp8((48, 40))), blocks(48, 40), nothing),
    "9 scales of blocks in bfloat16": ("qwen3-moe", by(fp8((128, 128), torch.bfloat16)), blocks(modules_to_not_convert=["lm_head"]), nothing),
    "9 one scale for all, activations too": ("ministral3", by(fp8(None)), {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False, "modules_to_not_convert": ["model.vision_tower", "lm_head"]}, nothing),
    "9 powers of two, said so": ("deepseek-v3", by(fp8((128, 128), powers=True)), blocks(scale_fmt="ue8m0"), nothing),
    "9 powers of two in bytes": ("deepseek-v3", by(fp8((32, 32), torch.float8_e8m0fnu, powers=True)), blocks(32, 32, scale_fmt="ue8m0"), nothing),
    "10 no list of what is not quantized, DeepSeek": ("deepseek-v3", by(fp8((128, 128)), "gate$"), blocks(fmt="e4m3"), nothing),
    "10 no list of what is not quantized, Kimi K2": ("kimi-k2", by(fp8((128, 128)), "kv_b_proj"), blocks(), nothing),
    "11 names of modules, and of what is none": ("qwen3", by(fp8((128, 128))), blocks(modules_to_not_convert=NO_MODULES), nothing),
    "11 words": ("minimax-m2", by(fp8((128, 128))), blocks(modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"]), nothing),
    "11 regular expressions": ("qwen3", by(rows8, "o_proj"), groups(of={"Linear": (ROWS, {})}, format="float-quantized", ignore=["lm_head", "re:.*self_attn\\.o_proj$", *NO_MODULES]), nothing),
    "11 patterns of a shell": ("qwen3", by(MODELOPT, "self_attn"), modelopt("lm_head", "*.self_attn*", "model.layers.*.input_layernorm"), nothing),
    "12 at the top and in text_config": ("qwen3-vl", by(int4), PACKED, in_text(PACKED, PACKED)),
    "12 in text_config alone": ("qwen3-vl", by(int4), PACKED, in_text(PACKED, None)),
    "12 in text_config alone, fp8": ("qwen3.5", by(fp8((128, 128))), blocks(), in_text(blocks(), None)),
    "12 in a file of ModelOpt's": ("qwen3", by(MODELOPT), None, lambda f: (f / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}}))),
    "13 the long name of e4m3": ("minimax-m2", by(fp8((128, 128))), blocks(fmt="float8_e4m3fn"), nothing),
    "24 experts packed, the shared one plain": ("qwen2-moe", by(COMPRESSED, only=r"\.experts\."), groups(of={"Linear": (FP4, {})}, format="nvfp4-pack-quantized", ignore=["re:.*shared_expert.*", "re:.*self_attn.*", "lm_head"]), nothing),
    "25 a draft in bf16, left out leaf by leaf": ("qwen3-next", by(MODELOPT, "linear_attn"), modelopt(*LEAVES), draft),
    "26 Granite's dense layers in fp8": ("granite-4-dense", by(rows8), groups(of={"Linear": (ROWS, {})}, format="float-quantized", ignore=["lm_head"]), nothing),
    "26 Granite's dense layers in nvfp4": ("granite-4-dense", by(MODELOPT), modelopt("lm_head"), nothing),
    "27 experts in nvfp4, the rest in fp8": ("minimax-m2", lambda m: by(COMPRESSED, only="experts")(m) or by(fp8((32, 48), leaf="weight_scale"))(m), MIXED, nothing),
    "28 scales of linear attention": ("qwen3.5", by(fp8((128, 128), torch.bfloat16)), blocks(modules_to_not_convert=["lm_head", "model.visual"]), nothing),
}  # fmt: skip


@pytest.mark.parametrize("odd", QUANTIZED)
def test_a_quantized_folder_is_the_matrices_that_its_format_defines(tmp_path, odd):
    family, how, section, change = QUANTIZED[odd]
    folder = write(FAMILIES[family], tmp_path / "m")
    dense = quantize(folder, how, **({"quantization_config": section} if section else {}))
    change(folder)
    with open_decoded(str(folder)) as source:
        for name, expected in dense.items():
            assert torch.equal(source.read(name).to(expected.dtype).reshape(expected.shape), expected), name
    assert json_of("inspect", folder, "--json")["format"] != "dense"
    assert len(said(folder)) > 0
    run("quantize", folder, "--bits", 8, "--group", 16, "--method", "rtn", "--out", tmp_path / "q", "--quiet")


REFUSED = {  # what -> (family, what is encoded and how, its quantization_config, what else is done, the reason)
    "12 two that differ": ("qwen3-vl", by(int4), PACKED, in_text(PACKED, PACKED | {"ignore": []}), "another in text_config"),
    "13 another kind of fp8": ("qwen3", by(fp8((128, 128))), blocks(fmt="e5m2"), nothing, "fmt='e5m2' is not supported"),
    "27 ModelOpt's mixture": ("qwen3", by(MODELOPT), modelopt(quant_algo="MIXED_PRECISION"), nothing, "quant_algo='MIXED_PRECISION' is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("odd", REFUSED)
def test_unsupported_folders_are_refused_with_the_reason(tmp_path, odd):
    family, how, section, change, reason = REFUSED[odd]
    folder = write(FAMILIES[family], tmp_path / "m")
    quantize(folder, how, quantization_config=section)
    change(folder)
    for command in (("generate", folder, "--prompt", PROMPT), ("inspect", folder), ("quantize", folder)):
        code, _, err = run_command(*command)
        assert code == UnsupportedError.exit_code
        assert reason in err
        assert "fetch" not in err


def test_templates_in_a_folder_of_their_own_are_read_as_transformers_reads_them(tmp_path):
    walk = Walk("command-r7b", tmp_path)
    facts(walk.published, "tokenizer_config.json", chat_template=None)
    (walk.published / "chat_template.jinja").write_text(TEMPLATES["cohere"])
    (walk.published / "additional_chat_templates").mkdir()
    (walk.published / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATES["cohere-tools"])
    walk.theirs = type(walk.theirs).from_pretrained(str(walk.published))
    assert sorted(walk.theirs.chat_template) == ["default", "tool_use"]
    walk.step_tokens()
    run("quantize", walk.published, "--bits", 8, "--zero", "none", "--method", "rtn", "--out", walk.packed, "--quiet")
    run("export", walk.packed, "--to", "compressed-tensors", "--out", walk.exported, "--quiet")
    for folder in (walk.packed, walk.exported):
        theirs = type(walk.theirs).from_pretrained(str(folder))
        assert theirs.chat_template == walk.theirs.chat_template
        with open_source(str(folder)) as source:
            assert tokenizer(source).chat_template == walk.theirs.chat_template
    run("inspect", walk.packed, "--verify")
    (walk.packed / "additional_chat_templates").mkdir()
    (walk.packed / "additional_chat_templates" / "rag.jinja").write_text("another's")
    code, _, err = run_command("inspect", walk.packed, "--verify")
    assert code == DamagedError.exit_code
    assert "rag.jinja has no hash" in err


def test_a_download_has_the_templates_and_no_other_folder():
    kept = [
        "config.json",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
    ]
    left = [
        "onnx/model.safetensors",
        "adapters/config.json",
        "additional/x.json",
        "additional_chat_templates/old/x.jinja",
        "additional_chat_templates_2/x.jinja",
        "original/tokenizer.model",
        "consolidated.safetensors",
    ]
    assert [*filter_repo_objects([*kept, *left], allow_patterns=WANTED, ignore_patterns=UNWANTED)] == kept


@pytest.mark.parametrize("name", ["call_0123456789abcdef01234567", "a1B2c3D4e", "zu-kurz"], ids=["OpenAI's", "nine", "short"])
def test_ids_of_calls_are_as_long_as_the_template_asks(tmp_path, name):
    """33: Mistral's refuse others than nine letters and digits, which no client but Mistral's own makes."""
    walk = Walk("mistral-nemo", tmp_path)

    def talk(i, arguments):
        call = {"id": i, "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [*SAID, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": i, "content": "found"}]

    with ExitStack() as walk.exits:
        run("quantize", walk.published, "--bits", 8, "--method", "rtn", "--out", walk.packed, "--quiet")
        walk.made = json_of("generate", walk.packed, "--prompt", PROMPT, "--max-new-tokens", NEW, "--device", "cpu", "--json")
        walk.step_serve()
        answer = walk.post("chat/completions", messages=talk(name, "{}"), max_tokens=1)
    theirs = walk.theirs.apply_chat_template(talk("a1B2c3D4e", {}), **HOW)
    assert answer["usage"]["prompt_tokens"] == len(theirs)


def test_a_call_and_its_result_keep_one_id():
    call = {"id": "call_1", "function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1"}]
    conversation.shorten_ids(messages)
    assert re.fullmatch("[0-9a-zA-Z]{9}", call["id"])
    assert messages[1]["tool_call_id"] == call["id"]
