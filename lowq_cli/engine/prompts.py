"""From a prompt to its generation: encode texts to tokens that fit the model, and choose the fastest decoder for it."""

import json
import os
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from numbers import Integral
from typing import Any
from weakref import ref

from lowq_cli.cached_models import model_path
from lowq_cli.calibrate.texts import check_ids
from lowq_cli.engine.detokenize import shown_tokens
from lowq_cli.engine.model_record import LOCK, owned
from lowq_cli.engine.moments import between, moment
from lowq_cli.engine.rope import reach
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.stopping import check
from lowq_cli.engine.stream import Decoder, Generation
from lowq_cli.output.syntaxes import marks, switches, syntax_of
from lowq_packers.errors import DamagedError, UnsupportedError, UsageError

LAST = 16  # last tokens of a prompt that are searched for a marker that opens the thoughts


def _given(prompt: Any) -> tuple[bool, list[str | list[int]]]:
    """Whether `stream` got a single prompt, and its prompts: texts, or token ids. Raises UsageError for anything else."""
    listed = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # of tensors and arrays
    one = isinstance(listed, str) or (isinstance(listed, Sequence) and len(listed) > 0 and isinstance(listed[0], Integral))
    prompts = []
    for p in [listed] if one or not isinstance(listed, Sequence) else listed:
        p = p.tolist() if hasattr(p, "tolist") else p
        ids = isinstance(p, (list, tuple)) and all(isinstance(i, Integral) for i in p)
        if not isinstance(p, str) and not ids:
            kind = type(p).__name__
            raise UsageError(
                f"a prompt is a text or token ids, not {kind}; tokenizer.apply_chat_template makes one of messages"
            )
        prompts.append(p if isinstance(p, str) else [int(i) for i in p])
    return one, prompts


