"""The folders of the most used families as their publishers write them: facts of config.json, tokenizer and files, at tiny sizes.

A family's config.json is the tiny sizes of its model type (tests/families/tiny.py) and the facts here, which win; GONE takes a
key out. Where a fact is a token's text, the file has its id.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))
from chat_templates import TEMPLATES

GONE = object()
VOCAB, LENGTH = 704, 2048
SHARDS = {  # as published -> the name of the i-th of n files
    "single": None,
    "usual": lambda i, n: f"model-{i + 1:05d}-of-{n:05d}.safetensors",
    "six digits": lambda i, n: f"model-{i + 1:05d}-of-{n:06d}.safetensors",  # DeepSeek
    "model.safetensors-": lambda i, n: f"model.safetensors-{i + 1:05d}-of-{n:05d}.safetensors",  # Qwen 3.5
    "no zeros": lambda i, n: f"model-{i + 1}-of-{n}.safetensors",  # Kimi K2
    "from zero, more promised": lambda i, n: f"model-{i:05d}-of-{n + 5:05d}.safetensors",  # MiniMax M2
}


@dataclass(frozen=True)
class Family:
    """One published folder.

    config: facts over the tiny sizes of `model_type`. vocabulary: a kind of vocabularies.py; special, plain: added tokens.
    writes_bos: the tokenizer begins texts with it. tokenizer, generation: tokenizer_config.json and generation_config.json (None:
    no such file). template: of chat_templates.py, or several by name; kept: the file it is in. shards: of SHARDS. text: the facts of
    text_config. extra: other files. model: the class's Auto kind. cache_tokens: of the server, which turns texts by its longest.
    """

    model_type: str
    config: dict[str, Any]
    vocabulary: str
    special: tuple[str, ...]
    tokenizer: dict[str, Any]
    plain: tuple[str, ...] = ()
    writes_bos: bool = False
    generation: dict[str, Any] | None = field(default_factory=dict)
    template: str | tuple[str, ...] | None = None
    kept: str = "tokenizer_config.json"
    shards: str = "single"
    text: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    model: str = "AutoModelForCausalLM"
    cache_tokens: int | None = None

    @property
    def templates(self) -> dict[str, str]:
        """By name."""
        if isinstance(self.template, tuple):
            return dict(zip(("default", "tool_use"), (TEMPLATES[t] for t in self.template), strict=True))
        return {"default": TEMPLATES[self.template]} if self.template else {}


def _old(*architectures: str, **facts: Any) -> dict[str, Any]:
    """A config.json of transformers 4: torch_dtype, rope_theta and rope_scaling at the top."""
    return {
        "architectures": [*architectures],
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "dtype": GONE,
    } | facts


def _new(*architectures: str, **facts: Any) -> dict[str, Any]:
    return {"architectures": [*architectures], "dtype": "bfloat16", "transformers_version": "5.2.0"} | facts


FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True, "model_max_length": 131072}
V5 = {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "is_local": False, "model_max_length": 131072}
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
LLAMA3_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
LLAMA3_SCALING["original_max_position_embeddings"] = 256
LLAMA3_TOKENS = {"bos_token": LLAMA3[0], "eos_token": LLAMA3[3]}
SPM = ("<unk>", "<s>", "</s>")
SPM_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False, "add_bos_token": True}
SPM_TOKENS |= {"add_eos_token": False, "sp_model_kwargs": {}, "use_default_system_prompt": False, "model_max_length": 1e30}
TEKKEN = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
TEKKEN += ("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[ARGS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]", "<pad>")
TEKKEN_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_PLAIN = ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<tool_response>", "</tool_response>", "<think>", "</think>")
QWEN_TOKENS = {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "add_prefix_space": False, "bos_token": None}
QWEN_TOKENS |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "split_special_tokens": False}
QWEN_TOKENS |= {"errors": "replace", "additional_special_tokens": [*QWEN[1:]], "clean_up_tokenization_spaces": False}
QWEN_GENERATION = {"eos_token_id": ["<|im_end|>", "<|endoftext|>"], "pad_token_id": "<|endoftext|>", "do_sample": True}
QWEN_GENERATION |= {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "bos_token_id": "<|endoftext|>"}
QWEN_IDS = {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>"}
GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>")
GEMMA_PLAIN = ("<unused0>", "<unused1>", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "<table>", "</table>")
GEMMA_IDS = {"bos_token_id": "<bos>", "eos_token_id": "<eos>", "pad_token_id": "<pad>"}
GEMMA_TOKENS = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>"}
GEMMA_TOKENS |= {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "spaces_between_special_tokens": False}
GEMMA4 = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>")
GEMMA4 += ("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|image|>", "<|audio|>")
GEMMA4_TOKENS = {"tokenizer_class": "GemmaTokenizer", "backend": "tokenizers", "bos_token": "<bos>", "eos_token": "<turn|>"}
GEMMA4_TOKENS |= {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>", "eot_token": "<turn|>"}
GEMMA4_TOKENS |= {"extra_special_tokens": ["<|tool_response>"], "image_token": "<|image|>", "model_max_length": 1e30}
GEMMA4_GENERATION = {"eos_token_id": ["<eos>", "<turn|>", "<|tool_response>"], "pad_token_id": "<pad>", "do_sample": True}
GEMMA4_GENERATION |= {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "suppress_tokens": ["<|audio|>", "<|image|>"]}
GEMMA4_ROPE = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}
GEMMA4_TEXT = GEMMA_IDS | {"rope_parameters": GEMMA4_ROPE, "global_head_dim": 32, "sliding_window": 32, "dtype": "bfloat16"}
GEMMA4_TEXT |= {"final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision", "vocab_size_per_layer_input": VOCAB}
GEMMA4_TEXT |= {"tie_word_embeddings": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
DEEPSEEK_PLAIN = ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<think>", "</think>")
DEEPSEEK_TOKENS = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False, "legacy": True}
DEEPSEEK_TOKENS |= {"bos_token": {"__type": "AddedToken", "content": DEEPSEEK[0], "lstrip": False, "normalized": True}}
DEEPSEEK_TOKENS |= {"eos_token": {"__type": "AddedToken", "content": DEEPSEEK[1], "lstrip": False, "normalized": True}}
DEEPSEEK_TOKENS |= {"pad_token": None, "sp_model_kwargs": {}, "unk_token": None, "clean_up_tokenization_spaces": False}
DEEPSEEK_IDS = {"bos_token_id": DEEPSEEK[0], "eos_token_id": DEEPSEEK[1]}
DEEPSEEK_CODE = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel": "modeling_deepseek.DeepseekV3Model"}
YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 512}
MLA = {
    "num_key_value_heads": 4,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "aux_loss_alpha": 0.001,
}
GLM = ("<|endoftext|>", "[MASK]", "[gMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GLM_TOKENS = FAST | {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "additional_special_tokens": [*GLM]}
GLM_TOKENS |= {"do_lower_case": False, "remove_space": False, "padding_side": "left", "clean_up_tokenization_spaces": False}
GLM_STOPS = ["<|endoftext|>", "<|user|>", "<|observation|>"]  # the next role's opener ends a turn
GPT2 = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "errors": "replace", "unk_token": "<|endoftext|>"}
GPT2 |= {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "clean_up_tokenization_spaces": False}
ONE = ("<|endoftext|>",)
ENDS = {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|endoftext|>"}
S_IDS = {"bos_token_id": "<s>", "eos_token_id": "</s>"}
IMAGE = "AutoModelForImageTextToText"
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
VISION3 = VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
QWEN_VISION_IDS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
QWEN_VISION_IDS |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
PIXTRAL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
PIXTRAL |= {"image_size": 32, "patch_size": 16, "num_channels": 3, "rope_theta": 1e4, "vocab_size": GONE}
SIGLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
SIGLIP |= {"patch_size": 14, "vision_use_head": False}
QWEN35_ROPE = {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25, "rope_theta": 1e7}
QWEN35_ROPE |= {"rope_type": "default"}
QWEN35_TEXT = {"dtype": "bfloat16", "eos_token_id": "<|endoftext|>", "rope_parameters": QWEN35_ROPE, "mlp_only_layers": []}
QWEN35_TEXT |= {
    "full_attention_interval": 2,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "attn_output_gate": True,
}
QWEN35: dict[str, Any] = {
    "vocabulary": "qwen35", "special": QWEN, "plain": QWEN_PLAIN, "template": "qwen3-coder", "kept": "chat_template.jinja",
    "tokenizer": QWEN_TOKENS | {"extra_special_tokens": [*QWEN[1:]]}, "generation": QWEN_GENERATION, "shards": "model.safetensors-", "model": IMAGE,
}  # fmt: skip
GRANITE = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
GRANITE_TOKENS = GPT2 | {"bos_token": GRANITE[0], "eos_token": GRANITE[0], "unk_token": GRANITE[0], "pad_token": GRANITE[0]}
GRANITE_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), GRANITE[0])
OLMO_TOKENS = GPT2 | {"pad_token": "<|pad|>"}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "rope_theta": 1e8,
}
MINISTRAL_ROPE |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MISTRAL4 = {
    "num_key_value_heads": 4,
    "head_dim": 32,
    "qk_head_dim": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
MISTRAL4 |= {"q_lora_rank": 32, "kv_lora_rank": 32, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 48}
MISTRAL4 |= {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
TEKKEN_V5 = V5 | TEKKEN_TOKENS | {"extra_special_tokens": [*TEKKEN[3:-1]]}

# fmt: off
FAMILIES: dict[str, Family] = {
    "llama-3.1": Family(
        "llama", _old("LlamaForCausalLM", rope_theta=5e5, rope_scaling=LLAMA3_SCALING, attention_bias=False, mlp_bias=False,
        pretraining_tp=1, tie_word_embeddings=False, bos_token_id=LLAMA3[0], eos_token_id=[*LLAMA3[1:4]], head_dim=GONE),
        "llama3", LLAMA3, FAST | LLAMA3_TOKENS | {"model_input_names": ["input_ids", "attention_mask"]}, writes_bos=True,
        generation={"bos_token_id": LLAMA3[0], "eos_token_id": [*LLAMA3[1:4]], "do_sample": True, "temperature": 0.6, "top_p": 0.9},
        template="llama3", shards="usual", extra={"special_tokens_map.json": LLAMA3_TOKENS},
    ),
    "llama-3.2": Family(
        "llama", _old("LlamaForCausalLM", rope_theta=5e5, rope_scaling=LLAMA3_SCALING | {"factor": 32.0}, head_dim=16,
        tie_word_embeddings=True, bos_token_id=LLAMA3[0], eos_token_id=[*LLAMA3[1:4]]),
        "llama3", LLAMA3, FAST | LLAMA3_TOKENS, writes_bos=True, template="llama3", generation={"bos_token_id": LLAMA3[0], "eos_token_id": [*LLAMA3[1:4]]},
    ),
    "yi": Family(
        "llama", _old("LlamaForCausalLM", rope_theta=5e6, rope_scaling=None, pretraining_tp=1, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, head_dim=GONE),
        "llama2", SPM, SPM_TOKENS | {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, plain=("<|im_start|>", "<|im_end|>"),
        template="chatml", generation={"bos_token_id": 1, "eos_token_id": "<|im_end|>", "pad_token_id": 0},
    ),
    "unigram-llama": Family(
        "llama", _old("LlamaForCausalLM", tie_word_embeddings=False, **S_IDS), "unigram", SPM, FAST | {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        template="zephyr", writes_bos=True,
    ),
    "wordpiece-llama": Family(
        "llama", _old("LlamaForCausalLM", tie_word_embeddings=False, bos_token_id="[CLS]", eos_token_id="[SEP]"), "wordpiece", ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]", "pad_token": "[PAD]", "clean_up_tokenization_spaces": True},
        generation=None,
    ),
    "mistral": Family(
        "mistral", _old("MistralForCausalLM", rope_theta=1e4, sliding_window=4096, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, head_dim=GONE),
        "llama2", SPM, SPM_TOKENS | {"tokenizer_class": "LlamaTokenizer", "additional_special_tokens": []}, writes_bos=True,
        generation={"bos_token_id": 1, "eos_token_id": 2}, template="mistral-old", shards="usual",
        extra={"special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}},
    ),
    "mistral-nemo": Family(
        "mistral", _old("MistralForCausalLM", rope_theta=1e6, sliding_window=None, head_dim=32, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2),
        "tekken", TEKKEN, TEKKEN_TOKENS | {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "add_eos_token": False}, writes_bos=True,
        generation={"bos_token_id": 1, "eos_token_id": 2}, template="mistral", shards="usual", extra={"params.json": {"dim": 64, "n_layers": 2}},
    ),
    "mistral3": Family(
        "mistral3", _old("Mistral3ForConditionalGeneration", image_token_index="[ARGS]", multimodal_projector_bias=False, spatial_merge_size=2, vision_feature_layer=-1, vision_config=PIXTRAL),
        "tekken", TEKKEN, TEKKEN_TOKENS | {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "processor_class": "PixtralProcessor"}, writes_bos=True,
        text={"rope_theta": 1e9, "head_dim": 16, "sliding_window": None, "hidden_act": "silu", **S_IDS},
        generation={"bos_token_id": 1, "eos_token_id": 2}, template="mistral", kept="chat_template.json", model=IMAGE, shards="usual",
    ),
    "ministral3": Family(
        "mistral3", _new("Mistral3ForConditionalGeneration", image_token_index="[ARGS]", spatial_merge_size=2, vision_feature_layer=-1, vision_config=PIXTRAL),
        "tekken", TEKKEN, TEKKEN_V5, writes_bos=True, text={"model_type": "ministral3", "rope_parameters": MINISTRAL_ROPE, "head_dim": 16, "sliding_window": None, "tie_word_embeddings": True, **S_IDS},
        generation={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": "<pad>", "max_length": 262144}, template="mistral", kept="chat_template.jinja", model=IMAGE,
    ),
    "devstral-2": Family(
        "ministral3", _new("Ministral3ForCausalLM", rope_parameters=MINISTRAL_ROPE | {"llama_4_scaling_beta": 0.0, "mscale_all_dim": 0.0, "rope_theta": 1e6}, tie_word_embeddings=False, sliding_window=None, **S_IDS),
        "tekken", TEKKEN, TEKKEN_V5, writes_bos=True, template="mistral", kept="chat_template.jinja", shards="usual",
    ),
    "mistral4": Family(
        "mistral3", _new("Mistral3ForConditionalGeneration", image_token_index="[ARGS]", spatial_merge_size=2, vision_feature_layer=-1, vision_config=PIXTRAL),
        "tekken", TEKKEN, TEKKEN_V5, writes_bos=True, template="mistral", kept="chat_template.jinja", model=IMAGE, shards="usual",
        text={"model_type": "mistral4", "rope_parameters": MINISTRAL_ROPE | {"partial_rotary_factor": 0.5, "rope_theta": 1e4}, "tie_word_embeddings": False, **MISTRAL4, **S_IDS},
    ),
    "mixtral": Family(
        "mixtral", _old("MixtralForCausalLM", rope_theta=1e6, sliding_window=None, tie_word_embeddings=False, router_aux_loss_coef=0.02, output_router_logits=False, bos_token_id=1, eos_token_id=2, head_dim=GONE),
        "llama2", SPM, SPM_TOKENS | {"tokenizer_class": "LlamaTokenizer"}, writes_bos=True, template="mistral-old", generation={"bos_token_id": 1, "eos_token_id": 2}, shards="usual",
    ),
    "qwen2.5": Family(
        "qwen2", _old("Qwen2ForCausalLM", rope_theta=1e6, use_sliding_window=False, max_window_layers=70, sliding_window=32768, tie_word_embeddings=True, **QWEN_IDS),
        "qwen", QWEN, QWEN_TOKENS, plain=QWEN_PLAIN, template="chatml", generation=QWEN_GENERATION | {"repetition_penalty": 1.05},
    ),
    "r1-distill-qwen": Family(
        "qwen2", _old("Qwen2ForCausalLM", rope_theta=1e4, use_mrope=False, use_sliding_window=False, max_window_layers=2, sliding_window=4096, tie_word_embeddings=False, bos_token_id="<|endoftext|>", eos_token_id="<|endoftext|>"),
        "qwen", ("<|endoftext|>", *DEEPSEEK[:2]), DEEPSEEK_TOKENS, plain=(*DEEPSEEK_PLAIN, ), template="deepseek-r1",
        generation={"bos_token_id": "<|endoftext|>", "eos_token_id": "<|endoftext|>", "do_sample": True, "temperature": 0.6, "top_p": 0.95}, shards="six digits",
    ),
    "qwen2-moe": Family(
        "qwen2_moe", _old("Qwen2MoeForCausalLM", rope_theta=1e6, use_sliding_window=False, max_window_layers=2, sliding_window=32768, tie_word_embeddings=False, decoder_sparse_step=1, norm_topk_prob=False, mlp_only_layers=[], **QWEN_IDS),
        "qwen", QWEN, QWEN_TOKENS, plain=QWEN_PLAIN, template="chatml", generation=QWEN_GENERATION, shards="usual",
    ),
    "qwen2.5-vl": Family(
        "qwen2_5_vl", _old("Qwen2_5_VLForConditionalGeneration", rope_theta=1e6, use_sliding_window=False, tie_word_embeddings=False, **QWEN_IDS, **QWEN_VISION_IDS,
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}, text_config=GONE, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=LENGTH, vocab_size=VOCAB, hidden_act="silu", vision_config=VISION | {"fullatt_block_indexes": [0], "model_type": "qwen2_5_vl"}),
        "qwen", QWEN, QWEN_TOKENS, plain=QWEN_PLAIN, template="chatml", kept="chat_template.json", generation=QWEN_GENERATION, model=IMAGE, shards="usual",
    ),
    "qwen3": Family(
        "qwen3", _old("Qwen3ForCausalLM", rope_theta=1e6, rope_scaling=None, use_sliding_window=False, sliding_window=None, max_window_layers=2, attention_bias=False, tie_word_embeddings=False, **QWEN_IDS),
        "qwen", QWEN, QWEN_TOKENS, plain=QWEN_PLAIN, template="qwen3", generation=QWEN_GENERATION, shards="usual",
    ),
    "qwen3-moe": Family(
        "qwen3_moe", _old("Qwen3MoeForCausalLM", rope_theta=1e7, rope_scaling=None, use_sliding_window=False, sliding_window=None, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, tie_word_embeddings=False, **QWEN_IDS),
        "qwen", QWEN, QWEN_TOKENS, plain=QWEN_PLAIN, template="qwen3", kept="chat_template.jinja", generation=QWEN_GENERATION, shards="usual",
    ),
    "qwen3-coder": Family(
        "qwen3_moe", _old("Qwen3MoeForCausalLM", rope_theta=1e7, qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0, decoder_sparse_step=1, norm_topk_prob=True, tie_word_embeddings=False, bos_token_id=GONE, eos_token_id="<|im_end|>"),
        "qwen", QWEN, QWEN_TOKENS, plain=QWEN_PLAIN, template="qwen3-coder", kept="chat_template.jinja", generation=QWEN_GENERATION, shards="usual",
    ),
    "qwen3-next": Family(
        "qwen3_next", _old("Qwen3NextForCausalLM", rope_theta=1e7, rope_scaling=None, partial_rotary_factor=0.25, full_attention_interval=2, layer_types=GONE, decoder_sparse_step=1, norm_topk_prob=True, mlp_only_layers=[], tie_word_embeddings=False, **QWEN_IDS),
        "qwen", QWEN, QWEN_TOKENS, plain=QWEN_PLAIN, template="qwen3", kept="chat_template.jinja", generation=QWEN_GENERATION, shards="usual",
    ),
    "qwen3-vl": Family(
        "qwen3_vl", _old("Qwen3VLForConditionalGeneration", torch_dtype=GONE, tie_word_embeddings=True, **QWEN_VISION_IDS, vision_config=VISION3 | {"model_type": "qwen3_vl"}),
        "qwen", QWEN, QWEN_TOKENS, plain=QWEN_PLAIN, template="chatml", kept="chat_template.json", generation=QWEN_GENERATION, model=IMAGE,
        text={"dtype": "bfloat16", "rope_theta": 5e6, "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}, "tie_word_embeddings": True, **QWEN_IDS},
    ),
    "qwen3-vl-moe": Family(
        "qwen3_vl_moe", _old("Qwen3VLMoeForConditionalGeneration", torch_dtype=GONE, tie_word_embeddings=False, **QWEN_VISION_IDS, vision_config=VISION3 | {"model_type": "qwen3_vl_moe"}),
        "qwen", QWEN, QWEN_TOKENS, plain=QWEN_PLAIN, template="chatml", kept="chat_template.json", generation=QWEN_GENERATION, model=IMAGE, shards="usual",
        text={"dtype": "bfloat16", "num_experts": 4, "num_local_experts": GONE, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "rope_theta": 5e6, "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}, **QWEN_IDS},
    ),
    "qwen3.5": Family(
        "qwen3_5", _new("Qwen3_5ForConditionalGeneration", dtype=GONE, tie_word_embeddings=True, **QWEN_VISION_IDS, vision_config=VISION | {"num_position_embeddings": 16, "model_type": "qwen3_5"}),
        text=QWEN35_TEXT, **QWEN35,
    ),
    "qwen3.5-moe": Family(
        "qwen3_5_moe", _new("Qwen3_5MoeForConditionalGeneration", dtype=GONE, tie_word_embeddings=False, **QWEN_VISION_IDS, vision_config=VISION | {"num_position_embeddings": 16, "model_type": "qwen3_5_moe"}),
        text=QWEN35_TEXT, **QWEN35,
    ),
    "qwen3.6": Family(
        "qwen3_5", _new("Qwen3_5ForConditionalGeneration", language_model_only=False, tie_word_embeddings=False, **QWEN_VISION_IDS, vision_config=VISION | {"num_position_embeddings": 16, "model_type": "qwen3_5"}),
        text=QWEN35_TEXT | {"partial_rotary_factor": 0.25, "output_gate_type": "swish", "tie_word_embeddings": False, "bos_token_id": "<|endoftext|>", "pad_token_id": None}, **QWEN35,
    ),
    "gemma-2": Family(
        "gemma2", _old("Gemma2ForCausalLM", rope_theta=1e4, sliding_window=64, sliding_window_size=64, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=GONE, layer_types=GONE, **GEMMA_IDS),
        "gemma", GEMMA, GEMMA_TOKENS, plain=GEMMA_PLAIN, writes_bos=True, template="gemma", generation=GEMMA_IDS | {"cache_implementation": "hybrid"}, shards="usual",
    ),
    "gemma-3-1b": Family(
        "gemma3_text", _old("Gemma3ForCausalLM", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None, sliding_window=32, sliding_window_pattern=2, layer_types=GONE, tie_word_embeddings=GONE, hidden_activation="gelu_pytorch_tanh", **GEMMA_IDS | {"eos_token_id": ["<eos>", "<end_of_turn>"]}),
        "gemma", GEMMA, GEMMA_TOKENS, plain=GEMMA_PLAIN, writes_bos=True, template="gemma", generation=GEMMA_IDS | {"eos_token_id": ["<eos>", "<end_of_turn>"], "cache_implementation": "hybrid", "do_sample": True, "top_k": 64, "top_p": 0.95},
        extra={"added_tokens.json": {"<image_soft_token>": 690}},
    ),
    "gemma-3": Family(
        "gemma3", _old("Gemma3ForConditionalGeneration", mm_tokens_per_image=4, boi_token_index="<start_of_image>", eoi_token_index="<unused0>", image_token_index="<unused1>", eos_token_id=["<eos>", "<end_of_turn>"], vision_config=SIGLIP),
        "gemma", GEMMA, GEMMA_TOKENS | {"boi_token": "<start_of_image>", "image_token": "<unused1>", "processor_class": "Gemma3Processor"}, plain=GEMMA_PLAIN, writes_bos=True, template="gemma", model=IMAGE, shards="usual",
        text={"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 32, "layer_types": GONE, "bos_token_id": GONE, "eos_token_id": GONE, "pad_token_id": GONE},
        generation=GEMMA_IDS | {"eos_token_id": ["<eos>", "<end_of_turn>"], "cache_implementation": "hybrid", "do_sample": True, "top_k": 64, "top_p": 0.95},
    ),
    "gemma-4": Family(
        "gemma4", _new("Gemma4ForConditionalGeneration", audio_config=None, tie_word_embeddings=True, eos_token_id=["<eos>", "<turn|>"], image_token_id="<|image|>", audio_token_id="<|audio|>", eoa_token_id="<|audio|>", eoa_token_index="<|audio|>",
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}),
        "gemma", GEMMA4, GEMMA4_TOKENS, writes_bos=False, template="gemma4", kept="chat_template.jinja", generation=GEMMA4_GENERATION, model=IMAGE, text=GEMMA4_TEXT | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma-4-moe": Family(
        "gemma4", _new("Gemma4ForConditionalGeneration", audio_config=None, tie_word_embeddings=True, eos_token_id=["<eos>", "<turn|>"], image_token_id="<|image|>", audio_token_id="<|audio|>",
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}),
        "gemma", GEMMA4, GEMMA4_TOKENS, template="gemma4", kept="chat_template.jinja", generation=GEMMA4_GENERATION, model=IMAGE, shards="usual",
        text=GEMMA4_TEXT | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "gemma-4-e": Family(
        "gemma4", _new("Gemma4ForConditionalGeneration", audio_config=None, tie_word_embeddings=True, eos_token_id=["<eos>", "<turn|>"], image_token_id="<|image|>", audio_token_id="<|audio|>",
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}),
        "gemma", GEMMA4, GEMMA4_TOKENS, template="gemma4", kept="chat_template.jinja", generation=GEMMA4_GENERATION, model=IMAGE,
        text=GEMMA4_TEXT | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32, "use_double_wide_mlp": True},
    ),
    "phi-3": Family(
        "phi3", _old("Phi3ForCausalLM", auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}, rope_theta=1e4, original_max_position_embeddings=256, sliding_window=2047, tie_word_embeddings=False,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.5] * 8}, bos_token_id=1, eos_token_id="<|endoftext|>", pad_token_id="<|endoftext|>"),
        "llama2", SPM, SPM_TOKENS | {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}, plain=("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"), template="phi3",
        generation={"bos_token_id": 1, "eos_token_id": ["<|endoftext|>", "<|assistant|>", "<|end|>"], "pad_token_id": "<|endoftext|>"}, shards="usual", cache_tokens=256,
    ),
    "phi-4": Family(
        "phi3", _old("Phi3ForCausalLM", rope_theta=250000, rope_scaling=None, original_max_position_embeddings=LENGTH, sliding_window=None, tie_word_embeddings=False, bos_token_id="<|endoftext|>", eos_token_id="<|im_end|>", pad_token_id="<|dummy|>"),
        "llama3", ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|dummy|>"), GPT2 | {"eos_token": "<|im_end|>", "pad_token": "<|dummy|>"}, template="phi4", shards="usual",
        generation={"bos_token_id": "<|endoftext|>", "eos_token_id": ["<|endoftext|>", "<|im_end|>"], "pad_token_id": "<|dummy|>"},
    ),
    "phi-2": Family(
        "phi", _old("PhiForCausalLM", torch_dtype="float16", hidden_act="gelu_new", rope_theta=1e4, rope_scaling=None, partial_rotary_factor=0.4, qk_layernorm=False, num_key_value_heads=4, tie_word_embeddings=False, **ENDS),
        "gpt2", ONE, GPT2 | {"tokenizer_class": "CodeGenTokenizer", "return_token_type_ids": False}, shards="usual", extra={"added_tokens.json": {"\t\t": 650, "   ": 651}},
    ),
    "gpt-oss": Family(
        "gpt_oss", _old("GptOssForCausalLM", torch_dtype=GONE, rope_theta=150000, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}, sliding_window=32,
        swiglu_limit=7.0, experts_per_token=2, tie_word_embeddings=False, attention_bias=True, eos_token_id="<|return|>", pad_token_id="<|endoftext|>", bos_token_id=GONE),
        "o200k", ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"), FAST | {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        template="harmony", kept="chat_template.jinja", generation={"bos_token_id": "<|startoftext|>", "eos_token_id": ["<|return|>", "<|endoftext|>", "<|call|>"], "pad_token_id": "<|endoftext|>", "do_sample": True},
    ),
    "deepseek-v2-lite": Family(
        "deepseek_v2", _old("DeepseekV2ForCausalLM", auto_map=DEEPSEEK_CODE, q_lora_rank=None, n_shared_experts=2, norm_topk_prob=False, scoring_func="softmax", topk_method="greedy", seq_aux=True, rope_theta=1e4,
        rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, num_key_value_heads=4, moe_layer_freq=1, head_dim=GONE, tie_word_embeddings=False, **DEEPSEEK_IDS),
        "deepseek", DEEPSEEK, DEEPSEEK_TOKENS, plain=DEEPSEEK_PLAIN, writes_bos=True, template="deepseek", generation=DEEPSEEK_IDS | {"do_sample": True, "temperature": 0.3}, shards="six digits",
    ),
    "deepseek-v3": Family(
        "deepseek_v3", _old("DeepseekV3ForCausalLM", auto_map=DEEPSEEK_CODE, num_nextn_predict_layers=1, rope_theta=1e4, rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, norm_topk_prob=True, routed_scaling_factor=2.5, ep_size=1, tie_word_embeddings=False, **MLA, **DEEPSEEK_IDS),
        "deepseek", DEEPSEEK, DEEPSEEK_TOKENS, plain=DEEPSEEK_PLAIN, writes_bos=True, template="deepseek", generation=DEEPSEEK_IDS | {"do_sample": True, "temperature": 0.6, "top_p": 0.95}, shards="six digits",
    ),
    "kimi-k2": Family(
        "deepseek_v3", _old("DeepseekV3ForCausalLM", model_type="kimi_k2", auto_map=DEEPSEEK_CODE, num_nextn_predict_layers=0, rope_theta=5e4, rope_scaling=YARN | {"beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}, norm_topk_prob=True, routed_scaling_factor=2.827, tie_word_embeddings=False,
        bos_token_id="[BOS]", eos_token_id="[EOS]", **MLA), "llama3", ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[PAD]"), FAST | {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"},
        plain=("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"), template="kimi", generation={"eos_token_id": "<|im_end|>", "max_length": 131072}, shards="no zeros",
    ),
    "minimax-m2": Family(
        "minimax_m2", _old("MiniMaxM2ForCausalLM", torch_dtype=GONE, auto_map={"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}, rope_theta=5e6, rotary_dim=8, attn_type_list=[1, 1], use_mtp=True, num_mtp_modules=3, mtp_transformer_layers=1, scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer", tie_word_embeddings=False, eos_token_id=GONE, bos_token_id=GONE),
        "o200k", ("]!p~[", "]!d~[", "]~!b[", "]~b]", "[e~["), FAST | {"tokenizer_class": "GPT2Tokenizer", "bos_token": "]~!b[", "eos_token": "[e~[", "unk_token": "]!d~[", "add_prefix_space": False}, plain=("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
        template="minimax", kept="chat_template.jinja", generation={"bos_token_id": "]~!b[", "eos_token_id": "[e~[", "do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 40}, shards="from zero, more promised",
    ),
    "glm-4": Family(
        "glm4", _old("Glm4ForCausalLM", rope_theta=1e4, partial_rotary_factor=0.5, attention_bias=False, tie_word_embeddings=False, eos_token_id=GLM_STOPS, pad_token_id="<|endoftext|>", bos_token_id=GONE),
        "llama3", GLM, GLM_TOKENS, plain=GLM_PLAIN, template="glm", generation={"eos_token_id": GLM_STOPS, "pad_token_id": "<|endoftext|>", "do_sample": True}, shards="usual",
    ),
    "glm-4.5": Family(
        "glm4_moe", _old("Glm4MoeForCausalLM", rope_theta=1e6, rope_scaling=None, partial_rotary_factor=0.5, attention_bias=True, num_nextn_predict_layers=1, use_qk_norm=True, norm_topk_prob=True, routed_scaling_factor=2.5, tie_word_embeddings=False, eos_token_id=GLM_STOPS[:2], pad_token_id="<|endoftext|>", bos_token_id=GONE),
        "llama3", GLM, GLM_TOKENS, plain=GLM_PLAIN, template="glm", kept="chat_template.jinja", generation={"eos_token_id": GLM_STOPS, "pad_token_id": "<|endoftext|>"}, shards="usual",
    ),
    "glm-4.7-flash": Family(
        "glm4_moe_lite", _new("Glm4MoeLiteForCausalLM", num_nextn_predict_layers=1, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, rope_interleave=True, norm_topk_prob=True, tie_word_embeddings=False, eos_token_id=GLM_STOPS, pad_token_id="<|endoftext|>", bos_token_id=GONE),
        "llama3", GLM, V5 | {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "extra_special_tokens": [*GLM]}, plain=GLM_PLAIN, template="glm", kept="chat_template.jinja", generation={"eos_token_id": GLM_STOPS, "pad_token_id": "<|endoftext|>"}, shards="usual",
    ),
    "llama-4": Family(
        "llama4", _old("Llama4ForConditionalGeneration", boi_token_index="<|eom|>", image_token_index="<|eom|>", tie_word_embeddings=False,
        vision_config={"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32, "pixel_shuffle_ratio": 0.5}),
        "llama3", ("<|begin_of_text|>", "<|end_of_text|>", "<|eom|>", "<|eot|>", "<|header_start|>", "<|header_end|>", "<|finetune_right_pad|>"), FAST | {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>", "pad_token": "<|finetune_right_pad|>"}, writes_bos=True, template="llama4", kept="chat_template.jinja", model=IMAGE, shards="usual",
        text={"torch_dtype": "bfloat16", "rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING | {"factor": 16.0, "high_freq_factor": 1.0}, "attention_chunk_size": 512, "interleave_moe_layer_step": 1, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "layer_types": GONE, "moe_layers": GONE, "bos_token_id": "<|begin_of_text|>", "eos_token_id": ["<|end_of_text|>", "<|eom|>", "<|eot|>"], "pad_token_id": "<|finetune_right_pad|>"},
        generation={"bos_token_id": "<|begin_of_text|>", "eos_token_id": ["<|end_of_text|>", "<|eom|>", "<|eot|>"], "do_sample": True, "temperature": 0.6, "top_p": 0.9},
    ),
    "granite-3": Family(
        "granite", _old("GraniteForCausalLM", rope_theta=1e7, rope_scaling=None, attention_multiplier=0.25, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0, tie_word_embeddings=True, **GRANITE_IDS),
        "digits", GRANITE, GRANITE_TOKENS, template="granite", generation=GRANITE_IDS, extra={"special_tokens_map.json": {"eos_token": GRANITE[0], "pad_token": GRANITE[0]}},
    ),
    "granite-moe": Family(
        "granitemoe", _old("GraniteMoeForCausalLM", rope_theta=1e4, attention_multiplier=0.25, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=6.0, tie_word_embeddings=True, **GRANITE_IDS),
        "digits", GRANITE, GRANITE_TOKENS, template="granite", generation=GRANITE_IDS,
    ),
    "granite-4": Family(
        "granitemoehybrid", _old("GraniteMoeHybridForCausalLM", position_embedding_type="nope", rope_theta=1e4, attention_multiplier=0.25, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=6.0, layer_types=["mamba", "attention"], tie_word_embeddings=True, **GRANITE_IDS),
        "llama3", GRANITE, GRANITE_TOKENS, template="granite", kept="chat_template.jinja", generation=GRANITE_IDS,
    ),
    "granite-4-dense": Family(
        "granitemoehybrid", _old("GraniteMoeHybridForCausalLM", position_embedding_type="rope", rope_theta=1e7, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=96, attention_multiplier=0.25, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=6.0, layer_types=["attention", "attention"], tie_word_embeddings=True, **GRANITE_IDS),
        "llama3", GRANITE, GRANITE_TOKENS, template="granite", kept="chat_template.jinja", generation=GRANITE_IDS,
    ),
    "nemotron-h": Family(
        "nemotron_h", _old("NemotronHForCausalLM", auto_map={"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, hybrid_override_pattern="M-*E", num_hidden_layers=4, layers_block_type=GONE, rope_theta=1e4, time_step_limit=[0.0, float("inf")], tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0),
        "tekken", ("<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(10, 16))), FAST | {"bos_token": "<s>", "eos_token": "<SPECIAL_12>", "unk_token": "<unk>", "pad_token": "<SPECIAL_12>"}, template="nemotron", kept="chat_template.jinja",
        generation={"bos_token_id": 1, "eos_token_id": [2, "<SPECIAL_11>", "<SPECIAL_12>"], "pad_token_id": 0}, shards="usual",
    ),
    "falcon-h1": Family(
        "falcon_h1", _old("FalconH1ForCausalLM", rope_theta=1e11, attention_in_multiplier=1.0, key_multiplier=0.5, lm_head_multiplier=0.1, embedding_multiplier=5.6, ssm_multipliers=[0.35, 0.25, 0.35, 0.5, 0.25], mlp_multipliers=[0.88, 0.29], tie_word_embeddings=False, bos_token_id="<|begin_of_text|>", eos_token_id="<|im_end|>", pad_token_id="<|pad|>"),
        "llama3", ("<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|pad|>"), FAST | {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}, template="chatml", generation={"eos_token_id": "<|im_end|>", "pad_token_id": "<|pad|>"},
    ),
    "falcon3": Family(
        "llama", _old("LlamaForCausalLM", rope_theta=1000042, head_dim=32, tie_word_embeddings=False, eos_token_id="<|endoftext|>", bos_token_id=GONE), "digits", ("<|endoftext|>", "<|pad|>"), FAST | {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"},
        plain=("<|assistant|>", "<|user|>", "<|system|>"), template="falcon3", generation={"eos_token_id": "<|endoftext|>"}, shards="usual",
    ),
    "lfm2": Family(
        "lfm2", _old("Lfm2ForCausalLM", norm_eps=1e-5, rope_theta=1e6, layer_types=["conv", "full_attention", "conv"], full_attn_idxs=GONE, num_hidden_layers=3, conv_L_cache=3, conv_bias=False, block_auto_adjust_ff_dim=False, intermediate_size=96, tie_word_embeddings=GONE, bos_token_id="<|startoftext|>", eos_token_id="<|im_end|>", pad_token_id="<|pad|>"),
        "llama3", ("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>"), FAST | {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}, writes_bos=True, template="lfm2", kept="chat_template.jinja",
        generation={"bos_token_id": "<|startoftext|>", "eos_token_id": "<|im_end|>", "pad_token_id": "<|pad|>", "do_sample": True, "min_p": 0.15, "temperature": 0.3},
    ),
    "olmo-2": Family(
        "olmo2", _old("Olmo2ForCausalLM", torch_dtype="float32", rope_theta=5e5, rope_scaling=None, tie_word_embeddings=False, attention_bias=False, eos_token_id="<|endoftext|>", pad_token_id="<|pad|>", bos_token_id=GONE),
        "llama3", ("<|endoftext|>", "<|pad|>"), OLMO_TOKENS, template="olmo", generation={"eos_token_id": "<|endoftext|>", "pad_token_id": "<|pad|>"}, shards="usual",
    ),
    "olmo-3": Family(
        "olmo3", _old("Olmo3ForCausalLM", rope_theta=5e5, rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0}, sliding_window=32, tie_word_embeddings=False, eos_token_id="<|endoftext|>", pad_token_id="<|pad|>", bos_token_id=GONE),
        "llama3", ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"), OLMO_TOKENS | {"eos_token": "<|im_end|>"}, template="chatml", kept="chat_template.jinja", generation={"eos_token_id": ["<|im_end|>", "<|endoftext|>"], "pad_token_id": "<|pad|>"}, shards="usual",
    ),
    "command-r7b": Family(
        "cohere2", _old("Cohere2ForCausalLM", rope_theta=5e4, sliding_window=64, sliding_window_pattern=2, layer_types=GONE, head_dim=16, logit_scale=0.25, layer_norm_eps=1e-5, order_of_interleaved_layers="local_attn_first", rotary_pct=1.0, position_embedding_type="rope_gptj", use_embedding_sharing=True, tie_word_embeddings=GONE, bos_token_id="<BOS_TOKEN>", eos_token_id="<|END_OF_TURN_TOKEN|>", pad_token_id="<PAD>"),
        "digits", ("<PAD>", "<UNK>", "<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_ACTION|>", "<|END_ACTION|>"), {"tokenizer_class": "CohereTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>", "unk_token": "<UNK>", "legacy": True, "merges_file": None},
        writes_bos=True, template=("cohere", "cohere-tools"), generation={"bos_token_id": "<BOS_TOKEN>", "eos_token_id": "<|END_OF_TURN_TOKEN|>", "pad_token_id": "<PAD>"}, shards="usual",
    ),
    "smollm2": Family(
        "llama", _old("LlamaForCausalLM", rope_theta=1e5, rope_interleaved=False, rope_scaling=None, is_llama_config=True, tie_word_embeddings=True, bos_token_id="<|im_start|>", eos_token_id="<|im_end|>", pad_token_id="<|im_end|>"),
        "digits", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), GPT2 | {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}, template="chatml", generation={"bos_token_id": "<|im_start|>", "eos_token_id": "<|im_end|>"},
        extra={"special_tokens_map.json": {"bos_token": {"content": "<|im_start|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}}},
    ),
    "smollm3": Family(
        "smollm3", _old("SmolLM3ForCausalLM", rope_theta=5e6, rope_scaling=None, no_rope_layer_interval=2, use_sliding_window=False, sliding_window=None, tie_word_embeddings=True, bos_token_id="<|begin_of_text|>", eos_token_id="<|im_end|>", pad_token_id="<|im_end|>"),
        "llama3", (*LLAMA3[:2], "<|im_start|>", "<|im_end|>", "<think>", "</think>"), FAST | {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "fast": False}, template="smollm3", kept="chat_template.jinja", generation={"bos_token_id": "<|begin_of_text|>", "eos_token_id": "<|im_end|>", "temperature": 0.6, "top_p": 0.95, "do_sample": True}, shards="usual",
    ),
    "starcoder2": Family(
        "starcoder2", _old("Starcoder2ForCausalLM", rope_theta=999999.4420358813, sliding_window=4096, use_bias=True, norm_epsilon=1e-5, mlp_type="default", norm_type="layer_norm", hidden_act="gelu_pytorch_tanh", tie_word_embeddings=GONE, **ENDS),
        "digits", ("<|endoftext|>", "<fim_prefix>", "<fim_suffix>", "<file_sep>"), GPT2 | {"tokenizer_class": "GPT2Tokenizer"}, extra={"vocab.json": "vocab", "merges.txt": "merges"}, generation=ENDS,
    ),
    "exaone-4": Family(
        "exaone4", _old("Exaone4ForCausalLM", rope_theta=1e6, rope_scaling=LLAMA3_SCALING | {"factor": 16.0}, sliding_window=64, sliding_window_pattern="LG", tie_word_embeddings=True, bos_token_id="[BOS]", eos_token_id="[|endofturn|]", pad_token_id="[PAD]"),
        "gpt2", ("[PAD]", "[BOS]", "[EOS]", "[UNK]", "[|endofturn|]", "[|system|]", "[|user|]", "[|assistant|]"), GPT2 | {"bos_token": "[BOS]", "eos_token": "[|endofturn|]", "unk_token": "[UNK]", "pad_token": "[PAD]"}, plain=("<tool_call>", "</tool_call>", "<think>", "</think>"), template="exaone", kept="chat_template.jinja", generation={"bos_token_id": "[BOS]", "eos_token_id": "[|endofturn|]", "pad_token_id": "[PAD]"},
    ),
    "seed-oss": Family(
        "seed_oss", _old("SeedOssForCausalLM", rope_theta=1e7, rope_scaling={"rope_type": "default"}, attention_bias=True, attention_out_bias=False, residual_dropout=0.1, mlp_bias=False, tie_word_embeddings=False, bos_token_id="<seed:bos>", eos_token_id="<seed:eos>", pad_token_id="<seed:pad>"),
        "llama3", ("<seed:bos>", "<seed:pad>", "<seed:eos>"), FAST | {"bos_token": "<seed:bos>", "eos_token": "<seed:eos>", "pad_token": "<seed:pad>"}, plain=("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"), template="seed", kept="chat_template.jinja", generation={"bos_token_id": "<seed:bos>", "eos_token_id": "<seed:eos>", "pad_token_id": "<seed:pad>"}, shards="usual",
    ),
    "ernie-4.5": Family(
        "ernie4_5", _old("Ernie4_5ForCausalLM", rope_theta=5e5, use_bias=False, tie_word_embeddings=True, head_dim=16, compression_ratio=1.0, **S_IDS),
        "llama2", (*SPM, "<|begin_of_sentence|>", "<mask:1>"), {"tokenizer_class": "Ernie4_5_Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>", "auto_map": {"AutoTokenizer": ["tokenization_ernie4_5.Ernie4_5_Tokenizer", None]}}, template="ernie", generation={"do_sample": True, "top_p": 0.8},
    ),
    "ernie-4.5-moe": Family(
        "ernie4_5_moe", _old("Ernie4_5_MoeForCausalLM", rope_theta=5e5, use_bias=False, tie_word_embeddings=True, moe_capacity=[64, 64, 64], moe_gate="topk", moe_layer_start_index=1, moe_layer_end_index=1, moe_layer_interval=1, moe_num_shared_experts=1, num_nextn_predict_layers=1, **S_IDS),
        "llama2", (*SPM, "<|begin_of_sentence|>", "<mask:1>"), {"tokenizer_class": "Ernie4_5_Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}, template="ernie", generation={"do_sample": True, "top_p": 0.8}, shards="usual",
    ),
    "hunyuan": Family(
        "hunyuan_v1_dense", _old("HunYuanDenseV1ForCausalLM", rope_theta=1e4, rope_scaling={"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "dynamic"}, use_qk_norm=True, use_cla=False, attention_head_dim=16, head_dim=16, tie_word_embeddings=True, bos_token_id="<｜hy_begin▁of▁sentence｜>", eos_token_id="<｜hy_place▁holder▁no▁2｜>", pad_token_id="<｜hy_▁pad▁｜>"),
        "llama3", ("<｜hy_begin▁of▁sentence｜>", "<｜hy_place▁holder▁no▁2｜>", "<｜hy_place▁holder▁no▁3｜>", "<｜hy_▁pad▁｜>", "<｜hy_User｜>", "<｜hy_Assistant｜>"), FAST | {"bos_token": "<｜hy_begin▁of▁sentence｜>", "eos_token": "<｜hy_place▁holder▁no▁2｜>", "pad_token": "<｜hy_▁pad▁｜>"}, plain=("<think>", "</think>", "<tool_calls>", "<tool_call>", "<tool_sep>"), template="hunyuan", kept="chat_template.jinja",
        generation={"eos_token_id": "<｜hy_place▁holder▁no▁2｜>", "pad_token_id": "<｜hy_▁pad▁｜>", "do_sample": True, "top_k": 20, "repetition_penalty": 1.05},
    ),
    "hunyuan-moe": Family(
        "hunyuan_v1_moe", _old("HunYuanMoEV1ForCausalLM", rope_theta=1e4, rope_scaling={"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}, use_qk_norm=True, num_experts=4, moe_topk=[2, 2], num_shared_expert=[1, 1], moe_intermediate_size=[48, 48], use_mixed_mlp_moe=True, tie_word_embeddings=True, bos_token_id="<｜hy_begin▁of▁sentence｜>", eos_token_id="<｜hy_place▁holder▁no▁2｜>", pad_token_id="<｜hy_▁pad▁｜>"),
        "llama3", ("<｜hy_begin▁of▁sentence｜>", "<｜hy_place▁holder▁no▁2｜>", "<｜hy_▁pad▁｜>", "<｜hy_User｜>", "<｜hy_Assistant｜>"), FAST | {"bos_token": "<｜hy_begin▁of▁sentence｜>", "eos_token": "<｜hy_place▁holder▁no▁2｜>", "pad_token": "<｜hy_▁pad▁｜>"}, plain=("<think>", "</think>", "<｜hy_place▁holder▁no▁3｜>"), template="hunyuan", generation={"eos_token_id": "<｜hy_place▁holder▁no▁2｜>"}, shards="usual",
    ),
    "pythia": Family(
        "gpt_neox", _old("GPTNeoXForCausalLM", torch_dtype="float16", rotary_pct=0.25, rotary_emb_base=10000, use_parallel_residual=True, layer_norm_eps=1e-5, hidden_act="gelu", num_key_value_heads=GONE, tie_word_embeddings=False, **ENDS),
        "neox", ("<|endoftext|>", "<|padding|>"), {"tokenizer_class": "GPTNeoXTokenizer", "add_prefix_space": False, "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}, plain=("  ", "   ", "    "), generation=None,
        extra={"special_tokens_map.json": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}},
    ),
    "mamba2": Family(
        "mamba2", _old("Mamba2ForCausalLM", torch_dtype="float32", tie_word_embeddings=True, num_heads=8, head_dim=16, expand=2, n_groups=1, bos_token_id=0, eos_token_id=0, pad_token_id=0),
        "neox", ("<|endoftext|>", "<|padding|>"), {"tokenizer_class": "GPTNeoXTokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}, generation={"bos_token_id": 0, "eos_token_id": 0},
    ),
    "gpt2": Family(
        "gpt2", _old("GPT2LMHeadModel", torch_dtype=GONE, transformers_version=GONE, activation_function="gelu_new", n_ctx=LENGTH, n_positions=LENGTH, task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}}, tie_word_embeddings=GONE, **ENDS),
        "gpt2", ONE, {"model_max_length": 1024}, generation=ENDS | {"_from_model_config": True, "transformers_version": "4.26.0"}, extra={"vocab.json": "vocab", "merges.txt": "merges"},
    ),
    "bloom": Family(
        "bloom", _old("BloomForCausalLM", torch_dtype="float16", n_embed=GONE, n_layer=2, n_head=4, n_inner=None, hidden_size=64, num_attention_heads=4, unk_token_id=0, bos_token_id=1, eos_token_id=2, pad_token_id=3, apply_residual_connection_post_layernorm=False, attention_softmax_in_fp32=True),
        "gpt2", ("<unk>", "<s>", "</s>", "<pad>"), {"tokenizer_class": "BloomTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "padding_side": "left", "add_prefix_space": False}, generation=None, extra={"special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}},
    ),
}
