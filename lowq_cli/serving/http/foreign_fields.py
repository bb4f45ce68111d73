"""Fields that clients of other servers send, and their meaning here.

A field with a counterpart is renamed to it. A field that changes no answer is ignored and named in the log. A field that would
change the answer in a way that is not implemented is refused unless it holds its default.
"""

from typing import Any

from lowq_cli.serving.http.refusal import wrong

RENAMED = {
    "repeat_penalty": "repetition_penalty",  # llama.cpp's, ollama's
    "n_predict": "max_tokens",  # llama.cpp's
    "max_new_tokens": "max_tokens",
    "thinking_budget": "thinking_token_budget",  # Qwen's
    "thinking_budget_tokens": "thinking_token_budget",  # llama.cpp's
}
HARMLESS = frozenset(  # fields for storage, scheduling, billing and display, and performance hints
    (
        *("cache_prompt", "keep_alive", "id_slot", "slot_id", "n_keep", "n_cache_reuse", "t_max_predict_ms", "cache_salt"),
        *("return_tokens", "return_progress", "timings_per_token", "post_sampling_probs", "response_fields", "priority"),
        *("request_id", "rid", "session_id", "data_parallel_rank", "kv_transfer_params", "stream_interval"),
        *("spaces_between_special_tokens", "add_generation_prompt", "prediction", "verbosity", "user_id", "provider", "route"),
        *("transforms", "models", "usage", "stream_reasoning", "parse_tool_calls", "options"),
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "numa"),
        *("low_vram", "enable_prefix_caching", "disable_log_stats", "chat_template_content_format", "debug", "draft_options"),
    )
)
NEUTRAL: dict[str, tuple[Any, ...]] = {  # field -> values that change nothing
    "typical_p": (1,),
    "typical": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "mirostat": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "continue_final_message": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "bad_words": ([],),
    "samplers": ([],),
    "logit_bias_exclusive": (False,),
    "grammar": ("",),
    "truncate_prompt_tokens": (-1,),
    "prompt_logprobs": (),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "reasoning_format": ("auto", "deepseek"),
    "input_prefix": ("",),
    "input_suffix": ("",),
}
WITH: dict[str, str] = {  # setting -> the field of NEUTRAL that it belongs to: without effect while that is off
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), "mirostat"),
    "xtc_threshold": "xtc_probability",
    **dict.fromkeys(("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"), "dry_multiplier"),
    "dynatemp_exponent": "dynatemp_range",
}
FORMS = ("guided_json", "guided_regex", "guided_choice", "json_schema", "structured_outputs")


def plain(body: dict[str, Any], own: set[str]) -> tuple[dict[str, Any], list[str]]:
    """(the body with our field names, the ignored fields). own: fields that are known already. Raises Refusal."""
    translated, left_out = {}, []
    for name, value in body.items():
        if name in own:
            translated[name] = value
        elif name in RENAMED:
            if value is not None:
                translated.setdefault(RENAMED[name], None if name == "n_predict" and value == -1 else value)
        elif name in FORMS:
            if value is not None:
                translated.setdefault("response_format", _form(name, value))
        elif name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise wrong(name, "is not supported; leave it out")
        elif name in NEUTRAL or name in WITH or name in HARMLESS:
            left_out.append(name)
        else:
            translated[name] = value
    return translated, left_out


def _form(name: str, value: Any) -> dict[str, Any]:
    """The equivalent response_format. Raises Refusal."""
    if name == "structured_outputs":
        kinds = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice"}
        kinds_given = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else {}
        if len(kinds_given) != 1 or next(iter(kinds_given)) not in kinds:
            raise wrong(name, f"must be an object with one of {', '.join(kinds)}")
        name, value = next((kinds[k], v) for k, v in kinds_given.items())
    if name == "guided_regex":
        return {"type": "regex", "regex": value}
    if name == "guided_choice":
        return {"type": "choice", "choice": value}
    return {"type": "json_schema", "json_schema": {"schema": value}}