def stream(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    repetition_penalty: float = 1.0,
    chat: bool = False,
    batch: int = 1,
    stop: str | Sequence[str] = (),
    decoder: Decoder | None = None,
    kv: str = "16",
    draft: str | os.PathLike[str] = "auto",
    images: Sequence[Any] = (),
    think: bool | None = None,
    deterministic: bool = False,
) -> Generation:
    """A Generation: iterate for pieces of text, then read tokens, finish_reason, ttft_s, prefill_tps, decode_tps.

    Args:
        model, tokenizer: what `lowq.load` returns, or any causal transformers model and its tokenizer.
        prompt: a text or its token ids, in a list, tensor or array; or several of either, decoded as one batch.
        chat: put the text into the model's chat template as the user's message; for a conversation give the text that
            `tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)` makes.
        batch: continue each prompt this many times, in one batch.
        stop: one or several texts that end a sequence where they occur; they are not part of the result.
        decoder: the decoder; None takes the fastest that can run the model (`lowq_cli.engine.decoders`).
        kv: format of the KV cache: "16", "fp8" or "4" (`lowq_kernels.decode.kv`).
        draft: the drafter (`lowq_cli.engine.drafts`): "auto", "ngram", "mtp", "none", or a draft head or
            model: its folder, or a name of `lowq ls`.
        images: the prompt's images, each a path, a file's bytes or a PIL image; with several prompts, a sequence of images for
            each. They are placed before the text, also in a chat; a prompt of token ids already contains their tokens.
        think: in a chat, False makes the model answer without thinking first. `marks` of the Generation says how the model
            marks its thoughts.
        deterministic: every `draft` gives the same text, also on a GPU: there all steps of one text have as many rows.
    Raises:
        UsageError: no token to start from, a prompt that fills the context, a setting out of range, a prompt or model of
            another kind.
        UnsupportedError: an encoder-decoder model.

    Later changes of the model's layers, weights, hooks or adapters count from the next call on, unless weights are written
    through `tensor.data`. Generations that run side by side, also in several threads, have a cache each.

    A model of `lowq.load` is one of transformers: its `generate(output_logits=True, ...)` returns logits. `lowq serve` answers
    with log-probabilities.
    """
    began = time.perf_counter()
    if not hasattr(model, "config") or tokenizer is None:
        kinds = f"{type(model).__name__} and {type(tokenizer).__name__}"
        raise UsageError(f"a model and its tokenizer are needed, got {kinds}; lowq.load(FOLDER) returns both")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{model.config.model_type} is an encoder-decoder model; lowq generates with causal models")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise UsageError(f"max_new_tokens={max_new_tokens} must be a whole number and must not be negative")
    if not isinstance(batch, int) or batch < 1:
        raise UsageError(f"batch={batch} must be a whole number and must be at least 1")
    if seed is None:
        raise UsageError("seed=None must be a whole number; random.getrandbits(32) draws one")
    numbers = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "repetition_penalty": repetition_penalty}
    if (missing := next((name for name, value in numbers.items() if value is None), None)) is not None:
        raise UsageError(f"{missing}=None must be a number; leave it out to turn it off")
    if draft is None:
        raise UsageError('draft=None must be text; draft="none" computes without drafts')
    draft = model_path(draft)
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
    stops = check([stop] if isinstance(stop, str) else stop)
    one, given = _given(prompt)
    looked = moment(model.device)
    pictures = _pictures(model, [images] if one else list(images), len(given)) if images else [[] for _ in given]
    encoded = [
        encode(tokenizer, p, chat, (model, seen), think) if isinstance(p, str) else list(p)
        for p, seen in zip(given, pictures, strict=True)
    ]
    prompts, pictures = [p for p in encoded for _ in range(batch)], [seen for seen in pictures for _ in range(batch)]
    if not prompts:
        raise UsageError("there is no prompt")
    longest = max(map(len, prompts))
    limit = check_length(model, longest)
    check_ids(chain.from_iterable(prompts), model.config.get_text_config().vocab_size)
    room = max_new_tokens if limit is None else min(max_new_tokens, limit - longest)
    limited_by = "length" if room == max_new_tokens else "context"
    how: dict[str, Any] = {"stop_ids": stop_ids(model, tokenizer), "limited_by": limited_by, "began": began, "stop": stops}
    how["check_files"] = owned(model).check_files
    if chat:
        how["marks"] = marks_of(tokenizer, prompts[0])
    with LOCK:  # other threads may begin generations of this model
        if decoder is None:
            from lowq_cli.engine.decoders import decoder_of  # the decoders take a second to import

            decoder = decoder_of(model, kv, free=True)
        if model.device.type == "cuda":
            from lowq_cli.engine.precompiling import warm

            how["prepare"] = partial(warm, model, decoder, prompts, sampling)
        if images:
            from lowq_cli.engine.vision import check_decoder, sight_of

            check_decoder(decoder)
            sight = sight_of(model)
            how["shown"] = [sight.shown(p, seen) if seen else None for p, seen in zip(prompts, pictures, strict=True)]
            how["pictures_s"] = partial(between, looked, moment(model.device))
        from lowq_cli.engine.drafts.drafter_choice import attach

        how["drafting"], how["why_no_drafts"] = attach(draft, model, tokenizer, decoder, len(prompts), deterministic)
        generation = Generation(decoder, tokenizer, prompts, sampling, room, **how)
        decoder.user = ref(generation)
    return generation


def _pictures(model: Any, images: Sequence[Sequence[Any]], prompts: int) -> list[list[Any]]:
    """The images of each prompt, ready for the vision tower. Raises UsageError, UnsupportedError."""
    from lowq_cli.engine.vision import sight_of

    if len(images) != prompts or any(isinstance(seen, str | bytes) for seen in images):
        raise UsageError(f"images must be one sequence per prompt ({prompts} prompts), or a flat one for a single prompt")
    sight = sight_of(model)
    return [[sight.picture(image) for image in seen] for seen in images]


def marks_of(tokenizer: Any, prompt: Sequence[int]) -> dict[str, Any] | None:
    """The markers of thoughts in an answer (`output.syntaxes.marks`), and under "shown" the special tokens among them."""
    syntax = syntax_of(_template(tokenizer), getattr(tokenizer, "added_tokens", dict)())
    end = tokenizer.decode(list(prompt[-LAST:]), skip_special_tokens=False) if syntax.thoughts or syntax.channels else ""
    marking = marks(syntax, end)
    return marking and {**marking, "shown": shown_tokens(tokenizer, syntax.tags(False))}


def _template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else str(template.get("default", ""))


def encode(
    tokenizer: Any, text: str, chat: bool = False, shown: tuple[Any, Sequence[Any]] = (None, ()), think: bool | None = None
) -> list[int]:
    """Token ids of a prompt. Raises UsageError for a missing chat template, a text without tokens, and half characters.

    shown: a model, and the images that go with the text.
    """
    check_characters(text)
    if shown[1]:
        return _with_pictures(tokenizer, text, chat, *shown)
    messages = [{"role": "user", "content": text}]
    ids = encode_messages(tokenizer, messages, think=think) if chat else tokenizer(text)["input_ids"]
    if not ids:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise UsageError("the prompt is empty and this model has no token to start a text with; give some text")
        ids = [start]
    return list(ids)


def _with_pictures(tokenizer: Any, text: str, chat: bool, model: Any, pictures: Sequence[Any]) -> list[int]:
    """Token ids of a text with images before it; in a chat, as one message of the user."""
    from lowq_cli.engine.vision import sight_of

    if chat:
        parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
        return encode_messages(tokenizer, [{"role": "user", "content": parts}], (model, pictures))
    return list(tokenizer(sight_of(model).written(text, pictures, spelled_by(tokenizer)))["input_ids"])


def spelled_by(tokenizer: Any) -> Any:
    """The method of a tokenizer, lowq's or transformers', that returns a token's spelling."""
    return tokenizer.spelling if hasattr(tokenizer, "spelling") else tokenizer.convert_ids_to_tokens


def encode_messages(
    tokenizer: Any, messages: Sequence[dict[str, Any]], shown: tuple[Any, Sequence[Any]] = (None, ()), think: bool | None = None
) -> list[int]:
    """Token ids of a conversation up to the start of the answer. Raises UsageError for a missing chat template and half
    characters, DamagedError where the template refuses the messages.

    shown: a model, and the images of the messages; a message's content may then be a list of parts: {"type": "image"} or a
    text.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("this model has no chat template, so it takes no messages; give a text to continue, without --chat")
    check_characters(json.dumps(messages, ensure_ascii=False))  # a template may write any field of a message
    if think is False and not shown[1]:
        template = _template(tokenizer)
        how: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, "return_dict": False}
        text = tokenizer.apply_chat_template(messages, **how, **switches(template, think, None))
        text = syntax_of(template, getattr(tokenizer, "added_tokens", dict)()).begun(text, think)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not shown[1]:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))
    from lowq_cli.engine.vision import sight_of
    from lowq_cli.hf.chat_template import render
    from lowq_cli.hf.pictures import check_typed, expanded

    check_typed(messages, sight_of(shown[0]).images, spelled_by(tokenizer))
    if hasattr(tokenizer, "spelling"):  # lowq's own
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    else:
        text = render(tokenizer.get_chat_template(), messages, True, tokenizer.special_tokens_map)
    text = expanded(text, shown[1], sight_of(shown[0]).images, spelled_by(tokenizer))
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def check_characters(text: str) -> None:
    """Raise UsageError for bytes that are not UTF-8 (from a terminal or a pipe) and for half a surrogate pair (from JSON)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("the prompt is not UTF-8 text; convert it, or check the locale") from None


def check_length(model: Any, tokens: int) -> int | None:
    """The model's context limit in tokens, or None. Raises UsageError for a prompt of `tokens` that fills it."""
    limit = context_limit(model)
    if limit is not None and tokens >= limit:
        raise UsageError(f"the prompt has {tokens} tokens and the model's context ends at {limit}; shorten the prompt")
    return limit


def context_limit(model: Any) -> int | None:
    """The max. tokens of a sequence, from the model's config; None where the config does not state a limit."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    return reach(getattr(config, "rope_parameters", None), limit, getattr(config, "max_sequence_length", None))


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a sequence: generation_config's, else the config's, else the tokenizer's."""
    sources = (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer)
    given = next((e for s in sources if (e := getattr(s, "eos_token_id", None)) is not None), ())
    ids = given if isinstance(given, list | tuple) else [given]
    if not all(type(i) is int for i in ids):
        files = "generation_config.json, or in config.json if that has none"
        raise DamagedError(f"the model's eos_token_id is {given!r}, which is not a token id; correct it in {files}")
    return frozenset(ids)
